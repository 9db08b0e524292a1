"""Who is in the job, who this worker is, and what Horovod's questions about itself are answered with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from bpsx import _adapter, api
from bpsx import torch as bps
from bpsx.errors import ConfigError

#: Where worker 0's timeline is to go when it ends.
_timeline = ""


class ProcessSet:
    """Some of the workers, by rank: all of them, or a set that every verb refuses, since a sum over summation servers takes all."""

    def __init__(self, ranks: Sequence[int] | None) -> None:
        known = [r for r in map(_adapter.integer, ranks) if r is not None and r >= 0] if isinstance(ranks, Sequence) else []
        if ranks is not None and not (isinstance(ranks, Sequence) and len(set(known)) == len(ranks)):
            raise ConfigError(f"ProcessSet: ranks={ranks!r}: a list of ranks from 0, each once, is needed, or None for all workers")
        self.ranks: list[int] | None = None if ranks is None else sorted(known)

    def size(self) -> int:
        """How many workers it has. Raises :class:`~bpsx.errors.NotInitializedError` where that is not known yet."""
        return api.size() if self.ranks is None else len(self.ranks)

    def rank(self) -> int:
        """This worker's place in it."""
        return api.rank() if self.ranks is None else self.ranks.index(api.rank())

    def included(self) -> bool:
        """Whether this worker is in it."""
        return self.ranks is None or api.rank() in self.ranks

    def __repr__(self) -> str:
        return "global_process_set" if self.ranks is None else f"ProcessSet({self.ranks})"


#: All workers.
global_process_set = ProcessSet(None)


def check_process_set(process_set: Any, argument: str = "process_set") -> None:
    """Raise :class:`ConfigError` unless it is all workers."""
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(f"{argument}={process_set!r}: a ProcessSet is needed, not {type(process_set).__name__}; leave it out for all workers")
    if process_set.ranks is not None and process_set.ranks != list(range(api.size())):
        raise ConfigError(f"{argument}={process_set}: these are not all {api.size()} workers, and a sum over summation servers takes all of them; "
                          "for some of them use torch.distributed.new_group(ranks, backend=\"gloo\")")


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """The set, if it has all workers. Raises :class:`ConfigError` for any other."""
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    check_process_set(given)
    return given


def remove_process_set(process_set: ProcessSet) -> bool:
    """False: the workers of a job cannot be removed from it. Raises :class:`ConfigError` for what is no set."""
    check_process_set(process_set)
    return False


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """:func:`bpsx.torch.init`. ``comm`` has to be None and ``process_sets`` to be of all workers, or None.

    Raises :class:`ConfigError` for anything else, and as :func:`bpsx.torch.init`.
    """
    if comm is not None and (not isinstance(comm, Sequence) or comm):
        raise ConfigError("init: comm: the job's workers are those that the launcher has started; leave comm out, and for some of them use "
                          "torch.distributed.new_group(ranks, backend=\"gloo\")")
    bps.init()
    if process_sets is not None and process_sets != "dynamic":
        for process_set in process_sets:
            check_process_set(process_set, "init: process_sets")


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return _adapter.initialised()


def cross_rank() -> int:
    """The index of this worker's machine; under ``bpsx-run --local --workers`` each worker imitates one."""
    return api.rank() // api.local_size()


def cross_size() -> int:
    """Number of machines."""
    return api.size() // api.local_size()


def is_homogeneous() -> bool:
    """True: all machines run the same number of workers."""
    return True


def join(device: int = -1) -> int:
    """:func:`bpsx.torch.join`: returns the rank that came last. ``device`` is Horovod's and ignored."""
    return api.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every worker is here."""
    check_process_set(process_set)
    api.barrier()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline of what begins from now on; :func:`stop_timeline` writes worker 0's to ``file_path``, and every worker's own to its place
    in ``BYTEPS_TRACE_DIR``. ``mark_cycles`` is ignored: there are no cycles. Raises :class:`ConfigError` for what is no path."""
    global _timeline
    path = os.fsdecode(file_path) if isinstance(file_path, (str, bytes, os.PathLike)) else ""
    if not path:
        raise ConfigError(f"start_timeline: file_path={file_path!r}: the path of a file is needed")
    api.trace_start()
    _timeline = path


def stop_timeline() -> None:
    """End what :func:`start_timeline` began. Raises :class:`OSError` if worker 0's cannot be written to its ``file_path``."""
    path = api.trace_stop()
    if path is not None and _timeline and api.rank() == 0:
        shutil.copyfile(path, _timeline)


def no() -> bool:
    """False: there is no MPI, gloo, NCCL, DDL, oneCCL, CUDA or ROCm in bpsx."""
    return False


def refuse_elastic() -> NoReturn:
    """Raise :class:`ConfigError`."""
    raise ConfigError("hvd.elastic: nothing is restarted behind a script's back: a worker that is lost is a bpsx.PeerLostError on all others, and "
                      "torchrun --max-restarts starts the job again, from a checkpoint; for a planned change of size there are "
                      "bpsx.torch.suspend() and resume()")
