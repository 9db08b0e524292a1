"""Connections that have ended, and for how long nothing has explained why.

A broken connection shows only an effect. The scheduler names the process that has died, or that has
left. It has some seconds for that.
"""

from __future__ import annotations

from bpsx.system.awake import AwakeClock


class Unexplained(dict[int, tuple[float, str]]):
    """When a peer's connection ended, and a text that says so, by the peer's number.

    Time in which this process was stopped does not count. For one thread, which reads the time
    every second.
    """

    def __init__(self, patience: float) -> None:
        """``patience``: seconds from the end of a connection to :meth:`verdict`."""
        super().__init__()
        self._patience, self._clock = patience, AwakeClock(patience)

    def note(self, peer: int, text: str) -> None:
        """Record that the connection of ``peer`` has ended now."""
        self[peer] = self._clock.now(), text

    def explain(self, peer: int) -> None:
        """Forget ``peer``: the scheduler has named the cause. Idempotent."""
        self.pop(peer, None)

    def restart(self, patience: float) -> None:
        """Give the scheduler ``patience`` seconds again, for all: there was none until now.

        They are at most those of the constructor.
        """
        since = self._clock.now() - max(0.0, self._patience - patience)
        self.update({peer: (since, text) for peer, (_, text) in self.items()})

    def older_than(self, seconds: float) -> set[int]:
        """Return the peers whose connections ended at least ``seconds`` ago."""
        now = self._clock.now()
        return {peer for peer, (since, _) in self.items() if now - since >= seconds}

    def verdict(self) -> str:
        """Return the text of the oldest end if its time is over; otherwise an empty string."""
        if not self:
            return ""
        since, text = min(self.values())
        return text if self._clock.now() - since >= self._patience else ""
