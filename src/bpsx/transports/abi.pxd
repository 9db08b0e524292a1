# Data plane of a transport: C function pointers that the worker's core and a server's lanes call
# without the GIL.
#
# Thread rules: one thread at a time calls send, recv and wait (the core's driver, or a lane's
# thread). Any thread may call `release` and `wake`. A `done` callback may run on a thread of the
# transport and must not block. A transport without a thread of its own makes progress only inside
# send, recv and wait. The driving thread therefore calls them again as long as a message is in
# flight.
from libc.stdint cimport uint32_t, uint64_t

# (data, hint): the argument order of libzmq's free function, so a transport over it needs no shim.
ctypedef void (*done_fn)(void *data, void *hint) noexcept nogil

# Hint: where in its own memory the receiver of a reply wants the reply's body, which saves a copy.
# The sender of the reply echoes the hint that came with the push, and may ignore it. The receiver
# therefore checks the body's address.
cdef struct Landing:
    uint64_t at                 # address; 0: anywhere
    uint64_t room               # bytes at `at`
    uint32_t key                # private to the transport
    bint remote                 # the hint came with a message, so `at` is in the peer's memory

cdef struct Message:
    uint32_t peer               # index of the sender among this endpoint's peers
    bint has_body
    char *head
    size_t head_size
    char *body                  # writable: the message's holder may sum into it
    size_t body_size
    uint64_t opaque[24]         # private to the transport: what keeps head and body alive
    uint64_t wrapper            # for a transport that wraps another: marks its own messages
    Landing landing             # where the reply's body goes; recv's caller sets `at` to 0 first

# Ownership on send: `head` is copied when head_done is NULL. A head or body with a done callback
# stays the caller's memory, which must not change until the callback has run. Each callback runs
# exactly once, also when send fails and when the endpoint is closed.
cdef struct Endpoint:
    void *self
    # Returns 0, or -1 if the peer cannot be reached. `landing`: where the reply's body goes or, if
    # `remote`, where this body goes; may be NULL.
    int (*send)(
        void *self, uint32_t peer,
        void *head, size_t head_size, done_fn head_done, void *head_hint,
        void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
    ) noexcept nogil
    # Returns 1 if *m is filled; the caller owns it until it calls release. Returns 0 if there is no
    # message. Malformed messages are counted and dropped inside.
    int (*recv)(void *self, Message *m) noexcept nogil
    void (*release)(void *self, Message *m) noexcept nogil
    # Block until a message may be received, wake is called, or the timeout ends (-1: no timeout).
    void (*wait)(void *self, int timeout_ms) noexcept nogil
    void (*wake)(void *self) noexcept nogil
    # Hint that this memory stays valid while the endpoint is open, and that bodies for this peer
    # (-1: any peer) are sent from it and replies arrive in it; the transport may register it.
    # May be repeated. Called by the thread that sends. NULL: the transport has no use for it.
    void (*lend)(void *self, uint32_t peer, void *at, uint64_t n) noexcept nogil
    # End the connection to a peer, whatever its state; `peer` is a lane that this endpoint has
    # connected to, for ever, or a worker. Another worker may connect under the number of one whose
    # connection has ended. ZeroMQ leaves it to the worker to end its connection. Unsent messages
    # are dropped, and their done callbacks run: during the call or soon, on any thread, at the
    # latest in close(). Messages that have arrived may still be returned by recv. Those that recv
    # has returned stay readable until they are released. Later sends return -1, and lost() does not
    # report the peer. Idempotent. Called by the thread that sends and receives. NULL: not
    # supported.
    void (*drop)(void *self, uint32_t peer) noexcept nogil
    # A received message may be kept for long, since no peer runs out of memory then. False: copy
    # what has to stay.
    bint keeps
