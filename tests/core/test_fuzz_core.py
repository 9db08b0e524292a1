"""A lane that sends mutated answers to a worker.

The core must drop and count invalid answers, and complete valid ones.
"""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from bpsx._core import Core
from bpsx.core._tensor import Tensor
from bpsx.planning.stages import stages_for
from bpsx.secret import lane_proof
from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from core.cores import Rig, push_pull
from support import wire as w

ROUNDS, EACH = 40, 250


def _mutant(rng: random.Random, push: w.Record) -> tuple[bytes, bytes | None]:
    """Return an answer that must be rejected, or random bytes."""
    body = rng.randbytes(push.length)
    right = w.Record(
        w.ANSWER,
        w.INLINE,
        push.dtype,
        7,
        push.key,
        0,
        0,
        0,
        push.round,
        0,
        0,
        push.cookie,
        push.length,
        body,
    )
    kind = rng.randrange(8)
    if kind == 0:
        return w.pack(right)[: rng.randrange(1, 64 + push.length)], None
    if kind == 1:
        return rng.randbytes(rng.randrange(1, 300)), None
    if kind == 2:
        return w.pack(right, magic=rng.randrange(2**31)), None
    if kind == 3:
        return w.pack(right, version=rng.randrange(w.VERSION + 1, 256)), None
    if kind == 4:
        return w.pack(right._replace(flags=0)), rng.randbytes(rng.randrange(push.length))
    field, most = rng.choice(
        [
            ("key", 2**64),
            ("round", 2**32),
            ("cookie", 2**64),
            ("job", 2**64),
            ("sender", 2**32),
            ("length", 2**63),
            ("kind", 256),
        ]
    )
    value = rng.randrange(most)
    if value == getattr(right, field) or (field == "kind" and value == w.ERROR):
        value ^= 64
    head = bytearray(w.pack(right))
    offset, code = {
        "kind": (5, "<B"),
        "job": (8, "<Q"),
        "key": (16, "<Q"),
        "sender": (28, "<I"),
        "round": (36, "<I"),
        "cookie": (48, "<Q"),
        "length": (56, "<Q"),
    }[field]
    struct.pack_into(code, head, offset, value)
    return bytes(head), None


def test_mutated_answers():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    worker, lane = LoopbackEndpoint(), LoopbackEndpoint()
    worker.link(0, lane, 0)
    lane.link(0, worker, 0)
    core = Core(worker, rank=0, job=7, lanes=[0], credit=0, spin_us=0)
    core.start()
    tensor = Tensor("x", 3, [(5, 0, 1, 0, 64)], stages_for("cpu"))
    for i in range(ROUNDS):
        out = np.zeros(16, np.float32)
        handle = push_pull(core, tensor, np.ones(16, np.float32), out)
        _, frame, second = lane.sent(20)
        (push,) = [r for r in w.unpack(frame, second) if r.kind == w.PUSH]
        for _ in range(EACH):
            worker.inject(0, *_mutant(rng, push))
        want = np.full(16, i + 1, np.float32)
        worker.inject(
            0,
            w.pack(
                w.Record(
                    w.ANSWER,
                    w.INLINE,
                    3,
                    7,
                    push.key,
                    0,
                    0,
                    0,
                    push.round,
                    0,
                    0,
                    push.cookie,
                    64,
                    want.tobytes(),
                )
            ),
        )
        handle.wait(60)
        assert (out == want).all(), f"round {i}, seed {seed}"
    assert core.counters()["malformed"] == ROUNDS * EACH, f"seed {seed}"
    core.close()
    worker.close()
    lane.close()
    core.reap()


def _moving_mutant(rng: random.Random) -> bytes:
    """Return a record of the takeover of the only key that the core must reject."""
    kind = rng.choice([w.WANT, w.SETTLED, w.TOOK, w.HAVE, w.HAVES, w.GIVE, w.ACK])
    length = rng.choice([0, 8, 16, 24])
    r = w.Record(kind, w.INLINE, key=5, slot=1, length=length, body=rng.randbytes(length))
    if kind == w.WANT:  # right, but for one field
        field, most = rng.choice([("key", 2**64), ("term", 2**32), ("cookie", 2**64)])
        r = r._replace(round=rng.randrange(3), term=1)._replace(**{field: rng.randrange(6, most)})
    elif kind == w.SETTLED:  # of a partition that does not exist, or of no whole item
        r = r._replace(body=b"\xff" * length, length=length - rng.choice([0, 1]) if length else 0)
    return w.pack(r)


def test_mutated_records_of_a_takeover():
    """A lane that has taken the key over sends them among its answers."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    r = Rig(lanes=2, elastic=True)
    tensor = Tensor("x", 3, [(5, 0, 1, 0, 64)], stages_for("cpu"))
    r.core.begin_term(1, [(0, [(1, 0)])])
    r.endpoint.inject(1, w.pack(w.Record(w.TOOK, w.INLINE, term=1)))
    for i in range(ROUNDS):
        out = np.zeros(16, np.float32)
        handle = push_pull(r.core, tensor, np.ones(16, np.float32), out)
        (push,) = r.pushes(1, lane=1)
        for _ in range(EACH):
            r.endpoint.inject(1, _moving_mutant(rng))
        want = np.full(16, i + 1, np.float32)
        r.answer(push, want.tobytes(), lane=1)
        handle.wait(60)
        assert (out == want).all(), f"round {i}, seed {seed}"
    assert r.core.counters()["malformed"] == ROUNDS * EACH, f"seed {seed}"
    r.close()


@pytest.mark.parametrize(
    "proof",
    ["right", "another secret", "another job", "another lane", "another nonce", "short", "none"],
)
def test_a_lane_must_prove_that_it_knows_the_secret(proof):
    worker, lane = LoopbackEndpoint(), LoopbackEndpoint()
    worker.link(0, lane, 0)
    lane.link(0, worker, 0)
    core = Core(worker, rank=0, job=7, lanes=[0], credit=0, spin_us=0)
    assert core.greet(0.01, ["h:1"], b"the secret") == [0]
    _, frame, second = lane.sent(20)
    (ping,) = w.unpack(frame, second)
    assert ping.kind == w.PING and len(ping.body) == 32
    code = lane_proof(
        b"other" if proof == "another secret" else b"the secret",
        8 if proof == "another job" else 7,
        "h:2" if proof == "another lane" else "h:1",
        bytes(32) if proof == "another nonce" else ping.body,
    )
    code = {"short": code[:31], "none": b""}.get(proof, code)
    worker.inject(0, w.pack(w.Record(w.PONG, w.INLINE, length=len(code), body=code)))
    assert core.greet(0.3, ["h:1"], b"the secret") == ([] if proof == "right" else [0])
    assert core.counters()["malformed"] == (proof != "right")
    core.close()
    worker.close()
    lane.close()
