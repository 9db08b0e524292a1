"""Horovod's functions that send Python objects from one worker to all, and from all to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bpsx.plugin import objects
from bpsx.plugin.horovod import ProcessSet, global_process_set
from bpsx.session.refusals import counted_together
from bpsx.tensorflow.horovod.job import check_process_set
from bpsx.tensorflow.objects import TENSORS


@counted_together("broadcast_object.")
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return worker ``root_rank``'s ``obj``: the object itself on the root, a copy elsewhere.

    Plain values always travel: None, bool, int, float, complex, str, bytes, bytearray, NumPy arrays
    and scalars of numbers and text, tensors of eager code, and tuples, lists, sets, dicts and
    OrderedDicts of these, exactly of these types. Anything else is pickled, if the job has a secret
    (``BPSX_SECRET``; ``bpsx-run --local`` and ``--hostfile`` make one). A worker unpickles it only
    after a proof with that secret. Calls of one name are matched in order. ``session`` is Horovod's
    and ignored: nothing runs in a graph.

    Raises :class:`~bpsx.plugin.objects.ObjectError` on all workers if the root's object cannot be
    sent, and on a single worker that cannot unpickle it; :class:`~bpsx.errors.ConfigError` for a
    root that does not exist; and the errors that end a job.
    """
    check_process_set(process_set)
    return objects.broadcast_object(obj, root_rank, name, TENSORS)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that calls :func:`broadcast_object` with its argument."""
    check_process_set(process_set)
    return lambda obj: broadcast_object(obj, root_rank, session, name or "broadcast_object_fn")


@counted_together("allgather_object.")
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the ``obj`` of each worker, by rank; this worker's entry is ``obj`` itself.

    Objects travel as with :func:`broadcast_object`; errors are raised on all workers.
    """
    check_process_set(process_set)
    return objects.all_gather_object(obj, name, TENSORS, "allgather_object")
