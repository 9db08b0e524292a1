"""Registry of the owners of tensor names.

Two live owners of one name would add up tensors that do not belong together.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from bpsx.errors import ConfigError
from bpsx.system.tracebacks import script_frame

# Re-entrant: garbage collection may run while it is held, and releases names.
_lock = threading.RLock()
_owners: dict[str, weakref.ref[Owner]] = {}
# Owners that have an ordinal in _session, by kind.
_ordinals: Counter[str] = Counter()
_session: weakref.ref[Any] | None = None


class Owner:
    """An optimizer, a module or a hook that exchanges tensors under names of its own.

    It owns the names until it dies or until :meth:`release`. ``what``: its kind, for messages; the
    place in the user's code that made it is added. Thread-safe.
    """

    #: What a user may do instead, for messages.
    instead = "Use that one, or give one of the two different names (named_parameters)"

    def __init__(self, what: str) -> None:
        place = _place()
        self.what = f"{what} made at {place}" if place else what
        self.names: dict[str, int] = {}  # id of the object that is exchanged under each
        self.replaced_by = ""

    def refusal(self, name: str, other: Owner, same: bool) -> str:
        """Return why ``other`` cannot take ``name`` from this owner; empty if it may replace it.

        ``same``: whether both use the name for the same tensor.
        """
        return f"the name {name!r} belongs to the {self.what}, which is still alive"

    def replace(self, by: Owner) -> None:
        """Release the names to owner ``by``; from then on this owner cannot exchange anything."""
        self.replaced_by = by.what
        self.release()

    def check_current(self) -> None:
        """Raise :class:`ConfigError` if another owner has taken the names over."""
        if self.replaced_by:
            raise ConfigError(
                f"the {self.what} can no longer exchange anything: the {self.replaced_by} has "
                f"taken over the same parameters under the same names. {self.instead}"
            )

    def release(self) -> None:
        """Free the names. Idempotent."""
        with _lock:
            for name in self.names:
                if name in _owners and _owners[name]() is self:
                    del _owners[name]
            self.names = {}


def claim(owner: Owner, named: Mapping[str, object]) -> None:
    """Register the names in ``named``, each with the object that ``owner`` exchanges under it.

    A name that another owner holds triggers a garbage collection first, which frees the names of
    garbage. Raises :class:`ConfigError` if another live owner has one of the names and cannot be
    replaced. Thread-safe.
    """
    with _lock:
        others = _others(owner, named)
        if any(_refusals(owner, named, others)):
            gc.collect()  # an owner in a reference cycle lives until then
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
    """Other live owners of some of the names, each by the first name it owns."""
    found: dict[int, tuple[str, Owner]] = {}
    for name in named:
        ref = _owners.get(name)
        other = ref() if ref is not None else None
        if other is not None and other is not owner:
            found.setdefault(id(other), (name, other))
    return dict(found.values())


def next_ordinal(session: object, kind: str, is_taken: Callable[[int], bool]) -> int:
    """Return the number, from 0, of an owner of ``kind`` whose names are generated.

    Owners are numbered in the order in which a session makes them, so workers that make the same
    owners give them the same numbers. ``is_taken``: whether an owner of an earlier session uses a
    number. Thread-safe.
    """
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
    return owner_of(name) is not None


def owner_of(name: str) -> Owner | None:
    """Return the live owner of ``name``, if there is one. Thread-safe."""
    with _lock:
        ref = _owners.get(name)
        return ref() if ref is not None else None


def _place() -> str:
    """File and line of the running script; empty if there is none."""
    frame, _ = script_frame()
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
