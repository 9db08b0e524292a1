# Copy that bypasses the caches for a MiB and more: the destination is not read first, and memory
# that is used again and again, such as the memory shared with a server, stays cached. The next
# reader of a tensor starts at its beginning, which a cached copy would have evicted anyway.
from libc.stddef cimport size_t

cdef extern from *:
    """
    #include <string.h>
    #include <stdint.h>
    #if defined(__SSE2__)
    #include <emmintrin.h>
    static inline void bpsx_copy_nontemporal(char *to, const char *from, size_t n) {
        size_t head = (64 - ((uintptr_t)to & 63)) & 63;
        if (n < (1 << 20)) { memcpy(to, from, n); return; }
        memcpy(to, from, head); to += head; from += head; n -= head;
        for (; n >= 64; n -= 64, to += 64, from += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)from),
                b = _mm_loadu_si128((const __m128i *)(from + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)),
                d = _mm_loadu_si128((const __m128i *)(from + 48));
            _mm_stream_si128((__m128i *)to, a); _mm_stream_si128((__m128i *)(to + 16), b);
            _mm_stream_si128((__m128i *)(to + 32), c); _mm_stream_si128((__m128i *)(to + 48), d);
        }
        _mm_sfence();
        memcpy(to, from, n);
    }
    #else
    #define bpsx_copy_nontemporal memcpy
    #endif
    """
    void copy_nontemporal "bpsx_copy_nontemporal"(
        char *to, const char *source, size_t n
    ) noexcept nogil
