"""The job and process sets in Horovod's forms, for PyTorch; most of it is
:mod:`bpsx.plugin.horovod`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from bpsx import torch as bps
from bpsx.api import verbs
from bpsx.plugin import horovod
from bpsx.plugin.horovod import ProcessSet, global_process_set
from bpsx.system.tracebacks import public

_GROUP = 'for some of them use torch.distributed.new_group(ranks, backend="gloo")'


def check_process_set(process_set: Any) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless it is all workers."""
    horovod.check_process_set(process_set, instead=_GROUP)


@public
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """The set, if it has all workers. Raises :class:`~bpsx.errors.ConfigError` for any other."""
    return horovod.checked_process_set(process_set, _GROUP)


@public
def remove_process_set(process_set: ProcessSet) -> bool:
    """False: the workers of a job cannot be removed from it.

    Raises :class:`~bpsx.errors.ConfigError` for what is no set.
    """
    check_process_set(process_set)
    return False


@public
def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """:func:`bpsx.torch.init`. ``comm`` must be None and ``process_sets`` of all workers, or None.

    Raises :class:`~bpsx.errors.ConfigError` for anything else, and as :func:`bpsx.torch.init`.
    """
    horovod.init(lambda: bps.init(), comm, process_sets, _GROUP)


@public
def join(device: int = -1) -> int:
    """:func:`bpsx.torch.join`: returns the rank that came last. ``device`` is ignored."""
    return verbs.join()


@public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every worker is here."""
    check_process_set(process_set)
    verbs.barrier()


def refuse_elastic() -> NoReturn:
    """Raise :class:`~bpsx.errors.ConfigError`."""
    horovod.refuse_elastic("bpsx.torch")
