# The data plane of a transport, as C function pointers: what the worker's core and a server's lane
# call without the GIL.
#
# Thread rules: send, recv and wait are called by one thread at a time (the core's driver, a lane's
# thread); `release` and `wake` may be called by any thread; a `done` callback may run on a thread
# of the transport and must not block. A transport without a thread of its own goes on sending only
# while somebody is in send, recv or wait: whoever drives it comes back to them as long as anything
# is under way.
from libc.stdint cimport uint32_t, uint64_t

# (data, hint); the order of libzmq's free function, so that a transport over it needs no shim.
ctypedef void (*done_fn)(void *data, void *hint) noexcept nogil

# Where the body of an answer shall come to lie, in memory that the one who will be answered has
# lent: then nobody need copy it there. Who answers passes on what came with the push. Nobody has to
# heed it: who is answered looks where the body lies.
cdef struct Landing:
    uint64_t at                 # 0: anywhere
    uint64_t room               # bytes
    uint32_t key                # the transport's own
    bint remote                 # it came with a message: it is the peer's memory

cdef struct Message:
    uint32_t peer               # index of the sender among this endpoint's peers
    bint has_body
    char *head
    size_t head_size
    char *body                  # writable: whoever holds the message may sum into it
    size_t body_size
    uint64_t opaque[24]         # the transport's own: whatever keeps head and body alive
    uint64_t wrapper            # of a transport that has others, to know its own by
    Landing landing             # where the answer shall lie; whoever calls recv has set `at` to 0

# Ownership on send: `head` is copied when head_done is NULL, else it and `body` stay the caller's
# memory, untouched, until their done callback has run. That happens exactly once for each, also
# when send fails and when the endpoint is closed.
cdef struct Endpoint:
    void *self
    # 0, or -1 if the peer cannot be reached. `landing`: where the answer, or, `remote`, this body
    # shall lie; or NULL.
    int (*send)(
        void *self, uint32_t peer,
        void *head, size_t head_size, done_fn head_done, void *head_hint,
        void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
    ) noexcept nogil
    # 1: *m is filled and owned by the caller until released. 0: nothing there. Malformed messages
    # are counted and dropped inside.
    int (*recv)(void *self, Message *m) noexcept nogil
    void (*release)(void *self, Message *m) noexcept nogil
    # Park until something can be received, wake was called, or the time is over (-1: never).
    void (*wait)(void *self, int timeout_ms) noexcept nogil
    void (*wake)(void *self) noexcept nogil
    # This memory stays as long as the endpoint is open, and will be sent from to this peer (-1: to
    # any) and answered into: it may be prepared for that. May be said again. By who sends. NULL: it
    # makes no difference.
    void (*lend)(void *self, uint32_t peer, void *at, uint64_t n) noexcept nogil
