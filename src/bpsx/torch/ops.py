"""push_pull of PyTorch tensors."""

from __future__ import annotations

import torch

from bpsx.api.staged import Handle as Handle
from bpsx.plugin import adapter
from bpsx.plugin.adapter import check_handle
from bpsx.session.refusals import counted
from bpsx.torch.compression import Compression, Compressor, check_compression
from bpsx.torch.dense import begin, check_arguments, push_pull_dense
from bpsx.torch.dynamo import eager
from bpsx.torch.sparse import push_pull_sparse


@eager
@counted("push_pull")
def push_pull_async(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle:
    """Begin to sum ``tensor`` over all workers; :func:`synchronize` returns the result.

    The result is a new tensor of the same shape, dtype and strides. In asynchronous training the
    servers add ``tensor`` to their value of ``name``, and the result is that value (see
    ``docs/train/async.md``).

    Arguments:
    - ``tensor``: dense, on the CPU or a GPU, of a dtype in :data:`bpsx.dtypes.DTYPES`. Any strides
      are allowed; the tensor may be empty or 0-dimensional. Elements travel in logical order, so
      the strides may differ between workers. The tensor must not be changed or resized until the
      operation has ended. Its values are taken as they are, without autograd.
    - ``average``: divide by ``size()``; integers round down.
    - ``name``: workers must agree on name, shape, dtype and ``average``. Calls without a name are
      matched by shape and dtype, in the order in which each worker makes them.
    - ``version``: accepted for BytePS and ignored, because bpsx counts rounds itself.
    - ``priority``: a larger priority goes first (32 bits, signed).

    On a GPU, the sum covers the work that the current stream had queued before the call; the call
    does not wait for that work. Work queued on a stream after :func:`synchronize` was called on it
    sees the result. NCCL adds the tensors of one machine's GPUs, in the tensor's own dtype.

    Raises :class:`UnsupportedTensor` or :class:`~bpsx.dtypes.UnsupportedDType` (both are
    :class:`TypeError`), :class:`~bpsx.errors.ConfigError` for other arguments,
    :class:`~bpsx.errors.NotInitializedError`. Thread-safe.
    """
    return begin(tensor, average, name, version, priority, inplace=False, will_wait=False)


@eager
@counted("push_pull")
def push_pull_async_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> Handle:
    """Same as :func:`push_pull_async`, but replace ``tensor``'s values by the result.

    The values are complete once :func:`synchronize` has returned.

    The result goes to the memory that ``tensor`` has at the call. If ``tensor.data`` is set or
    ``tensor.set_()`` is called before the end, the old memory receives the sum. :func:`synchronize`
    still returns ``tensor``, which then does not hold the sum.

    Also raises :class:`UnsupportedTensor` if elements of ``tensor`` share memory (``expand``,
    overlapping ``as_strided``).
    """
    return begin(tensor, average, name, version, priority, inplace=True, will_wait=False)


@eager
@counted("push_pull")
def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: type[Compressor] = Compression.none,
) -> torch.Tensor:
    """Return the sum or average of ``tensor`` over all workers, as a new tensor.

    Shape and dtype are those of ``tensor``; ``compression`` applies to the wire only.

    Differentiable, any number of times. Every worker's loss counts. Let y = c * sum over s of x_s,
    where c is 1 for a sum and 1 / ``size()`` for an average. The gradient of worker s is that of
    the losses' total: d(sum over r of L_r) / d x_s = c * sum over r of d L_r / d y_r. So backward
    is a push_pull of the gradients with the same ``average``, under the name ``name + ".grad"``.
    Either all workers run it or none. Asynchronous training has no derivative: the result does not
    require a gradient.

    A ``torch.sparse_coo`` tensor gives a coalesced tensor of the same shape. Its values and indices
    travel, and their number may differ between workers; it has no derivative. Raises as
    :func:`push_pull_async` and :func:`synchronize`.
    """
    check_compression(compression, "push_pull")
    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
        check_arguments(average, name, version, priority)
        return push_pull_sparse(tensor, average, name, compression)
    return push_pull_dense(tensor, average, name, version, priority, compression)


@eager
@counted("push_pull")
def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> torch.Tensor:
    """Replace ``tensor``'s values by their sum or average over all workers; return ``tensor``.

    Raises as :func:`push_pull`.
    """
    result: torch.Tensor = begin(
        tensor, average, name, version, priority, inplace=True, will_wait=True
    ).wait()
    return result


@eager
def poll(handle: Handle) -> bool:
    """Return whether ``handle``'s operation has ended, without blocking.

    Call :func:`synchronize` before using the result all the same.

    Raises :class:`~bpsx.errors.ConfigError` if ``handle`` is not a handle.
    """
    check_handle(handle, "poll")
    return handle.done()


@eager
def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for ``handle`` and return its tensor. May be called again.

    Raises :class:`~bpsx.errors.PeerLostError`, :class:`~bpsx.errors.MismatchError`,
    :class:`~bpsx.errors.StallError` and other errors of :mod:`bpsx.errors` that made the operation
    fail; :class:`~bpsx.errors.ConfigError` if ``handle`` is not a handle.
    """
    check_handle(handle, "synchronize")
    result: torch.Tensor = handle.wait()
    return result


@eager
def declare(name: str) -> int:
    """Fix the position of ``name`` in the order of declaration; return the position (0, 1, …).

    Declaring a name again changes nothing.

    Raises :class:`~bpsx.errors.ConfigError` unless ``name`` is a string of 1 to 4096 bytes of
    UTF-8.
    """
    return int(adapter.session().declare(name))
