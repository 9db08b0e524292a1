"""Detects children that multiprocessing starts by 'spawn' or 'forkserver'.

They import their parent's script again, and would run an ``init()`` in it.
"""

from __future__ import annotations

import multiprocessing
import os

from bpsx.errors import JobOverError


def is_importing() -> bool:
    """Whether this process is such a child and is still importing its parent's script.

    multiprocessing has no public way to ask.
    """
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def explained(error: JobOverError, rank: int) -> JobOverError:
    """Return ``error`` with its likely cause added, if this process is a child of multiprocessing.

    ``rank``: of the worker that this process wanted to be.
    """
    # The fork server itself imports the script, too, but has no `parent_process()`.
    is_child = is_importing() or multiprocessing.parent_process() is not None
    return JobOverError(f"{error}. {_cause(rank)}") if is_child else error


def check(rank: int) -> None:
    """Raise :class:`~bpsx.errors.JobOverError` if this process would take its parent's place.

    ``rank``: the parent's.
    """
    if is_importing():
        raise JobOverError(f"worker {rank}: this place in the job is taken. {_cause(rank)}")


def _cause(rank: int) -> str:
    parent = multiprocessing.parent_process()
    of = (
        f"process {os.getpid()} is a child of worker {rank}'s process"
        f" {parent.pid if parent else os.getppid()}, started by multiprocessing"
    )
    if is_importing():
        return (
            f"{of} (as data loaders do), and imports the script again: put init() and the training"
            ' code under if __name__ == "__main__":'
        )
    return (
        f"{of}, which has the parent's variables: call init() only in the parent, or give the"
        " child its own place in the job (DMLC_WORKER_ID)"
    )
