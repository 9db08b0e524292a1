"""A lane and compressed pushes: a push that cannot be decoded fails its own round only."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpsx.compression.spec import compression, mix, stream
from bpsx.dtypes import BY_NAME
from bpsx.kernels import reference, reference_dithering
from core.test_lane import Rig
from support import wire as w

PACKED = 16
E_CODEC, E_COMPRESSOR, E_MISMATCH, E_PROTOCOL = 11, 12, 2, 5
N = 1000
G = (np.arange(N) % 37 - 18).astype(np.float32)
SEED = mix(0, stream(b"name", 100))  # the key's number within its tensor


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


#: codec name -> (compression, a valid push of G)
CODECS: dict[str, tuple[dict, bytes]] = {
    "onebit": ({"compressor": "onebit", "scaling": True}, reference.onebit_encode(G, True)),
    "topk": ({"compressor": "topk", "k": 0.05}, reference.topk_encode(G, 0.05)),
    "topk-ef": ({"compressor": "topk", "k": 0.05, "ef": "vanilla"}, reference.topk_encode(G, 0.05)),
    "randomk": (
        {"compressor": "randomk", "k": 0.05},
        reference.randomk_encode(G, 1, signed(SEED), 0.05, False),
    ),
    "dithering": (
        {"compressor": "dithering", "k": 4},
        reference_dithering.encode(G, 4, False, False, 1, 1),
    ),
    "half": ({"compressor": "half"}, G.astype(np.float16).tobytes()),
}


def register(
    rig: Rig, slot: int, params: dict | bytes, dtype: str = "float32", nbytes: int = 4 * N
) -> None:
    codec = params if isinstance(params, bytes) else compression(params).text().encode()
    for rank in range(len(rig.workers)):
        rig.send(
            rank,
            w.Record(
                w.REGISTER,
                w.INLINE,
                BY_NAME[dtype].code,
                7,
                slot + 100,
                slot,
                rank,
                cookie=nbytes,
                priority=len(codec),
                length=4 + len(codec),
                body=b"name" + codec,
            ),
        )


def answers(rig: Rig) -> list[w.Record]:
    found = [rig.take(rank) for rank in range(len(rig.workers))]
    assert all(len(f) == 1 for f in found)
    return [f[0] for f in found]


def assert_round_is_right(rig: Rig, slot: int, wire: bytes, round_: int, divisor: int = 2) -> None:
    for rank in (0, 1):
        rig.push(rank, slot, wire, flags=PACKED, round_=round_, divisor=divisor)
    first, second = answers(rig)
    assert (first.kind, first.length) == (w.ANSWER, second.length) and first.body == second.body


@pytest.mark.parametrize("name", CODECS)
def test_the_average_of_the_same_is_the_same(rig, name: str) -> None:
    params, wire = CODECS[name]
    if name in ("dithering", "randomk"):
        pytest.skip(
            "draws again on the way back: tests/cluster/test_compressed_sums.py has the oracle for"
            " that"
        )
    r = rig()
    register(r, 0, params)
    for rank in (0, 1):
        r.push(rank, 0, wire, flags=PACKED, divisor=2)
    for answer in answers(r):
        assert answer.kind == w.ANSWER
        if name == "onebit":  # the magnitude was rounded to float32
            assert np.frombuffer(answer.body[:8]) == pytest.approx(
                np.frombuffer(wire[:8]), rel=1e-5
            )
            assert answer.body[8:] == wire[8:]
        else:
            assert answer.body == wire


@pytest.mark.parametrize("workers", [57, 58, 59])
def test_sums_of_onebit_are_the_same_whether_a_lane_keeps_pushes_or_not(rig, workers: int) -> None:
    """A lane keeps those of 58 workers, 8000 bytes for 1000 elements, and adds others at once."""
    r, rng = rig(workers=workers), np.random.default_rng(5)
    register(r, 0, {"compressor": "onebit", "scaling": True})
    for round_ in range(3):
        total = np.zeros(N, np.float32)
        for rank in range(workers):
            push = reference.onebit_encode((G * rng.normal(0, 1, N)).astype(np.float32), True)
            r.push(rank, 0, push, flags=PACKED, round_=round_, divisor=workers)
            total += reference.onebit_decode(push, N, "float32")
        want = reference.onebit_encode(total / np.float32(workers), True)
        for answer in answers(r):
            assert answer.body[8:] == want[8:]
            assert np.frombuffer(answer.body[:8]) == pytest.approx(
                np.frombuffer(want[:8]), rel=1e-5
            )


@pytest.mark.parametrize("name", CODECS)
def test_undecodable_data_fails_the_round_by_name_and_the_next_one_is_right(rig, name: str) -> None:
    params, wire = CODECS[name]
    r = rig()
    register(r, 0, params)
    bads = [b"", wire[:-1], wire[: len(wire) // 2], wire[:3]]
    if name.startswith("topk"):
        bads.append(wire[4:8] + wire[:4] + wire[8:])  # indices that do not ascend
    for round_, bad in enumerate(bads):
        r.push(0, 0, wire, flags=PACKED, round_=2 * round_)
        r.push(1, 0, bad, flags=PACKED, round_=2 * round_)
        for answer in answers(r):
            assert (answer.kind, answer.divisor, answer.slot, answer.term) == (
                w.ERROR,
                E_CODEC,
                1,
                1,
            ), bad
        assert_round_is_right(r, 0, wire, 2 * round_ + 1)
    assert r.lane.counters()["malformed"] == 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(CODECS)),
    st.lists(st.tuples(st.integers(0, 4999), st.integers(0, 255)), max_size=6),
    st.binary(max_size=64),
    st.booleans(),
)
def test_the_lane_survives_any_bytes(
    name: str, changes: list[tuple[int, int]], more: bytes, replace: bool
) -> None:
    params, wire = CODECS[name]
    bad = bytearray(b"" if replace else wire)
    for at, value in changes:
        if bad:
            bad[at % len(bad)] = value
    bad += more
    r = Rig(2)
    try:
        register(r, 0, params)
        r.push(0, 0, wire, flags=PACKED)
        r.push(1, 0, bytes(bad), flags=PACKED)
        first = r.take(1)[0]
        # Longer than this codec can produce: refused without being decoded.
        if first.kind == w.ERROR and first.divisor != E_CODEC:
            assert first.divisor == 5
            r.push(1, 0, wire, flags=PACKED)
            first = r.take(1)[0]
        assert (first.kind, first.divisor) == (r.take(0)[0].kind, first.divisor) and first.kind in (
            w.ANSWER,
            w.ERROR,
        )
        assert_round_is_right(r, 0, wire, 1)
    finally:
        r.close()


@pytest.mark.parametrize("ef", ["", "vanilla", "sparse"])
def test_randomks_reply_has_the_counter_of_the_pushes(rig, ef: str) -> None:
    """randomk's answer carries the larger of the pushes' counters.

    This also holds after a failed round, and after a worker's own counter has advanced. With error
    feedback, residuals keep the remainder.
    """
    r, params = rig(), {"compressor": "randomk", "k": 0.05, "ef": ef}
    register(r, 0, params)
    kept = np.zeros(N, np.float32)
    for round_, counters in enumerate([(1, 1), (5, 5), (9, 7), (10, 10), (2**64 - 1, 3), (11, 11)]):
        total = kept if ef else np.zeros(N, np.float32)
        for rank, counter in enumerate(counters):
            wire = reference.randomk_encode(G, counter, signed(SEED), 0.05, bool(ef))
            total = total + reference.randomk_decode(wire, N, signed(SEED), 0.05)
            r.push(rank, 0, wire, flags=PACKED, round_=2 * round_)
        want = reference.randomk_encode(total, max(counters), signed(SEED), 0.05, bool(ef))
        assert [a.body for a in answers(r)] == [want, want], counters
        kept = total - reference.randomk_decode(want, N, signed(SEED), 0.05)
        assert (len(set(counters)) == 1) or kept.any()
        for rank in (0, 1):
            r.push(rank, 0, b"123", flags=PACKED, round_=2 * round_ + 1)
        assert {a.divisor for a in answers(r)} == {E_CODEC}


def test_the_learning_rate_must_be_one(rig) -> None:
    r = rig()
    register(r, 0, {"compressor": "onebit", "ef": "corrected"})
    wire = reference.onebit_encode(G, False)
    for rank, rate in ((0, 0.5), (1, 0.25)):
        r.push(rank, 0, np.float64(rate).tobytes() + wire, flags=PACKED)
    for answer in answers(r):
        assert (answer.kind, answer.divisor, {answer.slot, answer.term}) == (
            w.ERROR,
            E_MISMATCH,
            {0, 1},
        )
    assert_round_is_right(r, 0, np.float64(0.5).tobytes() + wire, 1)


def test_unannounced_data_is_refused(rig) -> None:
    """Pushes that do not match the registration are refused.

    Cases: a plain push for a compressed key, a compressed push for a plain key, an unknown
    compression.
    """
    r = rig()
    register(r, 0, CODECS["onebit"][0])
    r.register(1, 4 * N)
    register(r, 2, json.dumps({"compressor": "gzip"}).encode())
    register(r, 3, b"\xff\xfe{")
    register(r, 4, CODECS["topk"][0], "int32")
    wire = CODECS["onebit"][1]
    for slot, data, flags in (
        (0, G.tobytes(), 0),
        (0, wire, 0),
        (1, wire, PACKED),
        (2, wire, PACKED),
        (3, wire, PACKED),
        (4, wire, PACKED),
        (2, G.tobytes(), 0),
        (2, G.tobytes(), w.BROADCAST),
    ):
        r.push(0, slot, data, flags=flags, dtype="int32" if slot == 4 else "float32")
        answer = r.take(0)[0]
        assert (answer.kind, answer.divisor) == (
            w.ERROR,
            E_COMPRESSOR if slot >= 2 else E_PROTOCOL,
        ), slot
    assert [line for line in r.log if "gzip" in line and "BPSX_COMPRESSORS" in line]
    assert_round_is_right(r, 0, wire, 0)
