"""Registry of who exchanges tensors under which names: two live owners of one name would add up
what does not belong together."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from bpsx.errors import ConfigError
from bpsx.system.tracebacks import script_frame

# Re-entrant: the garbage collection, which may run in here, releases names.
_lock = threading.RLock()
_owners: dict[str, weakref.ref[Owner]] = {}
_ordinals: Counter[str] = Counter()  # how many owners of each kind have been numbered in _session
_session: weakref.ref[Any] | None = None


class Owner:
    """An optimizer, a module or a hook that exchanges tensors under names of its own, as long as it
    lives or until :meth:`release`.

    ``what``: its kind, for messages; the place in the user's code where it was made is added.
    Thread-safe.
    """

    def __init__(self, what: str) -> None:
        place = _place()
        self.what = f"{what} made at {place}" if place else what
        self.names: dict[str, int] = {}  # with the id of what is exchanged under each
        self.replaced_by = ""

    def refusal(self, name: str, other: Owner, same: bool) -> str:
        """Why ``other`` cannot have ``name``, which is this one's; empty if it can, and replaces
        this one. ``same``: for the same tensor."""
        return f"{name!r} is a name of the {self.what}, which is still alive"

    def replace(self, by: Owner) -> None:
        """Another one takes this one's names over: this one can exchange nothing any more."""
        self.replaced_by = by.what
        self.release()

    def check_current(self) -> None:
        """Raise :class:`ConfigError` if another one has taken the names over."""
        if self.replaced_by:
            raise ConfigError(
                f"the {self.what} cannot exchange anything any more: the {self.replaced_by} has "
                "taken over the same parameters under "
                "the same names; use that one, or give one of the two other names "
                "(named_parameters)"
            )

    def release(self) -> None:
        """Free the names. Idempotent."""
        with _lock:
            for name in self.names:
                if name in _owners and _owners[name]() is self:
                    del _owners[name]
            self.names = {}


def claim(owner: Owner, named: Mapping[str, object]) -> None:
    """Register names with what is exchanged under each. Raises :class:`ConfigError` if another live
    owner has one of them and cannot be replaced.

    Garbage frees its names first. Thread-safe.
    """
    with _lock:
        others = _others(owner, named)
        if any(_refusals(owner, named, others)):
            gc.collect()  # an owner in a cycle of references lives on until then
            others = _others(owner, named)
        for refusal in filter(None, _refusals(owner, named, others)):
            raise ConfigError(f"{owner.what}: {refusal}")
        for other in others.values():
            other.replace(owner)
        for name, thing in named.items():
            owner.names[name] = id(thing)
            _owners[name] = weakref.ref(owner)


def _refusals(owner: Owner, named: Mapping[str, object], others: Mapping[str, Owner]) -> list[str]:
    return [
        other.refusal(name, owner, other.names.get(name) == id(named[name]))
        for name, other in others.items()
    ]


def _others(owner: Owner, named: Mapping[str, object]) -> dict[str, Owner]:
    """Other live owners of some of the names, by the first name of each."""
    found: dict[int, tuple[str, Owner]] = {}
    for name in named:
        ref = _owners.get(name)
        other = ref() if ref is not None else None
        if other is not None and other is not owner:
            found.setdefault(id(other), (name, other))
    return dict(found.values())


def next_ordinal(session: object, kind: str, is_taken: Callable[[int], bool]) -> int:
    """The number, from 0, of an owner of ``kind`` whose names are generated, in the order in which
    they are made in a session: the same on all workers
    that make the same. ``is_taken``: whether a number is in use by an owner of an earlier session.
    Thread-safe."""
    global _session
    with _lock:
        if _session is None or _session() is not session:
            _session = weakref.ref(session)
            _ordinals.clear()
        while is_taken(_ordinals[kind]):
            _ordinals[kind] += 1
        _ordinals[kind] += 1
        return _ordinals[kind] - 1


def is_owned(name: str) -> bool:
    """Whether a live owner has ``name``. Thread-safe."""
    with _lock:
        ref = _owners.get(name)
        return ref is not None and ref() is not None


def _place() -> str:
    """File and line of the script that is running; empty if there is none."""
    frame, _ = script_frame()
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
