"""One order, on all workers, for operations of one name: they meet their like in the order in which
each worker executes them.

Functions: TensorFlow puts what touches one resource into the order in which it was written down,
through branches, loops and calls of functions. It can be told what an operation touches: ours, and
what executes ours, touch one thing for each name. Graphs of TensorFlow 1 have no such order, and
what is executed there is chosen anew each time: there the second operation of a name gets another
name.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from bpsx.tensorflow.tracing import UnsupportedCompilation, is_compiled

log = logging.getLogger("bpsx.tensorflow")
#: The attribute of a graph that counts its operations by name.
_COUNTS = "_bpsx_counts"
#: The attribute of a graph that XLA is to compile: by name, what touches it.
_TOUCHED = "_bpsx_touched"
#: What operations that execute functions call those in their attributes.
_FUNCTIONS = ("f", "then_branch", "else_branch", "cond", "body", "branches")
#: The operation by which XLA calls a foreign function, and the attribute that says which.
_CALL, _MODULE = "XlaCallModule", "module"
_modules: dict[bytes, frozenset[str]] = {}  # what such a call touches
_things: dict[str, Any] = {}
# what a function touches; the names of functions are those of a process
_in_functions: dict[str, frozenset[str]] = {}


def in_graph(names: Sequence[str]) -> list[str]:
    """``names``, or where operations have no order those by which they can be told from earlier
    ones of the same graph.
    """
    if tf.executing_eagerly():
        return list(names)
    graph = tf.compat.v1.get_default_graph()
    if graph._add_control_dependencies:
        return list(names)
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    counts: Counter[str] | None = getattr(graph, _COUNTS, None)
    if counts is None:
        counts = Counter()
        setattr(graph, _COUNTS, counts)
    found = []
    for name in names:
        counts[name] += 1
        found.append(name if counts[name] == 1 else f"{name}@{counts[name]}")
    return found


def keep_turns(*operations: str) -> None:
    """Have TensorFlow keep the order of ``operations``, which have an attribute ``names``, and of
    what executes them.
    """
    ours = frozenset(operations)

    def bpsx_touches(op: Any, _: Any, writes: Any) -> bool:
        """TensorFlow asks of each operation in a function, until nothing is added any more."""
        names = _names_of(ours, op)
        added = [thing for thing in map(_thing, names) if thing not in writes]
        if added and is_compiled(op.graph):
            _check_compiled(op, names)
        writes.update(added)
        return bool(added)

    register = getattr(auto_control_deps, "register_acd_resource_resolver", None)
    if register is None:
        log.warning(
            "TensorFlow %s cannot be told which operations of bpsx need an order: in functions all"
            " run one after the other",
            tf.__version__,
        )
        return
    register(bpsx_touches)


def touches(module: str, names: Sequence[str]) -> None:
    """Note which names a call of a foreign function exchanges."""
    _modules[module.encode()] = frozenset(names)


def _check_compiled(op: Any, names: frozenset[str]) -> None:
    """XLA keeps the order of the calls that one function makes of foreign functions, since each
    gives something to the next.

    It forgets that of functions in a function, as it makes one program of all.
    """
    before: dict[str, Any] | None = getattr(op.graph, _TOUCHED, None)
    if before is None:
        before = {}
        setattr(op.graph, _TOUCHED, before)
    for name in sorted(names):
        other = before.setdefault(name, op)
        if other is not op and not other.type == op.type == _CALL:
            raise UnsupportedCompilation(
                f"jit_compile=True: {name!r} is exchanged twice in one function, in functions or"
                " branches in it, and XLA keeps no order of these: exchange in the compiled"
                " function itself, or leave jit_compile out"
            )


def _thing(name: str) -> Any:
    """What stands for a name where TensorFlow expects the handle of a resource."""
    return _things.setdefault(
        name, SimpleNamespace(_id=("bpsx", name), op=SimpleNamespace(type="BpsxName"))
    )


def _names_of(ours: frozenset[str], op: Any) -> frozenset[str]:
    # Only these can have any; of others it would cost something to look.
    return _names_in_node(ours, op.graph, op.node_def) if op._is_stateful else frozenset()


def _names_in_node(ours: frozenset[str], graph: Any, node: Any) -> frozenset[str]:
    """Of an operation, and of the functions that it executes."""
    if node.op in ours:
        return frozenset(name.decode() for name in node.attr["names"].list.s)
    if node.op == _CALL:
        return _modules.get(node.attr[_MODULE].s, frozenset())
    values = [node.attr[attribute] for attribute in _FUNCTIONS if attribute in node.attr]
    functions = [function.name for value in values for function in (value.func, *value.list.func)]
    return frozenset().union(*(_names_in(ours, graph, function) for function in functions))


def _names_in(ours: frozenset[str], graph: Any, function: str) -> frozenset[str]:
    """Of all operations that a function executes."""
    if function not in _in_functions:
        known = _definition(graph, function)
        if known is None:
            return frozenset()
        _in_functions[function] = frozenset().union(
            *(_names_in_node(ours, graph, node) for node in known.node_def)
        )
    return _in_functions[function]


def _definition(graph: Any, function: str) -> Any:
    while graph is not None:
        found = graph._get_function(function) if function else None
        if found is not None:
            return getattr(found, "cached_definition", None) or getattr(found, "definition", None)
        graph = getattr(graph, "outer_graph", None)
    return None
