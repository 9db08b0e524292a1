"""Keeps operations of one name in one order on all workers.

Operations of one name are matched in the order in which each worker executes them. In functions,
TensorFlow executes operations that touch one resource in the order of the program, through
branches, loops and calls of functions. A resolver can add resources: bpsx's operations, and
operations that execute these, touch one resource for each name. Graphs of TensorFlow 1 have no such
order, and each run of a session selects operations. There the second operation of a name gets
another name.
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
#: Attribute of a graph that counts its operations by name.
_COUNTS = "_bpsx_counts"
#: Attribute of a graph that XLA is to compile: by name, the operation that touches it.
_TOUCHED = "_bpsx_touched"
#: Attributes in which operations name the functions that they execute.
_FUNCTIONS = ("f", "then_branch", "else_branch", "cond", "body", "branches")
#: Operation with which XLA calls a foreign function, and its attribute that says which.
_CALL, _MODULE = "XlaCallModule", "module"
_modules: dict[bytes, frozenset[str]] = {}  # names that such a call touches
_things: dict[str, Any] = {}
# names that a function touches; names of functions are unique in a process
_in_functions: dict[str, frozenset[str]] = {}


def in_graph(names: Sequence[str]) -> list[str]:
    """Return ``names``, made unique within the graph where operations have no order."""
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
    """Have TensorFlow keep the order of ``operations``, and of operations that execute them.

    Each of ``operations`` has an attribute ``names``.
    """
    ours = frozenset(operations)

    def bpsx_touches(op: Any, _: Any, writes: Any) -> bool:
        """Resolver; TensorFlow calls it for each operation in a function until nothing is added."""
        names = _names_of(ours, op)
        added = [thing for thing in map(_thing, names) if thing not in writes]
        if added and is_compiled(op.graph):
            _check_compiled(op, names)
        writes.update(added)
        return bool(added)

    register = getattr(auto_control_deps, "register_acd_resource_resolver", None)
    if register is None:
        log.warning(
            "bpsx cannot tell TensorFlow %s which of its operations need an order, so in functions"
            " all of them run one after the other",
            tf.__version__,
        )
        return
    register(bpsx_touches)


def touches(module: str, names: Sequence[str]) -> None:
    """Record which names a call of a foreign function exchanges."""
    _modules[module.encode()] = frozenset(names)


def _check_compiled(op: Any, names: frozenset[str]) -> None:
    """Raise :class:`UnsupportedCompilation` if XLA would lose the order of a name's exchanges.

    XLA keeps the order of the foreign functions that one function calls, since each call passes a
    value to the next. It loses the order of functions in a function when it makes one program of
    all.
    """
    before: dict[str, Any] | None = getattr(op.graph, _TOUCHED, None)
    if before is None:
        before = {}
        setattr(op.graph, _TOUCHED, before)
    for name in sorted(names):
        other = before.setdefault(name, op)
        if other is not op and not other.type == op.type == _CALL:
            raise UnsupportedCompilation(
                f"jit_compile=True: {name!r} is exchanged twice in one function, within functions"
                " or branches of it, and XLA does not keep their order. Exchange it in the"
                " compiled function itself, or omit jit_compile"
            )


def _thing(name: str) -> Any:
    """Return a stand-in for a name, to use where TensorFlow expects the handle of a resource."""
    return _things.setdefault(
        name, SimpleNamespace(_id=("bpsx", name), op=SimpleNamespace(type="BpsxName"))
    )


def _names_of(ours: frozenset[str], op: Any) -> frozenset[str]:
    # Only stateful operations can have names; to look at others would cost time.
    return _names_in_node(ours, op.graph, op.node_def) if op._is_stateful else frozenset()


def _names_in_node(ours: frozenset[str], graph: Any, node: Any) -> frozenset[str]:
    """Return the names of an operation, and of the functions that it executes."""
    if node.op in ours:
        return frozenset(name.decode() for name in node.attr["names"].list.s)
    if node.op == _CALL:
        return _modules.get(node.attr[_MODULE].s, frozenset())
    values = [node.attr[attribute] for attribute in _FUNCTIONS if attribute in node.attr]
    functions = [function.name for value in values for function in (value.func, *value.list.func)]
    return frozenset().union(*(_names_in(ours, graph, function) for function in functions))


def _names_in(ours: frozenset[str], graph: Any, function: str) -> frozenset[str]:
    """Return the names of all operations that a function executes."""
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
