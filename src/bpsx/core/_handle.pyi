from typing import Any

from bpsx.local._cuda import Gpu

def own_pid() -> int: ...

class Request:
    source: Any
    target: Any
    owner: Any
    on: Any
    def __init__(
        self,
        name: str,
        source: Any,
        target: Any,
        *,
        divisor: int = 1,
        broadcast: bool = False,
        asynchronous: bool = False,
        priority: int = 0,
        will_wait: bool = False,
        rate: float = -1.0,
        is_codec_state: bool = False,
        owner: object = None,
        result: object = None,
        on: object = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def result(self) -> Any: ...
    @property
    def divisor(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def broadcast(self) -> bool: ...
    @property
    def asynchronous(self) -> bool: ...
    @property
    def will_wait(self) -> bool: ...
    @property
    def is_codec_state(self) -> bool: ...

class Item:
    #: The :class:`Handle`, once the push_pull has begun; the exception, if it could not begin;
    #: None before.
    begun: Any
    def __init__(self, name: str, view: Any, priority: int = 0) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def owner(self) -> object: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def priority(self) -> int: ...

class Handle:
    result: Any
    #: On a GPU: the memory is freed in the order of the stream that made it, as PyTorch's is. The
    #: handle may drop its reference once that stream waits for the end.
    by_stream: bool
    @property
    def name(self) -> str: ...
    @property
    def gpu(self) -> Gpu | None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...
