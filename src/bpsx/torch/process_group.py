"""The ``torch.distributed`` backend "bpsx".

Use it by ``torch.distributed.init_process_group("bpsx")`` after ``import bpsx.torch``. PyTorch
calls a process group by several names, depending on the release and on whether the call comes from
C++ or Python. All of them end in :class:`~bpsx.torch.collectives.Group`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.session.refusals import counted
from bpsx.system.tracebacks import warn
from bpsx.torch.collectives import Group, UnsupportedCollective
from bpsx.torch.dynamo import eager_methods
from bpsx.torch.profiling import profiled, recorded
from bpsx.torch.rendezvous import init, init_as
from bpsx.torch.work import Collective, Waiting, Work

NAME = "bpsx"


@eager_methods
class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc]    # mypy does not follow torch
    """Process group of all workers of the bpsx job, or of this worker alone.

    A group of some of the workers can be created, but refuses every collective. Methods are those
    of ``torch.distributed``. Collectives return a :class:`~bpsx.torch.work.Work`. They raise
    :class:`~bpsx.torch.collectives.UnsupportedCollective`, :class:`~bpsx.errors.ConfigError` for
    tensors that do not match each other, :class:`~bpsx.torch.UnsupportedTensor`. Use it from one
    thread at a time, as every backend.
    """

    #: Further capabilities that PyTorch queries.
    supports_splitting = supports_shrinking = supports_coalescing = supports_time_estimate = False

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        timeout: timedelta,
        refused: str = "",
        store: Any = None,
    ) -> None:
        super().__init__(rank, size)
        self._store, self._begun_so_far = store, 0
        # Works between _start_coalescing and _end_coalescing.
        self._together: list[Work] | None = None
        self._label, self._description = name, ""
        self._limit = timeout.total_seconds()
        self._refused = refused
        self._members = Group(f"torch.{name}", rank, size)
        self.wire = self._members.name  # prefix of its collectives' wire names

    # ---- properties

    def getBackendName(self) -> str:  # noqa: N802  (PyTorch's)
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._label

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._label = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """Return the group itself, which serves CPU and GPU.

        Raises :class:`RuntimeError` for other devices, as PyTorch's groups do.
        """
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _get_backend_name(self) -> str:
        return NAME

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        """Return False: tensors come from PyTorch's own allocators."""
        return False

    @property
    def options(self) -> Any:
        """Name and timeout, as PyTorch's backends have them."""
        return torch._C._distributed_c10d.Backend.Options(NAME, timedelta(seconds=self._limit))

    def get_group_store(self) -> Any:
        """Return the store at which the group's processes meet."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of collectives that begin from now on."""
        self._limit = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this worker has begun in the group."""
        return self._begun_so_far

    def _has_hooks(self) -> bool:
        return False

    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        """Return False: there is no symmetric memory."""
        return False

    def _start_coalescing(self, _: torch.device | None = None) -> None:
        """Collect the collectives that begin from now on, for :meth:`_end_coalescing`.

        They begin at once all the same.
        """
        if self._together is not None:
            raise RuntimeError(
                "_start_coalescing: the previous call has not been ended by _end_coalescing"
            )
        self._together = []

    def _end_coalescing(self, _: torch.device | None = None) -> Work:
        """Return one work for everything that has begun since :meth:`_start_coalescing`.

        Raises :class:`RuntimeError` if that was not called.
        """
        together, self._together = self._together, None
        if together is None:
            raise RuntimeError("_end_coalescing: _start_coalescing was not called")
        return Work(
            f"coalesced collectives of process group {self._label!r}",
            Collective([Waiting(work) for work in together]),
            [output for work in together for output in work.result()],
            self._limit,
        )

    def shutdown(self) -> None:
        """Do nothing: the session belongs to bpsx and outlives groups."""

    def _set_sequence_number_for_group(self) -> None:
        """Restart the count of collectives.

        Workers need not agree on a number, since bpsx counts rounds itself.
        """
        self._begun_so_far = 0

    # ---- collectives

    def _run(
        self,
        what: str,
        opts: Any,
        outputs: list[Any],
        *begin: Callable[[Group], Collective],
        operator: str = "",
    ) -> Work:
        if self._refused:
            raise UnsupportedCollective(f"{what}: {self._refused}")
        if profiled():
            shown = [t for t in outputs if isinstance(t, torch.Tensor)]
            work = recorded(
                f"c10d::{operator or what}",
                what,
                shown,
                lambda: self._begin(what, opts, outputs, begin),
                Work.get_future,
            )
        else:
            work = self._begin(what, opts, outputs, begin)
        if self._together is not None:
            self._together.append(work)
        return work

    @counted("torch", several=True, argument="self")
    def _begin(
        self,
        what: str,
        opts: Any,
        outputs: list[Any],
        begin: Sequence[Callable[[Group], Collective]],
    ) -> Work:
        begun = Collective()
        self._begun_so_far += 1
        for act in begin:
            begun.add(act(self._members))
        limit = getattr(opts, "timeout", None)
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else 0.0
        return Work(
            f"{what} of process group {self._label!r}",
            begun,
            outputs,
            seconds if seconds > 0 else self._limit,
        )

    def allreduce(
        self, tensors: Any, opts: Any = None, *_: Any, operator: str = "allreduce_"
    ) -> Work:
        tensors, op = _listed(tensors), _op_of(opts)
        will_wait = not getattr(opts, "asyncOp", True)
        return self._run(
            "all_reduce",
            opts,
            tensors,
            *[lambda g, t=t: g.all_reduce(t, op, will_wait=will_wait) for t in tensors],
            operator=operator,
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts, operator="allreduce_coalesced_")

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensors, root = (
            _listed(tensors),
            opts if isinstance(opts, int) else getattr(opts, "rootRank", 0),
        )
        return self._run(
            "broadcast",
            opts,
            tensors,
            *[lambda g, t=t: g.broadcast(t, root) for t in tensors],
            operator="broadcast_",
        )

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensors = _listed(tensors)
        return self._run(
            "reduce",
            opts,
            tensors,
            *[lambda g, t=t: g.reduce(t, opts.rootRank, _op_of(opts)) for t in tensors],
            operator="reduce_",
        )

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._run(
            "all_gather",
            opts,
            outputs,
            *[lambda g, o=o, i=i: g.all_gather(o, i) for o, i in zip(outputs, inputs, strict=True)],
            operator="allgather_",
        )

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Fill ``outputs[r][i]`` with worker r's ``inputs[i]``."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._run(
            "all_gather_into_tensor",
            opts,
            outputs,
            *[
                lambda g, o=o, i=i: g.all_gather_single(o, i)
                for o, i in zip(outputs, inputs, strict=True)
            ],
            operator=(
                "_allgather_base_" if len(outputs) == 1 else "allgather_into_tensor_coalesced_"
            ),
        )

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        mine = outputs[0] if outputs else []
        return self._run(
            "gather",
            opts,
            outputs,
            lambda g: g.gather(mine, inputs[0], opts.rootRank),
            operator="gather_",
        )

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> Work:
        theirs = inputs[0] if inputs else []
        return self._run(
            "scatter",
            opts,
            outputs,
            lambda g: g.scatter(outputs[0], theirs, opts.rootRank),
            operator="scatter_",
        )

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        return self._run(
            "reduce_scatter",
            opts,
            outputs,
            *[
                lambda g, o=o, i=i: g.reduce_scatter(o, i, _op_of(opts))
                for o, i in zip(outputs, inputs, strict=True)
            ],
            operator="reduce_scatter_",
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._run(
            "reduce_scatter_tensor",
            opts,
            outputs,
            *[
                lambda g, o=o, i=i: g.reduce_scatter_single(o, i, _op_of(opts))
                for o, i in zip(outputs, inputs, strict=True)
            ],
            operator=(
                "_reduce_scatter_base_" if len(outputs) == 1 else "reduce_scatter_tensor_coalesced_"
            ),
        )

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._run(
            "all_to_all",
            opts,
            outputs,
            lambda g: g.all_to_all(outputs, inputs),
            operator="alltoall_",
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        def begin(group: Group) -> Collective:
            return group.all_to_all(
                _rows(output, output_sizes, group.size, "output"),
                _rows(given, input_sizes, group.size, "input"),
            )

        return self._run("all_to_all_single", opts, [output], begin, operator="alltoall_base_")

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        return self._run("barrier", opts, [], lambda g: g.barrier())

    # Names in earlier releases of PyTorch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- unsupported

    def send(self, *_: Any) -> NoReturn:
        _refuse("send")

    def recv(self, *_: Any) -> NoReturn:
        _refuse("recv")

    def recv_anysource(self, *_: Any) -> NoReturn:
        _refuse("recv")

    def monitored_barrier(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(
            "monitored_barrier",
            "barrier() reports the missing workers after BPSX_STALL_WARN_SECONDS; otherwise ",
        )

    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("split_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("merge_remote_group")

    def _register_on_completion_hook(self, *_: Any) -> NoReturn:
        _refuse("_register_on_completion_hook", "use Work.get_future().then(); otherwise ")

    def _wait_for_pending_works(self) -> NoReturn:
        _refuse(
            "_wait_for_pending_works", "wait for the works that the collectives return; otherwise "
        )

    def abort(self) -> NoReturn:
        _refuse("abort", "bpsx.torch.shutdown() ends everything that is under way; otherwise ")


def create(options: Any, _: Any) -> ProcessGroup:
    """Create a group for ``torch.distributed``.

    Initialises bpsx if necessary; bpsx stays initialised when the group is destroyed.

    Raises :class:`ConfigError` if PyTorch and bpsx disagree about this process's rank or the size,
    or in asynchronous training.
    """
    rank, size, ranks = options.group_rank, options.group_size, list(options.global_ranks_in_group)
    if ranks:
        init()
    else:
        init_as(options.store, rank, size)
    ours = adapter.session()
    if ours.config.asynchronous:
        raise ConfigError(
            'the backend "bpsx" cannot be used with BYTEPS_ENABLE_ASYNC=1, because its collectives'
            " need all workers"
        )
    ours.require_all('the backend "bpsx" of torch.distributed')
    if not ranks and (rank, size) != (ours.rank, ours.size):
        raise ConfigError(
            f'init_process_group("bpsx"): this process is rank {rank} of {size} for PyTorch, but'
            f" rank {ours.rank} of {ours.size} for bpsx; both must be the same: "
            + (
                "call init_process_group before bpsx.torch.init"
                if ours.size == 1
                else "omit rank and world_size, or give bpsx.torch.rank() and size()"
            )
        )
    refused = ""
    if ranks not in ([], list(range(ours.size))) and size != 1:
        refused = (
            f"ranks {ranks} are not all {ours.size} workers in order, and collectives over bpsx"
            " need all of them; for such a group use torch.distributed.new_group(…,"
            ' backend="gloo")'
        )
        # An exception here would reach members only, while other workers may wait for them in
        # new_group.
        warn(f'backend "bpsx": this group\'s collectives will fail: {refused}')
    return ProcessGroup(str(options.group_id), rank, size, options.timeout, refused, options.store)


def register() -> None:
    """Register the backend with ``torch.distributed``. Called once, at the import of bpsx.torch."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    module: Any = dist.distributed_c10d
    if hasattr(module, "_set_pg_timeout"):
        module._set_pg_timeout = _extended(module._set_pg_timeout)


def _extended(original: Callable[..., None]) -> Callable[..., None]:
    """Extend PyTorch's ``_set_pg_timeout``, which knows only its own backends, to this one."""

    @functools.wraps(original)
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        chosen = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        if isinstance(chosen, ProcessGroup):
            chosen.set_timeout(timeout)
        else:
            original(timeout, group)

    return set_pg_timeout


def _refuse(what: str, instead: str = "") -> NoReturn:
    raise UnsupportedCollective(
        f'{what}: the backend "bpsx" supports only collectives of all workers; {instead}use a'
        ' group made with torch.distributed.new_group(backend="gloo")'
    )


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op_of(opts: Any) -> Any:
    """Return the reduction in a call's options, or a reduction passed instead of options."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _rows(
    tensor: torch.Tensor, sizes: list[int] | None, count: int, what: str
) -> list[torch.Tensor]:
    """Split ``tensor`` along its first dimension, evenly without ``sizes``.

    Raises :class:`ConfigError`.
    """
    length = tensor.shape[0] if tensor.dim() else 0
    given = list(sizes) if sizes else [length // count] * count
    if len(given) != count or sum(given) != length:
        raise ConfigError(
            f"all_to_all_single: the {what} has {length} rows, which cannot be split into {given}"
            f" for {count} workers; give one size per worker, with that sum"
        )
    return list(tensor.split(given))
