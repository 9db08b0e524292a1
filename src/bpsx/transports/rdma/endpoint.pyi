from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from bpsx.transports.sockets.endpoint import ListeningEndpoint

class RdmaEndpoint(ListeningEndpoint):
    def __init__(
        self,
        *,
        heartbeat_interval: float,
        heartbeat_timeout: float,
        secret: bytes = b"",
        encrypt: bool = False,
        most_bytes: int = -1,
        depth: int = 512,
        sends: int = 128,
        inbox: int = ...,
        device: str = "",
        gid_index: int | None = None,
    ) -> None: ...
    @property
    def copied(self) -> int: ...
    def bind(self, host: str, ports: Sequence[int] = ()) -> str: ...
    def lost(self) -> list[int]: ...
    def connect(
        self, peer: int, address: str, undriven: AbstractContextManager[Any] = ...
    ) -> None: ...
    def close(self) -> None: ...
