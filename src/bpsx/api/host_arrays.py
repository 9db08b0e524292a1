"""NumPy arrays for the verbs: memory that the core can use directly, and copies of the rest."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bpsx.api.arguments import check_unmasked
from bpsx.api.staged import StagedHandle
from bpsx.core._handle import Handle
from bpsx.dtypes import BY_NAME, DType, UnsupportedDType, dtype_named
from bpsx.errors import ConfigError


class Operands(NamedTuple):
    """Memory of one operation.

    ``source`` and ``target`` are C-contiguous, aligned, and of the machine's byte order.
    """

    source: np.ndarray
    target: np.ndarray
    #: The array that the caller gets.
    output: np.ndarray
    #: Whether ``target`` is not ``output``'s memory, so that the result must still be copied there.
    staged: bool

    def handle(self, begun: Handle) -> Handle | StagedHandle:
        """Return the caller's handle of operation ``begun`` between ``source`` and ``target``."""
        return StagedHandle(begun, self._complete, self.output) if self.staged else begun

    def _complete(self) -> None:
        _plain(self.output)[...] = self.target


def summand(array: Any, what: str) -> tuple[np.ndarray, DType]:
    """Return ``array`` as a NumPy array, and its element type. ``what`` names it in errors.

    Raises :class:`~bpsx.dtypes.UnsupportedDType`; :class:`~bpsx.errors.ConfigError` for an array
    with masked elements.
    """
    given = array if isinstance(array, np.ndarray) else np.asarray(array)
    check_unmasked(given, what)
    return given, dtype_named(given.dtype.name, what)


def movable(array: Any, what: str) -> np.ndarray:
    """Return ``array`` as a NumPy array of any dtype with fixed-size elements.

    Raises as :func:`summand`.
    """
    given = array if isinstance(array, np.ndarray) else np.asarray(array)
    check_unmasked(given, what)
    if given.dtype.hasobject or not given.dtype.itemsize:
        raise UnsupportedDType(
            f"{what}: dtype {given.dtype} cannot be sent, because its elements do not have a fixed"
            " size in bytes"
        )
    return given


def operands(given: np.ndarray, output: Any, what: str) -> Operands:
    """Return the memory to send for ``given`` and to receive into.

    The result goes to ``output``, or to a new array of ``given``'s shape and dtype. Raises
    :class:`~bpsx.errors.ConfigError` if ``output`` does not fit.
    """
    if output is None:
        output = np.empty(given.shape, given.dtype)
    else:
        _check_output(given, output, what)
    source, target = _plain(given), _plain(output)
    staged = not _usable(target)
    if staged:
        target = np.empty(target.shape, _native(target))
    if not _usable(source):
        source = np.array(source, _native(source), order="C")
    # Results arrive in pieces and would overwrite elements that have yet to be sent.
    elif _overlap(source, target):
        source = source.copy()
    return Operands(source, target, output, staged)


def copied(given: np.ndarray, output: Any, what: str) -> Operands:
    """Same as :func:`operands`, for verbs that work in place.

    ``source`` is ``target`` and holds ``given``'s elements.
    """
    found = operands(given, output, what)
    if found.source is not found.target:
        np.copyto(found.target, found.source)
    return found._replace(source=found.target)


def declared_as(array: np.ndarray) -> tuple[tuple[int, ...], int]:
    """Return the shape and element type by which workers compare arrays that are copied as bytes.

    Types that cannot be summed count as bytes, with the element size as a last dimension.
    """
    dtype = BY_NAME.get(array.dtype.name)
    return (
        (array.shape, dtype.code)
        if dtype
        else ((*array.shape, array.dtype.itemsize), BY_NAME["uint8"].code)
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the memory of a C-contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)


def as_words(array: np.ndarray) -> np.ndarray:
    """Return the same memory with a type that Python's buffer protocol supports.

    bfloat16 is not supported there.
    """
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _plain(array: np.ndarray) -> np.ndarray:
    """Return the same memory without the behaviour of a subclass.

    An ``np.matrix``, for example, always has two dimensions.
    """
    return array if type(array) is np.ndarray else array.view(np.ndarray)


def _usable(array: np.ndarray) -> bool:
    return bool(array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative)


def _overlap(source: np.ndarray, target: np.ndarray) -> bool:
    """Return whether the arrays share memory and do not begin at the same address."""
    return (
        source is not target
        and np.may_share_memory(source, target)
        and source.ctypes.data != target.ctypes.data
    )


def _native(array: np.ndarray) -> np.dtype[Any]:
    """Return the dtype of ``array`` in the machine's byte order."""
    return array.dtype.newbyteorder("=")


def _check_output(given: np.ndarray, output: Any, what: str) -> None:
    if not isinstance(output, np.ndarray):
        raise ConfigError(
            f"{what}: output must be a NumPy array, like the input, not {type(output).__name__}"
        )
    if (
        output.shape != given.shape
        or output.dtype != given.dtype
        and _native(output) != _native(given)
    ):
        raise ConfigError(
            f"{what}: output is {output.dtype} {output.shape}, input {given.dtype} {given.shape};"
            " dtype and shape must be equal"
        )
    if not output.flags.writeable:
        raise ConfigError(
            f"{what}: output is read-only; give a writeable array, or none to get a new array"
        )
    if not output.flags.c_contiguous:
        raise ConfigError(
            f"{what}: output must be C-contiguous; this one has shape {output.shape} and strides"
            f" {output.strides}. Give none to get a new array, and assign the result"
        )
    check_unmasked(output, f"{what}: output")
