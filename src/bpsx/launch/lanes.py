"""Finds the servers' lanes that this machine cannot reach, for ``bpsx-run top``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsx.launch.job_view import ENDED
from bpsx.transports.reach import Probe

_SECONDS = 3.0


class LaneProbes:
    """Probes each lane once, without blocking. Not thread-safe."""

    def __init__(self) -> None:
        self._probes: dict[tuple[int, str], Probe] = {}  # (server rank, address) -> probe

    def of(self, view: Mapping[str, Any]) -> list[str]:
        """The lanes of a scheduler's VIEW known to be unreachable so far, with the reason."""
        for node in view["nodes"]:
            for lane in (
                node["lanes"] if node["role"] == "server" and node["state"] not in ENDED else ()
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
        """Whether a probe is still running."""
        return any(probe.pending for probe in self._probes.values())
