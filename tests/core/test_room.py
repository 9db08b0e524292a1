"""What a worker's core hands to the transport, and when: by priority, credit and time on links."""

from __future__ import annotations

import time

import pytest

from bpsx.core._late_lanes import LateLanes
from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from core.cores import BIG, LONG, Rig, array, push_pull  # noqa: F401  (Rig is what the fixture makes)


def test_most_urgent_first_then_oldest(rig):
    # not started yet, so that the core sees all of them at once
    r = rig(credit=1, hold_done=True, start=False)
    order = [5, -1, 7, 5, 0]
    pushes = []
    tensors = [r.tensor(f"p{i}", BIG) for i in range(len(order))]
    handles = [
        push_pull(r.core, t, array(BIG), array(BIG), priority=p) for t, p in zip(tensors, order)
    ]
    r.core.start()
    seen = []
    for _ in order:
        (push,) = r.pushes(1)
        r.endpoint.complete()
        seen.append((push.priority, push.key))
        pushes.append(push)
    assert seen == sorted(seen, key=lambda s: (-s[0], s[1]))
    for p in pushes:
        r.answer(p, bytes(BIG))
    for h in handles:
        h.wait(60)


def test_credit_bounds_the_bytes_handed_over_and_returns_without_replies(rig):
    r = rig(credit=2 * BIG, hold_done=True)
    tensors = [r.tensor(f"c{i}", BIG) for i in range(5)]
    handles = [push_pull(r.core, t, array(BIG), array(BIG)) for t in tensors]
    pushes = r.pushes(2)
    assert r.lanes[0].sent(0.05) is None
    assert r.endpoint.complete() == 2
    pushes += r.pushes(2)
    assert r.lanes[0].sent(0.05) is None
    r.endpoint.complete()
    pushes += r.pushes(1)
    for p in pushes:
        r.answer(p, bytes(BIG))
    for h in handles:
        h.wait(60)


def test_lanes_of_a_server_share_the_limit_of_its_link(rig):
    # Lanes 0 and 2 belong to the first server.
    r = rig(lanes=4, servers=2, credit=100 * LONG, hold_done=True, ahead_ms=1e-6)
    handles, pushes = [], []

    def submit(name: str, lane: int, priority: int = 0) -> None:
        handles.append(
            push_pull(
                r.core, r.tensor(name, LONG, lane=lane), array(LONG), array(LONG), priority=priority
            )
        )

    # When this has been written out, the core knows that the link has a finite speed.
    submit("learn", 0)
    pushes += [(0, r.pushes(1)[0])]
    r.endpoint.complete()
    submit("plug", 0)
    pushes += [(0, r.pushes(1)[0])]
    for i, lane in enumerate((0, 2, 2, 0)):
        submit(f"s{i}", lane, priority=i)
    # One at a time, the most urgent of both lanes first.
    for lane, priority in ((0, 3), (2, 2), (2, 1), (0, 0)):
        assert r.lanes[0].sent(0.02) is None and r.lanes[2].sent(0.02) is None
        r.endpoint.complete()
        (push,) = r.pushes(1, lane)
        assert push.priority == priority
        pushes.append((lane, push))
    for lane, push in pushes:
        r.answer(push, bytes(LONG), lane)
    for h in handles:
        h.wait(60)


def test_all_servers_have_the_limit_of_the_slowest(rig):
    r = rig(lanes=2, servers=2, credit=100 * LONG, hold_done=True, ahead_ms=1e-6)
    handles, pushes = [], []

    def submit(name: str, lane: int) -> None:
        handles.append(push_pull(r.core, r.tensor(name, LONG, lane=lane), array(LONG), array(LONG)))

    def pushed(lane: int, n: int = 1) -> None:
        pushes.extend((lane, push) for push in r.pushes(n, lane))

    submit("learn", 0)  # measures how slow the first server's link is
    pushed(0)
    r.endpoint.complete()
    for i in range(3):
        submit(f"fast {i}", 1)
    # Nothing is under way to the slow server, so it does not limit the other.
    pushed(1, 3)
    submit("slow", 0)
    pushed(0)
    submit("other", 1)
    assert r.lanes[1].sent(0.05) is None
    r.endpoint.complete()
    pushed(1)
    for lane, push in pushes:
        r.answer(push, bytes(LONG), lane)
    for h in handles:
        h.wait(60)


@pytest.mark.parametrize(
    ("others", "beside", "room"), [(0, (), 2), (1, {1}, 2), (1, (), 1)], ids=str
)
def test_the_only_server_on_another_machine_has_twice_the_room(rig, others, beside, room):
    """Its answers leave by the link of this worker's pushes, and must not crowd them out."""
    size, seconds = 1_000_000, 0.9
    while True:  # until the core measures a pace at which this time has room for one, not for two
        r = rig(
            lanes=1 + others,
            servers=1 + others,
            beside=beside,
            credit=100 * size,
            hold_done=True,
            ahead_ms=1e3 * seconds,
        )
        if learn(r, 2 / 3 * seconds, size) < 0.95 * seconds:
            break
    handles = [
        push_pull(r.core, r.tensor(f"{i}", size), array(size), array(size)) for i in range(4)
    ]
    pushes = r.pushes(room)
    if room == 1:
        assert r.lanes[0].sent(0.05) is None
    while len(pushes) < len(handles):
        r.endpoint.complete()
        pushes += r.pushes(1)
    for push in pushes:
        r.answer(push, bytes(size))
    for h in handles:
        h.wait(60)


@pytest.mark.parametrize(
    ("servers", "trip", "room"),
    [(1, 0.0, 3), (2, 0.0, 1), (2, 0.01, 1), (2, 0.03, 2), (2, 1.0, 3)],
    ids=["one server", "two", "near ones", "farther ones", "far ones"],
)
def test_each_lane_may_have_a_partition_where_less_would_slow_the_link_down(
    rig, servers, trip, room
):
    """In 20 round trips the link takes 0.5, 1.5 or many partitions."""
    seconds = 0.4
    while True:  # until the core measures about this time for a partition
        r = rig(
            lanes=3 * servers,
            servers=servers,
            credit=100 * LONG,
            hold_done=True,
            ahead_ms=1e-6,
            trips=dict.fromkeys(range(servers), trip),
        )
        learned = learn(r, seconds)
        if learned < 1.3 * seconds:
            break
    check_room(r, list(range(0, 3 * servers, servers)), room)


def test_a_server_that_joins_may_be_far(rig):
    # Lanes 1 and 2 belong to the server that joins.
    r = rig(lanes=1, credit=100 * LONG, hold_done=True, ahead_ms=1e-6, elastic=True)
    r.lanes += [LoopbackEndpoint() for _ in range(2)]
    for i in (1, 2):
        r.endpoint.link(i, r.lanes[i], 0)
        r.lanes[i].link(0, r.endpoint, i)
    late = LateLanes(r.core)
    late.add(1, 2, beside=False)
    late.greet(1, ["h:1", "h:2"], b"secret", round_trip=1.0)
    learn(r, lane=1)
    check_room(r, [1, 2], 2)


def test_long_partitions_give_shorter_ones_no_more_room(rig):
    """Tensors may be cut anew or compressed. What counts is the number of lanes in use."""
    r = rig(lanes=3, credit=100 * LONG, hold_done=True, ahead_ms=1e-6)
    learn(r, size=8 * LONG)
    check_room(r, [0, 1, 2], 3)


def learn(r: Rig, seconds: float = 0, size: int = 2 * LONG, lane: int = 0) -> float:
    """Let the core measure that the link of a lane's server takes so long for a partition.

    Returns how long it took.
    """
    began = time.monotonic()
    handle = push_pull(r.core, r.tensor("learn", size, lane=lane), array(size), array(size))
    (push,) = r.pushes(1, lane)
    time.sleep(seconds)
    r.endpoint.complete()
    took = time.monotonic() - began
    r.answer(push, bytes(size), lane)
    handle.wait(60)
    return took


def check_room(r: Rig, lanes: list[int], room: int) -> None:
    """Check that these lanes, of one server, may have ``room`` partitions together."""
    size = 2 * LONG  # more than the least bound
    order = [*lanes, *lanes]
    handles = [
        push_pull(r.core, r.tensor(f"{i}", size, lane=lane), array(size), array(size))
        for i, lane in enumerate(order)
    ]
    pushes = [(lane, r.pushes(1, lane)[0]) for lane in order[:room]]
    assert all(r.lanes[lane].sent(0.02) is None for lane in lanes)
    for lane in order[room:]:
        r.endpoint.complete()
        pushes.append((lane, r.pushes(1, lane)[0]))
    r.endpoint.complete()
    for lane, push in pushes:
        r.answer(push, bytes(size), lane)
    for h in handles:
        h.wait(60)


def test_pushes_within_the_machine_wait_for_more_urgent_ones(rig):
    # Room for one partition at the first server, and for seven at the server on the same machine.
    r = rig(lanes=2, servers=2, credit=LONG, hold_done=True, start=False, beside={1})
    order = [(0, 9), (0, 5), (0, 3), (1, 7), (1, 5), (1, 4), (1, 1)]  # (lane, priority)
    sizes = [LONG, BIG]
    handles = [
        push_pull(
            r.core,
            r.tensor(f"t{i}", sizes[lane], lane=lane),
            array(sizes[lane]),
            array(sizes[lane]),
            priority=priority,
        )
        for i, (lane, priority) in enumerate(order)
    ]
    r.core.start()
    pushes = []
    # Of two with the same priority the older one goes first.
    for far, near in ((9, [7]), (5, [5, 4]), (3, [1])):
        found = [(0, r.pushes(1)[0]), *((1, push) for push in r.pushes(len(near), lane=1))]
        assert [push.priority for _, push in found] == [far, *near]
        assert r.lanes[0].sent(0.05) is None and r.lanes[1].sent(0) is None
        pushes += found
        r.endpoint.complete()
    for lane, push in pushes:
        r.answer(push, bytes(push.length), lane)
    for h in handles:
        h.wait(60)


@pytest.mark.parametrize("later", ["less urgent", "more urgent"])
def test_no_server_gets_far_ahead_of_one_that_has_no_room(rig, later):
    """It gets nothing less urgent than the second partition that waits for that one."""
    r = rig(lanes=2, servers=2, credit=LONG, hold_done=True, start=False)
    lanes = [0, 1, 0, 1, 0, 1, 1]  # from the most urgent partition to the least; 1 has room for all
    sizes = [LONG, LONG // 8]
    numbers = list(range(len(lanes)))
    handles = [
        push_pull(
            r.core,
            r.tensor(f"{i}", sizes[lanes[i]], lane=lanes[i]),
            array(sizes[lanes[i]]),
            array(sizes[lanes[i]]),
            priority=-i if later == "more urgent" else 0,
        )
        for i in (reversed(numbers) if later == "more urgent" else numbers)
    ]
    r.core.start()
    pushes = [(0, r.pushes(1)[0])]
    for n in (2, 2, 0):
        pushes += [(1, push) for push in r.pushes(n, lane=1)]
        assert r.lanes[1].sent(0.05) is None
        r.endpoint.complete()
        pushes += [(0, push) for push in r.pushes(1 if n else 0)]
    if later == "more urgent":
        for lane in (0, 1):
            found = [push.priority for at, push in pushes if at == lane]
            assert found == [-i for i in numbers if lanes[i] == lane]
    for lane, push in pushes:
        r.answer(push, bytes(push.length), lane)
    for h in handles:
        h.wait(60)


def test_a_small_partition_does_not_pass_a_large_urgent_one_on_another_lane_of_the_server(rig):
    # Lanes 0 and 2 belong to the first server.
    r = rig(lanes=3, servers=2, credit=100 * LONG, hold_done=True, ahead_ms=1e-6)
    handles = [push_pull(r.core, r.tensor("learn", LONG), array(LONG), array(LONG))]
    pushes = [(0, r.pushes(1)[0])]
    r.endpoint.complete()
    handles.append(push_pull(r.core, r.tensor("plug", LONG), array(LONG), array(LONG)))
    pushes.append((0, r.pushes(1)[0]))
    handles.append(
        push_pull(r.core, r.tensor("large", 2 * LONG), array(2 * LONG), array(2 * LONG), priority=1)
    )
    handles += [
        push_pull(r.core, r.tensor(f"small {i}", BIG, lane=2), array(BIG), array(BIG))
        for i in range(3)
    ]
    assert r.lanes[2].sent(0.05) is None  # although that lane has room
    r.endpoint.complete()
    pushes.append((0, r.pushes(1)[0]))
    assert pushes[-1][1].priority == 1 and r.lanes[2].sent(0.05) is None
    r.endpoint.complete()
    pushes += [(2, p) for p in r.pushes(3, lane=2)]
    for lane, push in pushes:
        r.answer(push, bytes(push.length), lane)
    for h in handles:
        h.wait(60)


def test_a_slow_server_gets_enough_bytes_to_show_that_it_became_faster(rig):
    r = rig(credit=100 * LONG, hold_done=True, ahead_ms=1e-6)
    handles = [push_pull(r.core, r.tensor("learn", LONG), array(LONG), array(LONG))]
    pushes = r.pushes(1)
    r.endpoint.complete()
    handles += [
        push_pull(r.core, r.tensor(f"{i}", LONG // 2), array(LONG // 2), array(LONG // 2))
        for i in range(4)
    ]
    # Each is too small to measure the speed; together they suffice.
    pushes += r.pushes(3)
    assert r.lanes[0].sent(0.05) is None
    r.endpoint.complete()
    pushes += r.pushes(1)
    for push in pushes:
        r.answer(push, bytes(push.length))
    for h in handles:
        h.wait(60)


def test_a_partition_larger_than_the_credit_goes_alone(rig):
    r = rig(credit=10)
    handle = push_pull(r.core, r.tensor("huge", BIG), array(BIG), array(BIG))
    (push,) = r.pushes(1)
    r.answer(push, bytes(BIG))
    handle.wait(60)
