"""What compression keeps of an optimizer's gradients, for its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bpsx.plugin import adapter


def kept_by_place(wires: Sequence[str]) -> dict[str, Any]:
    """What :meth:`bpsx.compression.manager.Compressing.save` has of each, by its place, as text:
    names may be others in the process that goes on.
    """
    places = {wire: str(i) for i, wire in enumerate(wires)}
    return {
        places[wire]: state for wire, state in adapter.session().compressing.save(places).items()
    }


class Keeping:
    """Of the gradients of one optimizer, which are known by their place in ``wires``, a list of
    their names that may grow.

    Not thread-safe.
    """

    def __init__(self, wires: Sequence[str]) -> None:
        self._wires = wires
        self._waiting: dict[str, Any] = {}  # for gradients that are not known yet

    def save(self) -> dict[str, Any]:
        """What is kept, by place."""
        return {**self._waiting, **kept_by_place(self._wires)}

    def load(self, saved: Mapping[str, Any], declared: bool) -> None:
        """Go on with what :meth:`save` has given, now if gradients have been ``declared``, or when
        they are; what is not in it begins anew.
        """
        self._waiting = dict(saved)
        if declared:
            adapter.session().compressing.forget(
                [wire for i, wire in enumerate(self._wires) if str(i) not in saved]
            )
            self.put_back()

    def put_back(self) -> None:
        """Gradients have been declared: what waited for them is theirs."""
        ready = {
            wire: self._waiting.pop(str(i))
            for i, wire in enumerate(self._wires)
            if str(i) in self._waiting
        }
        if ready:
            adapter.session().compressing.restore(ready)
