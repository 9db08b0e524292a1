"""The interface of a compressor: what its codec has on the CPU and, if it can, on a GPU.

A *codec* encodes the n elements of a partition into fewer bytes and decodes them again. It is one
module in ``cpu/`` with a subclass of :class:`Codec`, one module in ``cuda/``, and an oracle in
:mod:`bpsx.kernels.reference`. Numba compiles its Python functions. The core and the servers call
them by address, without the GIL, so the functions must neither allocate nor raise. CONTRIBUTING.md
shows how to add a codec.

An encoder computes, with g the gradient, e the residual and m the momentum of the partition:

    m = mu * m + g;  g = g + mu * m     with momentum (Nesterov's)
    p = g + factor * e                  with a residual (error feedback, arXiv 1905.10936)
    wire = encode(p); e = p - decode(wire)

It does not write to g. Elements are float32 or float64, the *wide* types of all compressible types.
On infinities or NaN an encoder sends bytes that decode to infinities or NaN, and clears residual
and momentum: an overflow shows in the result, as without compression, but leaves no trace in the
state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: Lengths of a codec's options and of its state between rounds. The last option is the seed. The
#: option before it is a flag for a lane's encoder and summer: error feedback is "sparse", and all
#: pushes of this round began with the same counter.
N_OPTIONS, N_STATE = 8, 4
ALIKE, SEED = N_OPTIONS - 2, N_OPTIONS - 1
#: The most pushes that a summer gets.
MOST_PUSHES = 1024
#: Bytes that an encoder may touch beyond its capacity, and a decoder beyond its input, since both
#: work in whole words.
SLACK = 64
#: encode(g, e, m, wire, scratch, state, options, n, counter, factor, mu) -> bytes written. g, e, m:
#: n wide elements; e and m only if the encoder was requested with residual and momentum. wire:
#: uint8, codec's capacity + SLACK. scratch: uint8, 64-byte aligned. state: N_STATE float64, zero at
#: first and kept between rounds. options: N_OPTIONS int64. counter: number of this partition's
#: push.
Encoder = Callable[..., int]
#: decode(wire, size, out, scratch, options, n, add) -> 0, or -1 if this codec cannot have written
#: the bytes. add: add to out instead of setting it. The sender may be hostile: a decoder must
#: survive any bytes, reads only wire[:size + SLACK] and writes only out[:n].
Decoder = Callable[..., int]
#: sum(pushes, stride, count, divisor, e, wire, scratch, state, options, n, counter, factor) ->
#: bytes written. Does what decoding ``count`` pushes (at most :data:`MOST_PUSHES`) one after the
#: other, dividing by ``divisor`` (1 or more) and encoding would do, to the same bits. pushes:
#: uint8, each of them ``stride`` bytes after the one before it. If the codec is ``counted``, all of
#: them begin with ``counter``. The others are as for an encoder.
Summer = Callable[..., int]
#: check(wire, options, n) -> 0, or -1 if this codec cannot have written the bytes. The sender may
#: be hostile, but the number of bytes is right.
Checker = Callable[..., int]


class Compressor(ABC):
    """A choice for ``compressor``, and its options. Instances are stateless and shared."""

    name: str
    #: This compressor's own keys of ``compression_params``.
    keys: tuple[str, ...] = ()
    #: Kinds of error feedback that this compressor supports.
    feedback: tuple[str, ...] = ("vanilla", "corrected")

    @abstractmethod
    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``given`` checked, with defaults filled in.

        ``given`` has this compressor's own keys only, without values of None, "" or False. Raises
        :class:`~bpsx.errors.ConfigError`.
        """

    def shrinks(self, options: Mapping[str, Any]) -> bool:
        """Whether p - decode(encode(p)) is always less than p.

        If it is not, a residual may grow from round to round without bound.
        """
        return True


class Codec(Compressor):
    """Interface of a compressor that encodes each partition by itself."""

    #: Whether each sender draws its own random numbers; otherwise all senders draw the same.
    own_noise = False
    #: Whether the wire begins with the counter (uint64). If so, a reply takes the pushes' counter,
    #: and workers take the reply's.
    counted = False
    #: Whether an encoder without a residual reads its ``state``, too. If not, a lane's counter is
    #: all that another lane needs to continue without a residual.
    remembers = True
    #: A partition must have fewer elements than this.
    too_many = 2**63

    @abstractmethod
    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """Return the options as at most :data:`ALIKE` 64-bit integers, for compiled functions."""

    @abstractmethod
    def capacity(self, n: int, numbers: list[int]) -> int:
        """Return the most bytes that n elements can take."""

    def scratch(self, n: int, numbers: list[int]) -> int:
        """Return the bytes of scratch memory that n elements need."""
        return 0

    @abstractmethod
    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """Return a function for Numba, with or without residual and momentum."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return a function for Numba."""

    def summer(self, residual: bool) -> Summer | None:
        """Return a function for Numba with which a lane decodes, sums and encodes in one pass.

        For codecs that encode n elements into :meth:`size` bytes always. None: a lane decodes each
        push into an accumulator, and encodes that.
        """
        return None

    def size(self, n: int, numbers: list[int], itemsize: int) -> int:
        """Return the bytes of n elements of ``itemsize`` bytes, for a codec with a summer."""
        return self.capacity(n, numbers)

    def checker(self) -> Checker | None:
        """Return a function for Numba that checks a push before a summer gets it.

        None: the codec decodes any bytes.
        """
        return None


class DeviceCodec(ABC):
    """Interface of the same compressor on a GPU.

    For the same input, seed and counter it gives the same bytes, residual and momentum as the
    :class:`Codec`, except that sums may be in another order.

    Its functions queue kernels on the given stream and return; they neither wait nor allocate.
    Memory is the device's: an array with ``__cuda_array_interface__``, or an address (int). wire
    and scratch are aligned to 16 bytes; state is as for an :data:`Encoder`. ``wide`` is float32 or
    float64. ``options`` are N_OPTIONS integers on the host, as for an :data:`Encoder`. ``stream``
    is a raw handle of the calling thread's current device. Calls for one partition come in order. n
    is below 2^31. Sizes and settings are those of the :func:`codec` of the same name.
    """

    name: str

    @abstractmethod
    def size(self, wide: str, n: int, options: Sequence[int]) -> int | None:
        """Return the bytes that an encoder writes, or None if the host cannot know the number."""

    def scratch(self, n: int, options: Sequence[int]) -> int:
        """Return the bytes of scratch memory that encoding and decoding n elements need.

        Scratch memory keeps nothing between calls.
        """
        return 0

    @abstractmethod
    def encode(
        self,
        wide: str,
        g: Any,
        e: Any,
        m: Any,
        wire: Any,
        written: Any,
        scratch: Any,
        state: Any,
        options: Sequence[int],
        n: int,
        counter: int,
        factor: float,
        mu: float,
        stream: int,
    ) -> None:
        """Queue the work of an :data:`Encoder`; e and m are None without residual and momentum.

        Where :meth:`size` is None, the kernel stores the number of bytes written in ``written``
        (int64).
        """

    @abstractmethod
    def decode(
        self,
        wide: str,
        wire: Any,
        size: int,
        out: Any,
        scratch: Any,
        status: Any,
        options: Sequence[int],
        n: int,
        add: bool,
        stream: int,
    ) -> None:
        """Queue the work of a :data:`Decoder`.

        ``status`` (int32) becomes -1 if this codec cannot have written the bytes. Otherwise it is
        left alone: the caller sets it to 0 beforehand.
        """


class Compiled(NamedTuple):
    """Addresses of a codec's functions for one element type; ``owners`` keep them alive."""

    encode: int
    decode: int
    owners: tuple[object, ...]


class Summing(NamedTuple):
    """Addresses of a codec's summer and checker for one element type; 0: it has none.

    ``owners`` keep them alive.
    """

    sum: int
    check: int
    owners: tuple[object, ...]
