# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""A lane of a server: receives, sums and replies on one thread, without the GIL while it works."""
cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from bpsx.core.wire cimport (
    ACK, GIVE, HAVE, HAVES, LOAD, LOG, NONCE_BYTES, PING, PUSH, REGISTER, YIELD, Header,
    next_record,
)
from bpsx.core.slab cimport drop_records
from bpsx.system.sync cimport atomic_add, atomic_load, atomic_store, now_ns, yield_cpu
from bpsx.core.trace.watch cimport Watch
from bpsx.kernels.loaded cimport fill_in
from bpsx.server.push cimport push
from bpsx.server.reply cimport flush_all, head_bytes, let_go, send_pong, take_acks
from bpsx.server.register cimport register
from bpsx.server.rounds cimport drop_held
from bpsx.server.lane cimport RECEIVE_AT_ONCE, Lane as CLane, Out
from bpsx.server.takeover cimport end_takeover
from bpsx.server.terms cimport note_given, note_have, take_news
from bpsx.server.yields cimport free_yields, take_yield
from bpsx.server.trace cimport note_message
from bpsx.server.priority cimport keep_pending
from bpsx.server.store cimport entry_free
from bpsx.transports.abi cimport Endpoint, Message

from bpsx.kernels import load as load_kernels
from bpsx.secret import lane_proof


cdef int pong(CLane *lane, Header *h, char *body) noexcept with gil:
    """Reply to a worker's greeting with a proof of the job secret."""
    cdef bytes proof
    if h.length != NONCE_BYTES:
        return -1
    try:
        proof = (<Lane>lane.owner).prove(body[:NONCE_BYTES])
        send_pong(lane, h.sender, <char *>proof)
        return 0
    except Exception as e:
        (<Lane>lane.owner).log(f"cannot reply to worker {h.sender}'s greeting: {e}")
        return -1


cdef int handle_record(
    CLane *lane, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Handle a record of a member. Returns 0, -1 if it is malformed, or 1 if its kind is unknown.

    Arguments as for push().
    """
    if h.kind == PUSH:
        return push(lane, h, m, body, kept)
    if h.kind == REGISTER:
        return register(lane, h, body)
    if h.kind == ACK:
        return take_acks(lane, h.sender, h, body)
    if h.kind == HAVE or h.kind == HAVES:
        return note_have(lane, h, body)
    if h.kind == GIVE or h.kind == LOAD or h.kind == LOG:
        return note_given(lane, h, m, body, kept)
    if h.kind == PING:
        return pong(lane, h, body)
    if h.kind == YIELD:
        return take_yield(lane, h)
    return 1


cdef void handle(CLane *lane, Message *m) noexcept nogil:
    """Handle the records of a message. Afterwards the lane must not use the message."""
    cdef Header h
    cdef char *body = NULL
    cdef size_t at = 0
    cdef bint kept = False
    cdef int more = 1 if m.peer < lane.settings.senders else -1
    cdef int rc
    lane.counters.messages_in += 1
    if atomic_load(&lane.absent.news):
        # A message that was sent after all had joined must not meet marks from before.
        take_news(lane)
    if lane.watch != NULL:
        note_message(lane.watch, m)
    while more > 0:
        more = next_record(m.head, m.head_size, m.body, m.body_size, m.has_body, &at, &h, &body)
        if more <= 0:
            break
        if h.job != lane.settings.job or h.sender != m.peer:
            more = -1
        elif lane.absent.departed[m.peer] or (
            lane.absent.lost[m.peer] and h.kind != PING     # one that is about to enter greets
        ):
            lane.counters.stale += 1
        else:
            rc = handle_record(
                lane, &h, m if body != NULL and body == m.body else NULL, body, &kept
            )
            if rc < 0:
                lane.counters.malformed += 1
            elif rc > 0:
                more = -1
        if kept:
            # The pushed record was the last one. The round may have closed already, and then the
            # message may have been released.
            break
    if more < 0:
        lane.counters.malformed += 1
    if not kept:
        let_go(lane, m)
    if lane.watch != NULL:
        lane.watch.server.arrived = 0


cdef Message *receive(CLane *lane) noexcept nogil:
    cdef Message *m = <Message *>malloc(sizeof(Message))
    if m == NULL:
        lane.counters.dropped += 1
        return NULL
    m.landing.at = 0
    if lane.endpoint.recv(lane.endpoint.self, m) != 1:
        free(m)
        return NULL
    return m


cdef int turn(CLane *lane) noexcept nogil:
    """Receive and handle some messages; return how many were handled.

    With `scheduled` it receives all that have arrived, and handles the most urgent one, besides
    those for which the queue has no memory.
    """
    cdef int n = 0
    cdef Message *m
    if not lane.settings.scheduled:
        while n < RECEIVE_AT_ONCE:
            m = receive(lane)
            if m == NULL:
                break
            handle(lane, m)
            n += 1
        return n
    while True:
        m = receive(lane)
        if m == NULL:
            break
        if not keep_pending(lane, m):
            handle(lane, m)
            n += 1
    if lane.pending.n:
        lane.pending.n -= 1
        if lane.watch != NULL:
            lane.watch.server.arrived = lane.pending.items[lane.pending.n].arrived
        handle(lane, lane.pending.items[lane.pending.n].message)
        n += 1
    return n


cdef void run(CLane *lane) noexcept nogil:
    cdef int64_t idle_since = 0, now
    while not atomic_load(&lane.stopping) and not lane.counters.dropped:
        if atomic_load(&lane.absent.news):
            take_news(lane)
            flush_all(lane)
        if turn(lane):
            flush_all(lane)
            idle_since = 0
            continue
        now = now_ns()
        if idle_since == 0:
            idle_since = now
        if now - idle_since < lane.settings.spin_ns:
            yield_cpu()
        else:
            lane.endpoint.wait(lane.endpoint.self, 1000)
            idle_since = 0
    flush_all(lane)


@cython.no_gc_clear
cdef class Lane:
    """A lane over one endpoint.

    :meth:`run` blocks until :meth:`stop`. Any thread may call ``gone``, ``joined``,
    ``all_joined``, ``stop`` and ``counters``; only the lane's own thread ``load``, ``keep``,
    ``break_with``, ``log`` and ``prove``.

    ``senders``: number of senders, one per worker, or one per machine; each speaks for
    ``processes`` workers. ``asynchronous``: pushes may be added to a value that the lane keeps.
    ``fixed_order``: sum in the order of senders. ``scheduled``: handle the most urgent message
    first. ``spin_us``: microseconds without messages after which the lane sleeps. ``joins``: joins
    of all workers that ended before this lane began. ``elastic``: keys survive this lane.
    ``log_ratio``: bytes of a worker's log of a compressed key after which the lane takes a
    snapshot, as a multiple of the key's state; 0: it takes none. ``shrinks``: the job goes on
    without workers that it loses. ``term``: the latest term before this lane began. ``vacant``:
    senders that may enter, and have not been there yet.
    """
    cdef CLane c
    cdef object endpoint, capsule, logger, watch
    cdef Exception broken
    cdef bytes secret
    cdef list _kernel_owners

    def __cinit__(
        self, endpoint, *, uint64_t job, int senders, int processes=1, bint asynchronous=False,
        bint elastic=False, bint fixed_order=False, bint scheduled=False, double spin_us=0,
        log=print, watch=None,
        bytes secret=b"", uint32_t joins=0, double log_ratio=0, bint shrinks=False,
        uint32_t term=0, vacant=()
    ):
        cdef int i
        memset(&self.c, 0, sizeof(CLane))
        self.endpoint = endpoint
        self.capsule = endpoint.abi()
        self.c.endpoint = <Endpoint *>PyCapsule_GetPointer(self.capsule, b"bpsx.Endpoint")
        self.c.settings.job = job
        self.c.settings.senders = senders
        self.c.settings.processes = processes
        self.c.settings.asynchronous = asynchronous
        self.c.settings.fixed_order = fixed_order
        self.c.settings.scheduled = scheduled
        self.c.settings.log_ratio = log_ratio
        self.c.settings.shrinks = shrinks
        self.c.terms.born = term
        self.c.absent.living = senders
        self.c.settings.spin_ns = <int64_t>(spin_us * 1000)
        self.c.absent.joins = self.c.terms.joins = joins
        self.c.owner = <void *>self
        self.c.outs = <Out *>calloc(senders, sizeof(Out))
        self.c.beside = <uint8_t *>calloc(senders, 1)
        self.c.absent.gone = <int64_t *>calloc(senders, sizeof(int64_t))
        self.c.absent.joined = <int64_t *>calloc(senders, sizeof(int64_t))
        self.c.absent.dropped = <int64_t *>calloc(senders, sizeof(int64_t))
        self.c.absent.entered = <int64_t *>calloc(senders, sizeof(int64_t))
        self.c.absent.lost = <bint *>calloc(senders, sizeof(bint))
        self.c.absent.skipped = <bint *>calloc(senders, sizeof(bint))
        self.c.absent.departed = <bint *>calloc(senders, sizeof(bint))
        if elastic and asynchronous:
            self.c.applied = <uint32_t *>calloc(senders, sizeof(uint32_t))
        self.c.head = <char *>malloc(head_bytes(&self.c))
        self.logger = log
        self.broken = None
        self.watch = watch
        if watch is not None:
            self.c.watch = <Watch *>PyCapsule_GetPointer(watch.abi(), b"bpsx.Watch")
        self.secret = secret
        self._kernel_owners = []
        if (
            self.c.outs == NULL or self.c.beside == NULL or self.c.absent.gone == NULL
            or self.c.absent.joined == NULL or self.c.absent.skipped == NULL
            or self.c.absent.dropped == NULL or self.c.absent.entered == NULL
            or self.c.absent.lost == NULL or self.c.absent.departed == NULL or self.c.head == NULL
            or elastic and asynchronous and self.c.applied == NULL
        ):
            raise MemoryError(f"no memory for {senders} senders")
        for i in vacant:
            self._check(i, 1)
            self.c.absent.lost[i] = self.c.absent.skipped[i] = True
            self.c.absent.any_skipped = True
            self.c.absent.living -= 1

    def load(self, dtype: int) -> None:
        """Load the kernels of a dtype code into this lane.

        Raises :class:`KeyError` for an unknown code.
        """
        found = load_kernels(dtype)
        self._kernel_owners.append(found)
        fill_in(&self.c.kernels[dtype], found)

    def keep(self, what) -> None:
        """Keep the owner of compiled code alive as long as this lane."""
        self._kernel_owners.append(what)

    def break_with(self, why: Exception) -> None:
        """Set the exception that :meth:`run` raises at its end."""
        self.broken = why

    def log(self, text: str) -> None:
        """Log a message to the user."""
        self.logger(text)

    def prove(self, nonce: bytes) -> bytes:
        """Return the proof for a worker's nonce; see :func:`bpsx.secret.lane_proof`."""
        return lane_proof(
            self.secret, self.c.settings.job, getattr(self.endpoint, "address", ""), nonce
        )

    def run(self) -> None:
        """Serve until stopped.

        Raises if a worker would otherwise wait for ever: :class:`MemoryError` if there is no memory
        for a message, or the error with which an element type's kernels could not be loaded.
        """
        with nogil:
            run(&self.c)
        if self.broken is not None:
            raise self.broken
        if self.c.counters.dropped:
            raise MemoryError("no memory for a message")

    def gone(self, rank: int) -> None:
        """Worker ``rank`` has left the job in good order.

        Rounds that lack it, or the sender that speaks for it, fail.
        """
        atomic_store(&self.c.absent.gone[rank // self.c.settings.processes], rank + 1)
        atomic_store(&self.c.absent.news, 1)
        self.c.endpoint.wake(self.c.endpoint.self)

    def joined(self, rank: int) -> None:
        """Worker ``rank`` has called join(), as have all workers for which its sender speaks.

        Rounds now close without them.
        """
        atomic_store(&self.c.absent.joined[rank // self.c.settings.processes], 1)
        atomic_store(&self.c.absent.news, 1)
        self.c.endpoint.wake(self.c.endpoint.self)

    def all_joined(self, entering=(), int64_t term=0) -> None:
        """Forget :meth:`joined`, as all workers are back; before any message that arrives later.

        ``entering``: workers that were lost or absent, and live from ``term`` on.
        """
        cdef int i
        for i in {rank // self.c.settings.processes for rank in entering}:
            self._check(i, term)
            atomic_store(&self.c.absent.dropped[i], 0)
            atomic_store(&self.c.absent.entered[i], term)
        for i in range(self.c.settings.senders):
            atomic_store(&self.c.absent.joined[i], 0)
        atomic_add(&self.c.absent.joins, 1)
        atomic_store(&self.c.absent.news, 1)
        self.c.endpoint.wake(self.c.endpoint.self)

    def drop(self, rank: int, term: int) -> None:
        """The job goes on without worker ``rank``, which it has lost, from ``term`` on.

        It goes on without all workers for which its sender speaks. Idempotent. Raises
        :class:`ValueError` if this lane's job cannot do that.
        """
        cdef int sender = rank // self.c.settings.processes
        self._check(sender, term)
        atomic_store(&self.c.absent.dropped[sender], term)
        atomic_store(&self.c.absent.news, 1)
        self.c.endpoint.wake(self.c.endpoint.self)

    def _check(self, sender: int, term: int) -> None:
        """Raise :class:`ValueError` if a sender cannot be lost or enter in a term."""
        cdef int senders = <int>self.c.settings.senders
        if not self.c.settings.shrinks or not 0 <= sender < senders or term < 1:
            raise ValueError(f"sender {sender} cannot be lost or enter in term {term}")

    @property
    def latest_term(self) -> int:
        """The latest term of which a worker has said something to this lane; any thread."""
        return atomic_load(&self.c.terms.latest)

    @property
    def named(self) -> tuple[int, int]:
        """Numbers of slots and of keys up to the highest that workers have named; any thread."""
        return atomic_load(&self.c.keys.slots_named), atomic_load(&self.c.keys.keys_named)

    def stop(self) -> None:
        """Make :meth:`run` return."""
        atomic_store(&self.c.stopping, 1)
        self.c.endpoint.wake(self.c.endpoint.self)

    def counters(self) -> dict:
        """Return this lane's counters, all since its start except ``pending``.

        * ``rounds``: rounds closed, and ``bytes``: bytes of their results;
        * ``messages_received``, ``messages_sent``;
        * ``malformed``: records or messages refused as malformed;
        * ``repeated``: pushes ignored because their sender had pushed in the round already;
        * ``taken_over``: keys that have come from lost lanes;
        * ``yielded``: keys that have gone to other lanes while this one lives;
        * ``stale``: records ignored because they are about such keys, or from before a worker was
          lost;
        * ``snapshots``: snapshots of compressed keys that were sent to workers;
        * ``replayed``: sums of compressed keys that were computed again, for a lost lane;
        * ``undone``: sums of compressed keys that were taken back, with a lost worker's push;
        * ``reset``: compressed keys whose residual was lost, with a server and a worker;
        * ``dropped``: messages lost for lack of memory, and other errors that end the lane;
        * ``pending``: messages received and not handled yet.
        """
        return {
            "rounds": self.c.counters.rounds, "bytes": self.c.counters.bytes,
            "messages_received": self.c.counters.messages_in,
            "messages_sent": self.c.counters.messages_out, "malformed": self.c.counters.malformed,
            "repeated": self.c.counters.repeated, "taken_over": self.c.counters.taken_over,
            "yielded": self.c.counters.yielded, "stale": self.c.counters.stale,
            "snapshots": self.c.counters.snapshots, "replayed": self.c.counters.replayed,
            "undone": self.c.counters.undone, "reset": self.c.counters.reset,
            "dropped": self.c.counters.dropped,
            "pending": self.c.pending.n
        }

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.c.pending.n):
            let_go(&self.c, self.c.pending.items[i].message)
        for i in range(self.c.keys.n):
            if self.c.keys.at[i] != NULL:
                drop_held(&self.c, self.c.keys.at[i])
                end_takeover(&self.c, self.c.keys.at[i])
                let_go(&self.c, self.c.keys.at[i].memory.first)
                entry_free(self.c.keys.at[i])
        drop_records(&self.c.keys.slabs)
        if self.c.outs != NULL:
            for i in range(self.c.settings.senders):
                free(self.c.outs[i].frame)
                free(self.c.outs[i].settled)
        free(self.c.pending.items)
        free(self.c.scratch.at)
        free(self.c.keys.at)
        for i in range(self.c.terms.n):
            free(self.c.terms.at[i].by)
        free(self.c.terms.at)
        free(self.c.head)
        free(self.c.applied)
        free_yields(&self.c)
        free(self.c.outs)
        free(self.c.beside)
        free(self.c.absent.gone)
        free(self.c.absent.joined)
        free(self.c.absent.dropped)
        free(self.c.absent.entered)
        free(self.c.absent.lost)
        free(self.c.absent.departed)
        free(self.c.absent.skipped)
