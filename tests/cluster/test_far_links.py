"""Processes that are far apart: relays between namespaces delay their packets."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from network import NetJob, Network, needed

from bench import network

pytestmark = needed

_ROUND_TRIP = 0.03
_SUMS = """
    import bpsx, os, socket, struct, numpy as np

    bpsx.init()
    for step in range(3):
        values = np.arange(2_000_000, dtype=np.float32) * (bpsx.rank() + 1)
        total = bpsx.push_pull(values, name="x", average=False)
        assert (total == np.arange(2_000_000, dtype=np.float32) * 3).all()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            held = socket.socket(fileno=os.dup(int(name)))
            peer = held.getpeername()[0]
        except (OSError, TypeError, IndexError):
            continue
        if held.family == socket.AF_INET and peer == os.environ["LANES"]:
            info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 152)
            shortest = struct.unpack_from("I", info, 148)[0] / 1e6
            size = held.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            control = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            found.append((shortest, size, control.rstrip(bytes(1)).decode()))
    report(sorted(found))
"""


def _connections(
    round_trip: float = _ROUND_TRIP, rate: str | None = None, **given: str
) -> list[tuple[float, int, str]]:
    """Return of a worker's connections to lanes: shortest round trip, send buffer, congestion
    control.
    """
    names = ["scheduler", "server 0", "worker 0", "worker 1"]
    with Network(names, rate, both=rate is not None, round_trip=round_trip) as links:
        env = {"DMLC_ENABLE_RDMA": "tcp", "LANES": links.address["server 0"], **given}
        with NetJob(_SUMS, links, env=env) as job:
            return [tuple(one) for one in job.results()[0][0]]


def test_far_connections_have_the_systems_send_buffer_unless_it_is_given():
    far, given = _connections(), _connections(BPSX_SEND_BUFFER_KB="224")
    assert far and len(given) == len(far)
    assert all(shortest >= _ROUND_TRIP for shortest, _, _ in far + given)
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    fixed = 2 * min(224 << 10, most)  # the kernel doubles what one asks for
    assert {size for _, size, _ in given} == {fixed}
    assert fixed not in {size for _, size, _ in far}


def test_connections_over_slow_links_have_small_send_buffers_unless_they_are_given():
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    for given, size in (
        ({}, 64),
        ({"BPSX_AUTOTUNE": "0"}, 224),
        ({"BPSX_SEND_BUFFER_KB": "128"}, 128),
    ):
        found = {size for _, size, _ in _connections(0.0, "200mbit", **given)}
        assert found == {2 * min(size << 10, most)}, given


@pytest.mark.skipif(network.congestion() != "bbr", reason="the system's is not BBR")
def test_bbr_stays_between_far_machines_only():
    for round_trip, given, stays in (
        (_ROUND_TRIP, "auto", True),
        (0.0, "auto", False),
        (0.0, "system", True),
    ):
        controls = {control for *_, control in _connections(round_trip, BPSX_CONGESTION=given)}
        assert (controls == {"bbr"}) is stays and "" not in controls, (round_trip, given, controls)


@pytest.mark.parametrize("transport", ["zmq", "tcp"])
def test_sums_are_right_and_a_death_is_noticed(transport):
    source = """
        import bpsx, numpy as np

        bpsx.init()
        try:
            for step in range(1, 10_000):
                total = bpsx.push_pull(np.full(300_000, step, np.float32), name="x", average=False)
                assert (total == 2 * step).all()
                if step == 3:
                    report("running")
        except bpsx.BpsxError as e:
            report(str(e))
    """
    names = ["scheduler", "server 0", "worker 0", "worker 1"]
    with (
        Network(names, round_trip=_ROUND_TRIP) as links,
        NetJob(source, links, env={"DMLC_ENABLE_RDMA": transport}) as job,
    ):
        for worker in job.workers:
            worker.wait_for_line("running")
        job.servers[0].signal(signal.SIGKILL)
        for worker in job.workers:
            worker.wait()
            assert "server 0" in worker.reports()[-1]
