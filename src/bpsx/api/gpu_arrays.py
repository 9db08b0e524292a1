"""GPU arrays for the verbs: CuPy's, and others with ``__cuda_array_interface__`` or DLPack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bpsx.dtypes import dtype_named
from bpsx.errors import ConfigError

#: DLPack's number for memory of a CUDA device.
_DLPACK_CUDA = 2
#: The default stream's number in ``__cuda_array_interface__`` and DLPack, where 0 means no stream.
_DEFAULT_STREAM = 1


class GpuView(NamedTuple):
    """A view of memory with the fields of :class:`bpsx.plugin.adapter.TensorView`."""

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    owner: object
    gpu: int
    streams: Callable[[], int] | None


def is_on_gpu(array: Any) -> bool:
    """Return whether ``array`` declares its memory as a CUDA device's."""
    if isinstance(array, np.ndarray):
        return False
    if hasattr(array, "__cuda_array_interface__"):
        return True
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] == _DLPACK_CUDA


def view(array: Any, what: str, moved: bool = False) -> GpuView:
    """Return the view of a C-contiguous array on a GPU.

    ``moved``: the elements are only moved, not summed, so they may be of any type.

    Raises :class:`~bpsx.errors.ConfigError`, also if the array needs CuPy and CuPy is missing,
    :class:`~bpsx.dtypes.UnsupportedDType`.
    """
    from bpsx.local._cuda import where

    if not hasattr(array, "__cuda_array_interface__"):
        array = _in_cupy(array, what)
    described = array.__cuda_array_interface__
    _check_described(described, what)
    shape, dtype = tuple(described["shape"]), _dtype_of(array, described["typestr"])
    itemsize = (
        np.dtype(described["typestr"]).itemsize if moved else dtype_named(dtype, what).itemsize
    )
    if not _is_contiguous(shape, described.get("strides"), itemsize):
        raise ConfigError(
            f"{what}: an array on a GPU must be C-contiguous; this one has shape {shape} and"
            f" strides {described['strides']}"
        )
    nbytes, address = _count(shape) * itemsize, int(described["data"][0])
    if not moved and nbytes and address % itemsize:
        raise ConfigError(
            f"{what}: memory on a GPU must be aligned to the element size; this array begins at"
            f" {address:#x}, and its elements have {itemsize} bytes"
        )
    gpu = (
        array.__dlpack_device__()[1]
        if hasattr(array, "__dlpack_device__")
        else where(address)
        if nbytes
        else 0
    )
    if gpu < 0:
        raise ConfigError(
            f"{what}: the address in its __cuda_array_interface__ is not memory of a GPU"
        )
    return GpuView(address, nbytes, dtype, shape, array, gpu, _streams_of(array, described))


def as_bytes(view: GpuView) -> GpuView:
    """Return the same memory as bytes, with the element size as a last dimension."""
    itemsize = view.nbytes // max(1, _count(view.shape))
    return view._replace(dtype="uint8", shape=(*view.shape, itemsize))


def output_for(array: Any, output: Any, what: str) -> Any:
    """Return the array for the result: ``output``, or a new CuPy array.

    Raises :class:`~bpsx.errors.ConfigError` if CuPy is missing or ``output`` cannot be written to.
    """
    if output is None:
        return _cupy(what).empty_like(_in_cupy(array, what), order="C")
    if not is_on_gpu(output):
        raise ConfigError(
            f"{what}: output must be an array on a GPU, like the input, not {type(output).__name__}"
        )
    if hasattr(output, "__cuda_array_interface__") and output.__cuda_array_interface__["data"][1]:
        raise ConfigError(f"{what}: output is read-only; give a writeable array")
    return output


def contiguous(array: Any, what: str) -> Any:
    """Return ``array`` itself, or a contiguous copy."""
    described = getattr(array, "__cuda_array_interface__", None)
    if described is None or described.get("strides") is None:
        return array
    _check_described(described, what)  # checked first: a copy would drop such a property
    return _cupy(what).ascontiguousarray(array)


def check_overlap(source: GpuView, target: GpuView, what: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` if two arrays overlap without being the same memory.

    Results arrive in pieces and would overwrite elements that have yet to be sent.
    """
    if source.address != target.address and max(source.address, target.address) < min(
        source.address + source.nbytes, target.address + target.nbytes
    ):
        raise ConfigError(
            f"{what}: output overlaps the input's memory but is not the input itself; give the"
            " input itself, or a separate array"
        )


def _check_described(described: dict[str, Any], what: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` for properties that bpsx would ignore.

    These are a mask and a foreign byte order in ``__cuda_array_interface__``.
    """
    if described.get("mask") is not None:
        raise ConfigError(
            f"{what}: the array has a mask, which cannot be sent; fill the masked elements with a"
            " value"
        )
    dtype = np.dtype(described["typestr"])
    if not dtype.isnative:
        raise ConfigError(
            f"{what}: dtype {dtype.str} does not have this machine's byte order, and bpsx does not"
            f" convert it on a GPU; give elements of {dtype.newbyteorder('=').str}"
        )


def _in_cupy(array: Any, what: str) -> Any:
    """Return the same memory as a CuPy array."""
    cupy = _cupy(what)
    if isinstance(array, cupy.ndarray):
        return array
    return (
        cupy.asarray(array)
        if hasattr(array, "__cuda_array_interface__")
        else cupy.from_dlpack(array)
    )


def _cupy(what: str) -> Any:
    try:
        import cupy
    except ImportError as e:
        raise ConfigError(
            f"{what}: this array on a GPU needs CuPy ({e}): pip install cupy-cuda13x (or"
            " cupy-cuda12x). CuPy is not needed for contiguous arrays with"
            " __cuda_array_interface__ if output=… is such an array, too"
        ) from e
    return cupy


def _dtype_of(array: Any, typestr: str) -> str:
    given = getattr(array, "dtype", None)
    name = str(getattr(given, "name", given)).removeprefix("torch.")
    # The interface has no type for bfloat16.
    return name if name == "bfloat16" else np.dtype(typestr).name


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = itemsize
    for length, stride in reversed(list(zip(shape, strides, strict=True))):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _streams_of(array: Any, described: dict[str, Any]) -> Callable[[], int]:
    """Return a function that gives the stream with which to order the operation.

    It is CuPy's current stream for CuPy's arrays, else the stream that the array names, else the
    default stream.
    """
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return lambda: int(cupy.cuda.get_current_stream().ptr)
    named = described.get("stream")
    stream = 0 if named in (None, _DEFAULT_STREAM) else int(named)
    return lambda: stream
