"""What names mean on a worker: their declarations, from the first push_pull to the scheduler's
answer and to failures.

Which push_pulls are summed together follows from one rule. A *declaration* is (epoch, name,
generation), and has keys of its own on the servers; under a key the n-th push of each worker
belongs to one round. So what remains is to count alike on all workers after an error: see "After
an error" in docs/internals/failures.md.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from typing import Any

from bpsx._core import Core
from bpsx.compression.manager import Compressing
from bpsx.compression.spec import Compression, parse
from bpsx.core._handle import Handle
from bpsx.core._tensor import Declared
from bpsx.errors import Status
from bpsx.scheduler.client import Link
from bpsx.scheduler.messages import MOST_ITEMS
from bpsx.session.join import Joining
from bpsx.session.refusals import mine
from bpsx.telemetry.reporter import Reporter

log = logging.getLogger("bpsx.session.session")


def _stands_for(which: tuple[str, str], name: str) -> bool:
    """Whether ``which`` means ``name``: ("unnamed", verb); ("name", name); ("below", name), which
    stands for all that begin with it and a dot, too; or ("beginning", text).
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
    """The part of a session that knows names. The control thread hears; any thread declares."""

    _lock: threading.RLock
    _core: Core
    _link: Link | None
    _closed: bool
    _joining: Joining
    _order: dict[str, int]
    compressing: Compressing
    reporter: Reporter

    def _begin_declarations(self) -> None:
        self._settled = threading.Condition(self._lock)  # a declaration has been answered
        # a name as it was used last
        self._tensors: dict[str, Declared] = {}
        # every declaration by (name, generation)
        self._declared: dict[tuple[str, int], Declared] = {}
        # ... and by what it is, to find it again
        self._shapes: dict[tuple[str, tuple[int, ...], int, Compression | None], Declared] = {}
        self._generations: dict[str, int] = {}
        # what has been refused, for names that are seen later
        self._renewed: Counter[tuple[str, str]] = Counter()
        self._lost: dict[str, Declared] = {}  # the latest of a name that has failed
        self._epoch = 0
        # those that have begun push_pulls, or the session
        self._threads = {threading.get_ident()}
        # push_pulls asked for since the job began, or began anew
        self._calls = 0
        # what the scheduler knows to be under way here
        self._said: dict[tuple[str, int], tuple[int, bool]] = {}

    # ---- what the scheduler says (control thread)

    def _adopt(self, message: dict[str, Any]) -> None:
        """A tensor that this machine's root adds for its neighbours while it has joined; declared
        as if it had been pushed here.
        """
        name, generation, shape = message["name"], message["generation"], tuple(message["shape"])
        with self._lock:
            codec = parse(message["codec"]) if message["codec"] else None
            declared = Declared(generation, shape, message["dtype"], message["nbytes"], codec)
            self._declared[name, generation] = self._shapes[
                name, shape, message["dtype"], codec
            ] = declared
            self._generations[name] = max(self._generations.get(name, 0), generation + 1)
        self._placed(name, generation, message["places"])
        if declared.tensor is not None:
            self._core.know(declared.tensor)

    def _placed(self, name: str, generation: int, places: list[tuple[int, int, int, int]]) -> None:
        with self._lock:
            declared = self._declared.get((name, generation))
            if declared is None or declared.tensor is not None or declared.failed:
                return
            offsets = itertools.accumulate((place[3] for place in places), initial=0)
            parts = [
                (key, lane, slot, offset, length)
                for (key, lane, slot, length), offset in zip(places, offsets)
            ]
            self.reporter.name(name, (place[0] for place in places))
            on = declared.pending[0].gpu if declared.pending else None
            tensor = self.compressing.tensor(
                name, declared.dtype, parts, generation, declared.codec, on
            )
            for handle in declared.pending:
                self._core.release(handle, tensor)
            declared.pending = []
            # Only now may others take the short way in: rounds start in the order of submission.
            declared.tensor = tensor
            self._settled.notify_all()

    def _fail_declaration(self, name: str, generation: int, status: int, text: str) -> None:
        """Workers disagree about what a name means the n-th time: that time is over for all of
        them, and the next is the n + 1st.

        That is right where each has used the declaration once; else nobody can say which of the
        later ones belong together.
        """
        with self._lock:
            declared = self._declared.get((name, generation))
            if declared is None or declared.failed:
                return
            declared.failed = True  # the next push_pull like this one declares it anew
            self._lost[name] = declared
            pending, declared.pending = declared.pending, []
            self._settled.notify_all()
            if declared.uses > 0:
                self._core.asking.unheard.add(name)
            if declared.tensor is not None:
                self._core.fail_tensor(declared.tensor, status, text)
            used = declared.uses > 0 or self._joining.active
            if not used and self._generations[name] == generation + 1:
                # who has not used it yet is told when it does
                self._generations[name] = generation
            doubtful = declared.uses > 1 or (
                declared.tensor is not None and declared.tensor.rounds > 0
            )
        for handle in pending:
            self._core.end(handle, status, text)
        if doubtful:
            self._doubt(
                status,
                f"it has begun more than one push_pull of {name!r}, which fail for this: {text}",
            )

    def _reset(self, epoch: int, status: int, text: str) -> None:
        """No worker can go on: everything under way fails, on all, and all count from zero.

        A worker is at one place in its script then, and hears of this there; where that is not so,
        nobody can say which of the later push_pulls belong together.
        """
        asking = self._core.asking
        deserted, waits = asking.deserted, asking.all_wait(self._threads - {self._joining.thread})
        with self._lock:
            pending = [
                handle for declared in self._declared.values() for handle in declared.pending
            ]
            for declared in self._declared.values():
                declared.failed, declared.pending = True, []
                if declared.tensor is not None:
                    self._core.fail_tensor(declared.tensor, status, text)
            for known in (
                self._tensors,
                self._declared,
                self._shapes,
                self._generations,
                self._lost,
                self._said,
                self._renewed,
            ):
                known.clear()
            self._epoch, self._calls = epoch, 0
            self._settled.notify_all()
        for handle in pending:
            self._core.end(handle, status, text)
        if not waits or asking.deserted != deserted:
            self._doubt(status, f"not all of its threads were waiting when this happened: {text}")

    def _doubt(self, status: int, text: str) -> None:
        if self._link is not None:
            self._link.send("DOUBT", status=status, text=text[:60_000])

    def _end_pending(self, status: int, text: str) -> None:
        """End what waits for a placement that will not come any more."""
        with self._lock:
            pending = [h for d in self._declared.values() for h in d.pending]
            for declared in self._declared.values():
                declared.pending = []
                declared.failed = declared.failed or declared.tensor is None
            self._settled.notify_all()
        for handle in pending:
            self._core.end(handle, status, text)

    def _report_waiting(self, age_s: float) -> None:
        """Tell the scheduler what has changed in what is under way here for longer than ``age_s``
        seconds; once a second, as long as there is any.
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
        busy = self._core.asking.busy(self._threads - {self._joining.thread})
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

    # ---- the way in

    def refused(self, kind: str, name: str, count: int = 1) -> None:
        """``count`` push_pulls of names that ``(kind, name)`` stands for were refused before the
        session knew of them.

        They count as they do on workers where they were not refused.
        """
        if not self._joining.active:
            self._calls += count
            self._renew_all((kind, name))

    def _renew(self, name: str) -> None:
        """A push_pull of ``name`` was asked for, and has been refused or interrupted: perhaps it
        has begun, perhaps not.

        So the next one shall not meet what others have pushed for this one: it declares the name
        anew. Where all workers were refused, they go on together.
        """
        if mine.inside:
            mine.broken = True  # the verb around it renews all that it needs
        else:
            self._renew_all(("name", name))

    def _renew_all(self, which: tuple[str, str]) -> None:
        """Have the names that ``which`` stands for declared anew, also those that have not been
        seen yet.
        """
        with self._lock:
            if self._link is None or self._closed:
                return
            for name in [name for name in self._generations if _stands_for(which, name)]:
                self._tensors.pop(name, None)
                for known in [known for known in self._shapes if known[0] == name]:
                    del self._shapes[known]
                self._generations[name] += 1
            self._renewed[which] += 1

    def _generation(self, name: str) -> int:
        """The next one of ``name``. The lock is held."""
        if name not in self._generations:
            self._generations[name] = sum(
                count for which, count in self._renewed.items() if _stands_for(which, name)
            )
        return self._generations[name]

    def _first_sight(
        self,
        handle: Handle,
        name: str,
        shape: tuple[int, ...],
        dtype: int,
        nbytes: int,
        codec: Compression | None,
    ) -> None:
        """Find what a name means when it is not what it meant last, or declare it.

        The lock is held.
        """
        assert self._link is not None
        if self._closed or self._core.failed:
            self._core.end(
                handle,
                *(
                    (Status.SHUTDOWN, "bpsx was shut down")
                    if self._closed
                    else (self._core.status, self._core.failed)
                ),
            )
            return
        last = self._tensors.get(name)
        declared = self._shapes.get((name, shape, dtype, codec))
        if declared is not None and declared.failed:
            declared = None
        if last is not declared and last is not None and last.pending:
            # Another meaning of the name is on its way to the scheduler: rounds start in the order
            # of submission, so it goes first.
            while last.pending and not self._core.failed and not self._closed:
                self._settled.wait(1.0)
            self._first_sight(handle, name, shape, dtype, nbytes, codec)
            return
        lost = self._lost.pop(name, None)
        # Another thread was using it when it failed; or this push_pull, too, is from before the
        # script knew.
        if lost is not None and (lost.uses > 1 or name in self._core.asking.unheard):
            self._doubt(
                Status.MISMATCH,
                f"it has begun more than one push_pull of {name!r}, about which the workers"
                " disagree",
            )
        if declared is None:
            declared = self._declare(name, shape, dtype, nbytes, codec)
        self._tensors[name] = declared
        declared.codec = codec  # that object: it is compared by identity
        declared.uses += 1
        if declared.tensor is not None:
            self._core.release(handle, declared.tensor)
        else:
            declared.pending.append(handle)

    def _declare(
        self, name: str, shape: tuple[int, ...], dtype: int, nbytes: int, codec: Compression | None
    ) -> Declared:
        """Ask the scheduler for places. The lock is held."""
        assert self._link is not None
        generation = self._generation(name)
        self._generations[name] = generation + 1
        declared = Declared(generation, shape, dtype, nbytes, codec)
        self._declared[name, generation] = self._shapes[name, shape, dtype, codec] = declared
        self._order.setdefault(name, len(self._order))
        self._link.send(
            "DECLARE",
            name=name,
            generation=generation,
            nbytes=nbytes,
            dtype=dtype,
            shape=list(shape),
            codec=codec.text() if codec is not None else "",
            epoch=self._epoch,
        )
        return declared
