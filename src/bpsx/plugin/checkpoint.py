"""Compression state of one optimizer's gradients, for its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bpsx.plugin import adapter


def kept_by_place(wires: Sequence[str]) -> dict[str, Any]:
    """Return the result of :meth:`bpsx.compression.manager.Compressing.save`, keyed by place.

    A gradient's place is its index in ``wires``, as text. The process that resumes may have other
    names.
    """
    places = {wire: str(i) for i, wire in enumerate(wires)}
    return {
        places[wire]: state for wire, state in adapter.session().compressing.save(places).items()
    }


class Keeping:
    """Saves and loads the compression state of one optimizer's gradients.

    A gradient is identified by its place in ``wires``, a list of the gradients' names that may
    grow. Not thread-safe.
    """

    def __init__(self, wires: Sequence[str]) -> None:
        self._wires = wires
        self._waiting: dict[str, Any] = {}  # state of gradients that are not declared yet

    def save(self) -> dict[str, Any]:
        """Return the state, keyed by place."""
        return {**self._waiting, **kept_by_place(self._wires)}

    def load(self, saved: Mapping[str, Any], declared: bool) -> None:
        """Continue with the state that :meth:`save` returned; gradients missing from it start anew.

        The state is restored now if gradients have been ``declared``, otherwise when they are.
        """
        self._waiting = dict(saved)
        if declared:
            adapter.session().compressing.forget(
                [wire for i, wire in enumerate(self._wires) if str(i) not in saved]
            )
            self.put_back()

    def put_back(self) -> None:
        """Restore the waiting state of gradients that have been declared."""
        ready = {
            wire: self._waiting.pop(str(i))
            for i, wire in enumerate(self._wires)
            if str(i) in self._waiting
        }
        if ready:
            adapter.session().compressing.restore(ready)
