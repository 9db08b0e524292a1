"""Tests that every transport must pass. A new transport adds a function to ``PAIRS``."""

from __future__ import annotations

import contextlib
import ctypes as C
import functools
import importlib
import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bpsx.errors import TransportError
from bpsx.transports.base import shortest_round_trips
from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from bpsx.transports.shm.endpoint import SharedEndpoint
from bpsx.transports.sockets import listener
from bpsx.transports.tcp.endpoint import TcpEndpoint
from bpsx.transports.threaded.endpoint import ThreadedEndpoint
from bpsx.transports.zeromq import auth
from bpsx.transports.zeromq.endpoint import ZeroMQEndpoint
from support.dataplane import DataPlane

SIZES = [0, 1, 31, 32, 33, 64, 8191, 8192, 8193, 100_000, 4_096_000]


def zeromq_endpoint(send_buffer: int | None = 0, **more: object) -> ZeroMQEndpoint:
    return ZeroMQEndpoint(
        io_threads=1, send_buffer=send_buffer, heartbeat_interval=5, heartbeat_timeout=30, **more
    )


def tcp_endpoint(send_buffer: int | None = 0, **more: object) -> TcpEndpoint:
    return TcpEndpoint(send_buffer=send_buffer, heartbeat_interval=5, heartbeat_timeout=30, **more)


def rdma_endpoint(**more: object) -> Any:
    """Skips without an RDMA adapter; tests/machine runs these tests in an emulated machine with
    one.
    """
    try:
        module = importlib.import_module("bpsx.transports.rdma.endpoint")
        return module.RdmaEndpoint(
            **{"heartbeat_interval": 5, "heartbeat_timeout": 30, "inbox": 8 << 20, **more}
        )
    except (ImportError, TransportError) as e:
        pytest.skip(f"no RDMA here: {e}")


def shared_endpoint(
    inner: Callable[..., object] = zeromq_endpoint, **more: object
) -> SharedEndpoint:
    return SharedEndpoint(inner(**more), secret=more.get("secret", b""))


def threaded_endpoint(inner: Callable[..., object] = tcp_endpoint) -> ThreadedEndpoint:
    return ThreadedEndpoint([inner() for _ in range(3)], spin_us=50)


def network_pair(
    make: Callable[..., object],
    host: str = "127.0.0.1",
    make_lane: Callable[..., object] | None = None,
    **more: object,
) -> tuple[object, object]:
    worker, lane = make(**more), (make_lane or make)(**more)
    lane.join(77, 0)
    worker.join(77, 5)
    worker.connect(0, lane.bind(host))
    return worker, lane


def other_endpoint(**more: object) -> Any:
    """Return an endpoint of the transport that the environment names as "module:class"."""
    module, _, name = os.environ["CONFORMANCE_OF"].partition(":")
    options = {"heartbeat_interval": 5, "heartbeat_timeout": 30, "most_bytes": -1}
    return getattr(importlib.import_module(module), name)(**options, **more)


PAIRS: dict[str, Callable[[], tuple[object, object]]] = {
    "loopback": lambda: network_pair(LoopbackEndpoint),
    "zeromq": lambda: network_pair(zeromq_endpoint),
    "tcp": lambda: network_pair(tcp_endpoint),
    "tcp-ipv6": lambda: network_pair(tcp_endpoint, "::1"),
    "zeromq-encrypted": lambda: network_pair(
        zeromq_endpoint, secret=b"sixteen bytes, or more", encrypt=True
    ),
    "zeromq-ipv6": lambda: network_pair(zeromq_endpoint, "::1"),
    "rdma": lambda: network_pair(rdma_endpoint),
    "rdma-narrow": lambda: network_pair(rdma_endpoint, depth=16, sends=16, inbox=1 << 20),
    "shared-zeromq": lambda: network_pair(shared_endpoint),
    "shared-rdma": lambda: network_pair(functools.partial(shared_endpoint, rdma_endpoint)),
    # Without a slot in shared memory, messages still go through the wrapper.
    "shared-rdma-apart": lambda: network_pair(
        lambda **more: SharedEndpoint(rdma_endpoint(**more), slots=0)
    ),
    "shared-tcp": lambda: network_pair(functools.partial(shared_endpoint, tcp_endpoint)),
    "threaded-tcp": lambda: network_pair(threaded_endpoint, make_lane=tcp_endpoint),
    "threaded-shared-tcp": lambda: network_pair(
        functools.partial(threaded_endpoint, functools.partial(shared_endpoint, tcp_endpoint)),
        make_lane=functools.partial(shared_endpoint, tcp_endpoint),
    ),
}

if "CONFORMANCE_OF" in os.environ:
    PAIRS = {"other": lambda: network_pair(other_endpoint)}


@pytest.fixture(params=list(PAIRS))
def pair(request):
    """A worker's endpoint (peer 0: the lane) and a lane's (peer 5: the worker), connected, and
    their data planes.
    """
    worker, lane = PAIRS[request.param]()
    w, s = DataPlane(worker), DataPlane(lane)
    w.other, s.other = s, w
    # A lane can reply to a worker only after it has received a message from it; through shared
    # memory, which the first message does not take, only after another one.
    for word in (b"hello", b"again"):
        assert w.send(0, word) == 0
        assert s.receive() == (5, word, None)
    yield w, s, worker, lane
    worker.close()
    lane.close()


@pytest.mark.parametrize("size", SIZES)
def test_bodies_arrive_whole_both_ways(pair, size):
    w, s, *_ = pair
    body = bytes(i % 251 for i in range(min(size, 5000))) * (size // 5000 + 1)
    body = body[:size]
    assert w.send(0, b"h" * 64, body) == 0
    assert s.receive() == (5, b"h" * 64, body)
    assert s.send(5, b"H" * 64, body) == 0
    assert w.receive() == (0, b"H" * 64, body)


def test_the_round_trip_to_a_lane_is_known_or_guessed(pair):
    *_, worker, _ = pair
    trip = worker.round_trip(0)
    assert 0 <= trip < 1
    assert trip > 0 or not isinstance(worker, (TcpEndpoint, ZeroMQEndpoint))


def test_heads_without_bodies_arrive(pair):
    w, s, *_ = pair
    for n in (1, 64, 100_000):
        assert w.send(0, b"a" * n, own_head=True) == 0
        assert s.receive() == (5, b"a" * n, None)


def test_order_is_kept_per_pair(pair):
    w, s, *_ = pair
    for i in range(500):
        assert w.send(0, i.to_bytes(4, "little") + bytes(60), bytes(i) if i % 3 else None) == 0
    for i in range(500):
        peer, head, body = s.receive()
        assert (
            peer == 5
            and int.from_bytes(head[:4], "little") == i
            and body == (bytes(i) if i % 3 else None)
        )


def test_many_large_in_flight_both_ways(pair):
    w, s, *_ = pair
    big = bytes(range(256)) * 4000
    for i in range(20):
        assert w.send(0, bytes([i]), big) == 0
        assert s.send(5, bytes([i]), big) == 0
    for i in range(20):
        assert s.receive() == (5, bytes([i]), big)
        assert w.receive() == (0, bytes([i]), big)


def test_every_done_callback_runs_once(pair):
    w, s, worker, lane = pair
    for token in range(1, 21):
        assert w.send(0, b"h", bytes(50_000), token, own_head=True) == 0
    for _ in range(20):
        assert s.receive() is not None
    worker.close()
    assert sorted(w.done) == sorted([*range(1, 21), *range(1001, 1021)])


def test_close_runs_the_done_callbacks_of_unsent_messages(pair):
    w, s, worker, lane = pair
    for token in range(1, 11):
        w.send(0, b"h", bytes(4_000_000), token)
    worker.close()
    assert sorted(w.done) == list(range(1, 11))


def test_an_unknown_peer_is_an_error_and_the_memory_is_released(pair):
    w, *_ = pair
    assert w.send(9, b"h", bytes(100), 3, own_head=True) == -1
    assert sorted(w.done) == [3, 1003]


def test_wake_ends_a_wait_from_another_thread(pair):
    w, *_ = pair
    woken = threading.Event()

    def wait() -> None:
        w.wait(60_000)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    w.wake()
    assert woken.wait(60)
    thread.join()


def test_wake_before_wait_is_not_lost(pair):
    w, *_ = pair
    w.wake()
    w.wait(60_000)


def test_wait_ends_when_a_message_arrives(pair):
    w, s, *_ = pair
    arrived = threading.Event()

    def wait() -> None:
        w.wait(60_000)
        arrived.set()

    thread = threading.Thread(target=wait)
    thread.start()
    s.send(5, b"now")
    assert arrived.wait(60)
    thread.join()
    assert w.receive() == (0, b"now", None)


def test_a_received_message_may_be_written_to_and_kept(pair):
    from support.dataplane import Message

    w, s, *_ = pair
    held = []
    for i in range(5):
        w.send(0, bytes([i]), bytes([i]) * 100_000)
    while len(held) < 5:
        m = Message()
        if s.table.recv(s.table.self, C.byref(m)) == 1:
            C.memset(m.body, 99, 10)
            held.append(m)
        else:
            s.wait(100)
    for i, m in enumerate(held):
        assert C.string_at(m.body, 12) == bytes([99] * 10 + [i] * 2)
        s.table.release(s.table.self, C.byref(m))


def test_replies_may_have_a_landing(pair):
    """A transport may ignore the wanted address.

    The body is complete wherever it is, and a body too long for that address still arrives.
    """
    w, s, *_ = pair
    landing = w.lend(C.create_string_buffer(100_000))
    for size in (100_000, 50_000, 1, 0, 100_001, 4_000_000):
        assert w.send(0, b"push" * 16, b"x" * size, landing=landing) == 0
        m = s.take()
        assert m is not None and m.body_size == size
        assert s.send(5, b"pull" * 16, b"y" * size, landing=m.landing) == 0
        s.release(m)
        assert w.receive() == (0, b"pull" * 16, b"y" * size)


def test_close_twice(pair):
    *_, worker, lane = pair
    worker.close()
    worker.close()


# ---- network transports only


def made_by(make: Callable[..., object]) -> Iterator[Callable[..., object]]:
    """For fixtures: yields a function that makes endpoints, and closes them at the end."""
    made = []

    def one(**more: object) -> object:
        made.append(make(**more))
        return made[-1]

    yield one
    for e in made:
        e.close()


@pytest.fixture
def zeromq():
    yield from made_by(zeromq_endpoint)


@pytest.fixture
def tcp():
    yield from made_by(tcp_endpoint)


@pytest.fixture
def rdma():
    yield from made_by(rdma_endpoint)


@pytest.fixture
def loopback():
    yield from made_by(LoopbackEndpoint)


@pytest.fixture
def other():
    yield from made_by(other_endpoint)


def test_messages_of_a_stranger_are_dropped(zeromq):
    """A lane rejects a peer of another job or secret, a second peer of a rank, and a peer without a
    token. It drops and counts nonsense from a peer with a token, and serves the right peer.
    """
    import zmq

    lane, friend = zeromq(), zeromq()
    lane.join(77, 0)
    address = lane.bind("127.0.0.1")
    s = DataPlane(lane)
    strangers = [zeromq(), zeromq(secret=b"another secret of 16 bytes"), zeromq(encrypt=True)]
    for stranger, job in zip(strangers, (78, 77, 77)):
        stranger.join(job, 5)
        stranger.connect(0, address)
        stranger.watch()
        DataPlane(stranger).send(0, b"not yours", bytes(100))
    context = zmq.Context()
    plain, insider = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    insider.setsockopt(zmq.PLAIN_USERNAME, b"3")
    insider.setsockopt(zmq.PLAIN_PASSWORD, auth.token(b"", 77, address, 3))
    for dealer in (plain, insider):
        dealer.connect(f"tcp://{address}")
        for parts in ([b"x"], [b"", b""], [b"a"] * 9):
            # The lane may have refused the plain one already: a blocking send would wait for ever.
            refused = (
                contextlib.suppress(zmq.Again) if dealer is plain else contextlib.nullcontext()
            )
            with refused:
                dealer.send_multipart(parts, zmq.NOBLOCK if dealer is plain else 0)
    while lane.malformed < 3 or lane.refused < 2:
        assert s.receive(0.1) is None
    friend.join(77, 5)
    friend.connect(0, address)
    f = DataPlane(friend)
    f.send(0, b"mine")
    assert s.receive() == (5, b"mine", None)
    again = zeromq()
    again.join(77, 5)
    again.connect(0, address)
    DataPlane(again).send(0, b"somebody has overheard a token")
    while lane.refused < 3:
        assert s.receive(0.1) is None
    assert lane.malformed == 3
    context.destroy(0)


def test_a_probe_of_a_port_does_not_count_as_refused(tcp):
    """A worker probes a lane's port, in :mod:`bpsx.transports.reach`, if the lane is slow."""
    lane, stranger, friend = tcp(), tcp(secret=b"another secret of 16 bytes"), tcp()
    lane.join(77, 0)
    address = lane.bind("127.0.0.1")
    host, port = address.split(":")
    for linger in (0, 1):  # the end of a connection, and a reset
        with socket.create_connection((host, int(port))) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", linger, 0))
    for peer in (stranger, friend):
        peer.join(77, 5)
        peer.connect(0, address)
        DataPlane(peer).send(0, b"hello")
    assert DataPlane(lane).receive() == (5, b"hello", None)
    assert lane.refused == 1


def test_messages_of_a_stranger_are_dropped_on_plain_sockets(tcp):
    """As above, but a peer with a token that sends nonsense loses its connection."""
    lane, friend = tcp(most_bytes=1000), tcp()
    lane.join(77, 0)
    address = lane.bind("127.0.0.1")
    s = DataPlane(lane)
    for stranger, job in ((tcp(), 78), (tcp(secret=b"another secret of 16 bytes"), 77)):
        stranger.join(job, 5)
        stranger.connect(0, address)
        DataPlane(stranger).send(0, b"not yours", bytes(100))
    friend.join(77, 5)
    friend.connect(0, address)
    f = DataPlane(friend)
    f.send(0, b"mine")
    assert s.receive() == (5, b"mine", None)
    again = tcp()
    again.join(77, 5)
    again.connect(0, address)
    DataPlane(again).send(0, b"somebody has overheard a token")
    while lane.refused < 3:
        assert s.receive(0.1) is None
    insiders = {
        3: b"\xff" * 64,
        4: b"\x04\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0",
        6: b"\0\0\0\0\x01\0\0\0\xe9\x03\0\0\0\0\0\0",
    }
    host, port = address.split(":")
    # a head of 4 GiB; a body that does not follow; a body above the maximum
    for rank, nonsense in insiders.items():
        made = socket.create_connection((host, int(port)))
        listener.greet(made, b"", 77, address, rank, nonsense)
        while lane.malformed < sorted(insiders).index(rank) + 1:
            assert s.receive(0.1) is None
        made.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert made.recv(1) == b""
        made.close()
    assert sorted(lane.lost()) == sorted(insiders)
    f.send(0, b"still here")
    assert s.receive() == (5, b"still here", None)


def made_greeting(address: str, rank: int) -> tuple[socket.socket, bytes]:
    """Return a connection on which the lane has sent its nonce, and the greeting for this nonce."""
    host, port = address.split(":")
    made = socket.create_connection((host, int(port)))
    near, far = socket.socketpair()
    with near, far:
        far.sendall(made.recv(32, socket.MSG_WAITALL))
        listener.greet(near, b"", 77, address, rank)
        return made, far.recv(4096)


def test_messages_in_pieces_of_any_size(tcp):
    """TCP is a stream, so it may split messages anywhere."""
    lane = tcp()
    lane.join(77, 0)
    address = lane.bind("127.0.0.1")
    s = DataPlane(lane)
    bodies = [None, b"", b"x", bytes(range(256)) * 700]
    greeted, stream = made_greeting(address, 2)
    for i, body in enumerate(bodies):
        stream += (
            struct.pack("<IIQ", 10 + i, body is not None, len(body or b""))
            + b"h" * (10 + i)
            + (body or b"")
        )
    with greeted as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        at, got = 0, []
        for size in itertools.cycle((1, 2, 15, 16, 17, 70_000, 3)):
            made.sendall(stream[at : at + size])
            at += size
            while (found := s.receive(0.002)) is not None:
                got.append(found)
            if at >= len(stream):
                break
        while len(got) < len(bodies):
            got.append(s.receive())
    assert got == [(2, b"h" * (10 + i), body) for i, body in enumerate(bodies)]


def test_a_lane_that_is_not_there_is_lost(tcp):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    worker = tcp()
    worker.join(77, 5)
    worker.connect(3, f"127.0.0.1:{port}")
    assert worker.lost() == [3] and DataPlane(worker).send(3, b"h", b"body", 1) == -1


@pytest.mark.parametrize("transport", ["zeromq", "tcp", "rdma"])
def test_garbage_bytes_on_the_port_do_not_disturb(transport, request):
    make = request.getfixturevalue(transport)
    lane, friend = make(), make()
    lane.join(77, 0)
    address = lane.bind("127.0.0.1")
    host, port = address.split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b"\0" * 64, b""):
        with socket.create_connection((host, int(port))) as s:
            s.sendall(garbage)
    friend.join(77, 1)
    friend.connect(0, address)
    f, s = DataPlane(friend), DataPlane(lane)
    f.send(0, b"mine")
    assert s.receive() == (1, b"mine", None)


@pytest.mark.parametrize(
    "transport", ["other"] if "other" in PAIRS else ["loopback", "zeromq", "tcp", "rdma"]
)
def test_a_broken_connection_is_noticed_and_named(transport, request):
    import select

    make = request.getfixturevalue(transport)
    worker = make()
    lanes = [make() for _ in range(3)]
    worker.join(77, 5)
    fd = worker.watch()
    w = DataPlane(worker)
    for i, lane in enumerate(lanes):
        lane.join(77, i)
        worker.connect(i, lane.bind("127.0.0.1"))
        w.send(i, b"hello")
        assert DataPlane(lane).receive() == (5, b"hello", None)
    assert worker.lost() == []
    lanes[1].close()
    lost: list[int] = []
    while not lost:
        w.receive(0.1)  # without a thread for losses, the receiving thread detects them
        asked = select.poll()
        asked.register(fd, select.POLLIN)
        assert asked.poll(20_000)
        lost = worker.lost()
    assert lost == [1]
    lanes[0].close()
    lanes[2].close()


def test_an_unreachable_address_and_one_of_another_job_are_named():
    lane, worker = LoopbackEndpoint(), LoopbackEndpoint()
    lane.join(7, 0)
    worker.join(8, 0)
    address = lane.bind("127.0.0.1")
    with pytest.raises(TransportError, match=f"{address}: it belongs to job 7, not 8"):
        worker.connect(0, address)
    with pytest.raises(TransportError, match="loopback:x: no endpoint of this process"):
        worker.connect(0, "loopback:x")


def test_unusable_addresses_are_named(zeromq):
    with pytest.raises(TransportError, match="203.0.113.1"):
        zeromq().bind("203.0.113.1")
    with pytest.raises(TransportError, match="no-such-host.invalid"):
        zeromq().connect(0, "no-such-host.invalid:5000")


def _sockets() -> dict[str, int]:
    """Return the send buffers of this process's TCP connections by file descriptor."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=int(fd))
        except (
            OSError
        ):  # not a socket, or the descriptor of the listed folder, which is closed by now
            continue
        if one.family == socket.AF_INET and not one.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            found[fd] = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        one.detach()
    return found


@pytest.mark.parametrize(
    ("given", "loopback", "wanted"),
    [(None, True, 448 << 10), (None, False, 224 << 10), (96 << 10, False, 96 << 10)],
)
@pytest.mark.parametrize("make", [zeromq_endpoint, tcp_endpoint], ids=["zeromq", "tcp"])
def test_send_buffers_are_chosen_by_address_unless_given(
    monkeypatch, make, given, loopback, wanted
):
    """At both ends. The test imitates whether an address is a loopback address."""
    for module in ("bpsx.system.address", "bpsx.transports.sockets.buffers"):
        monkeypatch.setattr(f"{module}.is_loopback", lambda host: loopback)
    monkeypatch.setattr("bpsx.transports.sockets.buffers.round_trip", lambda made: 0.0005)
    before = _sockets()
    worker, lane = network_pair(make, "127.0.0.2", send_buffer=given)  # the worker's is 127.0.0.1
    w, s = DataPlane(worker), DataPlane(lane)
    assert w.send(0, b"hello") == 0 and s.receive() == (5, b"hello", None)
    buffers = [size for fd, size in _sockets().items() if fd not in before]
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    # the kernel doubles the requested size
    assert buffers == [2 * min(wanted, most)] * 2
    # The worker hears that its links carry 70 MB/s. ZeroMQ cannot fit the buffers, TCP can.
    worker.fit_buffers(70e6)
    assert w.send(0, b"again") == 0 and s.receive() == (5, b"again", None)
    fits = make is tcp_endpoint and given is None and not loopback
    buffers = [size for fd, size in _sockets().items() if fd not in before]
    assert sorted(buffers) == sorted(
        [2 * min(70_000 if fits else wanted, most), 2 * min(wanted, most)]
    )
    worker.close()
    lane.close()


@pytest.mark.parametrize("way", ["tcp", "shared-tcp", "threaded-tcp", "threaded-shared-tcp"])
def test_each_connection_has_the_round_trip_that_was_measured(monkeypatch, way):
    trips = [0.003, 0.001, 0.002]
    measured = iter(trips)
    monkeypatch.setattr("bpsx.transports.tcp.endpoint.round_trip", lambda made: next(measured))
    inner = (lambda: shared_endpoint(tcp_endpoint)) if "shared" in way else tcp_endpoint
    worker = threaded_endpoint(inner) if "threaded" in way else inner()
    worker.join(77, 5)
    lanes = [tcp_endpoint() for _ in trips]
    assert [worker.round_trip(i) for i in range(3)] == [0, 0, 0]
    for i, lane in enumerate(lanes):
        lane.join(77, 0)
        worker.connect(i, lane.bind("127.0.0.1"))
    assert [worker.round_trip(i) for i in range(3)] == trips
    assert shortest_round_trips(worker, [0, 0, 1]) == {0: 0.001, 1: 0.002}
    for endpoint in (worker, *lanes):
        endpoint.close()


@pytest.mark.parametrize("way", ["shared-tcp", "threaded-tcp", "threaded-shared-tcp"])
def test_endpoints_around_others_hand_the_rate_of_links_on(monkeypatch, way):
    for module in ("bpsx.system.address", "bpsx.transports.sockets.buffers"):
        monkeypatch.setattr(f"{module}.is_loopback", lambda host: False)
    monkeypatch.setattr("bpsx.transports.sockets.buffers.round_trip", lambda made: 0.0)
    made = functools.partial(tcp_endpoint, send_buffer=None)
    # Without a slot in shared memory, all messages take the network.
    inner = (lambda: SharedEndpoint(made(), slots=0)) if "shared" in way else made
    worker = threaded_endpoint(inner) if "threaded" in way else inner()
    lane = inner()
    lane.join(77, 0)
    worker.join(77, 5)
    before = _sockets()
    worker.connect(0, lane.bind("127.0.0.2"))
    w, s = DataPlane(worker), DataPlane(lane)
    assert w.send(0, b"hello") == 0 and s.receive() == (5, b"hello", None)
    worker.fit_buffers(70e6)
    # The second answer arrives after the thread that drives has looked for news.
    for word in (b"more", b"last"):
        assert w.send(0, word) == 0 and s.receive() == (5, word, None)
        assert s.send(5, word) == 0 and w.receive() == (0, word, None)
    assert 2 * 70_000 in [size for fd, size in _sockets().items() if fd not in before]
    worker.close()
    lane.close()
