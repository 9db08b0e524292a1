"""Which lanes of a job's servers this machine cannot reach, for ``bpsx-run top``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsx.transports.reach import Probe

_SECONDS = 3.0


class Lanes:
    """Tries each lane once, without waiting. For one thread."""

    def __init__(self) -> None:
        self._probes: dict[tuple[int, str], Probe] = {}  # by server and address

    def of(self, view: Mapping[str, Any]) -> list[str]:
        """The unreachable lanes of a scheduler's VIEW, as far as known, with the reason."""
        for node in view["nodes"]:
            for lane in (
                node["lanes"] if node["role"] == "server" and node["state"] != "left" else ()
            ):
                if (node["rank"], lane) not in self._probes:
                    self._probes[node["rank"], lane] = Probe(lane, _SECONDS)
        return [
            f"server {rank} at {lane} ({why})"
            for (rank, lane), probe in self._probes.items()
            if (why := probe.why_not())
        ]

    @property
    def pending(self) -> bool:
        """Whether a lane has not answered yet and may still do so."""
        return any(probe.pending for probe in self._probes.values())
