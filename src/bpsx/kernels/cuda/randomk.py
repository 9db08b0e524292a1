"""randomk on a GPU, with the places, wire and residual of ``cpu/randomk.py``.

Places ascend, so those in a tile of elements are found without looking at others: the tile's bounds
give the first and last of their numbers, to within one. So the block that updates a tile's residual
also sends from it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from numba import cuda

from bpsx.kernels.codecs import N_OPTIONS, DeviceCodec, amount_of, register_device
from bpsx.kernels.cuda.bit_ops import mixed
from bpsx.kernels.cuda.device import (
    THREADS,
    Kernel,
    address,
    at,
    atomic_or,
    block,
    blocks,
    device,
    element,
    forget,
    grid,
    high,
    kernel,
    last,
    magnitude,
    np,
    plus,
    refuse,
    sync,
    thread,
    times,
)
from bpsx.kernels.cuda.feedback import EACH, TILE, add_up, fetch, keep, place

_HEAD = 8
_SEED = N_OPTIONS - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
#: Indices into the state, seen as int32: the blocks' ticket, and flags of infinities and NaN seen.
#: The flags: any element, any sent element.
_TICKET, _SEEN = 6, 5
_ANY, _SENT = 1, 2


@device
def _start(seed: int, counter: Any) -> Any:
    """Return the start of the round's random words."""
    return mixed(np.uint64(np.int64(seed)) + mixed(counter + _GAMMA))


@device
def _turn(start: Any, n: int) -> Any:
    """Return the rotation of the places."""
    return np.int64(high(mixed(start), np.uint64(n)))


@device
def _place(start: Any, turn: int, i: int, n: int, count: int) -> Any:
    """Return place i."""
    base, end = np.uint64(i * n) // np.uint64(count), np.uint64((i + 1) * n) // np.uint64(count)
    found = turn + np.int64(base + high(mixed(start + np.uint64(i + 1) * _GAMMA), end - base))
    return found if found < n else found - n


@device
def _near(j: int, n: int, count: int, inverse: float) -> Any:
    """Return the number of the place whose range has the rotated index ``j``, to within one."""
    return np.int64(np.float64(j) * np.float64(count) * inverse)


def _sender(wide: str, residual: bool, momentum: bool) -> Any:
    """Return a device function that sends one element."""
    real = element(wide)

    @device
    def send(g: Any, e: Any, m: Any, values: Any, seen: Any, i: int, at_: int, u: Any) -> None:
        value = g[at_]
        if residual:
            value = e[at_]
            e[at_] = real(0)
        elif momentum:
            value = plus(value, times(u, m[at_]))
        values[i] = value
        if magnitude(value) >= magnitude(real(np.inf)):
            atomic_or(seen, _SEEN, np.int32(_SENT))

    return send


@functools.cache
def _encoder(wide: str, residual: bool, momentum: bool) -> Kernel:
    real, send = element(wide), _sender(wide, residual, momentum)

    @kernel(addresses=5, integers=4, floats=3)
    def encode(
        g_: Any,
        e_: Any,
        m_: Any,
        wire: Any,
        state: Any,
        n: int,
        count: int,
        seed: int,
        counter: int,
        factor: float,
        mu: float,
        inverse: float,
    ) -> None:
        g, e, m, values, seen = (
            at(g_, 0, real),
            at(e_, 0, real),
            at(m_, 0, real),
            at(wire, _HEAD, real),
            at(state, 0, np.int32),
        )
        ticket = cuda.shared.array(1, np.int32)
        p, left, momenta = (
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
            cuda.local.array(EACH, real),
        )
        t, f, u, bound = thread(), real(factor), real(mu), magnitude(real(np.inf))
        start = _start(seed, np.uint64(counter))
        turn = _turn(start, n)
        overflow = False
        for begin in range(block() * TILE, n, blocks() * TILE):
            end = min(begin + TILE, n)
            fetch(p, g, begin, t, n)
            if residual:
                fetch(left, e, begin, t, n)
            if momentum:
                fetch(momenta, m, begin, t, n)
            add_up(p, left, momenta, f, u, residual, momentum)
            if momentum:
                keep(m, momenta, begin, t, n)
            if residual:
                keep(e, p, begin, t, n)
            for j in range(EACH):
                overflow |= place(begin, t, j) < n and magnitude(p[j]) >= bound
            sync()
            for part in range(2):  # elements before the rotation come last
                first, behind = (begin, min(end, turn)) if part == 0 else (max(begin, turn), end)
                if first < behind:
                    over = n - turn if part == 0 else -turn
                    low = max(_near(first + over, n, count, inverse) - 1, 0)
                    for i in range(
                        low + t, min(_near(behind + over, n, count, inverse) + 2, count), THREADS
                    ):
                        where = _place(start, turn, i, n, count)
                        if where >= first and where < behind:
                            send(g, e, m, values, seen, i, where, u)
        if overflow:
            atomic_or(seen, _SEEN, np.int32(_ANY))
        if not last(seen, _TICKET, ticket):
            return
        found = seen[_SEEN]
        sync()
        if t == 0:
            at(wire, 0, np.uint64)[0] = np.uint64(counter)
            seen[_SEEN] = 0
            if found == _ANY:
                values[0] = real(np.nan)
        if found:
            if residual:
                forget(e, n)
            if momentum:
                forget(m, n)

    return encode


@functools.cache
def _plain_encoder(wide: str) -> Kernel:
    real = element(wide)

    @kernel(addresses=2, integers=4)
    def encode(g_: Any, wire: Any, n: int, count: int, seed: int, counter: int) -> None:
        g, values, i = at(g_, 0, real), at(wire, _HEAD, real), block() * THREADS + thread()
        start = _start(seed, np.uint64(counter))
        if i == 0:
            at(wire, 0, np.uint64)[0] = np.uint64(counter)
        if i < count:
            values[i] = g[_place(start, _turn(start, n), i, n, count)]

    return encode


@functools.cache
def _adder(wide: str) -> Kernel:
    real = element(wide)

    @kernel(addresses=2, integers=3)
    def decode(wire: Any, out_: Any, n: int, count: int, seed: int) -> None:
        out, values, i = at(out_, 0, real), at(wire, _HEAD, real), block() * THREADS + thread()
        if i < count:
            start = _start(seed, at(wire, 0, np.uint64)[0])
            where = _place(start, _turn(start, n), i, n, count)
            out[where] = plus(out[where], values[i])

    return decode


@functools.cache
def _setter(wide: str) -> Kernel:
    real = element(wide)

    @kernel(addresses=2, integers=3, floats=1)
    def decode(wire: Any, out_: Any, n: int, count: int, seed: int, inverse: float) -> None:
        out, values, t = at(out_, 0, real), at(wire, _HEAD, real), thread()
        zeros = cuda.local.array(EACH, real)
        for j in range(EACH):
            zeros[j] = real(0)
        start = _start(seed, at(wire, 0, np.uint64)[0])
        turn = _turn(start, n)
        for begin in range(block() * TILE, n, blocks() * TILE):
            end = min(begin + TILE, n)
            keep(out, zeros, begin, t, n)
            sync()
            for part in range(2):
                first, behind = (begin, min(end, turn)) if part == 0 else (max(begin, turn), end)
                if first < behind:
                    over = n - turn if part == 0 else -turn
                    low = max(_near(first + over, n, count, inverse) - 1, 0)
                    for i in range(
                        low + t, min(_near(behind + over, n, count, inverse) + 2, count), THREADS
                    ):
                        where = _place(start, turn, i, n, count)
                        if where >= first and where < behind:
                            out[where] = values[i]

    return decode


class RandomK(DeviceCodec):
    """Codec ``randomk``; see the module."""

    name = "randomk"

    def size(self, wide: str, n: int, options: Sequence[int]) -> int:
        """Return the exact size, which is fixed for each element type."""
        return _HEAD + amount_of(n, [*options]) * int(element(wide)().itemsize)

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
        """Queue a kernel that passes over memory once.

        Without residual and momentum it reads only the elements that it sends.
        """
        count, seed = amount_of(n, [*options]), options[_SEED]
        if e is None and m is None:
            _plain_encoder(wide).launch(
                -(-count // THREADS), stream, address(g), address(wire), n, count, seed, counter
            )
        else:
            _encoder(wide, e is not None, m is not None).launch(
                grid(-(-n // TILE)),
                stream,
                *map(address, (g, e, m, wire, state)),
                n,
                count,
                seed,
                counter,
                factor,
                mu,
                1 / n,
            )

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
        """Queue a kernel that sets or adds the sent elements.

        Their places follow from the wire's counter.
        """
        count, seed = amount_of(n, [*options]), options[_SEED]
        if size != self.size(wide, n, options):
            refuse(status, stream)
        elif add:
            _adder(wide).launch(
                -(-count // THREADS), stream, address(wire), address(out), n, count, seed
            )
        else:
            _setter(wide).launch(
                grid(-(-n // TILE)), stream, address(wire), address(out), n, count, seed, 1 / n
            )


register_device(RandomK())
