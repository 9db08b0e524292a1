"""The worker's side of the native core; see ``_core.pyx``."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from typing_extensions import Buffer

from bpsx.core._handle import Handle, Item, Request
from bpsx.core._tensor import Declared, Tensor
from bpsx.core.waiters import Asking
from bpsx.local._cuda import Gpu, Moment

# Memory to read or write: a C-contiguous buffer, or (address, bytes) kept alive by `owner`.
_Memory: TypeAlias = Buffer | tuple[int, int]

class Core:
    """The state machine of a worker's partitions over one endpoint. Thread-safe."""

    def __init__(
        self,
        endpoint: Any,
        *,
        rank: int,
        job: int,
        lanes: Sequence[int],
        credit: int,
        spin_us: float,
        machine: Any = None,
        telemetry: bool = True,
        watch: Any = None,
        ahead_ms: float = 0,
        beside: Collection[int] = (),
    ) -> None:
        """``endpoint``: an object with ``abi()``; ``lanes``: the number of the server of each;
        ``credit``: bytes in flight per lane, 0 for no bound; ``ahead_ms``: in how many milliseconds
        the slowest server's link can take what is in flight to each, 0 for no bound; ``beside``:
        the servers on this machine; ``machine``: see :class:`bpsx.local._machine.Machine`;
        ``telemetry``: count the bytes that came home; ``watch``: a
        :class:`bpsx.telemetry._recorder.Watcher`.
        """
    @property
    def pid(self) -> int:
        """The process that made it."""
    @property
    def told(self) -> bool:
        """Whether a failure has been raised in the script."""
    def know(self, tensor: Tensor) -> None:
        """Learn of a tensor that the machine's other processes push, without pushing it."""
    def look(self) -> None:
        """Let the driver look around."""
    @property
    def mute(self) -> int:
        """The lane to which nothing can be sent; -1: there is none."""
    @property
    def failed(self) -> str:
        """Why the core has failed, or an empty string."""
    @property
    def status(self) -> int:
        """The status that everything ends with since the core has failed, or 0."""
    @property
    def outstanding(self) -> int:
        """push_pulls under way."""
    def cut_off(self) -> list[str]:
        """After :meth:`fail`: end what waits on the GPU for other processes, and spoil the results
        that are done and have not come.

        Returns their names.
        """
    @property
    def unsettled(self) -> int:
        """The same, and those that are done while the GPU is still at them, or the transport."""
    def greet(
        self, deadline_s: float, addresses: Sequence[str] = (), secret: bytes = b""
    ) -> list[int]:
        """Ask every lane whether it is there and knows ``secret``; returns those that did not
        answer rightly in time.

        Before :meth:`start`.
        """
    def open_gpu(self, gpu: Gpu, group: int = 1) -> None:
        """Let the core use a GPU, before the first tensor on it.

        ``group``: collectives that go together at most.
        """
    def open_coders(self) -> None:
        """Start the thread that queues kernels, before the first tensor that is compressed on the
        GPU.

        Idempotent.
        """
    def open_pool(self, threads: int) -> None:
        """Start the threads that compress, before the first tensor that is compressed.

        Idempotent.
        """
    def start(self) -> None:
        """Start the background thread."""
    def submit(self, tensor: Tensor, request: Request) -> Handle:
        """Begin a push_pull of a placed tensor."""
    def prepare(self, request: Request, nbytes: int) -> Handle:
        """The handle of a push_pull whose tensor may not be placed yet.

        :meth:`release` begins it, :meth:`end` ends it.
        """
    def release(self, handle: Handle, tensor: Tensor, will_wait: bool = False) -> None:
        """Hand a prepared handle to the driver."""
    def submit_known(
        self, item: Item, declared: dict[str, Declared], codes: dict[str, int], divisor: int
    ) -> bool:
        """As :meth:`submit` of one item in place, on the host and uncompressed.

        False, and nothing done, unless it is ``declared`` as what it is, of an element type in
        ``codes``.
        """
    def submit_all(
        self,
        items: list[Item],
        declared: dict[str, Declared],
        codes: dict[str, int],
        divisor: int,
        on: tuple[Gpu, Callable[[], int], Moment | None],
    ) -> None:
        """As :meth:`submit` of each of ``items``, in place and at once, but for those that are not
        ``declared``, uncompressed and of an element type in ``codes``, as what they are.

        Items have their handles then.
        """
    def copy_through(self, handle: Handle, nbytes: int) -> None:
        """What a push_pull is with a single worker: input to output, done."""
    def end(self, handle: Handle, status: int, detail: str | None) -> None:
        """End a prepared handle that was never released."""
    def fail_tensor(self, tensor: Tensor, status: int, detail: str) -> None:
        """End every push_pull of ``tensor``, present and future."""
    def fail(self, status: int, detail: str) -> None:
        """End every push_pull, present and future. The first failure wins."""
    @property
    def asking(self) -> Asking:
        """Which threads wait for what."""
    def waiting(self, age_s: float) -> list[tuple[str, int, int, float, float]]:
        """(name, generation, round, seconds, seconds waited for or -1) of push_pulls that need
        other workers and are older than ``age_s`` seconds, the oldest first.
        """
    def gauges(self) -> dict[str, int]:
        """What is under way: push_pulls, partitions that wait to be sent, bytes in flight."""
    def counters(self) -> dict[str, int]:
        """What has been moved so far."""
    def kick(self) -> None:
        """Somebody else has to drive from now on, if there is anything to do."""
    def error_of(self, handle: Handle) -> Exception:
        """What has ended a handle."""
    def settle(self, seconds: float) -> None:
        """Let what is outstanding go on for a moment, whoever drives."""
    def reap(self) -> None:
        """Drop the references to handles that are finished."""
    def close(self) -> None:
        """End what is under way, stop the thread. Before the endpoint's close. Idempotent."""
