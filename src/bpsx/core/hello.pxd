# Handshake before the first tensor: every lane must reply and prove that it knows the job secret.
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

from bpsx.core.wire cimport NONCE_BYTES, PROOF_BYTES
from bpsx.core.receive cimport pump_in
from bpsx.core.send cimport send_ping
from bpsx.core.state cimport Core
from bpsx.system.sync cimport now_ns


cdef inline int ask_lanes(Core *c, addresses, bytes secret) except -1:
    """Ping all lanes, and note the proof that each must reply with."""
    from os import urandom

    from bpsx.secret import lane_proof

    cdef bytes nonce, proof
    cdef uint32_t i
    for i in range(c.n_lanes):
        nonce = urandom(NONCE_BYTES)
        proof = lane_proof(secret, c.job, addresses[i], nonce)
        memcpy(c.lanes[i].proof, <char *>proof, PROOF_BYTES)
        send_ping(c, i, nonce)
    return 0


cdef inline list silent_lanes(Core *c, int64_t end_ns):
    """Wait for the replies; return the lanes that have not sent the right proof by `end_ns`."""
    while c.n_ready < c.n_lanes and now_ns() < end_ns:
        with nogil:
            if pump_in(c) == 0:
                c.endpoint.wait(c.endpoint.self, 50)
        PyErr_CheckSignals()
    return [i for i in range(c.n_lanes) if not c.lanes[i].ready]
