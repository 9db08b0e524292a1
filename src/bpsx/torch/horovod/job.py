"""Horovod's API for the job and process sets, for PyTorch; see :mod:`bpsx.plugin.horovod`."""

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
    """Raise :class:`~bpsx.errors.ConfigError` unless the set has all workers."""
    horovod.check_process_set(process_set, instead=_GROUP)


@public
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Return the set if it has all workers. Raises :class:`~bpsx.errors.ConfigError` otherwise."""
    return horovod.checked_process_set(process_set, _GROUP)


@public
def remove_process_set(process_set: ProcessSet) -> bool:
    """Return False: the workers of a job cannot be removed from it.

    Raises :class:`~bpsx.errors.ConfigError` if ``process_set`` is not a set of all workers.
    """
    check_process_set(process_set)
    return False


@public
def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Same as :func:`bpsx.torch.init`.

    ``comm`` must be None; ``process_sets`` must be None or sets of all workers. Raises
    :class:`~bpsx.errors.ConfigError` for anything else, and as :func:`bpsx.torch.init`.
    """
    horovod.init(lambda: bps.init(), comm, process_sets, _GROUP)


@public
def join(device: int = -1) -> int:
    """Same as :func:`bpsx.torch.join`: return the rank that joined last. ``device`` is ignored."""
    return verbs.join()


@public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every worker has called it."""
    check_process_set(process_set)
    verbs.barrier()


def refuse_elastic() -> NoReturn:
    """Raise :class:`~bpsx.errors.ConfigError`: elastic training is not supported."""
    horovod.refuse_elastic("bpsx.torch")
