# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Reads the trace records and statistics of a core or a lane: see ``core/trace/recorder.pxd``."""
import threading

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport strncpy

from bpsx.core.slab cimport drop_records
from bpsx.system.sync cimport atomic_load, atomic_store, now_ns
from bpsx.core.trace.watch cimport STAGE_NAMES, STAGE_NAME_BYTES, Block, Late, Named, Record, Watch


def monotonic_ns() -> int:
    """The clock of trace records, in ns."""
    return now_ns()


cdef class Watcher:
    """Trace records, debug prints and statistics of one core or lane.

    Created before the core or lane, which writes them; the methods read them and may be called from
    any thread.
    """
    cdef Watch c
    cdef object lock
    cdef int64_t keys_seen  # Named *: the newest key that `names` has returned

    def __cinit__(
        self, str who, *, int workers=0, bint show_time=True, bint messages=False, bint keys=False,
        sample=None, window=None, stages=()
    ):
        """``who``: name of the process, for prints. ``workers``: number of workers, for a lane.

        ``messages``, ``keys``: what to print. ``sample``: key whose values are printed, -1 for all.
        ``window``: (first, last) step to record. ``stages``: pairs (code, name).
        """
        self.lock = threading.Lock()
        encoded = who.encode()
        strncpy(self.c.who, encoded, sizeof(self.c.who) - 1)
        for code, name in stages:
            encoded = name.encode()
            if 0 <= code < STAGE_NAMES:
                strncpy(self.c.stages[<int>code], encoded, STAGE_NAME_BYTES - 1)
        self.c.show_time = show_time
        self.c.messages = messages
        self.c.keys = keys
        if sample is not None:
            self.c.values = True
            self.c.all_values = sample < 0
            self.c.sample_key = 0 if sample < 0 else sample
        if window is not None:
            self.c.window = True
            self.c.first, self.c.last = window
        self.c.server.n_late = workers
        self.c.server.late = <Late *>calloc(max(workers, 1), sizeof(Late))
        if self.c.server.late == NULL:
            raise MemoryError(f"no memory for {workers} workers")
        self._look()

    cdef void _look(self):
        atomic_store(&self.c.on, self.c.window or self.c.live or self.c.messages or self.c.values)

    def abi(self):
        """A capsule named ``bpsx.Watch`` with the C struct, which this object owns."""
        return PyCapsule_New(&self.c, b"bpsx.Watch", NULL)

    def live(self, bint on) -> None:
        """Start or stop recording every push_pull that begins from now on."""
        atomic_store(&self.c.live, on)
        self._look()

    def take(self) -> bytes:
        """The records written since the last call, as they lie in memory.

        Each is a ``Record`` of ``core/trace/recorder.pxd``, 48 bytes.
        """
        cdef Block *b
        cdef Block *following
        cdef int64_t n
        chunks = []
        with self.lock:
            while True:
                b = <Block *>atomic_load(<int64_t *>&self.c.head)
                if b == NULL:
                    break
                following = <Block *>atomic_load(&b.next)
                n = atomic_load(&b.n)
                if n > self.c.taken:
                    chunks.append(
                        PyBytes_FromStringAndSize(
                            <char *>&b.records[self.c.taken], (n - self.c.taken) * sizeof(Record)
                        )
                    )
                    self.c.taken = n
                if following == NULL:
                    break
                # The writer leaves a block only when it is full, so nothing in it is unread.
                self.c.taken = 0
                atomic_store(<int64_t *>&self.c.head, <int64_t>following)
                free(b)
        return b"".join(chunks)

    def names(self) -> list:
        """Keys that a lane has seen since the last call: [(key, name, dtype code, bytes)]."""
        cdef Named *n
        cdef int64_t newest, seen
        found = []
        with self.lock:
            newest = atomic_load(&self.c.server.named)
            seen = self.keys_seen
            self.keys_seen = newest
            n = <Named *>newest
            while n != NULL and <int64_t>n != seen:
                found.append(
                    (n.key, n.name[:n.name_bytes].decode("utf-8", "replace"), n.dtype, n.nbytes)
                )
                n = n.next
        return found

    @property
    def lost(self) -> int:
        """Number of records dropped for lack of room."""
        return self.c.lost

    def stats(self) -> dict:
        """A lane's statistics: bytes received and sent, open rounds, and waiting time.

        ``waited_ns``: ns from the first to the last push, summed over all rounds.
        """
        return {
            "bytes_received": self.c.server.received, "bytes_sent": self.c.server.sent,
            "open_rounds": self.c.server.open_rounds, "waited_ns": self.c.server.waited_ns
        }

    def late(self) -> list:
        """By rank: (rounds in which it pushed last, ns that these waited for it alone)."""
        return [
            (self.c.server.late[i].rounds, self.c.server.late[i].ns)
            for i in range(<int>self.c.server.n_late)
        ]

    def __dealloc__(self):
        cdef Block *b = self.c.head
        cdef Block *following
        while b != NULL:
            following = <Block *>b.next
            free(b)
            b = following
        drop_records(&self.c.server.slabs)
        free(self.c.server.late)
