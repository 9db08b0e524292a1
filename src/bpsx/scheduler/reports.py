"""Reports of nodes to a restarted scheduler: AGAIN and KNOWN, checked. Pure.

:func:`parse` and :meth:`Report.add` raise :class:`ValueError`, :class:`TypeError` or
:class:`KeyError` for messages whose contents are not as docs/internals/elastic-scheduler.md says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bpsx.planning.placement import MOST_SLOTS, Assignment, Moves, Yields

_MOST = 2**62


@dataclass
class Known:
    """A declaration that a worker knows. ``status``, ``failure``: of its error; 0: none."""

    nbytes: int
    dtype: int
    shape: tuple[int, ...]
    codec: str
    status: int
    failure: str
    places: list[Assignment] = field(default_factory=list)


@dataclass(frozen=True)
class Term:
    """A term as TERM told it.

    ``missed``: a sender had left before. ``dropped``, ``entered``: workers that were lost or have
    joined. ``living``: number of workers then. ``met``: it ended a meeting. ``leaving``: workers
    that leave in good order.
    """

    number: int
    moves: Moves
    text: str
    missed: bool
    yields: Yields
    dropped: list[int]
    living: int
    entered: list[int]
    met: bool
    leaving: list[int]


@dataclass
class Report:
    """A node's AGAIN and KNOWN messages, merged.

    ``failure``: why the job has failed, as far as the node knows. ``bye``: the failure in its BYE;
    None: it has not said BYE. ``parts``: number of KNOWN that have not come yet. ``broken``: lanes
    (worker) or ranks (server) to which it has lost the data connection. The other fields are those
    of AGAIN's ``state``: up to ``known`` of a worker, the others of a server, ``leaves`` of both.
    A worker that does not speak to servers has not heard of servers that came late.
    """

    ident: bytes
    role: str
    rank: int
    host: str
    pid: int
    lanes: list[str]
    config: dict[str, Any]
    size: int
    cleared: int
    failure: str | None
    bye: str | None
    parts: int
    broken: list[int]
    servers: list[tuple[str, int, list[str]]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    terms: list[Term] = field(default_factory=list)
    moved: int = 0
    epoch: int = 0
    reset: tuple[int, str] = (0, "")
    joins: int = 0
    last: int = -1
    joined: bool = False
    fresh: bool = False
    leaves: bool = False
    lost: bool = False
    key: int = -1
    slots: dict[int, int] = field(default_factory=dict)
    known: dict[tuple[str, int], Known] = field(default_factory=dict)
    marked: list[int] = field(default_factory=list)
    left: dict[int, tuple[str, int]] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    entered: dict[int, int] = field(default_factory=dict)
    heard: int = 0
    change: int = 0
    held: int = 0
    resized: int = 0

    def add(self, m: dict[str, Any]) -> None:
        """Take a KNOWN."""
        items = [_item(item) for item in m["items"]]
        for key, known in items:
            if before := self.known.get(key):
                before.places += known.places
            else:
                self.known[key] = known
        self.parts -= 1

    def renew(self, m: dict[str, Any]) -> None:
        """Take an ENDED."""
        self.broken = [_number(rank) for rank in m["broken"]]
        self._take_numbers(m)

    def _take_numbers(self, state: dict[str, Any]) -> None:
        self.key = _number(state["key"], -1)
        self.slots = {_number(lane): _number(count) for lane, count in state["slots"]}

    @property
    def name(self) -> str:
        """The node, as text for messages."""
        return f"{self.role} {self.rank} ({self.host}, pid {self.pid})"


def parse(ident: bytes, m: dict[str, Any]) -> Report:
    """Return what AGAIN ``m`` says; its outer fields have been checked."""
    state = m["state"]
    report = Report(
        ident,
        m["role"],
        m["rank"],
        m["host"],
        m["pid"],
        m["lanes"],
        m["config"],
        m["size"],
        m["cleared"],
        _text_or_none(m["failure"]),
        _text_or_none(m["bye"]),
        m["parts"],
        [_number(x) for x in state["broken"]],
    )
    if report.role == "server":
        report.marked = [_number(rank) for rank in state["joined"]]
        report.dropped = {_number(rank): _number(term) for rank, term in state["dropped"]}
        report.heard, report.leaves = _number(state["heard"]), bool(state["leaves"])
        report._take_numbers(state)
        report.entered = {_number(rank): _number(term) for rank, term in state["entered"]}
        report.left = {_number(r): (_text(host), _number(pid)) for r, host, pid in state["left"]}
        return report
    report.servers = [
        (_text(host), _number(pid), [_text(lane) for lane in lanes])
        for host, pid, lanes in state["servers"]
    ]
    report.gone = {_number(lane) for lane in state["gone"]}
    report.terms = [_term(term) for term in state["terms"]]
    if [term.number for term in report.terms] != list(range(1, len(report.terms) + 1)):
        raise ValueError("terms are not numbered from 1")
    report.moved, report.epoch = _number(state["moved"]), _number(state["epoch"])
    report.reset = (_number(state["reset"][0], -64), _text(state["reset"][1]))
    report.joins, report.last = _number(state["joins"]), _number(state["last"], -1)
    report.joined, report.fresh = bool(state["joined"]), bool(state["fresh"])
    report.leaves, report.lost = bool(state["leaves"]), bool(state["lost"])
    report.change, report.held, report.resized = (_number(number) for number in state["change"])
    report._take_numbers(state)
    return report


def _term(given: Sequence[Any]) -> Term:
    number, moves, text, missed, yields, dropped, living, entered, met, leaving = given
    return Term(
        _number(number),
        [(_number(lane), _targets(targets)) for lane, targets in moves],
        _text(text),
        bool(missed),
        [(_number(lane), _number(limit), _targets(targets)) for lane, limit, targets in yields],
        [_number(rank) for rank in dropped],
        _number(living),
        [_number(rank) for rank in entered],
        bool(met),
        [_number(rank) for rank in leaving],
    )


def _targets(given: Sequence[Any]) -> list[tuple[int, int]]:
    if not given:
        raise ValueError("a lane has no targets")
    return [(_number(to), _number(base, -MOST_SLOTS)) for to, base in given]


def _item(given: Sequence[Any]) -> tuple[tuple[str, int], Known]:
    name, generation, nbytes, dtype, shape, codec, places, status, text = given
    known = Known(
        _number(nbytes),
        _number(dtype),
        tuple(_number(n) for n in shape),
        _text(codec),
        _number(status, -64),
        _text(text),
        [
            Assignment(_number(key), _number(lane), _number(slot), _number(length))
            for key, lane, slot, length in places
        ],
    )
    return (_text(name), _number(generation)), known


def _number(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MOST:
        raise ValueError(f"{value!r} is not a number from {least}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)
