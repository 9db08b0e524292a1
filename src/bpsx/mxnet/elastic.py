"""Training with MXNet that goes on when workers are lost or join.

Set ``BPSX_ELASTIC=shrink`` on all processes. docs/train/uneven-and-elastic.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import mxnet as mx
import numpy as np

from bpsx.errors import ConfigError
from bpsx.mxnet.ops import overwrite
from bpsx.mxnet.optimizer_state import kept_of, put_back
from bpsx.mxnet.trainer import DistributedTrainer
from bpsx.plugin import elastic
from bpsx.plugin.elastic import Departed, HostsUpdatedInterrupt, leave, run, steps_of
from bpsx.plugin.objects import Tensors, broadcast_object

__all__ = ["Departed", "HostsUpdatedInterrupt", "State", "TrainerState", "leave", "run", "steps"]


def _taken(value: Any, what: str) -> tuple[str, list[int], bytes] | None:
    if type(value) is not mx.nd.NDArray:
        return None
    array = value.asnumpy()
    return array.dtype.name, list(array.shape), array.tobytes()


def _made(dtype: str, shape: list[int], raw: bytes) -> Any:
    array = np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
    return mx.nd.array(array, dtype=dtype, ctx=mx.cpu())


_ARRAYS = Tensors(_taken, _made)


class State(elastic.State):
    """Values that all workers have to agree on, as attributes.

    NDArrays, NumPy arrays, numbers and text travel plainly. Other objects are pickled, which needs
    a job secret. See :class:`bpsx.plugin.elastic.State` for the methods; :meth:`check_host_updates`
    waits for MXNet's engine.
    """

    _FOREIGN = (mx.MXNetError,)
    _INSTEAD = "Give Parameters to a TrainerState, as params=net.collect_params()"

    @staticmethod
    def _is_part(value: Any) -> bool:
        gluon = mx.gluon
        kinds = (gluon.Parameter, gluon.ParameterDict, gluon.Block, gluon.Trainer)
        return isinstance(value, kinds)

    def _broadcast(self, values: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = broadcast_object(values, 0, "elastic", _ARRAYS)
        return found


class TrainerState(State, elastic.PartsState):
    """A trainer with its Parameters, and other values that all workers have to agree on.

    ``trainer``: a :class:`bpsx.mxnet.DistributedTrainer`. Its optimizer's states, counts of updates
    and learning rate go with it. ``params``: Parameters that the trainer does not have, as
    ``collect_params()`` returns them; those that it has may be among them. A Parameter whose shape
    is not known here gets it from rank 0. Raises :class:`~bpsx.errors.ConfigError`.
    """

    trainer: DistributedTrainer

    def __init__(
        self, trainer: DistributedTrainer, params: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        what = type(self).__name__
        if not isinstance(trainer, DistributedTrainer):
            raise ConfigError(
                f"{what}: trainer is {type(trainer).__name__}; expected a DistributedTrainer"
            )
        if params is not None and not isinstance(params, (Mapping, mx.gluon.ParameterDict)):
            raise ConfigError(
                f"{what}: params is {type(params).__name__}; expected what collect_params() returns"
            )
        found = list(params.values()) if params is not None else []
        for i, parameter in enumerate(found):
            if not isinstance(parameter, mx.gluon.Parameter):
                raise ConfigError(
                    f"{what}: value {i} of params is {type(parameter).__name__}; expected a"
                    " Parameter"
                )
        others = [p for p in found if not any(p is known for known in trainer._params)]
        parts = {"params": others, "trainer": trainer}
        super().__init__(parts, more)

    def _copied(self, part: Any) -> Any:
        weights = [
            (p, [w.copy() for w in p.list_data()]) for p in _parameters_of(part) if _is_known(p)
        ]
        states = (
            kept_of(part._optimizer, part._updaters, part._decay) if part is self.trainer else None
        )
        return weights, states

    def _put_back(self, part: Any, kept: Any) -> None:
        weights, states = kept
        for parameter, saved in weights:
            for array, value in zip(parameter.list_data(), saved, strict=True):
                # An array with an error that the script has not seen ignores writes.
                with suppress(mx.MXNetError):
                    array.wait_to_read()
                value.copyto(array)
        if part is self.trainer:
            put_back(part._optimizer, part._updaters, part._decay, states)

    def _send(self, name: str, part: Any) -> None:
        complete = self._agree(name, _parameters_of(part))
        if part is not self.trainer:
            return
        optimizer = part._optimizer
        optimizer.lr = broadcast_object(optimizer.lr, 0, f"{name}.lr", _ARRAYS)
        if complete:  # otherwise there has been no step, so the optimizer has no state
            part.take_states(0)
            mx.nd.waitall()

    def _agree(self, name: str, parameters: list[Any]) -> bool:
        """Give ``parameters`` rank 0's shapes and values, and wait until they are there.

        Returns whether rank 0 knows all shapes.
        """
        own = [_shape_of(p) for p in parameters]
        told = broadcast_object(own, 0, f"{name}.shapes", _ARRAYS)
        if len(told) != len(own):
            raise ConfigError(
                f"{type(self).__name__}: {name.removeprefix('elastic.')} has {len(own)} Parameters"
                f" here and {len(told)} on rank 0. All workers must make the same"
            )
        sent = []
        for i, (parameter, shape) in enumerate(zip(parameters, told, strict=True)):
            if shape is None:
                continue  # rank 0 does not know it either; the trainer's first step sends it
            self._initialize(parameter, shape)
            overwrite(parameter.list_data(), f"{name}.{i}", root=0)
            sent += parameter.list_data()
        for array in sent:
            array.wait_to_read()
        return None not in told

    def _initialize(self, parameter: Any, told: list[Any]) -> None:
        dtype, shape = told[0], tuple(told[1])
        if parameter._deferred_init and _dtype_of(parameter) == dtype:
            with suppress(AssertionError):  # it has another shape as far as that is known
                parameter.shape = shape
                parameter._finish_deferred_init()
        own = _shape_of(parameter)
        if own != told:
            here = "has not been initialized" if own is None else f"is {own[0]} of {own[1]}"
            raise ConfigError(
                f"{type(self).__name__}: {parameter.name!r} {here} here, and is {dtype} of"
                f" {list(shape)} on rank 0. All workers must make the same, and initialize them"
            )


def _parameters_of(part: Any) -> list[Any]:
    return part if isinstance(part, list) else list(part._params)


def _is_known(parameter: Any) -> bool:
    """Whether it has values."""
    return parameter._data is not None


def _dtype_of(parameter: Any) -> str:
    return str(np.dtype(parameter.dtype).name)


def _shape_of(parameter: Any) -> list[Any] | None:
    return [_dtype_of(parameter), list(parameter.shape)] if _is_known(parameter) else None


def steps(number: int, *given: Any, **more: Any) -> Iterator[int]:
    """Return the numbers of the steps of a training loop, for jobs whose workers come and go.

    ``given`` and ``more``: a :class:`State`, or the arguments of :class:`TrainerState`, such as
    ``steps(1000, trainer)``. See :func:`bpsx.elastic.steps`.
    """
    return steps_of(TrainerState, number, given, more)
