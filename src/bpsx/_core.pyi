"""The worker's core as Python sees it; see ``_core.pyx``."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from typing_extensions import Buffer

from bpsx.core._handle import Handle, Item, Request
from bpsx.core._tensor import Declared, Tensor
from bpsx.core.waiters import Asking
from bpsx.local._cuda import Gpu, Moment

# Memory to read or write: a C-contiguous buffer, or (address, bytes) that `owner` keeps alive.
_Memory: TypeAlias = Buffer | tuple[int, int]

class Core:
    """State machine of a worker's partitions over one endpoint. Thread-safe."""

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
        """``endpoint``: an object with ``abi()``; ``lanes``: the server's number for each lane;
        ``credit``: bytes in flight per lane, 0 for no bound; ``ahead_ms``: bound on what is in
        flight to each server, as milliseconds of the slowest server's link, 0 for no bound;
        ``beside``: the servers on this machine; ``machine``: see
        :class:`bpsx.local._machine.Machine`; ``telemetry``: count the bytes of completed tensors;
        ``watch``: a :class:`bpsx.telemetry._recorder.Watcher`.
        """
    @property
    def pid(self) -> int:
        """Id of the process that created the core."""
    @property
    def told(self) -> bool:
        """Whether a failure has been raised in the script."""
    def know(self, tensor: Tensor) -> None:
        """Adopt a tensor that the machine's other processes push, without pushing it."""
    def look(self) -> None:
        """Make the driver check for changes that it cannot see by itself."""
    @property
    def mute(self) -> int:
        """The lane to which sending failed; -1: none."""
    @property
    def failed(self) -> str:
        """Why the core has failed, or an empty string."""
    @property
    def status(self) -> int:
        """The status with which everything ends since the core failed, or 0."""
    @property
    def outstanding(self) -> int:
        """Number of push_pulls under way."""
    def cut_off(self) -> list[str]:
        """After :meth:`fail`: end GPU work that waits for other processes.

        Overwrites the results of tasks that are done but whose work on the GPU has not ended, and
        returns their names.
        """
    @property
    def unsettled(self) -> int:
        """:attr:`outstanding`, plus those done whose memory the GPU or the transport still uses."""
    def greet(
        self, deadline_s: float, addresses: Sequence[str] = (), secret: bytes = b""
    ) -> list[int]:
        """Check that every lane is alive and knows ``secret``; return the lanes that did not
        prove it in time.

        Call before :meth:`start`.
        """
    def open_gpu(self, gpu: Gpu, group: int = 1) -> None:
        """Let the core use a GPU. Call before the first tensor on it.

        ``group``: largest number of collectives in one group.
        """
    def open_coders(self) -> None:
        """Start the thread that queues compression kernels. Idempotent.

        Call before the first tensor that is compressed on the GPU.
        """
    def open_pool(self, threads: int) -> None:
        """Start the threads that compress. Idempotent.

        Call before the first tensor that is compressed.
        """
    def start(self) -> None:
        """Start the background thread."""
    def submit(self, tensor: Tensor, request: Request) -> Handle:
        """Begin a push_pull of a placed tensor."""
    def prepare(self, request: Request, nbytes: int) -> Handle:
        """Return the handle of a push_pull whose tensor may not be placed yet.

        :meth:`release` begins it, :meth:`end` ends it.
        """
    def release(self, handle: Handle, tensor: Tensor, will_wait: bool = False) -> None:
        """Hand a prepared handle to the driver."""
    def submit_known(
        self, item: Item, declared: dict[str, Declared], codes: dict[str, int], divisor: int
    ) -> bool:
        """Begin a push_pull of one item in place, on the host and uncompressed.

        Returns False, with nothing done, unless the item is ``declared`` with its present shape and
        dtype, and ``codes`` has its element type.
        """
    def submit_all(
        self,
        items: list[Item],
        declared: dict[str, Declared],
        codes: dict[str, int],
        divisor: int,
        on: tuple[Gpu, Callable[[], int], Moment | None],
    ) -> None:
        """Begin push_pulls of ``items`` in place on the GPU, all at once.

        ``on``: the GPU, a function that returns the current stream, and the moment at which all
        items are ready.

        Skips items that are not ``declared`` with their present shape and dtype, that are
        compressed, or whose element type is not in ``codes``. The others get their handles.
        """
    def copy_through(self, handle: Handle, nbytes: int) -> None:
        """Do the push_pull of a single worker: copy input to output, and end."""
    def end(self, handle: Handle, status: int, detail: str | None) -> None:
        """End a prepared handle that was never released."""
    def fail_tensor(self, tensor: Tensor, status: int, detail: str) -> None:
        """End every push_pull of ``tensor``, present and future."""
    def fail(self, status: int, detail: str) -> None:
        """End every push_pull, present and future. The first failure wins."""
    @property
    def asking(self) -> Asking:
        """Which threads wait for which handles."""
    def waiting(self, age_s: float) -> list[tuple[str, int, int, float, float]]:
        """Return (name, generation, round, seconds under way, seconds waited for or -1) of
        push_pulls that need other workers and are older than ``age_s`` seconds, the oldest first.
        """
    def gauges(self) -> dict[str, int]:
        """Return the push_pulls under way, partitions waiting to be sent, and bytes in flight."""
    def counters(self) -> dict[str, int]:
        """Return totals since the start: bytes, messages, completed push_pulls."""
    def kick(self) -> None:
        """Wake another thread to drive, if there is anything to do."""
    def error_of(self, handle: Handle) -> Exception:
        """Return the exception for a handle that has failed."""
    def settle(self, seconds: float) -> None:
        """Let outstanding work proceed for a moment, whichever thread drives."""
    def reap(self) -> None:
        """Drop the references to finished handles whose memory is no longer in use."""
    def close(self) -> None:
        """End what is under way and stop the thread. Close the endpoint afterwards. Idempotent."""
