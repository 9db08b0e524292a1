"""Framework-independent part of Horovod's API: reductions, process sets, timelines, refusals.

The modules ``bpsx.torch.horovod`` and ``bpsx.tensorflow.horovod`` are built on it.
"""

from __future__ import annotations

import enum
import numbers
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bpsx.api import verbs
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.framework import Framework
from bpsx.system.tracebacks import public, warn

#: File to which :func:`stop_timeline` copies worker 0's timeline.
_timeline = ""


class ReduceOp(enum.IntEnum):
    """Reductions over workers, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


#: Reductions that servers compute. For the others, every worker gathers all tensors.
_ADDING = (ReduceOp.Average, ReduceOp.Sum)


class How(NamedTuple):
    """Checked arguments of a reduction."""

    verb: str
    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def here(self) -> bool:
        """Whether every worker gathers all tensors and reduces them itself."""
        return self.op not in _ADDING


def checked_op(verb: str, op: Any, average: Any = None) -> ReduceOp:
    """Return ``op``, or the reduction that the deprecated ``average`` stands for.

    Raises :class:`ConfigError`.
    """
    if average is not None:
        if op is not None:
            raise ConfigError(f"{verb}: op and average are both given; leave average out")
        adapter.check_flag(average, "average", verb)
        warn(
            f"{verb}: average is deprecated; give op=hvd.Average or op=hvd.Sum", DeprecationWarning
        )
        return ReduceOp.Average if average else ReduceOp.Sum
    try:
        known = ReduceOp.Average if op is None else ReduceOp(op)
    except ValueError:
        allowed = ", ".join(f"hvd.{o.name}" for o in ReduceOp if o is not ReduceOp.Adasum)
        raise ConfigError(f"{verb}: op={op!r}; expected one of {allowed}") from None
    if known is ReduceOp.Adasum:
        raise ConfigError(
            f"{verb}: op=hvd.Adasum is not supported, because summation servers only add; use "
            "op=hvd.Average, with the learning rate that fits an average"
        )
    return known


def check_adds(verb: str, op: ReduceOp) -> ReduceOp:
    """Return ``op`` if it is a sum or an average. Raises :class:`ConfigError` otherwise."""
    if op not in _ADDING:
        raise ConfigError(f"{verb}: op=hvd.{op.name}; expected hvd.Average or hvd.Sum")
    return op


# ---- process sets


class ProcessSet:
    """A set of workers, given by their ranks.

    Servers sum over all workers, so every verb refuses a smaller set.
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        known: list[int] = []
        if isinstance(ranks, Sequence):
            known = [r for r in map(adapter.as_integer, ranks) if r is not None and r >= 0]
        complete = isinstance(ranks, Sequence) and len(set(known)) == len(ranks)
        if ranks is not None and not complete:
            raise ConfigError(
                f"ProcessSet: ranks={ranks!r}: expected a list of ranks from 0, each once, or "
                "None for all workers"
            )
        self.ranks: list[int] | None = None if ranks is None else sorted(known)

    @property
    def process_set_id(self) -> int | None:
        """0 for the one set of all workers, None for any other set."""
        everyone = self.ranks is None
        if not everyone and adapter.initialised():
            everyone = self.ranks == list(range(verbs.size()))
        return 0 if everyone else None

    def size(self) -> int:
        """Number of workers in the set.

        Raises :class:`~bpsx.errors.NotInitializedError` if the number is not known yet.
        """
        return verbs.size() if self.ranks is None else len(self.ranks)

    def rank(self) -> int:
        """Index of this worker in the set."""
        return verbs.rank() if self.ranks is None else self.ranks.index(verbs.rank())

    def included(self) -> bool:
        """Whether this worker is in the set."""
        return self.ranks is None or verbs.rank() in self.ranks

    def __repr__(self) -> str:
        return "global_process_set" if self.ranks is None else f"ProcessSet({self.ranks})"


#: The set of all workers.
global_process_set = ProcessSet(None)


def check_process_set(process_set: Any, argument: str = "process_set", instead: str = "") -> None:
    """Raise :class:`ConfigError` unless the set has all workers.

    ``instead``: advice for a set of fewer workers.
    """
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(
            f"{argument}={process_set!r}: must be a ProcessSet, not {type(process_set).__name__}; "
            "leave it out for all workers"
        )
    if process_set.ranks is not None and process_set.ranks != list(range(verbs.size())):
        more = f"; {instead}" if instead else ""
        raise ConfigError(
            f"{argument}={process_set}: these are not all {verbs.size()} workers, but a sum over "
            f"summation servers needs all of them{more}"
        )


class Horovod:
    """Horovod's functions in which frameworks differ by their tensors and a few words only.

    ``begin``: the framework's ``init``. ``instead``: advice for a set of fewer workers.
    """

    def __init__(
        self, framework: Framework[Any], begin: Callable[[], None], instead: str = ""
    ) -> None:
        self._framework, self._begin, self._instead = framework, begin, instead

    @public
    def init(
        self,
        comm: Sequence[int] | None = None,
        process_sets: Sequence[ProcessSet] | str | None = None,
    ) -> None:
        """Same as the framework's ``init``.

        ``comm`` must be None; ``process_sets`` must be None or sets of all workers. Raises
        :class:`~bpsx.errors.ConfigError` for anything else, and as :func:`bpsx.init`.
        """
        if comm is not None and (not isinstance(comm, Sequence) or comm):
            more = f", and {self._instead}" if self._instead else ""
            raise ConfigError(
                "init: comm is not supported, because the launcher decides which workers the job"
                f" has; leave comm out{more}"
            )
        self._begin()
        if process_sets is not None and process_sets != "dynamic":
            for process_set in process_sets:
                check_process_set(process_set, "init: process_sets", self._instead)

    @public
    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Wait until every worker has called it."""
        self.check_process_set(process_set)
        verbs.barrier()

    def check_process_set(self, process_set: Any) -> None:
        """Raise :class:`~bpsx.errors.ConfigError` unless the set has all workers."""
        check_process_set(process_set, instead=self._instead)

    @public
    def add_process_set(self, process_set: ProcessSet | Sequence[int]) -> ProcessSet:
        """Return the set if it has all workers.

        Raises :class:`~bpsx.errors.ConfigError` otherwise.
        """
        given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        self.check_process_set(given)
        return given

    @public
    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Return False: the workers of a job cannot be removed from it.

        Raises :class:`~bpsx.errors.ConfigError` if ``process_set`` is not a set of all workers.
        """
        self.check_process_set(process_set)
        return False

    def how_to(
        self, verb: str, op: Any, average: Any, prescale: Any, postscale: Any, process_set: Any
    ) -> How:
        """Check the arguments of a reduction. ``average``: the deprecated form of ``op``.

        Raises :class:`ConfigError`.
        """
        kind = checked_op(verb, op, average)
        self.check_process_set(process_set)
        for argument, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
            if not isinstance(factor, numbers.Real):
                raise ConfigError(f"{verb}: {argument} must be a number, not {factor!r}")
        if adapter.session().config.asynchronous:
            raise ConfigError(
                f"{verb}: with BYTEPS_ENABLE_ASYNC=1 servers add to values that they keep, so there"
                f" is no sum over the workers; use {self._framework.module}.push_pull, which"
                " documents what it does then"
            )
        return How(verb, kind, float(prescale), float(postscale))

    def scaled(self, tensor: Any, factor: float) -> Any:
        """Return ``factor`` times ``tensor``.

        Integers are multiplied as float64 and truncated, as Horovod does.
        """
        if factor == 1.0:
            return tensor
        if self._framework.is_floating(tensor):
            return tensor * factor
        wide = self._framework.cast(tensor, "float64") * factor
        return self._framework.cast(wide, self._framework.dtype_of(tensor))

    def averages_here(self, tensor: Any, how: How) -> bool:
        """Whether the worker computes the average from the sum.

        It does so for integers: Horovod's average rounds towards zero, the servers' rounds down.
        """
        return how.op is ReduceOp.Average and not self._framework.is_floating(tensor)


# ---- queries about the job and the build


def is_initialized() -> bool:
    """Whether this process is part of a job."""
    return adapter.initialised()


def cross_rank() -> int:
    """Index of this worker's machine.

    Under ``bpsx-run --local --workers`` each worker counts as a machine.
    """
    return verbs.rank() // verbs.local_size()


def cross_size() -> int:
    """Number of machines."""
    return verbs.size() // verbs.local_size()


def is_homogeneous() -> bool:
    """True: all machines run the same number of workers."""
    return True


def no() -> bool:
    """False: there is no MPI, gloo, NCCL, DDL, oneCCL, CUDA or ROCm in bpsx."""
    return False


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline from now until :func:`stop_timeline`.

    :func:`stop_timeline` writes worker 0's timeline to ``file_path``, and each worker's own
    timeline to its place in ``BYTEPS_TRACE_DIR``. ``mark_cycles`` is ignored: bpsx has no cycles.
    Raises :class:`ConfigError` unless ``file_path`` is a path.
    """
    global _timeline
    path = ""
    if isinstance(file_path, (str, bytes, os.PathLike)):
        path = os.fsdecode(file_path)
    if not path:
        raise ConfigError(f"start_timeline: file_path={file_path!r}: must be the path of a file")
    verbs.trace_start()
    _timeline = path


def stop_timeline() -> None:
    """End the timeline that :func:`start_timeline` began.

    Raises :class:`OSError` if worker 0's timeline cannot be written to its ``file_path``.
    """
    path = verbs.trace_stop()
    if path is not None and _timeline and verbs.rank() == 0:
        shutil.copyfile(path, _timeline)


# ---- arguments


def group_names(verb: str, name: str | None, tensors: Any) -> list[str | None]:
    """Return the names of a group's members. Raises :class:`ConfigError`."""
    adapter.check_name(name, verb)
    if not isinstance(tensors, Sequence) or isinstance(tensors, (str, bytes)):
        raise ConfigError(f"{verb}: expected a list of tensors, not {type(tensors).__name__}")
    return [f"{name}.{i}" if name else None for i in range(len(tensors))]


def checked_training_op(verb: str, op: Any, predivide: Any) -> ReduceOp:
    """Return ``op`` if it is a sum or an average that ``gradient_predivide_factor`` may go with.

    Raises :class:`ConfigError`.
    """
    kind = check_adds(verb, checked_op(verb, op))
    if not isinstance(predivide, numbers.Real) or not float(predivide) > 0:
        raise ConfigError(
            f"{verb}: gradient_predivide_factor={predivide!r}: must be a number above 0"
        )
    if predivide != 1.0 and kind is not ReduceOp.Average:
        raise ConfigError(
            f"{verb}: gradient_predivide_factor divides an average in two steps; "
            f"with op=hvd.{kind.name} leave it out"
        )
    return kind


def check_groups(
    verb: str, num_groups: Any, groups: Any, known: Callable[[Any], bool], what: str = "parameter"
) -> None:
    """Raise :class:`ConfigError` unless ``groups`` is a number, or lists of ``what``, each once.

    ``known``: whether a member of a list is a ``what``.
    """
    listed = groups is not None and isinstance(groups, Sequence)
    counts = (("num_groups", num_groups), ("groups", 0 if groups is None or listed else groups))
    for argument, count in counts:
        number = adapter.as_integer(count)
        if number is None or number < 0:
            more = f", or a list of lists of {what}s" if argument == "groups" else ""
            raise ConfigError(f"{verb}: {argument}={count!r}: expected an integer from 0{more}")
    if listed:
        members = [m for group in groups for m in _members(group)]
        if not all(map(known, members)) or len({id(m) for m in members}) < len(members):
            raise ConfigError(f"{verb}: groups: must be lists of {what}s, with each {what} once")


def _members(group: Any) -> Iterable[Any]:
    return group if isinstance(group, Sequence) else [None]


def checked_splits(splits: Any, size: int, rows: int | None, shown: Any = None) -> list[int]:
    """Return the ``splits`` of an alltoall, a sequence or None, as ``size`` integers.

    ``rows``: the number of rows, None if it is not known yet. ``shown``: shown in the error in
    place of ``splits``. Raises :class:`ConfigError`.
    """
    if splits is None:
        if rows is None or rows % size:
            raise ConfigError(
                f"alltoall: {rows} rows cannot be divided evenly among {size} workers; give splits"
            )
        return [rows // size] * size
    given = list(splits) if isinstance(splits, Iterable) else []
    numbers_ = [n for n in map(adapter.as_integer, given) if n is not None and n >= 0]
    too_many = rows is not None and sum(numbers_) > rows
    if len(given) != size or len(numbers_) != size or too_many:
        limit = "" if rows is None else f", with at most {rows} rows in total"
        seen = splits if shown is None else shown
        raise ConfigError(
            f"alltoall: splits={seen!r}: must be {size} integers from 0, one for each worker{limit}"
        )
    return numbers_
