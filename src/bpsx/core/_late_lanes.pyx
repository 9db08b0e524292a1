# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Lanes of servers that join the running job, as the session adds them to the core.

docs/internals/elastic-servers.md describes the protocol.
"""
import os

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

from bpsx.core.late cimport add_lanes, await_greeting, resume
from bpsx.core.state cimport Core as CCore
from bpsx.core.wire cimport NONCE_BYTES, PROOF_BYTES

from bpsx.secret import lane_proof


cdef class Undriven:
    """Context in which no thread drives a core: the caller may use its endpoint.

    Not reentrant. Must not be held while waiting for a push_pull.
    """
    cdef CCore *c
    cdef object owner

    def __enter__(self) -> None:
        with nogil:
            self.c.lanes.late.pause(self.c)

    def __exit__(self, *exc) -> None:
        with nogil:
            resume(self.c)


cdef class LateLanes:
    """Adds lanes to a core whose driver runs, and ends lanes.

    ``core``: a :class:`bpsx._core.Core` that is elastic. Any thread may call the methods; each
    takes the driver's role for a moment.
    """
    cdef CCore *c
    cdef object core, capsule

    def __cinit__(self, core):
        self.core, self.capsule = core, core.abi()
        self.c = <CCore *>PyCapsule_GetPointer(self.capsule, b"bpsx.Core")

    def undriven(self) -> Undriven:
        """Return a context in which no thread drives the core."""
        cdef Undriven made = Undriven.__new__(Undriven)
        made.c, made.owner = self.c, self
        return made

    def add(self, uint32_t first, uint32_t n, bint beside) -> None:
        """Add the lanes of a new server, ``first`` and the ``n - 1`` after it.

        ``beside``: the server is on this machine. Raises :class:`ValueError` if other lanes are due
        first, or for too many lanes.
        """
        cdef bint done = False
        with self.undriven():
            done = first == self.c.lanes.n and add_lanes(self.c, n, beside)
        if not done:
            raise ValueError(
                f"lanes {first} to {first + n - 1}: this worker has {self.c.lanes.n} lanes, and at"
                f" most {self.c.lanes.capacity} are possible"
            )

    def greet(
        self, uint32_t first, list addresses not None, bytes secret not None, double round_trip
    ) -> None:
        """Ask the lanes from ``first`` on to prove that they know ``secret``.

        The endpoint must be connected to them. ``addresses``: each lane's own, which the proof
        covers. Lanes that are lost are left out. ``round_trip``: the shortest to them.
        """
        cdef uint32_t peer = first
        cdef bytes nonce, proof
        with self.undriven():
            self.c.lanes.at[first].server.trip_ns = <int64_t>(1e9 * round_trip)
            for address in addresses:
                nonce = os.urandom(NONCE_BYTES)
                proof = lane_proof(secret, self.c.settings.job, address, nonce)
                if not self.c.lanes.at[peer].lost:
                    memcpy(self.c.lanes.at[peer].proof, <char *>proof, PROOF_BYTES)
                    await_greeting(self.c, peer)
                    self.c.lanes.late.ping(self.c, peer, nonce)
                peer += 1

    def ready(self, uint32_t lane) -> bool:
        """Whether a lane has proved the secret. The core's ``moved_descriptor`` tells of it."""
        return bool(self.c.lanes.at[lane].ready)

    def end(self, list lanes not None) -> None:
        """End the connections to ``lanes``, whose keys do not move, or not yet. Idempotent."""
        cdef uint32_t lane
        with self.undriven():
            for lane in lanes:
                if lane < self.c.lanes.n:
                    self.c.lanes.late.end_lanes(self.c, &lane, 1)
