"""Element types that bpsx can sum, and their codes on the wire."""

from __future__ import annotations

from typing import NamedTuple

from bpsx.errors import ConfigError


class DType(NamedTuple):
    """One element type.

    ``code``: its number on the wire. ``itemsize``: bytes of an element. ``wide_itemsize``: bytes of
    an element of its accumulator.
    """

    code: int
    name: str
    itemsize: int
    wide_itemsize: int

    @property
    def integer(self) -> bool:
        """Whether the elements are integers."""
        return "int" in self.name


#: Halves are summed in float32, 8-bit integers in int32; the result is narrowed once.
DTYPES: tuple[DType, ...] = (
    DType(1, "float16", 2, 4),
    DType(2, "bfloat16", 2, 4),
    DType(3, "float32", 4, 4),
    DType(4, "float64", 8, 8),
    DType(5, "uint8", 1, 4),
    DType(6, "int8", 1, 4),
    DType(7, "int32", 4, 4),
    DType(8, "int64", 8, 8),
)
BY_NAME: dict[str, DType] = {d.name: d for d in DTYPES}
BY_CODE: dict[int, DType] = {d.code: d for d in DTYPES}
FLOAT_CODES: dict[str, int] = {d.name: d.code for d in DTYPES if not d.integer}


def dtype_named(name: str, what: str, instead: str = "") -> DType:
    """Return the type called ``name``.

    ``what`` names the tensor or option in the error, ``instead`` says what to send. Raises
    :class:`UnsupportedDType` for any other name.
    """
    try:
        return BY_NAME[name]
    except KeyError:
        raise UnsupportedDType(
            f"{what}: dtype {name} cannot be summed; allowed: {', '.join(BY_NAME)}"
            + (f"; {instead}" if instead else "")
        ) from None


class UnsupportedDType(ConfigError, TypeError):
    """A tensor's element type is one that bpsx cannot sum."""
