"""Broadcast of one worker's weights and optimizer state to all workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from bpsx.api.staged import Handle
from bpsx.errors import BpsxError, ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_root
from bpsx.plugin.objects import broadcast_bytes
from bpsx.session.refusals import counted
from bpsx.system.tracebacks import public
from bpsx.torch.all_gather import check_alike
from bpsx.torch.serialization import Encoder, StateError, decode, device_for, empty_for
from bpsx.torch.tensors import (
    bytes_view,
    check_tensor,
    check_writable,
    dtype_name,
    is_plain,
    mark_written,
    plain_copy,
    view_of,
)


@public
@counted("broadcast_parameters", several=True, argument="prefix")
def broadcast_parameters(params: Any, root_rank: int, prefix: str = "Parameter.") -> None:
    """Overwrite tensors on all workers with worker ``root_rank``'s, bit for bit.

    ``params``: a mapping (``model.state_dict()``) or (name, tensor) pairs
    (``model.named_parameters()``) of dense CPU tensors of any dtype. All workers must give the same
    names, shapes and dtypes; the order does not matter. ``prefix``: a tensor's wire name is
    ``prefix + name``.

    Raises :class:`~bpsx.errors.ConfigError` (not names and tensors, a name twice, no such root),
    :class:`~bpsx.torch.UnsupportedTensor`, and as :func:`bpsx.torch.synchronize`.
    """
    pairs = _named_tensors(params)
    root = checked_root(root_rank, "broadcast_parameters", adapter.session().size)
    _check_prefix(prefix, "broadcast_parameters")
    if adapter.session().size > 1:
        _broadcast_all(pairs, root, prefix)


@public
@counted("broadcast_optimizer_state", several=True, argument="prefix")
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter."
) -> None:
    """Give ``optimizer`` on all workers the state and options of worker ``root_rank``'s.

    Afterwards ``state_dict()`` is equal everywhere, also before the first step; weights and
    gradients are not touched. State that is new here is put on the devices of the parameters. State
    may consist of tensors as in :func:`broadcast_parameters`, None, bool, int, float, str, and
    tuples, lists and dictionaries of these. Anything else raises :class:`StateError` on all
    workers. The optimizers must have the same class name and the same number of parameters in each
    group. Otherwise :class:`~bpsx.errors.MismatchError` is raised on all workers, before anything
    is changed.

    Raises also what :func:`broadcast_parameters` raises, and :class:`~bpsx.errors.ConfigError` if
    ``optimizer`` is not an optimizer.
    """
    verb, ours = "broadcast_optimizer_state", adapter.session()
    root = checked_root(root_rank, verb, ours.size)
    _check_prefix(prefix, verb)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{verb}: optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer"
        )
    if ours.size > 1:
        # The gradients in flight concern the workers that have pushed them, not one that joins.
        with getattr(optimizer, "_leaving_gradients", contextlib.nullcontext)():
            _broadcast_optimizer(optimizer, root, prefix)


def _broadcast_optimizer(optimizer: torch.optim.Optimizer, root: int, prefix: str) -> None:
    """Same as :func:`broadcast_optimizer_state`, whose arguments have been checked."""
    verb, ours = "broadcast_optimizer_state", adapter.session()
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    check_alike(
        f"{type(optimizer).__name__} with groups of {sizes} parameters",
        f"{prefix}optimizer.kind",
        f"{verb}: the optimizers differ",
    )
    packed, problem = None, ""
    if ours.rank == root:
        try:
            packed = _pack(optimizer)
        except BpsxError as e:  # the other workers wait for a reply: send the error
            problem = str(e)
        except Exception as e:
            problem = f"worker {root}'s state cannot be sent: {type(e).__name__}: {e}"
    text = json.dumps({"error": problem} if packed is None else packed.structure).encode()
    structure = json.loads(broadcast_bytes(text, root, prefix + "optimizer"))
    if structure.get("error"):
        raise StateError(structure["error"])
    told = structure["tensors"]
    params = _all_params(optimizer)
    tensors = packed.tensors if packed is not None else [_room_for(m, params) for m in told]
    _broadcast_all(
        [(f"optimizer.{m['name']}", t) for m, t in zip(told, tensors, strict=True)], root, prefix
    )
    if ours.rank != root:
        _unpack(optimizer, structure, tensors)


def _room_for(described: dict[str, Any], params: list[torch.Tensor]) -> torch.Tensor:
    """Allocate a tensor of the root's state.

    Its strides are the parameter's if its shape is, as those of PyTorch's own state are: fused
    optimizers go through a parameter and its state by memory.
    """
    found = empty_for(described["dtype"], described["shape"], device_for(described, params))
    own = params[described["param"]] if described["param"] >= 0 else found
    if own.shape != found.shape:
        return found
    return torch.zeros_like(own, dtype=found.dtype, device=found.device, requires_grad=False)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        entries: Iterable[Any] = params.items()
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        entries = params
    else:
        raise ConfigError(
            "broadcast_parameters: expected a state_dict or (name, tensor) pairs, not"
            f" {type(params).__name__}"
        )
    pairs: dict[str, torch.Tensor] = {}
    for i, entry in enumerate(entries):
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ConfigError(
                f"broadcast_parameters: entry {i} is a {type(entry).__name__}, not a (name, tensor)"
                " pair; give model.state_dict() or model.named_parameters()"
            )
        name, tensor = entry
        if name in pairs:
            raise ConfigError(f"broadcast_parameters: the name {name!r} is given twice")
        check_tensor(tensor, f"broadcast_parameters: {name!r}")
        check_writable(tensor, f"broadcast_parameters: {name!r}")
        pairs[name] = tensor
    return list(pairs.items())


def _check_prefix(prefix: Any, verb: str) -> None:
    if not isinstance(prefix, str):
        raise ConfigError(f"{verb}: prefix must be a string, not {prefix!r}")


class Overwriting:
    """Broadcast in flight: ``tensor``, already checked, gets the values of worker ``root``'s.

    If the tensor is not plain memory, a copy travels and is copied back. The tensor is complete
    after :meth:`wait`. ``typed``: send elements that servers can add to, instead of bytes.
    """

    def __init__(self, tensor: torch.Tensor, root: int, name: str, typed: bool = False) -> None:
        self._tensor, self._stage = tensor, plain_copy(tensor)
        ours = adapter.session()
        self._keeps = ours.rank == root
        view = view_of(self._stage, dtype_name(self._stage)) if typed else bytes_view(self._stage)
        self._handle: Handle = ours.broadcast(name, view, root)

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not, without blocking."""
        return self._handle.done()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Return the tensor. Raises the error that made the broadcast fail."""
        self._handle.wait(timeout)
        if self._keeps:
            return self._tensor
        if is_plain(self._tensor):
            mark_written(self._tensor)
        else:
            with torch.no_grad():
                self._tensor.detach().copy_(self._stage)
        return self._tensor


def _broadcast_all(pairs: list[tuple[str, torch.Tensor]], root: int, prefix: str) -> None:
    """Start all broadcasts at once, then wait for each."""
    for begun in [Overwriting(tensor, root, prefix + name) for name, tensor in pairs]:
        begun.wait()


class _Packed(NamedTuple):
    """An optimizer's state as JSON, and the tensors that it refers to, in order."""

    structure: dict[str, Any]
    tensors: list[torch.Tensor]


def _all_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _pack(optimizer: torch.optim.Optimizer) -> _Packed:
    """Describe ``optimizer``; parameters are named by their position in the groups.

    Raises :class:`StateError`.
    """
    index = {p: i for i, p in enumerate(_all_params(optimizer))}
    encoder = Encoder()
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        encoder.param = index[group["params"][0]] if group["params"] else -1
        groups.append(
            {k: encoder.encode(v, f"group {i}.{k}") for k, v in group.items() if k != "params"}
        )
    state = []
    for p, value in optimizer.state.items():
        if p not in index:
            raise StateError(
                f"broadcast_optimizer_state: {type(optimizer).__name__} keeps state under"
                f" {type(p).__name__} {str(p)[:40]!r}, which is not one of its parameters; only"
                " state of parameters can be broadcast"
            )
        encoder.param = index[p]
        state.append([index[p], encoder.encode(value, f"state {index[p]}")])
    return _Packed(
        {"groups": groups, "state": state, "tensors": encoder.described}, encoder.tensors
    )


def _unpack(
    optimizer: torch.optim.Optimizer, structure: dict[str, Any], tensors: list[torch.Tensor]
) -> None:
    """Write the root's state into ``optimizer``.

    ``load_state_dict`` is not used, since it converts state to the parameters' dtype.
    """
    params = _all_params(optimizer)
    kept: set[int] = set()
    for group, root_group in zip(optimizer.param_groups, structure["groups"], strict=True):
        for key in [k for k in group if k != "params" and k not in root_group]:
            del group[key]
        for key, value in root_group.items():
            group[key] = _in_place(group.get(key), decode(value, tensors), kept)
    optimizer.state.clear()
    for i, value in structure["state"]:
        optimizer.state[params[i]] = decode(value, tensors)


def _in_place(ours: Any, given: Any, kept: set[int]) -> Any:
    """Return the option ``given``; a learning rate that is a tensor stays the same object.

    The script may change the rate through a reference of its own. ``kept``: ids of the objects that
    have stayed so far; a second group that had the same object may get another value.
    """
    fits = (
        isinstance(ours, torch.Tensor)
        and isinstance(given, torch.Tensor)
        and not ours.is_inference()
        and id(ours) not in kept
        and (ours.shape, ours.dtype, ours.device) == (given.shape, given.dtype, given.device)
        and ours.dim() == 0
    )
    if not fits:
        return given
    with torch.no_grad():
        ours.copy_(given)
    kept.add(id(ours))
    return ours
