"""States of a session and of its declarations, under any events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.config import Config
from bpsx.core._tensor import Declaration, Tensor
from bpsx.core.declared_state import DECLARED, DeclaredEvent, DeclaredState
from bpsx.errors import InternalError, PeerLeftError, Status
from bpsx.session.join import Joining
from bpsx.session.session import Session
from bpsx.session.states import CLOSING, HALTED, OVER, SESSION, Event, Life, Lifetime

ALL_JOINED = {"type": "ALL_JOINED", "last": 1}


def alone() -> Session:
    return Session(Config(role="worker", num_worker=1, num_server=0))


# ---- the session


def test_a_session_runs_ends_and_is_closed() -> None:
    ours, seen = alone(), []
    assert ours.state is Life.RUNNING
    unfinished = ours._unfinished
    ours._unfinished = lambda: seen.append(ours.state) or unfinished()  # type: ignore[method-assign,func-returns-value]
    ours.close()
    assert seen == [Life.ENDING] * 2 and ours.state is Life.CLOSED
    ours.close()
    assert ours.state is Life.CLOSED


def test_ctrl_c_while_a_session_ends_frees_it_all_the_same() -> None:
    ours = alone()

    def interrupted() -> int:
        raise KeyboardInterrupt

    ours._unfinished = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ours.close()
    assert ours.state is Life.CLOSED


def test_a_core_that_fails_by_itself_is_known_and_is_not_the_jobs_failure() -> None:
    ours = alone()
    ours._gpu_failed("NCCL cannot start")
    assert ours.state is Life.BROKEN and ours.failure == ""
    ours._peer_lost("worker 1 is gone")
    assert ours.state is Life.FAILED and ours.failure == "worker 1 is gone"
    ours.close()
    assert ours.state is Life.CLOSED


def test_a_core_that_the_driver_has_failed_is_seen_within_a_second() -> None:
    ours = alone()
    ours._core.fail(Status.MEMORY, "no memory")
    ours._tick()
    assert ours.state is Life.BROKEN
    ours.close()
    assert ours.failure == "no memory"


def test_a_message_out_of_place_names_itself_and_the_state() -> None:
    ours = alone()
    with pytest.raises(InternalError, match="a session in state 'running' .* 'all joined'"):
        ours._handle(ALL_JOINED)
    ours.close()


# ---- join()

#: What may happen while join() waits for push_pulls, and while it waits for other workers.
BEFORE = ["nothing", "interrupt", Event.JOB_FAILS, Event.CORE_FAILS, Event.CLOSE_CALLED]
DURING = ["all joined", "left", Event.JOB_FAILS, Event.CORE_FAILS, Event.CLOSE_CALLED]
BETWEEN = ["nothing", "all joined", Event.JOB_FAILS, Event.CORE_FAILS, Event.CLOSE_CALLED]


def test_after_an_interrupt_while_push_pulls_end_this_worker_goes_on() -> None:
    joining = begun()
    assert join(joining, "interrupt", "left") == "interrupted"
    assert joining._life.state is Life.RUNNING


def begun() -> Joining:
    life = Lifetime()
    life.move(Event.BEGUN)
    return Joining(life)


def join(joining: Joining, before: Any, during: Any) -> str:
    """Call join() once; returns how it ended."""
    life, sent = joining._life, []

    def unfinished() -> int:
        if before == "interrupt":
            return 1
        if before != "nothing":
            life.move(before)
        return 0

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    def send(kind: str) -> None:
        assert life.state is Life.JOINED, "the scheduler hears of it when this worker knows"
        sent.append(kind)
        happen(joining, during)

    try:
        last = joining.run(unfinished, interrupt, send)
    except KeyboardInterrupt:
        return "interrupted"
    except PeerLeftError:
        return "left"
    assert last in (-1, 1) and (last == -1 or sent == ["JOIN"])
    return "joined" if last == 1 else "over"


def happen(joining: Joining, what: Any) -> None:
    if what == "left":
        joining.hear({"type": "UNJOINED", "text": "worker 2 has left"})
    elif what == "all joined" and joining._life.state is not Life.RUNNING:
        joining.hear(ALL_JOINED)
    elif isinstance(what, Event):
        joining._life.move(what)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(BEFORE), st.sampled_from(DURING), st.sampled_from(BETWEEN)),
        max_size=6,
    )
)
def test_join_ends_as_its_state_says(calls: list[tuple[Any, Any, Any]]) -> None:
    joining = begun()
    life = joining._life
    for before, during, between in calls:
        if life.halted and before == "nothing":
            break  # JOIN was sent, and this join() would wait for a message
        over = life.state in OVER
        how = join(joining, before, during)
        assert how != "joined" or life.state is Life.RUNNING and not over
        assert how != "over" or life.state in OVER
        assert how != "left" or life.state is Life.JOINED
        assert life.state is not Life.JOINING, "JOINING lasts as long as a call"
        happen(joining, between)
        assert life.halted == (life.state in HALTED)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(Event), max_size=20))
def test_a_session_only_goes_forward(events: list[Event]) -> None:
    """After close() only the end follows; after a failure only close(). Nothing else is final."""
    life = Lifetime()
    for event in events:
        before = life.state
        try:
            life.move(event)
        except InternalError:
            assert life.state is before and event not in SESSION.rows[before]
            continue
        assert before not in CLOSING or life.state in CLOSING
        assert before is not Life.CLOSED or life.state is Life.CLOSED
        assert before not in OVER or life.state in OVER
    # What other threads may do at any time can be done in every state after the beginning.
    late = {Event.JOB_FAILS, Event.CORE_FAILS, Event.CLOSE_CALLED}
    assert life.state is Life.GATHERING or late <= set(SESSION.rows[life.state])


# ---- declarations


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(DeclaredEvent), max_size=12))
def test_only_a_placed_declaration_is_pushed_directly(events: list[DeclaredEvent]) -> None:
    declared, expected = Declaration(0, (4,), 3, 16), DeclaredState.ASKED
    tensor = declared.tensor = Tensor("x", 3, [(1, 0, 0, 0, 16)], b"")
    for event in events:
        if event in DECLARED.rows[expected]:
            declared.move(event)
            expected = DECLARED.rows[expected][event]
        else:
            with pytest.raises(InternalError, match="a declaration in state"):
                declared.move(event)
        assert declared.state is expected
        found = declared.take((4,), 3, None)
        assert found is (tensor if expected is DeclaredState.PLACED else None)
        assert declared.take((5,), 3, None) is None


def test_what_waits_at_a_last_count_is_never_out_of_join_s_sight() -> None:
    """join() and close() count what waits, then what the core has: each push_pull is in one."""
    declared, successor, seen = Declaration(0, (4,), 3, 16), Declaration(1, (4,), 3, 16), []
    successor.tensor = Tensor("x", 3, [(1, 0, 0, 0, 16)], b"")

    class Released:
        """A session as far as it takes part, whose core may be slow to take push_pulls."""

        class _core:
            unsettled = 0

            @classmethod
            def release(cls, handle: Any, tensor: Tensor) -> None:
                assert tensor is successor.tensor
                seen.append(Session._unfinished(Released))  # type: ignore[arg-type]
                cls.unsettled += 1
                seen.append(Session._unfinished(Released))  # type: ignore[arg-type]

        _declared = {("x", 0): declared, ("x", 1): successor}

    declared.pending = [object(), object()]  # type: ignore[list-item]
    Session._release_pending(Released, declared, successor)  # type: ignore[arg-type]
    assert min(seen) == 2 and Session._unfinished(Released) == 2  # type: ignore[arg-type]
    assert not declared.pending and successor.count == successor.uses == 2


def test_join_looks_at_the_core_last() -> None:
    """A push_pull that moves to the core between the two looks would otherwise count in neither."""
    order: list[str] = []

    class Looked:
        class _core:
            @property
            def unsettled(self) -> int:
                order.append("core")
                return 0

        class _Known(dict[str, Any]):
            def values(self) -> Any:
                order.append("waiting")
                return super().values()

        _declared = _Known()

    Looked._core = Looked._core()  # type: ignore[assignment,misc]
    assert Session._unfinished(Looked) == 0  # type: ignore[arg-type]
    assert order == ["waiting", "core"]
