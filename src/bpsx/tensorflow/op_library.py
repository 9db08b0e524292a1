"""Loads the operations of ``_ops.pyx`` into TensorFlow.

:func:`push_pull` and :func:`broadcast` are one operation for a list of tensors. Eager code executes
it at once; otherwise it is added to the graph. :func:`push_pull_together` is for graphs only.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf

from bpsx.tensorflow.op_order import keep_turns

#: Names of the operations in TensorFlow.
PUSH_PULL, BROADCAST = "BpsxPushPull", "BpsxBroadcast"
BEGIN, END = "BpsxBegin", "BpsxEnd"


def _load() -> ModuleType:
    """Load the library, into TensorFlow first, which has it register operations."""
    spec = importlib.util.find_spec("bpsx.tensorflow._ops")
    if spec is None or spec.origin is None:
        raise ImportError(
            "bpsx.tensorflow: this bpsx was built without its library of TensorFlow operations;"
            " reinstall it"
        )
    library = tf.load_op_library(spec.origin)
    importlib.import_module("bpsx.tensorflow._ops").check()
    made: ModuleType = library
    return made


def check_header() -> None:
    """Raise :class:`ImportError` if callbacks in TensorFlow's header are not those of ``_ops.pyx``.

    A TensorFlow without headers passes.
    """
    header = Path(tf.sysconfig.get_include(), "tensorflow", "core", "framework", "op_kernel.h")
    try:
        text = header.read_text(errors="replace")
    except OSError:
        return
    if not re.search(
        r"(typedef\s+std::function<void\(\)>\s+DoneCallback|using\s+DoneCallback\s*=\s*std::function<void\(\)>)\s*;",
        text,
    ):
        raise ImportError(
            f"bpsx.tensorflow cannot work with TensorFlow {tf.__version__}, because its operations"
            f" report completion in a different way ({header} has no DoneCallback that is a"
            " std::function<void()>). Use a release that the documentation of bpsx lists"
        )


def check_callbacks() -> None:
    """Execute an empty push_pull to check TensorFlow's callbacks.

    It runs in a session of its own: an eager operation would fix the program's devices before the
    program has chosen them. Raises :class:`ImportError` if the callbacks are not those that
    ``_ops.pyx`` knows.
    """
    with (
        tf.Graph().as_default() as graph,
        tf.compat.v1.Session(
            graph=graph, config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        ) as session,
    ):
        _library.bpsx_push_pull([], -1.0, names=[], priorities=[], average=False)
        try:
            session.run(graph.get_operations()[-1])
        except tf.errors.FailedPreconditionError as e:
            raise ImportError(
                f"bpsx.tensorflow cannot work with TensorFlow {tf.__version__}: {e.message}"
            ) from None


_library = _load()
keep_turns(PUSH_PULL, BROADCAST, BEGIN, END)
check_header()
check_callbacks()


def push_pull(
    tensors: list[tf.Tensor], rate: Any, names: list[str], priorities: list[int], average: bool
) -> list[tf.Tensor]:
    """Return sums or averages, in order. ``rate``: the learning rate; -1: none."""
    with tf.device("CPU:0"):
        return list(
            _library.bpsx_push_pull(
                tensors, rate, names=names, priorities=priorities, average=average
            )
        )


def push_pull_together(
    tensors: list[tf.Tensor], rate: Any, names: list[str], priorities: list[int], average: bool
) -> list[tf.Tensor]:
    """Return sums or averages that end together, each begun when its tensor is complete.

    No operation waits for one that may never run, as after an error elsewhere in the graph.
    """
    how = {"average": average, "step": random.getrandbits(62)}
    with tf.device("CPU:0"):
        begun = [
            _library.bpsx_begin(tensor, rate, names=[name], priorities=[priority], **how)
            for tensor, name, priority in zip(tensors, names, priorities, strict=True)
        ]
        pending, tokens = zip(*begun, strict=True)
        return list(_library.bpsx_end(pending, tokens, names=names, priorities=priorities, **how))


def broadcast(tensors: list[tf.Tensor], names: list[str], root_rank: int) -> list[tf.Tensor]:
    """Return worker ``root_rank``'s ``tensors``."""
    with tf.device("CPU:0"):
        return list(_library.bpsx_broadcast(tensors, names=names, root_rank=root_rank))
