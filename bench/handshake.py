"""Cost of one data connection for each way of authentication.

The ways are none (NULL), a token (the default of jobs), and CURVE (BPSX_ENCRYPT=1).
"""

from __future__ import annotations

import statistics
import struct
import time
from typing import Any

import zmq

from bpsx import secret
from bpsx.transports.zeromq.auth import Acceptor, token

JOB, KEY = 7, b"a secret for this measurement"
MECHANISMS = ("null", "token", "curve")


def _lane(context: zmq.Context[Any], mechanism: str) -> tuple[Any, Any]:
    s = context.socket(zmq.ROUTER)
    acceptor = None
    if mechanism != "null":
        acceptor = Acceptor(context, KEY)
        s.setsockopt(zmq.ZAP_DOMAIN, b"bpsx")
        s.setsockopt(zmq.PLAIN_SERVER if mechanism == "token" else zmq.CURVE_SERVER, 1)
    if mechanism == "curve":
        s.setsockopt(zmq.CURVE_SECRETKEY, secret.curve_key(KEY, "lane"))
    s.bind("tcp://127.0.0.1:*")
    address = s.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
    if acceptor is not None:
        acceptor.open(JOB, address)
    return s, acceptor


def _connect(context: zmq.Context[Any], mechanism: str, address: str, rank: int) -> Any:
    s = context.socket(zmq.DEALER)
    s.setsockopt(zmq.ROUTING_ID, b"\x01" + struct.pack("<IQ", rank, JOB))
    if mechanism == "token":
        s.setsockopt(zmq.PLAIN_USERNAME, str(rank).encode())
        s.setsockopt(zmq.PLAIN_PASSWORD, token(KEY, JOB, address, rank))
    elif mechanism == "curve":
        public, own = zmq.curve_keypair()
        s.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(secret.curve_key(KEY, "lane")))
        s.setsockopt(zmq.CURVE_PUBLICKEY, public)
        s.setsockopt(zmq.CURVE_SECRETKEY, own)
    s.connect(f"tcp://{address}")
    return s


def seconds(mechanism: str, times: int = 100) -> float:
    """Return the median seconds from a new socket to the lane's reply to its first message.

    Both ends are on this machine.
    """
    with zmq.Context() as lanes, zmq.Context() as workers:
        lane, acceptor = _lane(lanes, mechanism)
        address = lane.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        taken = []
        for rank in range(times):
            begun = time.perf_counter()
            with _connect(workers, mechanism, address, rank) as s:
                s.send(b"ping")
                ident, nonce = lane.recv_multipart()
                lane.send_multipart(
                    [
                        ident,
                        b"pong"
                        if mechanism == "null"
                        else secret.lane_proof(KEY, JOB, address, nonce),
                    ]
                )
                s.recv()
                taken.append(time.perf_counter() - begun)
        if acceptor is not None:
            acceptor.close()
        lane.close(0)
        return statistics.median(taken)


def all_seconds(times: int = 100) -> dict[str, float]:
    """Return :func:`seconds` of each mechanism."""
    return {m: seconds(m, times) for m in MECHANISMS}
