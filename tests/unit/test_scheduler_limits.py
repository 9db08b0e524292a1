"""The scheduler with name collisions, missing options and huge numbers.

No single process may prevent the job of the others.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.config import Config
from bpsx.planning.placement import Placement, key_of
from bpsx.scheduler import messages
from bpsx.scheduler.compatibility import disagreement
from unit.scheduler_tools import config, declare, hello, kinds, members, running


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit memory, so that absurd requests raise MemoryError instead of exhausting the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_workers_in_containers_on_one_host_are_two():
    """Two containers show the same address and pid.

    They have host networking and separate process namespaces.
    """
    m = members(2, 1)
    m.hello(b"w0", hello("worker", 0, pid=1))
    m.hello(b"w1", hello("worker", 1, pid=1))
    assert m.missing() == ["the server"]


def test_servers_in_containers_on_one_host_are_two():
    m = members(1, 2)
    m.hello(b"s0", hello("server", -1, 1, 2, pid=1, lanes=["h:5001"]))
    m.hello(b"s1", hello("server", -1, 1, 2, pid=1, lanes=["h:5002"]))
    assert m.missing() == ["worker 0"]


@pytest.mark.parametrize(
    "lacking",
    [
        "BYTEPS_KEY_HASH_FN",
        "BYTEPS_BUILT_IN_HASH_COEF",
        "BYTEPS_PARTITION_BYTES",
        "BYTEPS_LOCAL_SIZE",
    ],
)
def test_a_worker_without_an_option_is_refused_and_does_not_keep_the_place(lacking):
    m = members(1, 1)
    m.hello(b"s0", hello("server", -1, 1, 1))
    incomplete = {k: v for k, v in config(1, 1).items() if k != lacking}
    assert kinds(m.hello(b"x", hello("worker", 0, 1, 1, pid=7, config=incomplete))) == {
        b"x": "REFUSED"
    }
    assert kinds(m.hello(b"w0", hello("worker", 0, 1, 1))) == {b"w0": "WELCOME", b"s0": "WELCOME"}


@pytest.mark.parametrize(
    "changes",
    [
        {"BYTEPS_PARTITION_BYTES": 0},
        {"BYTEPS_PARTITION_BYTES": "x"},
        {"BYTEPS_BUILT_IN_HASH_COEF": "x"},
        {"BYTEPS_LOCAL_SIZE": 10**12},
    ],
    ids=str,
)
def test_a_worker_with_an_option_out_of_range_is_refused(little_memory, changes):
    m = members(1, 1)
    m.hello(b"s0", hello("server", -1, 1, 1))
    assert kinds(
        m.hello(b"x", hello("worker", 0, 1, 1, pid=7, config=config(1, 1, **changes)))
    ) == {b"x": "REFUSED"}
    assert m.state == "waiting"


@pytest.mark.parametrize(("size", "allowed"), [(16 << 20, True), ((16 << 20) + 1, False)])
def test_a_worker_whose_messages_are_too_large_for_a_server_is_refused(size, allowed):
    m = members(1, 1)
    m.hello(b"s0", hello("server", -1, 1, 1, config=config(1, 1, BYTEPS_PARTITION_BYTES=4096)))
    answers = dict(
        m.hello(b"w0", hello("worker", 0, 1, 1, config=config(1, 1, BYTEPS_PARTITION_BYTES=size)))
    )
    assert (answers[b"w0"]["type"] == "WELCOME") == allowed
    assert allowed or answers[b"w0"]["reason"].endswith(
        "with BYTEPS_PARTITION_BYTES=16777217 may send messages of 67108868 bytes, but a server"
        " accepts at most 67108864: set BYTEPS_PARTITION_BYTES on the servers, too"
    ), answers


def test_workers_and_servers_of_different_transports_are_refused():
    m = members(1, 1)
    m.hello(b"s0", hello("server", -1, 1, 1, config=config(1, 1, DMLC_ENABLE_RDMA="tcp")))
    other = config(1, 1, DMLC_ENABLE_RDMA="zeromq")
    answers = dict(m.hello(b"w0", hello("worker", 0, 1, 1, config=other)))
    assert (
        answers[b"w0"]["reason"]
        == "DMLC_ENABLE_RDMA=zeromq on this worker, tcp on a server: must be the same on all"
        " workers and servers"
    )


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.just([])
    | st.just({})
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["worker", "server"]),
    st.dictionaries(st.sampled_from(sorted(config(1, 1))), VALUES, max_size=3),
    st.integers(-1, 3),
)
def test_no_hello_message_breaks_a_gathering_job(role, changes, rank):
    """Any HELLO with valid fields is accepted or refused; the real nodes still get their job."""
    changes = {
        k: v
        for k, v in changes.items()
        if not (k == "BYTEPS_LOCAL_SIZE" and type(v) is int and v > 1000)
    }  # see above
    message = hello(role, rank, 1, 1, pid=7, config=config(1, 1, **changes))
    messages.check(message)
    m = members(1, 1)
    first = kinds(m.hello(b"x", message))
    if first == {b"x": "REFUSED"}:
        m.hello(b"s0", hello("server", -1, 1, 1))
        assert kinds(m.hello(b"w0", hello("worker", 0, 1, 1))) == {
            b"w0": "WELCOME",
            b"s0": "WELCOME",
        }
    elif (
        role == "worker"
        and m.size == 1
        and not disagreement("worker", message["config"], [("server", config(1, 1))])
    ):
        assert kinds(m.hello(b"s0", hello("server", -1, 1, 1))) == {
            b"x": "WELCOME",
            b"s0": "WELCOME",
        }
        assert kinds(m.declare(b"x", declare("t", [5]))) == {b"x": "PLACED"}


@pytest.mark.parametrize("nbytes", [2**50, 2**62])
def test_a_tensor_larger_than_any_memory_is_refused(little_memory, nbytes):
    """It is refused without running out of memory, as the scheduler serves other workers, too."""
    m = running(1, 1)
    assert kinds(m.declare(b"w0", {**declare("t", [1]), "nbytes": nbytes})) == {b"w0": "FAILED"}


def test_a_large_tensor_in_the_smallest_partitions_fits_a_message():
    """A gibibyte with BYTEPS_PARTITION_BYTES=4096.

    A message above MAX_BYTES would break the worker's connection to the scheduler.
    """
    smallest = Config({"BYTEPS_PARTITION_BYTES": "4096"}).partition_bytes
    places = Placement([1, 1], partition_bytes=smallest).place(3, 1 << 30)
    assert (
        len(messages.encode("PLACED", name="t", generation=0, places=[list(p) for p in places]))
        <= messages.MAX_BYTES
    )


def test_a_key_is_unique_however_many_partitions_a_tensor_has():
    assert key_of(0, 65536) != key_of(1, 0)


def test_a_job_that_is_done_stays_done():
    """SIGTERM while the last server is still leaving.

    All workers have left in good order, and the exit status says so.
    """
    m = running(1, 1)
    m.bye(b"w0", {"failure": ""})
    assert m.state == "done"
    m.abort("the scheduler was ended by SIGTERM")
    assert m.state == "done" and not m.failure


def test_the_first_failure_is_reported():
    m = running(2, 1)
    m.gone(b"w0", "its connection broke")
    m.abort("the scheduler was ended by SIGTERM")
    assert "worker 0" in m.failure
