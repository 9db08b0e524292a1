"""Makes the state of a Trainer's optimizer the same on all workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from bpsx.mxnet.names import name_of
from bpsx.mxnet.ops import overwrite, submit
from bpsx.mxnet.weight_decay import DecayMomentum

_OVERVIEW, _STATE, _DECAY = "Overview of states of ", "State.", "Momentum of decay."
_OPTIONS = "Options of "
#: Numbers of an optimizer or a scheduler that are no options, or that each step sets anew.
_NO_OPTIONS = ("num_update", "begin_num_update", "rescale_grad", "aggregate_num")


def share(
    parameters: Sequence[Any],
    optimizer: Any,
    updaters: Sequence[Any],
    decay: DecayMomentum,
    root: int,
) -> None:
    """Give this worker's optimizer the state of worker ``root``'s.

    The state is the counts of updates, the optimizer's states, the momentum of weight decay, and
    the optimizer's and its scheduler's options, such as the learning rate: gluon keeps them in a
    file of states, which perhaps the root alone has loaded.
    ``updaters``: the optimizer's, one for each device. Waits for an overview of the root's state.
    All workers must call it at the same point.
    """
    if not parameters:
        return
    counts = optimizer._index_update_count
    rows = [
        [counts.get(i, -1), i in updaters[0].states, i in decay.kept]
        for i in range(len(parameters))
    ]
    options = _options_of(optimizer)
    values = mx.nd.array(
        [float("nan" if v is None else v) for *_, v in options], dtype="float64", ctx=mx.cpu()
    )
    submit(values, _OPTIONS + name_of(parameters[0]), root=root)
    overview = mx.nd.array([optimizer.num_update, *np.ravel(rows)], dtype="int64", ctx=mx.cpu())
    submit(overview, _OVERVIEW + name_of(parameters[0]), root=root)
    for (thing, name, ours), told in zip(options, values.asnumpy().tolist(), strict=True):
        setattr(thing, name, _as(told, ours))
    said = overview.asnumpy()
    optimizer.num_update = int(said[0])
    for i, (parameter, (count, has_state, has_decay)) in enumerate(
        zip(parameters, said[1:].reshape(-1, 3), strict=True)
    ):
        for device in range(len(updaters)):
            of_device = optimizer._all_index_update_counts.setdefault(device, {})
            of_device.pop(i, None)
            if count >= 0:
                of_device[i] = int(count)
        _share_state(i, parameter, updaters, bool(has_state), root)
        decay.expect(i, parameter, bool(has_decay))
        if has_decay:
            overwrite(decay.kept[i], _DECAY + name_of(parameter), root=root)


def _options_of(optimizer: Any) -> list[tuple[Any, str, Any]]:
    """Return the options that are a number or None: of which object, their name, their value."""
    scheduler = optimizer.lr_scheduler
    return [
        (thing, name, value)
        for thing in (optimizer, *([] if scheduler is None else [scheduler]))
        for name, value in sorted(vars(thing).items())
        if name not in _NO_OPTIONS
        and name != "lr_scheduler"
        and (value is None or isinstance(value, (bool, int, float)))
    ]


def _as(told: float, ours: Any) -> Any:
    """Return the root's option in the type that it has here. NaN stands for None."""
    if math.isnan(told):
        return None
    same = isinstance(ours, (bool, int)) and float(type(ours)(told)) == told
    return type(ours)(told) if same else told


def _share_state(i: int, parameter: Any, updaters: Sequence[Any], there: bool, root: int) -> None:
    for updater, weight in zip(updaters, parameter.list_data() if there else updaters, strict=True):
        if not there:
            updater.states.pop(i, None)
        elif i not in updater.states:
            updater.states[i] = updater.optimizer.create_state_multi_precision(i, weight)
            updater.states_synced[i] = True
    if there:
        for number, copies in enumerate(
            zip(*(_arrays(updater.states[i]) for updater in updaters), strict=True)
        ):
            overwrite(copies, f"{_STATE}{number}.{name_of(parameter)}", root=root)


def _arrays(state: Any) -> Iterator[Any]:
    """Yield the arrays of which a state consists."""
    if isinstance(state, mx.nd.NDArray):
        yield state
    elif isinstance(state, (list, tuple)):
        for part in state:
            yield from _arrays(part)


def kept_of(optimizer: Any, updaters: Sequence[Any], decay: DecayMomentum) -> Any:
    """Return a copy of an optimizer's state, for :func:`put_back`."""
    counts = {device: dict(of) for device, of in optimizer._all_index_update_counts.items()}
    states = [{i: _copy(state) for i, state in u.states.items()} for u in updaters]
    return optimizer.num_update, optimizer.lr, counts, states, _copy(list(decay.kept.items()))


def put_back(optimizer: Any, updaters: Sequence[Any], decay: DecayMomentum, kept: Any) -> None:
    """Go back to what :func:`kept_of` has returned, which may be used again."""
    optimizer.num_update, optimizer.lr, counts, states, momenta = kept
    for device, of in optimizer._all_index_update_counts.items():
        of.clear()  # the optimizer refers to one of them
        of.update(counts.get(device, {}))
    for updater, of_updater in zip(updaters, states, strict=True):
        updater.states = {i: _copy(state) for i, state in of_updater.items()}
        updater.states_synced = dict.fromkeys(updater.states, True)
    decay.kept = dict(_copy(momenta))


def _copy(state: Any) -> Any:
    """Return a copy of a state, whose arrays are copied, too."""
    if isinstance(state, mx.nd.NDArray):
        return state.copy()
    return type(state)(map(_copy, state)) if isinstance(state, (list, tuple)) else state
