"""push_pull and broadcast of NDArrays, in place and in the order of MXNet's engine."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import mxnet as mx
import numpy as np

from bpsx.dtypes import UnsupportedDType
from bpsx.errors import BpsxError, ConfigError, PeerLostError
from bpsx.mxnet import _pushes
from bpsx.mxnet.errors import in_short
from bpsx.plugin import adapter
from bpsx.plugin._async_ops import Plan
from bpsx.plugin.adapter import check_flag, check_name, check_priority
from bpsx.session.refusals import counted
from bpsx.system.tracebacks import public

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Element types that are summed, by mshadow's numbers.
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
#: Kinds of devices whose memory is the host's.
HOST = ("cpu", "cpu_pinned", "cpu_shared")
#: BytePS's keys of a tensor's compression, and ours.
_KEYS = {
    "compressor_type": "compressor",
    "compressor_k": "k",
    "compressor_onebit_scaling": "scaling",
    "ef_type": "ef",
    "momentum_type": "momentum",
    "momentum_mu": "mu",
    "seed": "seed",
    "dithering_partition": "partition",
    "dithering_normalize": "normalize",
}
_CHOICES = {"dithering_partition": ("linear", "natural"), "dithering_normalize": ("max", "l2")}
#: By name: what keeps the order of its operations, and what a thread holds while it adds one.
_turns: dict[str, tuple[int, threading.Lock]] = {}
#: By session: what has made the engine leave out an exchange; None: nobody has asked the engine
#: yet.
_causes: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
#: Labels of arrays that :func:`refuse` has got in this job.
_refused: set[str] = set()
_lock = threading.Lock()
#: Whether an exception of ours has said that exchanges of this job fail.
told = threading.Event()


class UnsupportedTensor(BpsxError, TypeError):
    """Not an NDArray, or a sparse one."""


def check_array(array: Any, what: str) -> None:
    """Raise :class:`UnsupportedTensor` for anything but a dense NDArray."""
    if not isinstance(array, mx.nd.NDArray):
        raise UnsupportedTensor(f"{what}: a mxnet.nd.NDArray is needed, not {type(array).__name__}")
    if array.stype != "default":
        raise UnsupportedTensor(
            f"{what}: an NDArray of stype {array.stype!r} cannot be sent: give"
            " array.tostype('default')"
        )


def check_summable(array: Any, what: str) -> None:
    """Raise :class:`~bpsx.dtypes.UnsupportedDType` for elements that cannot be summed."""
    if _dtype_name(array) not in _SUMMED.values():
        raise UnsupportedDType(
            f"{what}: dtype {_dtype_name(array)} cannot be summed; allowed:"
            f" {', '.join(_SUMMED.values())}"
        )


def _dtype_name(array: Any) -> str:
    dtype = np.dtype(array.dtype)
    # bfloat16 is a structure with one field of that name
    return str(dtype.names[0] if dtype.names else dtype.name)


@functools.lru_cache(4096)
def _plan(name: str, priority: int, average: bool, root: int) -> Plan:
    return Plan([name], [priority], average, root, _SUMMED)


def _turn(name: str) -> tuple[int, threading.Lock]:
    with _lock:
        if name not in _turns:
            _turns[name] = _pushes.new_turn(), threading.Lock()
        return _turns[name]


def _check_job() -> None:
    """Raise if no exchange can be begun any more."""
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
    """What has failed in it, and nobody has been told of, is a line on standard error and exit
    status 1: unless another one stands already.
    """
    if told.is_set():
        told.clear()
    elif (text := _pushes.unheard()) and adapter.set_exit_status(1):
        print(
            "bpsx: exit status 1, because an exchange has failed, and nobody had waited for its"
            f" array: {in_short(text)}",
            file=sys.stderr,
        )


def _left_out(session: Any) -> str:
    with _lock:
        # Only once: for the engine an error is over once it has told it, and those of later steps
        # are for whoever waits for their arrays.
        if _causes[session] is None:
            _causes[session] = in_short(_pushes.why())
    return (
        "an earlier exchange was left out by MXNet's engine, because what computes its array has"
        f" failed ({_causes[session] or 'an MXNetError said why'}): from then on this worker's"
        " gradients would be added to those of other steps of the others. End this worker"
    )


def submit(
    array: Any,
    name: str,
    *,
    average: bool = False,
    root: int = -1,
    priority: int = 0,
    rate: float = -1.0,
) -> None:
    """Have the engine overwrite ``array``, when it is complete, with the sum or average of all
    workers', or with worker ``root``'s.

    Returns at once.

    Raises :class:`~bpsx.errors.NotInitializedError`; :class:`~bpsx.errors.PeerLostError` where the
    job is known to have failed; and :class:`~bpsx.errors.BpsxError` where the engine has left an
    exchange out, or one of that name did not begin.
    """
    _check_job()
    # Elsewhere it is copied here and back, both by the engine.
    here = array if array.context.device_type in HOST else array.as_in_context(mx.cpu())
    turn, adding = _turn(name)
    if _pushes.is_behind(turn):
        told.set()
        raise BpsxError(f"{name!r}: {_pushes.BEHIND}")
    with mx.autograd.pause():
        # the engine gets operations in the order of their turns: those on one array would wait for
        # each other otherwise
        with adding:
            _pushes.push(
                here.handle.value, turn, _plan(name, priority, average, root), rate, priority
            )
        if here is not array:
            here.copyto(array)


def refuse(arrays: Mapping[str, Any], error: Exception) -> None:
    """Have ``error`` raised where ``arrays``, or what is computed from them, are waited for: for
    what Python would print and forget.

    Until then nobody has been told of it.

    ``arrays``: by what tells them apart in a job.
    """
    told.clear()
    turn, adding = _turn("Refused")
    for label, array in arrays.items():
        with adding:
            again = label in _refused
            _pushes.push(array.handle.value, turn, _pushes.Refused(error, again), -1.0, 0)
            _refused.add(label)


def overwrite(
    copies: Sequence[Any], name: str, *, root: int = -1, priority: int = 0, rate: float = -1.0
) -> None:
    """:func:`submit` of the first of a worker's copies, and the others become the same."""
    submit(copies[0], name, root=root, priority=priority, rate=rate)
    copy_to_devices(copies)


def add_devices(copies: list[Any]) -> None:
    """Make the first the sum of all: a gradient on each of a worker's devices."""
    with mx.autograd.pause():
        for other in copies[1:]:
            copies[0] += other.as_in_context(copies[0].context)


def copy_to_devices(copies: Sequence[Any]) -> None:
    """Make all what the first is."""
    with mx.autograd.pause():
        for other in copies[1:]:
            copies[0].copyto(other)


def _behind_engine(function: _Function) -> _Function:
    """A verb whose refusals come after what the engine has been given before, as its operations
    do.
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
@_behind_engine
def byteps_push_pull(
    tensor: mx.nd.NDArray,
    version: int = 0,
    priority: int = 0,
    name: str | None = None,
    is_average: bool = True,
) -> None:
    """Overwrite ``tensor`` with the average (or sum) over all workers.

    An operation of MXNet's engine: it returns at once, begins when what writes to ``tensor`` before
    has been done, and what reads it afterwards waits for it. ``tensor``: dense, of a dtype in
    :data:`bpsx.dtypes.DTYPES`, any shape; on a GPU it is copied to the host and back. Workers must
    agree on name, shape, dtype and reduction; operations of one name are executed in the order of
    the calls. Without a ``name`` a call is known by dtype and shape. Integers round down. Larger
    ``priority`` goes first. ``version`` is BytePS's and ignored. In asynchronous training: adds to
    the servers' value of ``name``, and gives that.

    Raises :class:`UnsupportedTensor`, :class:`~bpsx.dtypes.UnsupportedDType`,
    :class:`~bpsx.errors.ConfigError`, :class:`~bpsx.errors.NotInitializedError`. What goes wrong
    later is a :class:`mxnet.MXNetError`, with bpsx's text, where the array, or what is computed
    from it, is waited for. Thread-safe.
    """
    check_name(name, "byteps_push_pull")
    check_flag(is_average, "is_average", "byteps_push_pull")
    check_priority(priority, "byteps_push_pull")
    what = f"byteps_push_pull of {name!r}" if name else "byteps_push_pull"
    check_array(tensor, what)
    check_summable(tensor, what)
    wire = name or f"byteps_push_pull.noname.{_dtype_name(tensor)}.{tuple(tensor.shape)}"
    submit(tensor, wire, average=bool(is_average), priority=int(priority))


@public
def byteps_declare_tensor(name: str, **kwargs: Any) -> int:
    """Fix the place of ``name`` in the order of declaration; returns it (0, 1, …).

    ``kwargs``: how its sums are compressed, by BytePS's keys (``byteps_compressor_type``, …; texts
    are as good as numbers), or ours, as in :doc:`docs/train/compression.md`. The same on all
    workers. Raises :class:`~bpsx.errors.ConfigError`.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"byteps_declare_tensor: name={name!r}: a string is needed")
    params = dict(_said(key.removeprefix("byteps_"), value) for key, value in kwargs.items())
    return int(
        adapter.session().declare(
            name,
            adapter.compression(params, f"byteps_declare_tensor of {name!r}") if params else None,
        )
    )


def _said(key: str, value: Any) -> tuple[str, Any]:
    """A key and value of BytePS's as one of ours."""
    if key in _CHOICES and str(value) in ("0", "1"):
        value = _CHOICES[key][int(value)]
    elif (
        isinstance(value, str)
        and key == "compressor_onebit_scaling"
        and value.lower() in ("true", "false")
    ):
        value = value.lower() == "true"
    elif isinstance(value, str) and key in ("compressor_k", "momentum_mu", "seed"):
        value = _number(value)
    return _KEYS.get(key, key), value


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
