"""The code of ``cpu/entropy_code.py`` for chunks of levels and signs, by a block of threads.

A thread has WORDS adjacent words of 32 elements. A sum over the block, of the bits that earlier
threads have, gives the position of a thread's bits in a plane. The packer gets levels and signs as
planes of bits. Threads share words, so it writes with atomic or. The unpacker makes levels as
uint16 with the sign on top, in rows of 32. Rows are two longer, to avoid bank conflicts both along
rows and along columns.

A Rice-coded number begins where the previous one ends. A number might begin at any of a thread's 32
bits. For each of these the thread finds where the first number of the next thread's bits would
begin. One thread follows these links through all threads, and then each knows where its first
number begins.
"""

from __future__ import annotations

from typing import Any

from bpsx.kernels.cuda.device import (
    THREADS,
    device,
    leading,
    lowest,
    np,
    ones,
    scan,
    scan_wide,
    shared_or,
    sync,
    thread,
)

#: Elements of a chunk, words of a thread, elements of a row.
CHUNK, WORDS, ROW = 8192, 8192 // 32 // THREADS, 34
#: Most words of a chunk, with one to spare: 12 bits per element.
MOST = CHUNK * 12 // 32 + 2
_LIMIT, _RAW = 16, 14
#: Most levels at which a thread's counts of all levels fit into 64 bits.
FEW = 4
#: Bytes of a row of the table of where numbers begin.
_STEPS = 36
#: Sizes of arrays in shared memory: levels (uint16), one bit per element (uint32), the table of
#: where numbers begin (uint8), values exchanged between threads (int32).
LEVELS, BITMAP, STEPS, LASTS = CHUNK // 32 * ROW, CHUNK // 32, THREADS * _STEPS, THREADS + 2
SIGN = 0x8000
#: Words from one of the packer's planes of bits to the next. There is a plane for each bit of the
#: levels, the lowest first, and one for the signs.
PLANE = BITMAP + 8
#: Steps that gather the bits of a word of 32, and a thread's moves for all of its words.
_STEPS_OF_32 = 5
MOVES = _STEPS_OF_32 * WORDS


@device
def row(i: int) -> Any:
    """Return the index of element i's level."""
    return (i >> 5) * ROW + (i & 31)


@device
def spacing(size: int, count: int) -> Any:
    """Return the parameter s, like the CPU's ``_spacing``."""
    s = 0
    while (count + 1) << (s + 1) <= size:
        s += 1
    return s if (count + 1) * (s + 1) + 2 * (size >> s) < size else 0


@device
def put(buffer: Any, position: int, word: Any) -> None:
    """Set those of the 32 bits from ``position`` on that are set in ``word``."""
    if word != np.uint32(0):
        both, first = (
            np.uint64(word) << np.uint64(position & 31),
            np.int64(np.uint32(np.uint32(position) >> np.uint32(5))),
        )
        shared_or(buffer, first, np.uint32(both & np.uint64(0xFFFFFFFF)))
        if both >> np.uint64(32) != np.uint64(0):
            shared_or(buffer, first + 1, np.uint32(both >> np.uint64(32)))


@device
def steer(masks: Any, moves: Any) -> None:
    """Compute the bits that :func:`gathered` moves at each step, for a thread's masks."""
    for w in range(WORDS):
        mask = masks[w]
        left = np.uint32(~mask << np.uint32(1))
        for step in range(_STEPS_OF_32):
            odd = np.uint32(left ^ np.uint32(left << np.uint32(1)))
            odd = np.uint32(odd ^ np.uint32(odd << np.uint32(2)))
            odd = np.uint32(odd ^ np.uint32(odd << np.uint32(4)))
            odd = np.uint32(odd ^ np.uint32(odd << np.uint32(8)))
            odd = np.uint32(odd ^ np.uint32(odd << np.uint32(16)))
            moved = np.uint32(odd & mask)
            mask = np.uint32(np.uint32(mask ^ moved) | np.uint32(moved >> np.uint32(1 << step)))
            left = np.uint32(left & np.uint32(~odd))
            moves[w * _STEPS_OF_32 + step] = moved


@device
def gathered(word: Any, w: int, moves: Any) -> Any:
    """Return the bits of ``word`` where the w-th mask has ones, packed from the lowest bit on.

    ``word`` has no other bits. The method is "compress" of Warren's "Hacker's Delight".
    """
    for step in range(_STEPS_OF_32):
        moving = np.uint32(word & moves[w * _STEPS_OF_32 + step])
        word = np.uint32(np.uint32(word ^ moving) | np.uint32(moving >> np.uint32(1 << step)))
    return word


@device
def put_plane(buffer: Any, position: int, words: Any, masks: Any, moves: Any) -> None:
    """Write a thread's part of a plane."""
    for w in range(WORDS):
        put(buffer, position, gathered(np.uint32(words[w] & masks[w]), w, moves))
        position += ones(masks[w])


@device
def _length(x: int, s: int) -> Any:
    return (x >> s) + 1 + s if x >> s < _LIMIT else _LIMIT + _RAW


@device
def put_number(buffer: Any, position: int, x: int, s: int) -> None:
    """Write a Rice-coded number."""
    if x >> s < _LIMIT:
        put(buffer, position, np.uint32((((x & ((1 << s) - 1)) << 1) | 1) << (x >> s)))
    else:
        put(buffer, position, np.uint32(x << _LIMIT))


@device
def _behind(lasts: Any, t: int) -> Any:
    """Return the index behind the last nonzero element of the threads before ``t``."""
    while t > 0 and lasts[t - 1] < 0:
        t -= 1
    return np.int64(lasts[t - 1]) + 1 if t > 0 else np.int64(0)


@device
def put_places(buffer: Any, masks: Any, size: int, s: int, lasts: Any, room: Any) -> Any:
    """Write the places of nonzero elements behind the first byte; return the position behind them.

    ``lasts``: THREADS + 1 int32.
    """
    t = thread()
    if s == 0:
        for w in range(WORDS):
            put(buffer, 8 + 32 * (t * WORDS + w), masks[w])
        return 8 + size
    lasts[t] = -1
    for w in range(WORDS):
        if masks[w] != np.uint32(0):
            lasts[t] = np.int32(32 * (t * WORDS + w) + highest(masks[w]))
    sync()
    first, own, end = 0, 0, 0
    if t == 0:
        end = _behind(lasts, THREADS)
    if lasts[t] >= 0:
        first = _behind(lasts, t)
    after = first
    for w in range(WORDS):
        mask = masks[w]
        while mask != np.uint32(0):
            i = 32 * (t * WORDS + w) + lowest(mask)
            own += _length(i - after, s)
            after = i + 1
            mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
    if t == 0:
        lasts[THREADS] = end
    before, all_ = scan(own, room)
    position, after = 8 + before, first
    for w in range(WORDS):
        mask = masks[w]
        while mask != np.uint32(0):
            i = 32 * (t * WORDS + w) + lowest(mask)
            put_number(buffer, position, i - after, s)
            position += _length(i - after, s)
            after = i + 1
            mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
    left = size - np.int64(lasts[THREADS])
    if t == 0:
        put_number(buffer, 8 + all_, left, s)
    return 8 + all_ + _length(left, s)


@device
def highest(x: Any) -> Any:
    """Return the index of the highest set bit of a uint32, which is not 0."""
    return 31 - leading(x)


@device
def _at_least(planes: Any, word: int, bound: int, bits_: int) -> Any:
    """Return a mask of a word's levels, of ``bits_`` bits, that are at least ``bound``."""
    equal, larger = np.uint32(0xFFFFFFFF), np.uint32(0)
    for back in range(bits_):
        b = bits_ - 1 - back
        ones_ = planes[b * PLANE + word]
        if (bound >> b) & 1:
            equal = np.uint32(equal & ones_)
        else:
            larger = np.uint32(larger | np.uint32(equal & ones_))
            equal = np.uint32(equal & np.uint32(~ones_))
    return np.uint32(equal | larger)


@device
def _less_one(planes: Any, word: int, b: int) -> Any:
    """Return bit ``b`` of a word's levels less 1, for levels that are not 0."""
    lower = np.uint32(0)
    for below in range(b):
        lower = np.uint32(lower | planes[below * PLANE + word])
    return np.uint32(planes[b * PLANE + word] ^ np.uint32(~lower))


def _counter(bits_: int, few: bool) -> Any:
    @device
    def count_all(planes: Any, size: int, masks: Any, room: Any) -> Any:
        """Count nonzero levels before this thread and in all, and sum up the levels less 1.

        Returns the three numbers. A count has 16 bits. With ``few``, the numbers of levels of at
        least 2, 3 and 4 follow it.
        """
        t, own, high_, total = thread(), np.uint64(0), np.uint64(0), 0
        for w in range(WORDS):
            word, masks[w] = t * WORDS + w, np.uint32(0)
            if 32 * word < size:
                masks[w] = _at_least(planes, word, 1, bits_)
                own += np.uint64(ones(masks[w]))
                if few:
                    for bound in range(2, FEW + 1):
                        high_ += np.uint64(
                            ones(_at_least(planes, word, bound, bits_))
                        ) << np.uint64(16 * (bound - 1))
                else:
                    for b in range(bits_):
                        total += ones(planes[b * PLANE + word]) << b
                    total -= ones(masks[w])
        if few:
            before, all_ = scan_wide(own + high_, room)
            for bound in range(2, FEW + 1):
                total += _of(all_, bound)
            return before, all_, total
        before, all_ = scan_wide(own | (np.uint64(total) << np.uint64(16)), room)
        return before, all_, np.int64(all_ >> np.uint64(16))

    return count_all


def packer(bits_: int, few: bool) -> Any:
    """Return a function that encodes a chunk of levels of ``bits_`` bits.

    With few levels, no more than FEW, it makes all counts at once.
    """
    count_all = _counter(bits_, few)

    @device
    def pack(
        buffer: Any,
        planes: Any,
        size: int,
        k: int,
        lasts: Any,
        room: Any,
        sums: Any,
        masks: Any,
        words: Any,
        moves: Any,
    ) -> Any:
        """Encode a chunk into ``buffer``, which must be 0; return the bytes written.

        masks, words, moves: uint32 of the thread's own.
        """
        t = thread()
        counts, counts_all, total = count_all(planes, size, masks, sums)
        before, count, r = _of(counts, 1), _of(counts_all, 1), 0
        if count == 0:
            return 0
        if k > 2:
            while count << (r + 1) <= total:
                r += 1
        s = spacing(size, count)
        if t == 0:
            put(buffer, 0, np.uint32(r + 8 * s))
        position = put_places(buffer, masks, size, s, lasts, room)
        steer(masks, moves)
        for w in range(WORDS):
            words[w] = planes[bits_ * PLANE + t * WORDS + w]
        put_plane(buffer, position + before, words, masks, moves)
        position += count
        for low in range(r):
            for w in range(WORDS):
                words[w] = _less_one(planes, t * WORDS + w, low)
            put_plane(buffer, position + before, words, masks, moves)
            position += count
        for high_ in range(1, ((k - 1) >> r) + 1):
            bound, own = 1 + (high_ << r), 0
            for w in range(WORDS):
                words[w] = np.uint32(masks[w] & _at_least(planes, t * WORDS + w, bound, bits_))
                own += ones(words[w])
            put_plane(buffer, position + before, words, masks, moves)
            position += count
            if high_ == (k - 1) >> r:
                break
            if few:
                before, count = _of(counts, bound), _of(counts_all, bound)
            else:
                before, count = scan(own, room)
            if count == 0:
                break
            for w in range(WORDS):
                masks[w] = words[w]
            steer(masks, moves)
        return (position + 7) >> 3

    return pack


@device
def _of(counts: Any, bound: int) -> Any:
    """Return how many levels are at least ``bound``, from ``counts``."""
    return np.int64((counts >> np.uint64(16 * (bound - 1))) & np.uint64(0xFFFF))


@device
def get(of: Any, position: int) -> Any:
    """Return the 32 bits from bit ``position`` on; ``of``: uint32."""
    both = np.uint64(of[position >> 5]) | (np.uint64(of[(position >> 5) + 1]) << np.uint64(32))
    return np.uint32((both >> np.uint64(position & 31)) & np.uint64(0xFFFFFFFF))


@device
def _get_two(of: Any, position: int) -> Any:
    return np.uint64(get(of, position)) | (np.uint64(get(of, position + 32)) << np.uint64(32))


@device
def _number(window: Any, s: int) -> Any:
    """Return the number at the start of a window of bits, and the bits that it takes."""
    high_ = lowest(np.uint32(window & np.uint64(0xFFFFFFFF)) | np.uint32(1 << _LIMIT))
    if high_ < _LIMIT:
        return (high_ << s) | (
            np.int64((window >> np.uint64(high_ + 1)) & np.uint64((1 << s) - 1))
        ), high_ + 1 + s
    return np.int64((window >> np.uint64(_LIMIT)) & np.uint64((1 << _RAW) - 1)), _LIMIT + _RAW


@device
def _follow(window: Any, s: int, steps: Any, entries: Any) -> None:
    """Set entries[t] to where in a thread's 32 bits its first number begins.

    entries[0] is given. entries[THREADS] becomes entries[0] of the next 32 * THREADS bits.
    """
    t = thread()
    for back in range(32):
        begin = 31 - back
        _, length = _number(window >> np.uint64(begin), s)
        to = begin + length
        steps[t * _STEPS + begin] = np.uint8(steps[t * _STEPS + to] if to < 32 else to - 32)
    sync()
    if t == 0:
        at_ = np.int64(entries[0])
        for i in range(THREADS):
            at_ = np.int64(steps[i * _STEPS + at_])
            entries[i + 1] = np.int32(at_)
    sync()


@device
def get_numbers(
    of: Any,
    base: int,
    limit: int,
    size: int,
    s: int,
    bitmap: Any,
    steps: Any,
    entries: Any,
    room: Any,
) -> Any:
    """Set the bits of ``bitmap``, which are 0, from Rice-coded numbers.

    Returns the position behind the numbers, or -1 if they are invalid. ``steps``: THREADS rows of
    bytes. ``entries``: THREADS + 2 int32; the last one is the threads' result.
    """
    t, place, begin = thread(), 0, 8
    if t == 0:
        entries[0], entries[THREADS + 1] = 0, 0
    while begin < limit:
        own = begin + 32 * t
        window = _get_two(of, base + own) if own < limit else np.uint64(0)
        _follow(window, s, steps, entries)
        first, sum_ = np.int64(entries[t]), 0
        at_ = first
        while at_ < 32:
            x, length = _number(window >> np.uint64(at_), s)
            sum_ += x + 1
            at_ += length
        before, all_ = scan(sum_, room)
        i, at_ = place + before, first
        while at_ < 32 and i <= size:
            x, length = _number(window >> np.uint64(at_), s)
            i += x
            at_ += length
            if own + at_ > limit or i >= size:
                entries[THREADS + 1] = (
                    np.int32(own + at_) if i == size and own + at_ <= limit else np.int32(-1)
                )
                break
            shared_or(bitmap, i >> 5, np.uint32(1) << np.uint32(i & 31))
            i += 1
        place = min(place + all_, CHUNK + 1)
        sync()
        if entries[THREADS + 1] != 0:
            return np.int64(entries[THREADS + 1])
        sync()
        if t == 0:
            entries[0] = entries[THREADS]
        begin += 32 * THREADS
    return np.int64(-1)


@device
def _raise(levels: Any, of: Any, position: int, masks: Any, amount: int, narrow: bool) -> Any:
    """Add ``amount`` to those of a thread's masked levels whose bit is set; return their number.

    With ``narrow`` they become the new mask.
    """
    t, count = thread(), 0
    for w in range(WORDS):
        mask, kept = masks[w], np.uint32(0)
        if mask != np.uint32(0):
            word = get(of, position)
            position += ones(mask)
            while mask != np.uint32(0):
                if word & np.uint32(1):
                    lane = lowest(mask)
                    to = (t * WORDS + w) * ROW + lane
                    levels[to] = np.uint16(levels[to] + np.uint16(amount))
                    kept = np.uint32(kept | (np.uint32(1) << np.uint32(lane)))
                word = np.uint32(word >> np.uint32(1))
                mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
        count += ones(kept)
        if narrow:
            masks[w] = kept
    return count


@device
def unpack(
    of: Any,
    base: int,
    length: int,
    levels: Any,
    size: int,
    k: int,
    bitmap: Any,
    steps: Any,
    entries: Any,
    room: Any,
    masks: Any,
) -> Any:
    """Decode levels and signs of a chunk of ``length`` bytes, at least 1, from bit ``base`` on.

    Returns whether the bytes are valid.
    """
    t, limit, head = thread(), 8 * length, np.int64(get(of, base)) & 255
    r, s, position = head & 7, head >> 3, 8 + size
    if s >= _RAW or (r > 0 and (1 << r) >= k) or (s == 0 and position > limit):
        return False
    for w in range(WORDS):
        bitmap[t * WORDS + w] = 0
    sync()
    if s > 0:
        position = get_numbers(of, base, limit, size, s, bitmap, steps, entries, room)
        if position < 0:
            return False
    own = 0
    for w in range(WORDS):
        first = 32 * (t * WORDS + w)
        masks[w] = bitmap[t * WORDS + w]
        if s == 0 and first < size:
            inside = (
                np.uint32(0xFFFFFFFF)
                if size - first >= 32
                else np.uint32((1 << (size - first)) - 1)
            )
            masks[w] = np.uint32(get(of, base + 8 + first) & inside)
        own += ones(masks[w])
        for lane in range(32 if first < size else 0):
            levels[(t * WORDS + w) * ROW + lane] = np.uint16(
                (masks[w] >> np.uint32(lane)) & np.uint32(1)
            )
    before, count = scan(own, room)
    if position + count * (1 + r) > limit:
        return False
    _raise(levels, of, base + position + before, masks, SIGN, False)
    position += count
    for low in range(r):
        _raise(levels, of, base + position + before, masks, 1 << low, False)
        position += count
    for _ in range((k - 1) >> r):
        if count == 0:
            break
        if position + count > limit:
            return False
        own = _raise(levels, of, base + position + before, masks, 1 << r, True)
        position += count
        before, count = scan(own, room)
    return (position + 7) >> 3 == length
