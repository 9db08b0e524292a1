"""push_pull of PyTorch tensors, and the checks and views that give bpsx their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bpsx.api.staged import Handle as Handle
from bpsx.api.staged import StagedHandle
from bpsx.dtypes import BY_NAME, UnsupportedDType
from bpsx.errors import BpsxError, ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import TensorView, check_handle, check_name, check_priority
from bpsx.session.refusals import counted
from bpsx.torch.compression import Compression, Compressor, check_compression
from bpsx.torch.dynamo import eager
from bpsx.torch.profiling import followed, profiled

_ALLOWED = f"allowed are dense tensors of {', '.join(BY_NAME)}, on the CPU or a CUDA device"
#: What to send instead of a tensor whose dtype cannot be summed, by dtype name.
_INSTEAD = {
    "bool": "send tensor.to(torch.uint8), whose sum counts the workers with True",
    **dict.fromkeys(
        ("complex32", "complex64", "complex128"),
        "send torch.view_as_real(tensor), which shares its memory",
    ),
}
#: Names of the dtypes that can be summed.
SUMMED: dict[torch.dtype, str] = {getattr(torch, name): name for name in BY_NAME}


class UnsupportedTensor(BpsxError, TypeError):
    """The argument is not a tensor, or bpsx cannot use its memory.

    Unsupported are sparse, quantized and nested tensors, tensors on other devices than the CPU or a
    GPU, and outputs whose elements overlap.
    """


def check_tensor(tensor: Any, what: str) -> None:
    """Raise :class:`UnsupportedTensor` unless ``tensor`` is dense and on the CPU or a GPU.

    ``what`` names the tensor in the message.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensor(f"{what}: a torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        kind = (
            "nested"
            if tensor.is_nested
            else "quantized"
            if tensor.is_quantized
            else str(tensor.layout).removeprefix("torch.")
        )
        raise UnsupportedTensor(f"{what}: {kind} tensors cannot be sent; {_ALLOWED}")
    check_device(tensor, what)


def check_rows(tensor: torch.Tensor, verb: str) -> None:
    """Raise :class:`UnsupportedTensor` unless ``tensor`` has at least one dimension."""
    if tensor.dim() == 0:
        raise UnsupportedTensor(
            f"{verb}: a tensor with at least one dimension is needed; give tensor.reshape(1)"
        )


def check_device(tensor: torch.Tensor, what: str) -> None:
    """Raise :class:`UnsupportedTensor` unless ``tensor`` is on the CPU or a GPU."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedTensor(f"{what}: tensors on {tensor.device} cannot be sent; {_ALLOWED}")


def check_writable(tensor: torch.Tensor, what: str) -> None:
    """Raise :class:`UnsupportedTensor` if elements of ``tensor`` share memory.

    Such a tensor cannot hold a result.
    """
    if tensor.is_contiguous():
        return
    reach = 0
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if stride <= reach:
            raise UnsupportedTensor(
                f"{what}: elements share memory (shape {tuple(tensor.shape)}, strides"
                f" {tensor.stride()}, as expand() makes them), so it cannot be written in place;"
                " give a clone(), or use push_pull() for a new tensor"
            )
        reach += stride * (length - 1)


def check_replaceable(tensor: torch.Tensor, what: str, instead: str = "push_pull()") -> None:
    """Raise :class:`UnsupportedTensor` unless ``tensor`` can hold the result in place.

    ``tensor`` has passed :func:`check_tensor`. A tensor that autograd computed is refused, because
    autograd would not notice that its values are overwritten.
    """
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        raise UnsupportedTensor(
            f"{what}: the tensor is the result of an operation that autograd follows, and would not"
            f" know of being overwritten; use {instead}, which has a gradient, or detach() it first"
        )
    check_writable(tensor, what)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory at ``data_ptr()`` holds the elements in order.

    There must be no pending negation or conjugation.
    """
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself, detached, if it is plain; otherwise a contiguous copy."""
    detached = tensor.detach()
    return detached if is_plain(detached) else detached.resolve_conj().resolve_neg().contiguous()


def mark_written(tensor: torch.Tensor) -> None:
    """Tell autograd of a write to ``tensor``, which it may have saved for a backward pass."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def mark_all_written(tensors: list[torch.Tensor]) -> None:
    """Same as :func:`mark_written` for many tensors, none of which is an inference tensor."""
    if _MARKS_MANY:
        torch.autograd.graph.increment_version(tensors)
        return
    for tensor in tensors:
        mark_written(tensor)


def _marks_many() -> bool:
    """Return whether this PyTorch's ``increment_version`` takes many tensors in one call."""
    try:
        torch.autograd.graph.increment_version([])
    except (TypeError, AttributeError, RuntimeError):  # which of these depends on the release
        return False
    return True


_MARKS_MANY = _marks_many()


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of the tensor's dtype, such as ``float32``."""
    return SUMMED.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def summable(tensor: torch.Tensor, what: str) -> str:
    """Return the name of ``tensor``'s dtype.

    Raises :class:`~bpsx.dtypes.UnsupportedDType` if the dtype cannot be summed; the message says
    what to send instead.
    """
    name = SUMMED.get(tensor.dtype)
    if name is None:
        name = dtype_name(tensor)
        instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise UnsupportedDType(
            f"{what}: dtype {name} cannot be summed; allowed: {', '.join(BY_NAME)}{instead}"
        )
    return name


def view_of(tensor: torch.Tensor, dtype: str) -> TensorView:
    """Describe a plain tensor's memory to bpsx."""
    return view_at(tensor, tensor.nbytes, dtype, tuple(tensor.shape))


def view_at(tensor: torch.Tensor, nbytes: int, dtype: str, shape: tuple[int, ...]) -> TensorView:
    """Describe a plain tensor's memory as elements of type ``dtype`` and shape ``shape``."""
    if not tensor.is_cuda:
        return TensorView(tensor.data_ptr(), nbytes, dtype, shape, tensor)
    device = tensor.get_device()
    return TensorView(tensor.data_ptr(), nbytes, dtype, shape, tensor, device, streams_of(device))


@functools.cache
def streams_of(device: int) -> Callable[[], int]:
    """Return a function that gives the calling thread's current stream on ``device``.

    Where PyTorch has a function for the raw handle, that function is five times as fast.
    """
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return functools.partial(raw, device)
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)


def submit(
    source: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    *,
    average: bool,
    priority: int = 0,
    will_wait: bool = False,
    rate: float = -1.0,
) -> Handle:
    """Begin to sum ``source`` over all workers into ``output``, which may be the same tensor.

    Both tensors are dense and have been checked.

    Raises :class:`~bpsx.dtypes.UnsupportedDType`, :class:`~bpsx.errors.NotInitializedError`.
    """
    dtype = SUMMED.get(source.dtype) or summable(
        source, f"push_pull of {name!r}" if name else "push_pull"
    )
    plain = is_plain(source)
    # Hot path: a step has hundreds of gradients.
    if source is output and plain:
        # A tensor object of our own: setting `source.data` meanwhile must not free the memory in
        # flight.
        stage_in = stage_out = source.detach()
        staged = False
    else:
        stage_in = source.detach() if plain else plain_copy(source)
        staged = not is_plain(output)
        if staged:
            stage_out = (
                torch.empty(output.shape, dtype=output.dtype, device=output.device)
                if plain
                else stage_in
            )
        else:
            stage_out = stage_in if output is source else output.detach()
    view = view_of(stage_in, dtype)
    handle: Handle = adapter.session().push_pull(
        name or unnamed("push_pull", source),
        view,
        view if stage_out is stage_in else view_of(stage_out, dtype),
        average=average,
        priority=priority,
        will_wait=will_wait,
        result=output,
        **({"rate": rate} if rate >= 0 else {}),
    )
    return (
        StagedHandle(handle, functools.partial(_overwrite, output, stage_out), output)
        if staged
        else handle
    )


def _overwrite(output: torch.Tensor, result: torch.Tensor) -> None:
    with torch.no_grad():
        output.detach().copy_(result)


def unnamed(verb: str, tensor: torch.Tensor, whole: bool = True) -> str:
    """Return the name of an operation that was given none: its dtype and shape.

    With ``whole`` false, the name has the shape of a row instead of the tensor's.

    Operations of one name are matched in the order in which each worker calls them, so equal
    sequences of calls match. A counter would create a new name on every call, and names are never
    forgotten.
    """
    return (
        f"{verb}.noname.{dtype_name(tensor)}.{tuple(tensor.shape if whole else tensor.shape[1:])}"
    )


def _checked(tensor: Any, average: bool, name: str | None, version: int, priority: int) -> str:
    _check_arguments(average, name, version, priority)
    what = f"push_pull of {name!r}" if name else "push_pull"
    check_tensor(tensor, what)
    return what


def _check_arguments(average: Any, name: Any, version: Any, priority: Any) -> None:
    adapter.check_flag(average, "average", "push_pull")
    check_name(name, "push_pull")
    if not isinstance(version, int):
        raise ConfigError(f"push_pull: version must be an integer, not {type(version).__name__}")
    check_priority(priority, "push_pull")


def _begin(
    tensor: torch.Tensor,
    average: bool,
    name: str | None,
    version: int,
    priority: int,
    inplace: bool,
    will_wait: bool,
) -> Handle:
    what = _checked(tensor, average, name, version, priority)
    if inplace:
        check_replaceable(tensor, what)
    output = tensor if inplace else torch.empty_like(tensor, requires_grad=False)
    if profiled():
        wire = name or unnamed("push_pull", tensor)
        handle: Handle = followed(
            wire,
            tensor,
            lambda: submit(
                tensor, output, wire, average=average, priority=priority, will_wait=will_wait
            ),
        )
    else:
        handle = submit(
            tensor, output, name, average=average, priority=priority, will_wait=will_wait
        )
    if inplace:
        mark_written(tensor)
    return handle


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
    return _begin(tensor, average, name, version, priority, inplace=False, will_wait=False)


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
    return _begin(tensor, average, name, version, priority, inplace=True, will_wait=False)


class _Options(NamedTuple):
    """Arguments of a push_pull that its derivative needs."""

    average: bool
    name: str
    priority: int
    compression: type[Compressor]


class _PushPull(torch.autograd.Function):  # type: ignore[misc]
    """Sum or average over the workers; :func:`push_pull` describes the derivative."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, options: _Options) -> torch.Tensor:
        """Return the sum or average."""
        ctx.options = options
        return _summed(tensor, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Push_pull the gradient, under a name of its own; differentiable again."""
        return (
            _differentiable(gradient, ctx.options._replace(name=f"{ctx.options.name}.grad")),
            None,
        )


def _differentiable(tensor: torch.Tensor, options: _Options) -> torch.Tensor:
    if (
        tensor.requires_grad
        and torch.is_grad_enabled()
        and not adapter.session().config.asynchronous
    ):
        result: torch.Tensor = _PushPull.apply(tensor, options)
        return result
    return _summed(tensor, options)


def _summed(tensor: torch.Tensor, options: _Options) -> torch.Tensor:
    given = tensor.detach()
    wire, ctx = options.compression.compress(given)
    handle = _begin(
        wire,
        options.average,
        options.name,
        0,
        options.priority,
        inplace=wire is not given,
        will_wait=True,
    )
    return options.compression.decompress(handle.wait(), ctx)


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
        # imported here: sparse.py imports this module
        from bpsx.torch.sparse import push_pull_sparse

        _check_arguments(average, name, version, priority)
        return push_pull_sparse(tensor, average, name, compression)
    _checked(tensor, average, name, version, priority)
    return _differentiable(
        tensor, _Options(average, name or unnamed("push_pull", tensor), priority, compression)
    )


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
    result: torch.Tensor = _begin(
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
