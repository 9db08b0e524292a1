"""Reads what a core or a lane writes about itself; see ``_recorder.pyx``."""

from collections.abc import Iterable
from typing import Any

def monotonic_ns() -> int:
    """The clock of trace records."""

class Watcher:
    """One core's or lane's trace records, debug prints and statistics. Any thread."""

    def __init__(
        self,
        who: str,
        *,
        workers: int = 0,
        show_time: bool = True,
        messages: bool = False,
        keys: bool = False,
        sample: int | None = None,
        window: tuple[int, int] | None = None,
        stages: Iterable[tuple[int, str]] = (),
    ) -> None:
        """``who``: the process, for prints; ``workers``: a lane's; ``messages``, ``keys``: what to
        print; ``sample``: the key whose values are printed, -1 for all; ``window``: (first, last)
        step to record; ``stages``: pairs (code, name).
        """
    def abi(self) -> Any:
        """A capsule named ``bpsx.Watch``."""
    def live(self, on: bool) -> None:
        """Begin or end to record every push_pull that starts from now on."""
    def close_window(self) -> None:
        """No more steps of the window are wanted."""
    def take(self) -> bytes:
        """The records written since the last call, 48 bytes each."""
    def names(self) -> list[tuple[int, str, int, int]]:
        """Keys that a lane has seen since the last call: [(key, name, dtype code, bytes)]."""
    @property
    def lost(self) -> int:
        """Records for which there was no room."""
    def stats(self) -> dict[str, int]:
        """A lane's statistics."""
    def late(self) -> list[tuple[int, int]]:
        """By rank: (rounds in which it pushed last, nanoseconds that they waited for it alone)."""
