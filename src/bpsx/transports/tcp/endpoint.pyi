from contextlib import AbstractContextManager
from typing import Any

from bpsx.transports.sockets.endpoint import ListeningEndpoint

class TcpEndpoint(ListeningEndpoint):
    def __init__(
        self,
        *,
        send_buffer: int | None,
        heartbeat_interval: float,
        heartbeat_timeout: float,
        secret: bytes = b"",
        encrypt: bool = False,
        most_bytes: int = -1,
        io_threads: int = 0,
        congestion: str = "auto",
    ) -> None: ...
    def connect(
        self, peer: int, address: str, undriven: AbstractContextManager[Any] = ...
    ) -> None: ...
    def round_trip(self, peer: int) -> float: ...
    def fit_buffers(self, rate: float) -> None: ...
    def close(self) -> None: ...
