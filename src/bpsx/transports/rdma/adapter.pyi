import struct

#: Description of a queue pair, which each end sends to the other.
PAIR: struct.Struct

def explain_refusal(code: int) -> str: ...

class Memory: ...

class Pair:
    def describe(self) -> bytes: ...
    def meet(self, other: bytes) -> None: ...

class Adapter:
    name: str
    forks: bool

    def __init__(self, name: str, port: int, gid_index: int, gid: str, ethernet: bool) -> None: ...
