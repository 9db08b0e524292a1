"""At most one side of a split network goes on; how the hub tells silence from an end."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from dataclasses import dataclass, field

import pytest

from bpsx.scheduler import ends
from bpsx.scheduler.quorum import Quorum, suffice


@pytest.mark.parametrize(
    ("here", "order", "enough"),
    [
        ([0], [0], True),
        ([0], [0, 1], True),
        ([1], [0, 1], False),
        ([1], [1, 0], True),
        ([1, 2], [0, 1, 2], True),
        ([0], [0, 1, 2], False),
        ([0, 3], [0, 1, 2, 3], True),
        ([1, 2], [0, 1, 2, 3], False),
        ([], [0, 1], False),
        ([], [], True),
    ],
)
def test_more_than_half_suffice_or_half_with_the_first(here, order, enough):
    assert suffice(here, order) is enough


def test_workers_whose_connections_have_ended_do_not_count():
    quorum = Quorum()
    quorum.confirm([0, 1, 2])
    assert quorum.holds([2]), "0 and 1 were killed"
    assert not quorum.holds([2], [1]), "0 was killed, 1 is silent: half, without the first of them"
    assert quorum.holds([1], [2])


def test_losses_that_all_others_know_of_are_over():
    quorum = Quorum()
    quorum.confirm(range(4))
    assert quorum.holds([0, 1, 2], [3])
    quorum.lose([3])
    assert not quorum.holds([1, 2], [0])
    quorum.confirm([0, 1, 2])
    assert quorum.holds([1, 2], [0])


@dataclass
class Life:
    """A job as its scheduler and workers know it."""

    orders: list[list[int]]  # by term
    known: dict[int, int]  # worker -> the latest term of which it knows
    quorum: Quorum = field(default_factory=Quorum)

    def begin_term(self, order: list[int], hear: set[int]) -> None:
        self.orders.append(order)
        for rank in order:
            if rank in hear:
                self.known[rank] = len(self.orders) - 1
        self.quorum.change(order)
        if all(self.known.get(rank) == len(self.orders) - 1 for rank in order):
            self.quorum.confirm(order)

    def lose_in_silence(self, rank: int, hear: set[int]) -> bool:
        """Let the scheduler miss a worker; returns whether the job goes on."""
        others = [r for r in self.orders[-1] if r != rank]
        if not others or not self.quorum.holds(others, [rank]):
            return False
        self.quorum.lose([rank])
        self.begin_term(others, hear)
        return True


def goes_on_elsewhere(life: Life, beyond: set[int]) -> bool:
    """Whether another scheduler lets the workers ``beyond`` go on."""
    term = max((life.known[rank] for rank in beyond), default=-1)
    return term >= 0 and suffice(beyond, life.orders[term])


@pytest.mark.parametrize("seed", range(20))
def test_a_split_network_has_one_job_at_most(seed):
    rng = random.Random(seed)
    for _ in range(500):
        n = rng.randint(1, 6)
        life = Life([list(range(n))], dict.fromkeys(range(n), 0))
        life.quorum.confirm(range(n))
        lost: set[int] = set()  # in silence, before the split; they may live
        going = True
        for _ in range(rng.randrange(6)):
            order = life.orders[-1]
            hear = {*order, n} if rng.random() < 0.7 else {r for r in order if rng.random() < 0.5}
            what = rng.choice(["dies", "enters", "silent"])
            if what == "dies" and len(order) > 1:
                dead = rng.choice(order)
                life.known.pop(dead)
                life.begin_term([r for r in order if r != dead], hear)
            elif what == "enters":
                life.known[n] = len(life.orders)
                life.begin_term([*order, n], hear | {n})
                n += 1
            elif what == "silent":
                rank = rng.choice(order)
                lost.add(rank)
                going = going and life.lose_in_silence(rank, hear - {rank})
                if not going:
                    break
        beyond = {r for r in life.known if r in lost or rng.random() < 0.5}
        cut = [r for r in life.orders[-1] if r in beyond]
        rng.shuffle(cut)
        for rank in cut:
            here = {r for r in life.orders[-1] if r not in beyond}
            going = going and life.lose_in_silence(rank, here)
        assert not (going and goes_on_elsewhere(life, beyond)), (life, beyond)


# ---- how connections end


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            yield client, server


def _await_end(server: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert server.recv(1) == b""


def test_a_connection_that_the_peer_has_closed_has_ended(pair):
    client, server = pair
    held, number = ends.Ends(), server.fileno()
    held.note(number, b"w0")
    client.close()
    _await_end(server)
    server.close()
    assert held.ended(number) == (b"w0", False)
    assert held.ended(number) is None


def test_a_connection_that_was_reset_has_ended(pair):
    client, server = pair
    held, number = ends.Ends(), server.fileno()
    held.note(number, b"w0")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    _await_end(server)
    server.close()
    assert held.ended(number) == (b"w0", False)


def test_a_connection_that_this_side_has_closed_was_silent(pair):
    client, server = pair
    held, number = ends.Ends(), server.fileno()
    held.note(number, b"w0")
    server.close()
    assert held.ended(number) == (b"w0", True)
    assert client.recv(1) == b"", "the duplicate is closed, too"


def test_a_connection_that_the_kernel_has_given_up_was_silent():
    assert ends._was_silent(7, 3) and not ends._was_silent(7, 0)
    assert not ends._was_silent(8, 3), "the peer's end has come, though something was lost before"


def test_a_descriptor_that_is_used_again_belongs_to_the_newest(pair):
    client, server = pair
    held, number = ends.Ends(), server.fileno()
    held.note(number, b"w0")
    held.note(number, b"w1")
    server.close()
    assert held.ended(number) == (b"w1", True)
    assert client.recv(1) == b""


def test_all_duplicates_can_be_closed(pair):
    client, server = pair
    held = ends.Ends()
    held.note(server.fileno(), b"w0")
    held.close()
    server.close()
    assert client.recv(1) == b""


def test_a_number_that_has_become_something_else_leaves_no_duplicate():
    number = os.eventfd(0)
    try:
        before = len(os.listdir("/proc/self/fd"))
        held = ends.Ends()
        held.note(number, b"w0")
        assert len(os.listdir("/proc/self/fd")) == before
        assert held.ended(number) == (b"w0", False)
    finally:
        os.close(number)
