"""The lanes that a worker sends to, and which of their connections have broken.

A broken connection shows only an effect. The scheduler names the process that has died, and whether
the job goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from bpsx.scheduler.waiting import VERDICT_SECONDS
from bpsx.system.address import is_here
from bpsx.system.unexplained import Unexplained

connections = logging.getLogger("bpsx.connections")
#: Seconds that a scheduler has which was started again, for connections that broke before.
_AGAIN_SECONDS = 4.0


class Lanes:
    """The lanes that this worker sends to, and those whose connections have broken.

    The thread that joins the job calls it, later the control thread.
    """

    def __init__(
        self, endpoint: Any, addresses: list[tuple[int, str]], servers: list[str], patience: float
    ) -> None:
        """``addresses``: number of the server and address, for each lane. ``servers``: names.

        ``patience``: seconds from the end of a connection to the verdict, while this process is
        awake.
        """
        self._endpoint, self._servers, self._addresses = endpoint, servers, addresses
        #: Readable when :meth:`take_broken` has something to take; negative: there are no lanes.
        self.descriptor = -1
        #: Ends of lanes' connections; -1: of a lane that has not replied yet. Until the verdict,
        #: the session is in doubt.
        self.broken = Unexplained(patience)
        # The scheduler's text about each lane without which the job goes on.
        self._lost: dict[int, str] = {}
        # Lanes of servers that join the running job, until this worker has connected to them; and
        # why it could not.
        self._coming: set[int] = set()
        self._failures: dict[int, str] = {}
        # Servers of which the scheduler has heard that they are broken, and whether no other could
        # be reached then.
        self._reported: dict[int, bool] = {}

    @property
    def servers(self) -> list[int]:
        """The server's number for each lane."""
        return [server for server, _ in self._addresses]

    @property
    def addresses(self) -> list[str]:
        """The address of each lane."""
        return [address for _, address in self._addresses]

    @property
    def beside(self) -> set[int]:
        """The servers on this machine."""
        # dict() keeps one lane of each server: all lanes of a server are on one host.
        return {server for server, address in dict(self._addresses).items() if is_here(address)}

    def add(self, first: int, server: str, addresses: Sequence[str]) -> None:
        """Add the lanes of a server that joins the running job, the first of them ``first``.

        Raises ValueError if other lanes are due first.
        """
        if first != len(self._addresses):
            raise ValueError(f"lane {first} comes after {len(self._addresses)} lanes")
        self._addresses += [(len(self._servers), address) for address in addresses]
        self._servers.append(server)
        self._coming.update(range(first, first + len(addresses)))

    def is_beside(self, lane: int) -> bool:
        """Whether a lane's server is on this machine."""
        return is_here(self._addresses[lane][1])

    def note_failure(self, lane: int, text: str) -> None:
        """Note that this worker cannot connect to a lane. Any thread may call it."""
        self._failures.setdefault(lane, text)

    def take_failures(self) -> list[tuple[int, str]]:
        """The lanes to which this worker could not connect since the last call, and why."""
        return [(lane, self._failures.pop(lane)) for lane in list(self._failures)]

    def have_come(self, lanes: Iterable[int]) -> None:
        """Note that this worker has connected to late ``lanes``: their ends need an explanation."""
        self._coming.difference_update(lanes)

    def named(self) -> list[tuple[str, str]]:
        """Name and address of each lane."""
        return [(self._name(i), address) for i, address in enumerate(self.addresses)]

    def _name(self, lane: int) -> str:
        server, address = self._addresses[lane]
        return f"{self._servers[server]} at {address}"

    def watch(self) -> None:
        """Begin to notice broken connections, for :meth:`take_broken`."""
        self.descriptor = self._endpoint.watch()

    def take_broken(self, leaving: bool = False) -> None:
        """Take the connections that have broken from the endpoint, and note them.

        ``leaving``: they end because this worker leaves.
        """
        for lane in self._endpoint.lost():
            where = self._name(lane) if lane >= 0 else "a server"
            if self._note(lane, f"{where} is gone: its connection broke"):
                connections.info(
                    "the connection to %s %s", where, "has ended" if leaving else "is gone"
                )

    def note_mute(self, lane: int) -> None:
        """Note that nothing can be sent to ``lane``; negative: none.

        The endpoint reports broken connections, except where memory was short.
        """
        if lane >= 0:
            self._note(lane, f"{self._name(lane)} is gone: nothing can be sent to it")

    def _note(self, lane: int, text: str) -> bool:
        """Note the end of a connection; returns whether it is news."""
        if lane in self.broken or lane in self._lost:
            return False
        if lane in self._coming:
            self.note_failure(lane, text)
            return True
        self.broken.note(lane, text)
        return True

    def lose(self, lanes: Iterable[int], text: str) -> None:
        """Note that the job goes on without ``lanes``: ends of their connections are explained.

        ``text``: the scheduler's reason.
        """
        for lane in lanes:
            self._lost[lane] = text
            self.broken.explain(lane)
            self._coming.discard(lane)

    def lost(self, lane: int) -> str:
        """Return the scheduler's reason if the job goes on without ``lane``, else ""."""
        return self._lost.get(lane, "")

    def restart(self) -> None:
        """Give the scheduler time again: there was none until now.

        It has just answered, so it gets less time than a scheduler that may be silent.
        """
        self.broken.restart(_AGAIN_SECONDS)
        self._reported.clear()

    def take_suspects(self) -> list[tuple[int, bool]]:
        """The servers, each once, whose end the scheduler should have explained.

        With each, whether no other connection works: this worker itself is to blame, perhaps. If
        another server has joined since then, the server is returned once more.
        """
        of = self.servers
        ended = {of[lane] for lane in self.broken if lane >= 0}
        others = {of[i] for i in range(len(of)) if i not in self._lost and i not in self._coming}
        others -= ended
        if -1 in self.broken:
            return []
        late = {of[lane] for lane in self.broken.older_than(VERDICT_SECONDS)}
        alone = not others
        news = [
            server
            for server in sorted(late)
            if server not in self._reported or (self._reported[server] and not alone)
        ]
        self._reported.update(dict.fromkeys(news, alone))
        return [(server, alone) for server in news]

    def verdict(self) -> str:
        """Return how the first lane broke, once the scheduler has had time to explain it; or ""."""
        return self.broken.verdict()
