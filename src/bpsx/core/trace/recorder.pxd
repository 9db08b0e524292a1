# Recorder of the core and the lanes: trace records, debug prints, and workers that come late. A
# Watch belongs to one worker's core or to one lane, which writes it without the GIL and without a
# lock; `_recorder.pyx` reads it from another thread.
#
# Trace records form a queue of blocks with one writer and one reader. The writer publishes a
# block's `n` after the record, and `next` after the following block is ready. The reader frees a
# block once it has taken all of it and a next one exists. The driver role passes from thread to
# thread under the core's monitor, so there is one writer at any moment.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport malloc

from bpsx.core.trace.watch cimport BLOCK_RECORDS, LIVE, MOST_BLOCKS, WINDOW, Block, Record, Watch
from bpsx.system.sync cimport atomic_load, atomic_store

cdef extern from *:
    """
    #include <ctype.h>
    #include <errno.h>
    #include <stdarg.h>
    #include <stdint.h>
    #include <stdio.h>
    #include <string.h>
    #include <time.h>
    #include <unistd.h>

    /* One write per line, so that lines of several threads and processes do not mix. */
    static void bpsx_say(const char *who, int show_time, const char *format, ...) {
        char line[1280];
        size_t at = 0;
        int left;
        va_list args;
        if (show_time) {
            struct timespec t;
            struct tm parts;
            clock_gettime(CLOCK_REALTIME, &t);
            localtime_r(&t.tv_sec, &parts);
            at += strftime(line, 32, "%Y-%m-%d %H:%M:%S", &parts);
            at += snprintf(line + at, 8, ",%03d ", (int)(t.tv_nsec / 1000000));
        }
        at += snprintf(line + at, 96, "bpsx %s DEBUG: ", who);
        left = (int)(sizeof line - at - 1);
        va_start(args, format);
        int wanted = vsnprintf(line + at, left, format, args);
        va_end(args);
        if (wanted < 0) return;
        size_t end = at + (wanted < left ? wanted : left - 1);
        for (size_t i = at; i < end; i++)       /* a name from the network may contain any byte */
            if ((unsigned char)line[i] < 32 || line[i] == 127) line[i] = '?';
        line[end++] = '\\n';
        while (write(2, line, end) < 0 && errno == EINTR) {}
    }

    static double bpsx_half(uint16_t bits) {
        int exponent = bits >> 10 & 31, fraction = bits & 1023;
        double value = exponent == 31 ? (fraction ? 0.0 / 0.0 : 1.0 / 0.0)
            : exponent ? (1024 + fraction) / 1024.0 : fraction / 512.0;
        for (int e = exponent ? exponent : 0; exponent != 31 && e < 15; e++) value /= 2;
        for (int e = 15; exponent != 31 && e < exponent; e++) value *= 2;
        return bits >> 15 ? -value : value;
    }

    /* Format one element as text; the codes are those of dtypes.py. */
    static void bpsx_element(char *out, size_t size, int dtype, const char *at, uint64_t index) {
        uint16_t h; uint32_t w; float f; double d; int32_t i; int64_t l;
        switch (dtype) {
        case 1: memcpy(&h, at + 2 * index, 2); snprintf(out, size, "%.6g", bpsx_half(h)); break;
        case 2: memcpy(&h, at + 2 * index, 2); w = (uint32_t)h << 16; memcpy(&f, &w, 4);
        snprintf(out, size, "%.6g", f); break;
        case 3: memcpy(&f, at + 4 * index, 4); snprintf(out, size, "%.9g", f); break;
        case 4: memcpy(&d, at + 8 * index, 8); snprintf(out, size, "%.17g", d); break;
        case 5: snprintf(out, size, "%u", ((const uint8_t *)at)[index]); break;
        case 6: snprintf(out, size, "%d", ((const int8_t *)at)[index]); break;
        case 7: memcpy(&i, at + 4 * index, 4); snprintf(out, size, "%d", i); break;
        case 8: memcpy(&l, at + 8 * index, 8); snprintf(out, size, "%lld", (long long)l); break;
        default: snprintf(out, size, "?");
        }
    }
    static const char *const bpsx_dtypes[9] = {"?", "float16", "bfloat16", "float32", "float64",
        "uint8", "int8", "int32", "int64"};
    static const char *bpsx_dtype(uint32_t code) { return bpsx_dtypes[code < 9 ? code : 0]; }
    static const int bpsx_itemsize[9] = {1, 2, 2, 4, 8, 1, 1, 4, 8};

    /* Print the number of elements in memory, and the first and last of them. */
    static void bpsx_values(const char *who, int show_time, const char *what, uint64_t key,
        uint32_t step, int dtype, const char *at, uint64_t bytes) {
        char first[40] = "-", last[40] = "-";
        uint64_t n = bytes / bpsx_itemsize[dtype < 9 ? dtype : 0];
        if (at != NULL && n) {
            bpsx_element(first, sizeof first, dtype, at, 0);
            bpsx_element(last, sizeof last, dtype, at, n - 1);
        }
        bpsx_say(who, show_time, "key %llu step %u %s: %llu elements, first %s, last %s",
            (unsigned long long)key, step, what, (unsigned long long)n, first, last);
    }
    """
    void say "bpsx_say"(const char *who, bint show_time, const char *format, ...) noexcept nogil
    const char *dtype_name "bpsx_dtype"(uint32_t code) noexcept nogil
    void say_values "bpsx_values"(
        const char *who, bint show_time, const char *what, uint64_t key, uint32_t step, int dtype,
        const char *at, uint64_t bytes
    ) noexcept nogil


cdef inline bint watched(Watch *w) noexcept nogil:
    """Whether anything is recorded or printed: the only branch that the data path pays when
    nothing is.
    """
    return w != NULL and atomic_load(&w.on)


cdef inline uint8_t recording(Watch *w, uint32_t step) noexcept nogil:
    """Return the recordings that step number `step` of a tensor belongs to."""
    return (WINDOW if w.window and w.first <= step <= w.last else 0) | (
        LIVE if atomic_load(&w.live) else 0
    )


cdef inline Record *new_record(Watch *w) noexcept nogil:
    """Return the address for the next record, or NULL when there is no room.

    After the caller has filled it, incrementing `w.tail.n` publishes it.
    """
    cdef Block *b = w.tail
    if b == NULL or b.n == BLOCK_RECORDS:
        b = <Block *>malloc(sizeof(Block)) if w.blocks < MOST_BLOCKS else NULL
        if b == NULL:
            w.lost += 1
            return NULL
        w.blocks += 1
        b.next = 0
        b.n = 0
        if w.tail == NULL:
            atomic_store(<int64_t *>&w.head, <int64_t>b)
        else:
            atomic_store(&w.tail.next, <int64_t>b)
        w.tail = b
    return &b.records[b.n]


cdef inline void put(
    Watch *w, uint8_t what, uint8_t flags, uint64_t key, uint32_t step, int64_t begin, int64_t end,
    uint64_t nbytes, uint32_t peer, int status
) noexcept nogil:
    """Append a record and publish it."""
    cdef Record *r = new_record(w)
    if r == NULL:
        return
    r.begin = begin
    r.end = end
    r.key = key
    r.nbytes = nbytes
    r.step = step
    r.peer = peer
    r.what = what
    r.flags = flags
    r.status = status
    r.spare = 0
    atomic_store(&w.tail.n, w.tail.n + 1)


cdef inline bint wants_values(Watch *w, uint64_t key) noexcept nogil:
    return w.values and (w.all_values or w.sample_key == key)
