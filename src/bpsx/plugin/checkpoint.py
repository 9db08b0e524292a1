"""Compression state of one optimizer's gradients, for its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bpsx.plugin import adapter


def by_place(wires: Iterable[str]) -> dict[str, str]:
    """Return ``wires`` by place: their index, as text."""
    return {str(i): wire for i, wire in enumerate(wires)}


class Keeping:
    """Saves and loads the compression state of one optimizer's gradients.

    ``wires``: the gradients' names on the wire, by keys that the process that resumes has, too; the
    mapping may grow. Not thread-safe.
    """

    def __init__(self, wires: Mapping[str, str]) -> None:
        self._wires = wires
        self._waiting: dict[str, Any] = {}  # state of gradients that are not declared yet

    def save(self) -> dict[str, Any]:
        """Return the state by key. No gradient may be under way."""
        saved = adapter.session().compressing.save(self._wires.values())
        found = {key: saved[wire] for key, wire in self._wires.items() if wire in saved}
        return {**self._waiting, **found}

    def load(self, saved: Mapping[str, Any], declared: bool = True) -> None:
        """Continue with the state that :meth:`save` returned; gradients missing from it start anew.

        The state is restored now if gradients have been ``declared``, otherwise when they are.
        Raises as :meth:`bpsx.compression.manager.Compressing.restore`.
        """
        self._waiting = dict(saved)
        if declared:
            self.put_back()
            missing = [wire for key, wire in self._wires.items() if key not in saved]
            adapter.session().compressing.forget(missing)

    def put_back(self) -> None:
        """Restore the waiting state of gradients that have been declared."""
        ready = {
            wire: self._waiting.pop(key)
            for key, wire in self._wires.items()
            if key in self._waiting
        }
        if ready:
            adapter.session().compressing.restore(ready)
