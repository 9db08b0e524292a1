"""Training with TensorFlow that goes on when workers are lost or join.

Set ``BPSX_ELASTIC=shrink`` on all processes. docs/train/uneven-and-elastic.md has an example. The
callbacks for Keras' ``fit`` are in :mod:`bpsx.tensorflow.keras.elastic`. All is for eager code: it
may call functions, but is not itself in a function or in a graph of TensorFlow 1.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from bpsx.errors import ConfigError
from bpsx.plugin import elastic
from bpsx.plugin.elastic import Departed, HostsUpdatedInterrupt, leave, run, steps_of
from bpsx.plugin.objects import broadcast_object
from bpsx.tensorflow.objects import TENSORS
from bpsx.tensorflow.ops import check_bytes
from bpsx.tensorflow.primitives import copies

__all__ = [
    "Departed",
    "HostsUpdatedInterrupt",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "leave",
    "run",
    "steps",
]

#: Models of states: BroadcastGlobalVariablesCallback has nothing to do for them.
models: weakref.WeakSet[Any] = weakref.WeakSet()
#: The end of the path of variables that each worker keeps: states of random generators.
SEED = "seed_generator_state"


class State(elastic.State):
    """Values that all workers have to agree on, as attributes.

    Tensors of eager code, NumPy arrays, numbers and text travel plainly. Other objects are pickled,
    which needs a job secret. See :class:`bpsx.plugin.elastic.State` for the methods.
    """

    _FOREIGN = (tf.errors.OpError,)
    _INSTEAD = "Give variables, also those of models, to a TensorFlowState"

    @staticmethod
    def _is_part(value: Any) -> bool:
        return _is_variable(value) or hasattr(value, "variables")

    def _broadcast(self, values: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = broadcast_object(values, 0, "elastic", TENSORS)
        return found


class _VariablesState(State, elastic.PartsState):
    """A State whose parts are variables, or have them."""

    def _copied(self, part: Any) -> Any:
        return [(v, tf.convert_to_tensor(v)) for v in _variables_of(part)]

    def _put_back(self, part: Any, kept: Any) -> None:
        for variable, value in kept:
            variable.assign(value)

    def _send(self, name: str, part: Any) -> None:
        _agree(type(self).__name__, name, _variables_of(part), False)


class TensorFlowState(_VariablesState):
    """Variables and other values that all workers have to agree on.

    ``variables``: a list of :class:`tf.Variable`, the same on all workers in the same order:
    weights, an optimizer's slots and its count of steps. Variables may also be among ``more``,
    under any names. ``session`` is Horovod's, and must be None: sessions of TensorFlow 1 are not
    supported. Raises :class:`~bpsx.errors.ConfigError`.
    """

    def __init__(
        self, variables: Iterable[tf.Variable] | None = None, session: Any = None, **more: Any
    ) -> None:
        what = type(self).__name__
        _check_eager(what)
        if session is not None:
            raise ConfigError(
                f"{what}: session is {type(session).__name__}; expected None, as elastic training"
                " works in eager code, not in sessions of TensorFlow 1"
            )
        if _is_variable(variables) or not isinstance(variables, Iterable):
            raise ConfigError(
                f"{what}: variables is {type(variables).__name__}; expected a list of variables:"
                " eager code has no collection of all variables"
            )
        given = list(variables)
        for i, variable in enumerate(given):
            if not _is_variable(variable):
                raise ConfigError(
                    f"{what}: element {i} of variables is {type(variable).__name__}; expected a"
                    " variable"
                )
        super().__init__({"variables": given, **_single(more)}, _plain(more))


class TensorFlowKerasState(_VariablesState):
    """A Keras model, its optimizer and other values that all workers have to agree on.

    ``model``: a :class:`keras.Model`. ``optimizer``: of Keras, also a distributed one; by default
    that with which the model is compiled, now or later. ``backend`` is Horovod's and ignored.
    Variables may also be among ``more``, under any names.

    A model that has been built on rank 0 and not here is built by :meth:`sync`, with rank 0's
    shapes; so is the optimizer. If rank 0's has not been built either, all get rank 0's weights in
    the first :meth:`commit` or :meth:`check_host_updates` after it has been. States of random
    generators stay each worker's own. Raises :class:`~bpsx.errors.ConfigError`.
    """

    _OWN = (*_VariablesState._OWN, "_late", "_compiled")

    model: Any
    optimizer: Any

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **more: Any) -> None:
        import keras  # takes seconds, and has been imported where there is a model

        what = type(self).__name__
        _check_eager(what)
        if not isinstance(model, keras.Model):
            raise ConfigError(f"{what}: model is {type(model).__name__}; expected a keras.Model")
        if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigError(
                f"{what}: optimizer is {type(optimizer).__name__}; expected an optimizer of Keras 3"
            )
        # Whether the model has no weights on rank 0 yet.
        self._late = False
        compiled = getattr(model, "optimizer", None)
        # compile() puts another optimizer around one that is to scale the loss
        if optimizer is None or getattr(compiled, "inner_optimizer", None) is optimizer:
            optimizer = compiled
        parts = {"model": model, "optimizer": optimizer, **_single(more)}
        self._compiled = optimizer is compiled
        models.add(model)
        super().__init__(parts, _plain(more))

    def check_host_updates(self) -> None:
        """As :meth:`bpsx.plugin.elastic.State.check_host_updates`."""
        if self._late and self.model.built:
            self.sync()
        super().check_host_updates()

    def save(self) -> None:
        """Keep a copy of all, for :meth:`restore`; on the devices on which they are."""
        self._take_compiled()
        super().save()

    def sync(self) -> None:
        """As :meth:`bpsx.plugin.elastic.PartsState.sync`; builds what is built on rank 0."""
        self._take_compiled()
        super().sync()

    def _take_compiled(self) -> None:
        """Take the optimizer with which the model is compiled now, unless another was given."""
        if not self._compiled:
            return
        compiled = getattr(self.model, "optimizer", None)
        self.optimizer = self._parts["optimizer"] = compiled
        if self.model.built and compiled is not None and not compiled.built:
            with self.model.distribute_strategy.scope():
                compiled.build(self.model.trainable_variables)  # as the first step of fit() does

    def _send(self, name: str, part: Any) -> None:
        if part is self.model:
            self._build_model(name)
        elif part is self.optimizer and part is not None:
            self._build_optimizer(name)
        if not self._late or part is not self.model:
            _agree(type(self).__name__, name, _variables_of(part), part is self.model)

    def _build_model(self, name: str) -> None:
        """Build the model if rank 0's has been built."""
        model = self.model
        own = [len(model.variables), _untracked(model.get_build_config())] if model.built else None
        told = _told(f"{name}.build", own)
        self._late = told is None
        if told is None or model.built:
            return
        count, config = told
        with warnings.catch_warnings(), model.distribute_strategy.scope():
            warnings.simplefilter("ignore")  # Keras warns if it fails; the error below says so
            _build(model, config or {})
        if len(model.variables) != count:
            raise ConfigError(
                f"{type(self).__name__}: model {model.name!r} has been built on rank 0, and cannot"
                " be built here from the shapes of its inputs there. Call it once with such data"
                " before training"
            )
        model.built = True

    def _build_optimizer(self, name: str) -> None:
        """Build the optimizer if rank 0's has been built, for the same variables of the model."""
        optimizer, known = self.optimizer, [id(v) for v in self.model.variables]
        trained = [id(v) for v in optimizer._trainable_variables] if optimizer.built else []
        places = [known.index(v) if v in known else -1 for v in trained]
        built, of = _told(f"{name}.build", [optimizer.built, places])
        if not built or optimizer.built:
            return
        if -1 in of:
            raise ConfigError(
                f"{type(self).__name__}: optimizer {optimizer.name!r} has been built on rank 0 for"
                " variables that are not the model's. Build it here, too, before training:"
                " optimizer.build(variables)"
            )
        with self.model.distribute_strategy.scope():
            optimizer.build([self.model.variables[i] for i in of])


def _untracked(value: Any) -> Any:
    """Return a model's build configuration without Keras' own containers and other objects."""
    if isinstance(value, dict):
        return {str(key): _untracked(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return (
            tuple(map(_untracked, value)) if isinstance(value, tuple) else [*map(_untracked, value)]
        )
    return value if isinstance(value, (int, float, str)) else None


def _build(model: Any, config: dict[str, Any]) -> None:
    """Build a model as far as that is possible from another one's ``config``.

    Variables get the names that they have if the model is called: those of the other one.
    """
    import keras

    shape = config.get("input_shape")
    if shape is not None:
        with suppress(Exception):  # it may need more than its first input
            model(keras.tree.map_shape_structure(keras.KerasTensor, shape))
    if not model.built:
        with keras.name_scope(model.name):
            model.build_from_config(config)


def _check_eager(what: str) -> None:
    if not tf.executing_eagerly():
        raise ConfigError(
            f"{what}: it must be made in eager code, not in a tf.function or in a graph of"
            " TensorFlow 1"
        )


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign") and hasattr(value, "shape")  # Keras' optimizers have the first


def _single(more: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``more`` that are variables."""
    return {name: value for name, value in more.items() if _is_variable(value)}


def _plain(more: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``more`` that are no variables."""
    return {name: value for name, value in more.items() if not _is_variable(value)}


def _variables_of(part: Any) -> list[Any]:
    if isinstance(part, list) or part is None:
        return part or []
    return [part] if _is_variable(part) else list(part.variables)


def _told(name: str, own: Any) -> Any:
    """Return rank 0's ``own``."""
    return broadcast_object(own, 0, name, TENSORS)


def _agree(what: str, name: str, variables: Sequence[Any], same_names: bool) -> None:
    """Assign rank 0's values to ``variables``.

    ``same_names``: names must be the same on all workers, as gradients will have them. On the wire
    variables are numbered: in a worker that has just begun, optimizers may have other names.
    """
    sent = [v for v in variables if not str(getattr(v, "path", "")).endswith(SEED)]
    values = [tf.convert_to_tensor(v) for v in sent]
    own = [
        [_name_of(v), f"{value.dtype.name} of shape {tuple(value.shape)}"]
        for v, value in zip(sent, values, strict=True)
    ]
    theirs = _told(f"{name}.variables", own)
    compared = 0 if same_names else 1  # the first element to compare
    wrong = [i for i, (a, b) in enumerate(zip(own, theirs)) if a[compared:] != b[compared:]]
    if len(own) != len(theirs) or wrong:
        here, there = (" ".join(of[wrong[0]]) if wrong else "" for of in (own, theirs))
        more = f": number {wrong[0]} is {here} here and {there} there" if wrong else ""
        raise ConfigError(
            f"{what}: {name.removeprefix('elastic.')} has {len(own)} variables here and"
            f" {len(theirs)} on rank 0{more}. All workers must make the same"
        )
    names = [f"{name}.{i}" for i in range(len(sent))]
    for value, variable in zip(values, sent, strict=True):
        check_bytes(value, f"{what}: {_name_of(variable)!r}")
    for variable, value in zip(sent, copies(values, names, 0), strict=True):
        variable.assign(value)


def _name_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def steps(number: int, *given: Any, **more: Any) -> Iterator[int]:
    """Return the numbers of the steps of a training loop, for jobs whose workers come and go.

    ``given`` and ``more``: a :class:`State`, or the arguments of :class:`TensorFlowKerasState`,
    such as ``steps(1000, model, optimizer)``. See :func:`bpsx.elastic.steps`.
    """
    return steps_of(TensorFlowKerasState, number, given, more)
