"""Reads the trace records and statistics of a core or a lane; see ``_recorder.pyx``."""

from collections.abc import Iterable
from typing import Any

def monotonic_ns() -> int:
    """The clock of trace records, in ns."""

class Watcher:
    """Trace records, debug prints and statistics of one core or lane. Thread-safe."""

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
        """``who``: name of the process, for prints. ``workers``: number of workers, for a lane.

        ``messages``, ``keys``: what to print. ``sample``: key whose values are printed, -1 for all.
        ``window``: (first, last) step to record. ``stages``: pairs (code, name).
        """
    def abi(self) -> Any:
        """A capsule named ``bpsx.Watch``."""
    def live(self, on: bool) -> None:
        """Start or stop recording every push_pull that begins from now on."""
    def close_window(self) -> None:
        """Stop recording steps of the window."""
    def take(self) -> bytes:
        """The records written since the last call, 48 bytes each."""
    def names(self) -> list[tuple[int, str, int, int]]:
        """Keys that a lane has seen since the last call: [(key, name, dtype code, bytes)]."""
    @property
    def lost(self) -> int:
        """Number of records dropped for lack of room."""
    def stats(self) -> dict[str, int]:
        """A lane's statistics."""
    def late(self) -> list[tuple[int, int]]:
        """By rank: (rounds in which it pushed last, ns that these waited for it alone)."""
