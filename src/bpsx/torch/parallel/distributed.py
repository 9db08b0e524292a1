"""DistributedDataParallel: a module whose gradients are averages when ``backward()`` returns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bpsx.api.verbs import local_rank, local_size, rank, size
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.torch.broadcast import broadcast_parameters
from bpsx.torch.compression import Compression, Compressor, check_compression
from bpsx.torch.ops import declare, poll, push_pull_async_inplace, synchronize
from bpsx.torch.parallel.averaging import Averaging
from bpsx.torch.tensors import bytes_view, check_tensor

#: BytePS's name for :func:`push_pull_async_inplace`; BytePS's module of this name has it too.
byteps_push_pull = push_pull_async_inplace

__all__ = [
    "Compression",
    "DistributedDataParallel",
    "byteps_push_pull",
    "declare",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "size",
    "synchronize",
]

# Numbers of the modules created in this process; all workers create them in the same order.
_numbers = itertools.count()
# Options of PyTorch that do not affect the result: there are no flat buckets here, and unused
# parameters need no search.
_CHANGE_NOTHING = {
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
}
_REFUSED = {
    "output_device",
    "process_group",
    "device_mesh",
    "mixed_precision",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
}
_ALIGNED = 16


class DistributedDataParallel(nn.Module):  # type: ignore[misc]
    """Wrapper of ``module`` whose ``backward()`` leaves gradients averaged over all workers.

    Use it in the place of ``module``, with any optimizer.

    Call it after ``init()``, and create such modules in the same order on all workers. The
    constructor gives all workers worker 0's parameters and buffers. Each gradient is pushed as soon
    as backward has finished it. ``backward()`` returns when all averages are in ``grad``, bitwise
    the same on all workers. Parameters registered first are the most urgent. Backward adds to
    gradients that are already in ``grad``, as always. Gradients of passes inside :meth:`no_sync`
    are this worker's own; they are averaged together with the next pass.

    **Parameters without a gradient.** Every exchange moves every parameter that requires a
    gradient, so workers may use different parts of the module. A parameter that some workers have
    used gets the average, with the other workers' ``grad`` as it is (None counts as zeros). A
    parameter that no worker has used keeps its ``grad``, None included. The result is that of one
    process with the joined batch. A worker whose loss does not depend on the module's outputs at
    all calls :meth:`synchronize` instead of ``backward()``. Freeze and unfreeze parameters on all
    workers alike, before a forward pass.

    Arguments:
    - ``device_ids``: None, or a list of the module's GPU.
    - ``broadcast_buffers``: give the buffers worker 0's values before each forward pass in training
      mode, with gradients enabled and outside :meth:`no_sync`.
    - ``compression``: one of :class:`Compression`, for the wire only.
    - ``options``: options of ``torch.nn.parallel.DistributedDataParallel``. ``init_sync=False``
      omits the broadcast in the constructor; ``dim`` must be 0. ``find_unused_parameters``,
      ``gradient_as_bucket_view``, ``static_graph``, ``bucket_cap_mb``, ``check_reduction`` and
      ``skip_all_reduce_unused_params`` are accepted and change nothing. Others are refused.

    ``state_dict()`` has the inner module's keys, prefixed with ``module.``; the inner module is
    ``module``. It may be compiled. ``deepcopy`` and pickling are refused: take the inner module.
    With reentrant checkpointing (``use_reentrant=True``), gradients of checkpointed parts are
    pushed at the end of the pass. Sparse gradients are made dense. With a single worker (unless
    ``BYTEPS_FORCE_DISTRIBUTED``) nothing is pushed.

    Raises :class:`~bpsx.errors.ConfigError` (a :class:`ValueError`) for options that cannot be
    honoured, a module without parameters that require a gradient, and asynchronous training;
    :class:`~bpsx.torch.UnsupportedTensor` and :class:`~bpsx.dtypes.UnsupportedDType` for parameters
    that cannot be sent; :class:`~bpsx.errors.NotInitializedError`. ``backward()`` raises the error
    that made a push fail, as :func:`bpsx.torch.synchronize` does; ``forward()`` does so for
    buffers. If another exception ends a ``backward()`` while gradients are in flight, the next
    ``forward()`` or ``backward()`` raises :class:`~bpsx.torch.GradientOrderError`. Not thread-safe.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        broadcast_buffers: bool = True,
        compression: type[Compressor] = Compression.none,
        **options: Any,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"DistributedDataParallel: module is a {type(module).__name__}; expected a"
                " torch.nn.Module"
            )
        check_compression(compression, "DistributedDataParallel")
        adapter.check_flag(broadcast_buffers, "broadcast_buffers", "DistributedDataParallel")
        init_sync = _checked(module, device_ids, options)
        session = adapter.session()
        if session.config.asynchronous:
            raise ConfigError(
                "DistributedDataParallel cannot be used with BYTEPS_ENABLE_ASYNC=1, because"
                " workers exchange weights instead of gradients; use DistributedOptimizer"
            )
        named = list(module.named_parameters())
        if not any(p.requires_grad for _, p in named):
            raise ConfigError(
                "DistributedDataParallel: no parameter of the module requires a gradient, so there"
                " is nothing to average"
            )
        super().__init__()
        self.module = module
        self.broadcast_buffers = bool(broadcast_buffers)
        name = f"DDP.{next(_numbers)}"
        self._averaging = Averaging(
            [(f"{name}.{n}", p) for n, p in named], compression, name, session.config.distributed
        )
        self._buffers_of_0 = _Buffers(f"Buffers.{name}")
        if init_sync:
            broadcast_parameters([*named, *module.named_buffers()], 0, prefix=f"Parameter.{name}.")
        self._averaging.attach()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the inner module returns."""
        averaging = self._averaging
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        averaging.follow()
        if averaging.syncing:
            averaging.check_ready()
            averaging.expected = True
            if self.broadcast_buffers and self.training and averaging.active:
                self._buffers_of_0.spread(self.module)
        outputs = self.module(*inputs, **kwargs)
        averaging.watch(_tensors_in(outputs))
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which ``backward()`` only adds to this worker's own gradients.

        ``forward()`` leaves buffers alone inside. The first ``backward()`` outside exchanges
        everything. All workers must make the same number of passes outside; the number inside may
        differ.
        """
        before, self._averaging.syncing = self._averaging.syncing, False
        try:
            yield
        finally:
            self._averaging.syncing = before

    def synchronize(self) -> None:
        """Take part in an exchange without ``backward()``.

        Call it on a worker whose loss did not depend on this module, or whose backward pass has
        failed. Each worker must take part in the same number of exchanges. Does nothing if there
        has been no forward pass since the last exchange.

        Raises the error that made a push fail.
        """
        if self._averaging.active and (self._averaging.expected or self._averaging.under_way):
            self._averaging.complete()

    def register_comm_hook(self, state: object, hook: object) -> NoReturn:
        """Raise :class:`ConfigError`: there are no buckets to pass to a comm hook."""
        raise ConfigError(
            "DistributedDataParallel.register_comm_hook: this module exchanges gradients one by"
            " one, without buckets. Give compression=bpsx.torch.Compression.fp16 here, or use"
            " torch.nn.parallel.DistributedDataParallel, which supports hooks, on the backend"
            ' "bpsx"'
        )

    def __getstate__(self) -> Any:
        raise ConfigError(
            "DistributedDataParallel cannot be copied or pickled, because its gradients are"
            " exchanged under one name; copy its .module, or its state_dict()"
        )


def _checked(module: Any, device_ids: Any, options: dict[str, Any]) -> bool:
    """Check PyTorch's options and return the value of ``init_sync``.

    Raises :class:`ConfigError`, and :class:`TypeError` for unknown options.
    """
    devices = {p.device for p in module.parameters()} if isinstance(module, nn.Module) else set()
    if device_ids and [
        torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in device_ids
    ] != list(devices):
        raise ConfigError(
            f"DistributedDataParallel: device_ids={device_ids!r}, but the module is on"
            f" {', '.join(map(str, devices)) or 'no device'}; expected None or the one GPU"
            " that holds the module"
        )
    for option, value in options.items():
        if option in _REFUSED and value is not None:
            raise ConfigError(f"DistributedDataParallel: {option} is not supported; expected None")
        if option == "dim" and value != 0:
            raise ConfigError(f"DistributedDataParallel: dim={value!r}; expected 0")
        if option not in _REFUSED | _CHANGE_NOTHING | {"dim", "init_sync"}:
            raise TypeError(f"DistributedDataParallel: unknown option {option!r}")
    init_sync = options.get("init_sync", True)
    adapter.check_flag(init_sync, "init_sync", "DistributedDataParallel")
    return bool(init_sync)


def _tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, sets, mappings and dataclasses."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from _tensors_in(list(outputs.values()))
    elif isinstance(outputs, (tuple, list, set)):
        for part in outputs:
            yield from _tensors_in(part)
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        yield from _tensors_in([getattr(outputs, f.name) for f in fields(outputs)])


class _Buffers:
    """Broadcast of all buffers of a module in one message."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._key: tuple[Any, ...] = ()
        self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._parts: list[torch.Tensor] = []

    def spread(self, module: nn.Module) -> None:
        """Give the buffers worker 0's values.

        Buffers that already have these values are not written to, so that autograd may keep them.
        """
        buffers = list(_buffers_of(module))
        if not buffers:
            return
        self._lay_out([b for b, _ in buffers])
        session = adapter.session()
        if session.rank == 0:
            for (buffer, _), part in zip(buffers, self._parts, strict=True):
                part.copy_(buffer.detach())
        session.broadcast(self._name, bytes_view(self._flat), 0).wait()
        if session.rank != 0:
            with torch.no_grad():
                for (buffer, statistic), part in zip(buffers, self._parts, strict=True):
                    # Backward does not read it, as when batch normalisation itself updates it.
                    if statistic:
                        buffer.data.copy_(part)
                    elif not torch.equal(buffer, part.to(buffer.device)):
                        buffer.detach().copy_(part)

    def _lay_out(self, buffers: Sequence[torch.Tensor]) -> None:
        key = tuple((b.dtype, b.shape, b.device) for b in buffers)
        if key == self._key:
            return
        places, end = [], 0
        for buffer in buffers:
            check_tensor(buffer, "buffer")
            nbytes = buffer.numel() * buffer.element_size()
            places.append((end, nbytes))
            end += -(-nbytes // _ALIGNED) * _ALIGNED
        self._flat = torch.zeros(end, dtype=torch.uint8, device=buffers[0].device)
        self._parts = [
            self._flat[at : at + n].view(b.dtype).reshape(b.shape)
            for b, (at, n) in zip(buffers, places, strict=True)
        ]
        self._key = key


def _buffers_of(module: nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield each buffer once, and whether it is a running statistic of a training batch norm."""
    seen: set[int] = set()
    for part in module.modules():
        for buffer in part.buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer, isinstance(part, _BatchNorm) and part.training
