"""push_pull and broadcast of TensorFlow's tensors, in graphs and in eager code."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bpsx.dtypes import BY_NAME, UnsupportedDType
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import check_name, check_priority, checked_root
from bpsx.plugin.framework import UnsupportedTensor
from bpsx.session.refusals import counted
from bpsx.tensorflow.compression import Compression, Compressor, check_compression
from bpsx.tensorflow.framework import TENSORFLOW
from bpsx.tensorflow.primitives import copies, sums
from bpsx.tensorflow.reductions import averages
from bpsx.tensorflow.sparse import sum_of_slices
from bpsx.tensorflow.tracing import as_it_is

check_summable, unnamed = TENSORFLOW.check_summable, TENSORFLOW.unnamed
#: Dtypes whose elements have no fixed number of bytes: they cannot be sent.
_WITHOUT_BYTES = ("string", "resource", "variant")


def as_tensor(value: Any, what: str) -> tf.Tensor:
    """Return ``value`` as a dense tensor.

    Raises :class:`UnsupportedTensor`; :class:`ConfigError` for a NumPy array with masked elements.
    """
    if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
        raise UnsupportedTensor(
            f"{what}: a {type(value).__name__} cannot be sent; expected a dense tensor or"
            " tf.IndexedSlices"
        )
    adapter.check_unmasked(value, what)  # TensorFlow would drop the mask
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as e:
        raise UnsupportedTensor(
            f"{what}: cannot convert {type(value).__name__} to a tensor: {e}"
        ) from None


def check_async(enable_async: Any, verb: str) -> None:
    """Raise :class:`ConfigError` if a call asks for asynchronous training in a synchronous job.

    Asynchronous training is chosen for the job, not for a call.
    """
    if enable_async and not adapter.session().config.asynchronous:
        raise ConfigError(
            f"{verb}: enable_async={enable_async!r}: BYTEPS_ENABLE_ASYNC=1 makes training"
            " asynchronous for the whole job; omit enable_async"
        )


@as_it_is
@counted("push_pull", prefix="scope")
def push_pull(
    tensor: Any,
    scope: str = "",
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    enable_async: bool = False,
    name: str | None = None,
    priority: int = 0,
) -> Any:
    """Return the sum or average of ``tensor`` over all workers, in its shape and dtype.

    ``tensor``: a dense tensor, a variable, or a value that converts to a tensor, of a dtype in
    :data:`bpsx.dtypes.DTYPES`, any shape; or a :class:`tf.IndexedSlices`, for which the result
    holds all workers' rows. Workers must agree on name, shape, dtype and reduction. Without a
    ``name``, a call is identified by its graph and the tensor's operation there. In eager code it
    is identified by dtype and shape, and calls of one shape and dtype are matched in the order in
    which each worker makes them. ``scope`` is put before the name. ``op`` is ``Average`` (the
    default) or ``Sum``; ``average`` says the same as a bool. Integers round down. Larger
    ``priority`` goes first. ``device_dense`` and ``device_sparse`` are BytePS's and ignored: the
    operation runs on the host, and TensorFlow copies. ``compression``: a compressor that makes
    tensors smaller on the wire.

    In a graph this is an asynchronous operation: it starts when the tensor is complete and occupies
    no thread. Differentiable: the gradient is the push_pull of the gradient, under
    ``name + ".grad"``. In asynchronous training the call adds ``tensor`` to the servers' value of
    ``name``, and returns the new value.

    Raises at the call :class:`UnsupportedTensor`, :class:`~bpsx.dtypes.UnsupportedDType`,
    :class:`~bpsx.errors.ConfigError`. When it is executed, it raises TensorFlow's exceptions:
    :class:`tf.errors.AbortedError` for a lost peer, :class:`tf.errors.InvalidArgumentError` if
    workers differ, :class:`tf.errors.DeadlineExceededError` for a stall,
    :class:`tf.errors.FailedPreconditionError` before init. Thread-safe.
    """
    mean = averages(op, average, "push_pull")
    check_name(name, "push_pull")
    check_scope(scope, "push_pull")
    check_priority(priority, "push_pull")
    check_compression(compression, "push_pull")
    if enable_async:
        check_async(enable_async, "push_pull")
    what = f"push_pull of {name!r}" if name else "push_pull"
    if isinstance(tensor, tf.IndexedSlices):
        if adapter.session().config.asynchronous:
            raise ConfigError(
                f"{what}: tf.IndexedSlices cannot be sent with BYTEPS_ENABLE_ASYNC=1, because"
                " servers add each push to a value of a fixed shape; give a dense tensor"
            )
        check_summable(tensor.values, what)
        return sum_of_slices(
            tensor,
            f"{scope}{name or unnamed('push_pull.sparse', tensor.values)}",
            mean,
            compression,
        )
    dense = as_tensor(tensor, what)
    check_summable(dense, what)
    wire, ctx = compression.compress(dense)
    (total,) = sums(
        [wire],
        [f"{scope}{name or unnamed('push_pull', dense)}"],
        average=mean,
        priorities=[priority],
    )
    return compression.decompress(total, ctx)


@as_it_is
@counted("broadcast", prefix="scope")
def broadcast(
    tensor: Any, root_rank: int, scope: str = "", name: str | None = None, is_variable: bool = True
) -> tf.Tensor:
    """Return worker ``root_rank``'s ``tensor``.

    ``tensor``: of any dtype but strings, of one shape on all workers; a variable is read, not
    written. Names, errors and graphs as in :func:`push_pull`. The gradient is the sum of all
    workers' gradients on the root, and zero elsewhere. ``is_variable`` is BytePS's and ignored.
    """
    check_name(name, "broadcast")
    check_scope(scope, "broadcast")
    what = f"broadcast of {name!r}" if name else "broadcast"
    root = checked_root(root_rank, "broadcast", adapter.session().size)
    dense = as_tensor(tensor, what)
    check_bytes(dense, what)
    return copies([dense], [f"{scope}{name or unnamed('broadcast', dense)}"], root)[0]


def check_scope(scope: Any, verb: str) -> None:
    """Raise :class:`ConfigError` unless ``scope`` is a string."""
    if not isinstance(scope, str):
        raise ConfigError(f"{verb}: scope={scope!r}: must be a string, to put before the name")


def check_bytes(tensor: tf.Tensor, what: str) -> None:
    """Raise :class:`~bpsx.dtypes.UnsupportedDType` for elements without a fixed number of bytes."""
    name = tensor.dtype.base_dtype.name
    if name in _WITHOUT_BYTES or name not in _BROADCAST:
        raise UnsupportedDType(
            f"{what}: dtype {name} cannot be sent; allowed: {', '.join(_BROADCAST)}"
        )


_BROADCAST = (*BY_NAME, "uint16", "uint32", "uint64", "int16", "bool", "complex64", "complex128")
