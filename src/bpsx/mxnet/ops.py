"""push_pull and broadcast of NDArrays, in place and in the order of MXNet's engine."""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import mxnet as mx

from bpsx.errors import BpsxError, ConfigError, PeerLostError
from bpsx.mxnet import _pushes
from bpsx.mxnet.errors import in_short
from bpsx.mxnet.framework import HOST, MXNET
from bpsx.plugin import adapter
from bpsx.plugin._async_ops import CallPlan
from bpsx.plugin.adapter import check_flag, check_name, check_priority
from bpsx.plugin.framework import UnsupportedTensor
from bpsx.plugin.steps import Step
from bpsx.session.refusals import counted
from bpsx.system.tracebacks import public

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Element types that can be summed, by mshadow's numbers.
_SUMMED = {
    0: "float32",
    1: "float64",
    2: "float16",
    3: "uint8",
    4: "int32",
    5: "int8",
    6: "int64",
    12: "bfloat16",
}
#: BytePS's keys for a tensor's compression, with bpsx's keys.
_KEYS = {
    "compressor_type": "compressor",
    "compressor_k": "k",
    "compressor_rank": "rank",
    "compressor_onebit_scaling": "scaling",
    "ef_type": "ef",
    "momentum_type": "momentum",
    "momentum_mu": "mu",
    "seed": "seed",
    "dithering_partition": "partition",
    "dithering_normalize": "normalize",
}
#: Keys whose values are numbers, also if they are given as strings.
_NUMBERS = ("compressor_k", "compressor_rank", "rank", "momentum_mu", "seed")
_CHOICES = {"dithering_partition": ("linear", "natural"), "dithering_normalize": ("max", "l2")}
#: By name: the turn, which keeps the order of its operations, and the lock for adding an operation.
_turns: dict[str, tuple[int, threading.Lock]] = {}
#: By session: why the engine has left out an exchange. None: the engine has not been asked yet.
_causes: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
#: Labels of the arrays that :func:`refuse` has been given in this job.
_refused: set[str] = set()
_lock = threading.Lock()
#: Set when an exception of bpsx has reported that exchanges of this job fail.
told = threading.Event()


def check_array(array: Any, what: str) -> None:
    """Raise :class:`UnsupportedTensor` for anything but a dense NDArray."""
    if not isinstance(array, mx.nd.NDArray):
        raise UnsupportedTensor(f"{what}: expected a mxnet.nd.NDArray, not {type(array).__name__}")
    if array.stype != "default":
        raise UnsupportedTensor(
            f"{what}: an NDArray of stype {array.stype!r} cannot be sent; give"
            " array.tostype('default')"
        )


@functools.lru_cache(4096)
def _plan(name: str, priority: int, average: bool, root: int) -> CallPlan:
    return CallPlan([name], [priority], average, root, _SUMMED)


def _turn(name: str) -> tuple[int, threading.Lock]:
    with _lock:
        if name not in _turns:
            _turns[name] = _pushes.new_turn(), threading.Lock()
        return _turns[name]


def _check_job() -> None:
    """Raise if exchanges can no longer begin."""
    session = adapter.session()
    with _lock:
        if session not in _causes:
            end_job()
            _pushes.begin_job()
            _refused.clear()
            _causes[session] = None
    if session.failure:
        told.set()
        raise PeerLostError(session.failure)
    if _pushes.left_out():
        told.set()
        raise BpsxError(_left_out(session))


def end_job() -> None:
    """Report a failed exchange of the job that no exception has reported.

    Prints a line on standard error and sets exit status 1, unless another status is already set.
    """
    if told.is_set():
        told.clear()
    elif (text := _pushes.unheard()) and adapter.set_exit_status(1):
        print(
            "bpsx: exit status 1, because an exchange has failed and the script did not wait for"
            f" its array: {in_short(text)}",
            file=sys.stderr,
        )


def _left_out(session: Any) -> str:
    with _lock:
        # Ask only once. The engine drops an error when it has reported it, and errors of later
        # steps are for code that waits for their arrays.
        if _causes[session] is None:
            _causes[session] = in_short(_pushes.why())
    return (
        "MXNet's engine has skipped an earlier exchange, because the computation of its array"
        f" failed ({_causes[session] or 'an MXNetError said why'}). This worker's gradients would"
        " now be added to other workers' gradients of different steps. End this worker"
    )


def submit(
    array: Any,
    name: str,
    *,
    average: bool = False,
    root: int = -1,
    priority: int = 0,
    rate: float = -1.0,
    step: Step | None = None,
    mark: Any = None,
) -> None:
    """Have the engine overwrite ``array`` with all workers' sum or average, or the root's value.

    Returns at once; the operation begins when ``array`` is complete. ``step``: the step that it
    counts with, or None. ``mark``: None, or an array of one uint8 in host memory, which is set to 1
    if the operation succeeds.

    Raises :class:`~bpsx.errors.NotInitializedError`; :class:`~bpsx.errors.PeerLostError` if the job
    is known to have failed; and :class:`~bpsx.errors.BpsxError` if the engine has left out an
    exchange, or an exchange of that name did not begin.
    """
    _check_job()
    # The engine copies a device's array to the host and back.
    here = array if array.context.device_type in HOST else array.as_in_context(mx.cpu())
    turn, adding = _turn(name)
    if _pushes.is_behind(turn):
        _check_job()  # it names the cause, if that came after the first check
        told.set()
        raise BpsxError(f"{name!r}: {_pushes.BEHIND}")
    if step is None:
        plan = _plan(name, priority, average, root)
    else:
        plan = CallPlan([name], [priority], average, root, _SUMMED, step)
    with mx.autograd.pause():
        # The engine must get operations in the order of their turns: otherwise two on one array
        # would wait for each other.
        with adding:
            if step is not None:
                step.add()
            of_mark = 0 if mark is None else mark.handle.value
            _pushes.push(here.handle.value, turn, plan, rate, priority, of_mark)
        if here is not array:
            here.copyto(array)


def refuse(arrays: Mapping[str, Any], error: Exception) -> None:
    """Have ``error`` raised where ``arrays``, or values computed from them, are waited for.

    For errors that Python would print and forget. Until it is raised, the error counts as not
    reported.

    ``arrays``: by labels that are unique in a job.
    """
    told.clear()
    turn, adding = _turn("Refused")
    for label, array in arrays.items():
        with adding:
            again = label in _refused
            _pushes.push(array.handle.value, turn, _pushes.Refused(error, again), -1.0, 0)
            _refused.add(label)


def overwrite(copies: Sequence[Any], name: str, **more: Any) -> None:
    """:func:`submit` the first of a worker's copies, and copy the result to the others.

    ``more``: arguments of :func:`submit`.
    """
    submit(copies[0], name, **more)
    copy_to_devices(copies)


def add_devices(copies: list[Any]) -> None:
    """Add a gradient's copies on all of a worker's devices into the first copy."""
    with mx.autograd.pause():
        for other in copies[1:]:
            copies[0] += other.as_in_context(copies[0].context)


def copy_to_devices(copies: Sequence[Any]) -> None:
    """Copy the first array to all others."""
    with mx.autograd.pause():
        for other in copies[1:]:
            copies[0].copyto(other)


def behind_engine(function: _Function) -> _Function:
    """Decorate a verb: it raises errors after the engine's earlier operations are over.

    Operations of the engine report their errors in this order, too. After an error that other
    workers do not get, names are declared anew: an operation that began later would be summed
    under the new declaration on this worker alone.
    """

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        try:
            return function(*args, **more)
        except BaseException:
            adapter.finish()
            raise

    return call  # type: ignore[return-value]


@public
@counted("byteps_push_pull")
@behind_engine
def byteps_push_pull(
    tensor: mx.nd.NDArray,
    version: int = 0,
    priority: int = 0,
    name: str | None = None,
    is_average: bool = True,
) -> None:
    """Overwrite ``tensor`` with the average (or sum) over all workers.

    This is an operation of MXNet's engine. The call returns at once. The operation begins after
    earlier writes to ``tensor``, and later reads of ``tensor`` wait for it. ``tensor``: dense, of a
    dtype in :data:`bpsx.dtypes.DTYPES`, any shape; on a GPU it is copied to the host and back.
    Workers must agree on name, shape, dtype and reduction; operations of one name run in the order
    of the calls. Without a ``name`` a call is identified by dtype and shape. Integers round down.
    Larger ``priority`` goes first. ``version`` is BytePS's and ignored. In asynchronous training
    the call adds ``tensor`` to the servers' value of ``name``, and overwrites it with the new
    value.

    Raises :class:`UnsupportedTensor`, :class:`~bpsx.dtypes.UnsupportedDType`,
    :class:`~bpsx.errors.ConfigError`, :class:`~bpsx.errors.NotInitializedError`. Later failures are
    a :class:`mxnet.MXNetError`, with bpsx's text, where the array, or a value computed from it, is
    waited for. Thread-safe.
    """
    check_name(name, "byteps_push_pull")
    check_flag(is_average, "is_average", "byteps_push_pull")
    check_priority(priority, "byteps_push_pull")
    what = f"byteps_push_pull of {name!r}" if name else "byteps_push_pull"
    check_array(tensor, what)
    MXNET.check_summable(tensor, what)
    wire = name or MXNET.unnamed("byteps_push_pull", tensor)
    submit(tensor, wire, average=bool(is_average), priority=int(priority))


@public
def byteps_declare_tensor(name: str, **kwargs: Any) -> int:
    """Fix the place of ``name`` in the order of declaration; returns it (0, 1, …).

    ``kwargs``: how its sums are compressed, by BytePS's keys (``byteps_compressor_type``, …;
    numbers may be given as strings) or by bpsx's, see :doc:`docs/train/compression.md`. They must
    be the same on all workers. Raises :class:`~bpsx.errors.ConfigError`.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"byteps_declare_tensor: name={name!r}: expected a string")
    params = dict(_said(key.removeprefix("byteps_"), value) for key, value in kwargs.items())
    if params and name in adapter.session().order:
        adapter.finish(math.inf)  # a sum that begins later would be compressed here alone
    return int(
        adapter.session().declare(
            name,
            adapter.compression(params, f"byteps_declare_tensor of {name!r}") if params else None,
        )
    )


def _said(key: str, value: Any) -> tuple[str, Any]:
    """Translate a key and value of BytePS's into bpsx's."""
    if key in _CHOICES and str(value) in ("0", "1"):
        value = _CHOICES[key][int(value)]
    elif (
        isinstance(value, str)
        and key == "compressor_onebit_scaling"
        and value.lower() in ("true", "false")
    ):
        value = value.lower() == "true"
    elif isinstance(value, str) and key in _NUMBERS:
        value = _number(value)
    return _KEYS.get(key, key), value


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
