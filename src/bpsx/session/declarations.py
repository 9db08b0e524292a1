"""Declarations of names on a worker, from the first push_pull to the scheduler's reply and to
failures.

One rule decides which push_pulls are summed together. A *declaration* is (epoch, name, generation)
and has its own keys on the servers. Until a join(), the n-th pushes of all workers under a key
belong to one round; a joined worker's count stands still (docs/internals/rounds-and-joins.md). So
after an error all workers must count alike: see "After an error" in docs/internals/failures.md.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from typing import Any

from bpsx._core import Core
from bpsx.compression.manager import Compressing
from bpsx.compression.spec import CompressionSpec, parse
from bpsx.core._handle import Handle
from bpsx.core._tensor import Declaration, Tensor
from bpsx.core.declared_state import DeclaredEvent, DeclaredState
from bpsx.dtypes import BY_CODE
from bpsx.errors import Status
from bpsx.planning.link_rate import LEAST
from bpsx.scheduler.client import SchedulerLink
from bpsx.scheduler.messages import MOST_ITEMS
from bpsx.session.decisions import Decisions
from bpsx.session.join import Joining
from bpsx.session.refusals import mine
from bpsx.session.states import CLOSING, Life, Lifetime
from bpsx.session.successors import Successors
from bpsx.session.told_names import Signature, packed
from bpsx.session.told_names import parse as parse_names
from bpsx.telemetry.reporter import Reporter

log = logging.getLogger("bpsx.session.session")
_UNANSWERED = (DeclaredState.ASKED, DeclaredState.RETIRING)
#: Most tensors in COUNTS, and characters of their names, so that it is no larger than the hub
#: accepts. The others keep their partitions.
_MOST_COUNTS, _LONGEST_NAME = 1 << 13, 160


def _stands_for(which: tuple[str, str], name: str) -> bool:
    """Return whether the pattern ``which`` includes ``name``.

    Patterns:
    - ("name", name);
    - ("below", name): the name itself and all names that begin with it and a dot;
    - ("beginning", text): all names that begin with the text;
    - ("unnamed", verb): the names of the verb's calls without a name.
    """
    kind, text = which
    if kind == "unnamed":
        return name.startswith(f"{text}.") and ".noname." in name
    if kind == "beginning":
        return name.startswith(text)
    return (
        name == text
        or kind == "below"
        and name.startswith(text if text.endswith(".") else f"{text}.")
    )


class Declarations:
    """The part of a session that knows names.

    The control thread handles the scheduler's messages; any thread may declare.
    """

    _core: Core
    _link: SchedulerLink | None
    _decisions: Decisions
    compressing: Compressing
    reporter: Reporter

    def __init__(self, order: dict[str, int]) -> None:
        """``order``: index of each name that has been declared, by an earlier session too."""
        self._life = Lifetime()
        self._lock = self._life.lock
        self._order = order
        self._joining = Joining(self._life)
        # Notified when a declaration has been placed or has failed.
        self._settled = threading.Condition(self._lock)
        # Declaration that each name used last.
        self._latest: dict[str, Declaration] = {}
        # Every declaration by (name, generation).
        self._declared: dict[tuple[str, int], Declaration] = {}
        # By (name, shape, dtype code, compression): asked and placed declarations, and failed ones
        # until the name's next push_pull.
        self._by_signature: dict[
            tuple[str, tuple[int, ...], int, CompressionSpec | None], Declaration
        ] = {}
        self._generations: dict[str, int] = {}  # next generation of each name
        # Declarations of other workers that this one, which has joined, has not made yet.
        self._told: dict[Signature, int] = {}
        # Refusals by the pattern of their names; they also apply to names that are seen later.
        self._renewed: Counter[tuple[str, str]] = Counter()
        self._failed: dict[str, Declaration] = {}  # latest failed declaration of each name
        self._epoch = 0
        # Threads that have begun push_pulls, and the one that has begun the session.
        self._threads = {threading.get_ident()}
        # Push_pulls that the script has asked for since the last stall or join.
        self._calls = 0
        # Push_pulls in progress as last reported: (name, generation) -> (round, is waited for).
        self._said: dict[tuple[str, int], tuple[int, bool]] = {}
        self._successors = Successors()

    # ---- names of workers that have joined

    def _names_for_newcomers(self) -> str:
        """The names with which this worker goes on, as text. The caller holds the lock."""
        current = {
            (name, shape, dtype, codec.text() if codec is not None else ""): declared.generation
            for (name, shape, dtype, codec), declared in self._by_signature.items()
            if declared.state is not DeclaredState.FAILED
        }
        return packed({**self._told, **current}, self._generations, self._renewed)

    def _adopt_names(self, text: str) -> None:
        """Go on with the names of another worker."""
        told = parse_names(text)
        self._told, self._renewed = told.current, told.renewed
        self._generations.update(told.following)

    # ---- messages of the scheduler (control thread)

    def _adopt(self, message: dict[str, Any]) -> None:
        """On a root that has joined: add a tensor that the machine's other processes push.

        The tensor is declared as if it had been pushed here.
        """
        name, generation, shape = message["name"], message["generation"], tuple(message["shape"])
        with self._lock:
            codec = parse(message["codec"]) if message["codec"] else None
            declared = Declaration(generation, shape, message["dtype"], message["nbytes"], codec)
            self._declared[name, generation] = self._by_signature[
                name, shape, message["dtype"], codec
            ] = declared
            self._generations[name] = max(self._generations.get(name, 0), generation + 1)
        self._placed(name, generation, message["places"])
        if declared.tensor is not None:
            self._core.adopt(declared.tensor)

    def _placed(self, name: str, generation: int, places: list[tuple[int, int, int, int]]) -> None:
        """Give a declaration its core tensor, and submit the handles that waited for it.

        ``places``: (key, lane, slot, bytes) of each partition.
        """
        with self._lock:
            self._decisions.place((name, generation), places)
            declared = self._declared.get((name, generation))
            if declared is None or declared.state not in _UNANSWERED:
                return
            on = declared.pending[0].gpu if declared.pending else None
            tensor = self._make_tensor(name, declared, places, on)
            for handle in declared.pending:
                self._core.release(handle, tensor)
            declared.pending = []
            declared.tensor = tensor
            # Change the state last: rounds start in the order of submission. Only now may other
            # threads submit directly.
            declared.move(DeclaredEvent.PLACED)
            self._settled.notify_all()

    def _make_tensor(
        self,
        name: str,
        declared: Declaration,
        places: list[tuple[int, int, int, int]],
        on: Any = None,
    ) -> Tensor:
        """Return the core's tensor of a declaration that has got its places.

        ``on``: the GPU of its first push_pull, or None.
        """
        offsets = itertools.accumulate((place[3] for place in places), initial=0)
        parts = [
            (key, lane, slot, offset, length)
            for (key, lane, slot, length), offset in zip(places, offsets)
        ]
        self.reporter.name(
            name,
            (place[0] for place in places),
            shape=declared.shape,
            dtype=BY_CODE[declared.dtype].name,
            compression=declared.codec.text() if declared.codec is not None else "",
        )
        return self.compressing.tensor(
            name, declared.dtype, parts, declared.generation, declared.codec, declared.shape, on
        )

    def _fail_declaration(self, name: str, generation: int, status: int, text: str) -> None:
        """Fail a generation of a name about whose declaration the workers disagree.

        That generation is over on all workers; the next push_pull has the next generation. Going on
        is safe only if each worker has used the failed generation once. Otherwise it is unknown
        which of the later push_pulls belong together, and the job ends.
        """
        with self._lock:
            declared = self._declared.get((name, generation))
            if declared is None or declared.state is DeclaredState.FAILED:
                return
            declared.move(DeclaredEvent.DISPUTED)  # the next push_pull declares the name anew
            self._successors.forget(declared)
            self._decisions.fail((name, generation), status, text)
            self._failed[name] = declared
            pending, declared.pending = declared.pending, []
            self._settled.notify_all()
            if declared.uses > 0:
                self._core.waiters.unraised_names.add(name)
            if declared.tensor is not None:
                self._core.fail_tensor(declared.tensor, status, text)
            # Whether this worker's script gets the error. In join() it makes no push_pulls.
            used = declared.uses > 0 or self._life.halted
            if not used and self._generations[name] == generation + 1:
                # A worker that has not used it yet gets the error when it does.
                self._generations[name] = generation
            # Before a thread can declare the next generation: no round of it may complete.
            if declared.uses > 1 or (declared.tensor is not None and declared.tensor.rounds > 0):
                self._doubt(
                    status,
                    f"it has started more than one push_pull of {name!r}, and all of them fail"
                    f" because of this error: {text}",
                )
        for handle in pending:
            self._core.end(handle, status, text)

    def _reset(self, epoch: int, status: int, text: str) -> None:
        """Begin a new epoch: no worker could go on.

        Everything in progress fails on all workers, and all count from zero. All workers must be at
        the same point of the script and get the error there. Otherwise it is unknown which of the
        later push_pulls belong together, and the job ends.
        """

        def doubtful() -> bool:
            return not waits or waiters.abandoned_waits != abandoned

        waiters = self._core.waiters
        # Read them before failing anything, because a failure ends the waits.
        abandoned, waits = (
            waiters.abandoned_waits,
            waiters.all_wait(self._threads - {self._joining.thread}),
        )
        with self._lock:
            pending = [
                handle for declared in self._declared.values() for handle in declared.pending
            ]
            for declared in self._declared.values():
                declared.move(DeclaredEvent.RESET)
                declared.pending = []
                if declared.tensor is not None:
                    self._core.fail_tensor(declared.tensor, status, text)
            for known in (
                self._latest,
                self._declared,
                self._by_signature,
                self._generations,
                self._failed,
                self._said,
                self._renewed,
                self._told,
                self._successors,
            ):
                known.clear()
            self._epoch, self._calls = epoch, 0
            self._decisions.begin_epoch(status, text)
            reason = f"some of its threads were not waiting when this happened: {text}"
            # Before a thread can declare a tensor of the new epoch: no round of it may complete.
            if doubted := doubtful():
                self._doubt(status, reason)
            self._settled.notify_all()
        for handle in pending:
            self._core.end(handle, status, text)
        if not doubted and doubtful():
            self._doubt(status, reason)

    def _doubt(self, status: int, text: str) -> None:
        """End the job: this worker cannot tell which later push_pulls belong together.

        The scheduler handles what this worker has sent before, a declaration for instance, first.
        """
        if self._link is not None:
            self._decisions.doubt = (status, text[:60_000])
            self._link.send("DOUBT", status=status, text=text[:60_000])

    def _end_pending(self, status: int, text: str) -> None:
        """End the handles that wait for a placement, which will not come any more."""
        with self._lock:
            pending = [h for d in self._declared.values() for h in d.pending]
            for declared in self._declared.values():
                declared.move(DeclaredEvent.SESSION_ENDS)
                declared.pending = []
            self._settled.notify_all()
        for handle in pending:
            self._core.end(handle, status, text)

    def _report_waiting(self, age_s: float) -> None:
        """Tell the scheduler which push_pulls have been in progress for over ``age_s`` seconds.

        Called once a second; it sends what has changed, as long as there is any such push_pull.
        """
        assert self._link is not None
        waiting = self._core.waiting(age_s)
        if not waiting and not self._said:
            return
        with self._lock:
            now = {
                (name, generation): (round_, waited >= 0)
                for name, generation, round_, _, waited in waiting
            }
            new = [
                [name, generation, round_, round(seconds, 1), round(waited, 1)]
                for name, generation, round_, seconds, waited in waiting
                if self._said.get((name, generation)) != (round_, waited >= 0)
            ]
            over = [list(key) for key in self._said if key not in now]
            self._said, epoch = now, self._epoch
        busy = self._core.waiters.busy(self._threads - {self._joining.thread})
        end = max(len(new), len(over), 1)
        for at in range(0, end, MOST_ITEMS):
            self._link.send(
                "WAITING",
                new=new[at : at + MOST_ITEMS],
                over=over[at : at + MOST_ITEMS],
                busy=busy,
                epoch=epoch,
                calls=self._calls,
                last=at + MOST_ITEMS >= end,
            )

    # ---- partitions of another size (control thread)

    def _resize(self, message: dict[str, Any]) -> None:
        """Handle COUNT, CHANGE, HOLD or DROP."""
        kind = message["type"]
        if kind == "COUNT":
            self._tell_counts(message)
        elif kind == "CHANGE":
            self._change(message)
        elif kind == "HOLD":
            self._hold(message["number"], message["size"])
        else:
            self._drop(message["number"])

    def _tell_counts(self, message: dict[str, Any]) -> None:
        """Handle COUNT: tell how many push_pulls of each tensor have begun."""
        assert self._link is not None
        with self._lock:
            items = [
                [name, declared.generation, declared.count]
                for (name, *_), declared in self._by_signature.items()
                if declared.state is DeclaredState.PLACED
                and declared.last < 0
                and declared.codec is None
                and declared.nbytes > LEAST
                and len(name) <= _LONGEST_NAME
            ]
            epoch = self._epoch
        self._link.send("COUNTS", number=message["number"], epoch=epoch, items=items[:_MOST_COUNTS])

    def _change(self, message: dict[str, Any]) -> None:
        """Handle CHANGE: note last counts and successors, unless a count has passed its last."""
        assert self._link is not None
        number, items = message["number"], message["items"]
        with self._lock:
            self._decisions.change = number
            fits = not self._life.halted and all(
                self._may_end(name, old, last) for name, old, last, *_ in items
            )
            if fits:
                for name, old, _, new, places in items:
                    self._prepare_successor(name, old, new, places)
                # In one step each: other threads count push_pulls without the lock.
                fits = all(self._declared[name, n].bound(last) for name, n, last, *_ in items)
            if not fits:
                self._forget_successors()
        self._link.send("TAKEN", number=number, fits=fits)

    def _may_end(self, name: str, generation: int, last: int) -> bool:
        """Whether a declaration can end after so many push_pulls. The caller holds the lock.

        Not if there is none, if it ends anyway, or if more push_pulls have begun.
        """
        declared = self._declared.get((name, generation))
        return (
            declared is not None
            and declared.state is DeclaredState.PLACED
            and declared.last < 0
            and declared.count <= last
        )

    def _prepare_successor(self, name: str, old: int, new: int, places: list[Any]) -> None:
        """Make a declaration's successor. The caller holds the lock."""
        declared = self._declared[name, old]
        successor = Declaration(
            new, declared.shape, declared.dtype, declared.nbytes, declared.codec
        )
        self._declared[name, new] = successor
        self._decisions.place((name, new), places)
        successor.tensor = self._make_tensor(name, successor, places)
        successor.move(DeclaredEvent.PLACED)
        self._successors.close(name, declared, successor)

    def _forget_successors(self) -> None:
        """Go on with the declarations of a change that is off. The caller holds the lock."""
        for name, declared, successor in self._successors.drop():
            self._release_pending(declared, declared)
            declared.last = -1
            del self._declared[name, successor.generation]
            self._decisions.forget((name, successor.generation))

    def _hold(self, number: int, size: int) -> None:
        """Handle HOLD: all workers have noted the last counts of a change to ``size`` bytes."""
        with self._lock:
            if number != self._decisions.change or number == self._decisions.held:
                return
            self._decisions.held, self._decisions.size = number, size
            for name, declared, successor in self._successors.hold():
                if declared.pending:
                    self._succeed(name, declared, successor)
            self._settled.notify_all()

    def _drop(self, number: int) -> None:
        """Handle DROP: a change is off."""
        with self._lock:
            if number != self._decisions.change or number == self._decisions.held:
                return
            self._forget_successors()
            self._settled.notify_all()

    def _succeed(self, name: str, declared: Declaration, successor: Declaration) -> None:
        """Go on with a declaration's successor. The caller holds the lock."""
        self._successors.forget(declared)
        successor.codec = declared.codec
        self._release_pending(declared, successor)
        if declared.state is DeclaredState.PLACED:
            declared.move(DeclaredEvent.ENDED)
        signature = name, declared.shape, declared.dtype, declared.codec
        if self._by_signature.get(signature) is declared:
            self._by_signature[signature] = successor
        # Last: push_pulls start in the order of submission. Only now may other threads begin some
        # without the lock.
        if self._latest.get(name) is declared:
            self._latest[name] = successor

    def _release_pending(self, declared: Declaration, with_: Declaration) -> None:
        """Begin the push_pulls that wait at a last count. The caller holds the lock.

        ``with_``: the declaration with which they begin, which no other thread can use yet.
        """
        for handle in declared.pending:
            with_.uses += 1
            with_.count += 1
            assert with_.tensor is not None
            self._core.release(handle, with_.tensor)
        declared.pending = []  # only now: join() waits for all that have not ended

    def _begin_counts(self) -> None:
        """Count from zero, as all workers do: closed declarations end here."""
        with self._lock:
            for name, declared, successor in self._successors.held():
                self._succeed(name, declared, successor)
            for declared in self._declared.values():
                declared.count = 0

    # ---- declaring (any thread)

    def count_refused(self, kind: str, name: str, count: int = 1) -> None:
        """Count ``count`` push_pulls that were refused before the session knew of them.

        ``(kind, name)`` is the pattern of their names. They count as on workers where they were not
        refused.
        """
        if not self._life.halted:
            self._calls += count
            self._renew_all((kind, name))

    def _renew(self, name: str) -> None:
        """Have ``name`` declared anew after one of its push_pulls was refused or interrupted.

        That push_pull may have begun or not. So the next one must not be summed with what other
        workers have pushed for this one. Where all workers were refused, they go on together.
        """
        if mine.inside:
            mine.broken = True  # the outermost verb renews all names that it uses
        else:
            self._renew_all(("name", name))

    def _renew_all(self, which: tuple[str, str]) -> None:
        """Have all names that the pattern ``which`` includes declared anew, including names not yet
        seen.
        """
        with self._lock:
            if self._link is None or self._life.state in CLOSING:
                return
            for name in [name for name in self._generations if _stands_for(which, name)]:
                self._latest.pop(name, None)
                for known in [known for known in self._by_signature if known[0] == name]:
                    self._by_signature.pop(known).move(DeclaredEvent.CALL_REFUSED)
                self._generations[name] += 1
                for signature in [known for known in self._told if known[0] == name]:
                    del self._told[signature]
            self._renewed[which] += 1

    def _generation(self, name: str) -> int:
        """Return the next generation of ``name``. The caller holds the lock."""
        if name not in self._generations:
            self._generations[name] = sum(
                count for which, count in self._renewed.items() if _stands_for(which, name)
            )
        return self._generations[name]

    def _submit_slow(
        self,
        handle: Handle,
        name: str,
        shape: tuple[int, ...],
        dtype: int,
        nbytes: int,
        codec: CompressionSpec | None,
    ) -> None:
        """Submit ``handle`` where :meth:`Session.submit`'s fast path has found no placed tensor.

        Finds or makes its declaration, then hands the handle to the core, or keeps it in
        ``pending`` until PLACED. The caller holds the lock. The wait for another declaration of the
        name releases it.
        """
        assert self._link is not None
        if self._life.state in CLOSING:
            self._core.end(handle, Status.SHUTDOWN, "bpsx was shut down")
            return
        if self._core.failed:
            self._core.end(handle, self._core.status, self._core.failed)
            return
        last = self._latest.get(name)
        declared = self._by_signature.get((name, shape, dtype, codec))
        if declared is not None and declared.state is DeclaredState.FAILED:
            declared = None
        if last is not declared and last is not None and last.pending:
            # The name's previous declaration is not placed yet. Rounds start in the order of
            # submission, so it goes first.
            try:
                while last.pending and not self._core.failed and self._life.state not in CLOSING:
                    self._settled.wait(1.0)
            except BaseException:  # a signal's handler has raised
                self._core.end(handle, Status.SHUTDOWN, "interrupted before it had begun")
                raise
            self._submit_slow(handle, name, shape, dtype, nbytes, codec)
            return
        failed = self._failed.pop(name, None)
        # Another thread was using the declaration when it failed, or the script has called
        # push_pull again before the first error was raised.
        if failed is not None and (failed.uses > 1 or name in self._core.waiters.unraised_names):
            self._doubt(
                Status.MISMATCH,
                f"it has started more than one push_pull of {name!r}, about which the workers"
                " disagree",
            )
        if declared is None:
            declared = self._request_placement(name, shape, dtype, nbytes, codec)
        declared.codec = codec  # later calls compare this object by identity
        counted = declared.count_use()
        if not counted and (successor := self._successors.follow(declared)) is not None:
            self._succeed(name, declared, successor)
            declared, counted = successor, successor.count_use()
        self._latest[name] = declared
        if declared.tensor is not None and counted:
            self._core.release(handle, declared.tensor)
        else:  # it is not placed, or it has reached its last count and others have yet to note that
            declared.pending.append(handle)

    def _request_placement(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: int,
        nbytes: int,
        codec: CompressionSpec | None,
    ) -> Declaration:
        """Ask the scheduler for a tensor's keys, lanes and slots. The caller holds the lock."""
        assert self._link is not None
        text = codec.text() if codec is not None else ""
        generation = self._told.pop((name, shape, dtype, text), -1)
        if generation < 0:
            generation = self._generation(name)
            self._generations[name] = generation + 1
        declared = Declaration(generation, shape, dtype, nbytes, codec)
        self._declared[name, generation] = self._by_signature[name, shape, dtype, codec] = declared
        self._order.setdefault(name, len(self._order))
        self._send_declare(name, declared)
        return declared

    def _send_declare(self, name: str, declared: Declaration) -> None:
        """Send DECLARE. The caller holds the lock."""
        assert self._link is not None
        codec = declared.codec
        self._link.send(
            "DECLARE",
            name=name,
            generation=declared.generation,
            nbytes=declared.nbytes,
            dtype=declared.dtype,
            shape=list(declared.shape),
            codec=codec.text() if codec is not None else "",
            pieces=self.compressing.pieces(codec, declared.dtype, declared.shape),
            epoch=self._epoch,
        )

    # ---- another scheduler (control thread)

    def _send_unanswered(self) -> None:
        """Send again what the scheduler before may not have answered.

        All of it may arrive twice.
        """
        link, decisions = self._link, self._decisions
        assert link is not None
        with self._lock:
            self._said.clear()  # WAITING sends differences
            for (name, _), declared in self._declared.items():
                if declared.state in _UNANSWERED:
                    self._send_declare(name, declared)
            if self._life.state is Life.JOINED:
                link.send("JOIN", generation=decisions.joins)
        if decisions.moved[0]:
            term, partitions, again = decisions.moved
            link.send("MOVED", term=term, partitions=partitions, again=again)
        if decisions.doubt is not None:
            link.send("DOUBT", status=decisions.doubt[0], text=decisions.doubt[1])
