"""Where tensors are: in the host's memory, or on this process's GPU, which is opened when the first
tensor on it comes.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bpsx._core import Core
from bpsx.config import Config
from bpsx.dtypes import BY_CODE
from bpsx.errors import ConfigError
from bpsx.local.group import Neighbourhood
from bpsx.planning.partitioner import most_bytes

if TYPE_CHECKING:
    from bpsx.local._cuda import Gpu, Moment
    from bpsx.local.communicator import Meeting

#: NCCL is near its best rate with so many bytes of a step's gradients; what is more comes later for
#: nothing.
_BATCH = 50 << 20
#: Collectives that go together at most, with servers and without.
_GROUP, _GROUP_ALONE = 4, 64
#: Gives the stream on which the caller works right now, as CUDA's handle.
Streams = Callable[[], int]


class View(Protocol):
    """What a framework hands over; see :class:`bpsx.plugin.adapter.TensorView`."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def owner(self) -> object: ...
    @property
    def gpu(self) -> int: ...
    @property
    def streams(self) -> Streams | None: ...


class OnGpu(NamedTuple):
    """Where a tensor is that is on a GPU, as :meth:`bpsx._core.Core.prepare` takes it."""

    gpu: Gpu
    streams: Streams
    #: When the input is there; None: when the current stream has done what it has been asked for.
    moment: Moment | None = None


class Devices:
    """The GPU of a session. Thread-safe."""

    def __init__(self, config: Config, near: Neighbourhood, fail: Callable[[str], None]) -> None:
        """``fail``: a method of the session, called with a text, on another thread, when the GPUs
        of this machine do not come together.
        """
        self._config, self._near = config, near
        # the session has this object: a closed one shall be freed at once
        self._session_fails = weakref.WeakMethod(fail)
        self.core: Core  # set once there is one
        self._lock = threading.Lock()
        self._gpu: Gpu | None = None
        self._meeting: Meeting | None = None
        self._closed = False
        self._gatherings = 0  # how often all workers have joined

    def place(self, name: str, source: View, target: View) -> OnGpu | None:
        """Where a tensor is: None for the host's memory.

        Raises :class:`~bpsx.errors.ConfigError` if its output is elsewhere, or on a second GPU.
        """
        if source.gpu < 0 and target.gpu < 0:
            return None
        if source.gpu != target.gpu or source.streams is None:
            where = [
                "the host's memory" if gpu < 0 else f"GPU {gpu}" for gpu in (source.gpu, target.gpu)
            ]
            raise ConfigError(
                f"{name!r}: input is in {where[0]}, output in {where[1]}: must be alike"
            )
        return self.place_on(name, source.gpu, source.streams)

    def place_on(
        self, name: str, ordinal: int, streams: Streams, stream: int | None = None
    ) -> OnGpu:
        """Where tensors on a GPU are, of which ``name`` is the first.

        ``stream``: what makes them; None: the current one at the time.

        Raises :class:`~bpsx.errors.ConfigError` if it is a second GPU, and if the stream cannot
        tell.
        """
        gpu = self._gpu
        if gpu is None or gpu.ordinal != ordinal:
            gpu = self._open(name, ordinal)
        return OnGpu(gpu, streams, None if stream is None else gpu.moment(stream, name))

    @property
    def batch_bytes(self) -> int:
        """How many bytes of gradients are worth a hand-over of their own."""
        return self._config.partition_bytes if self._config.servers else _BATCH

    def check_average(self, name: str, dtype: int, divisor: int, on: OnGpu | None) -> None:
        """See to it that sums of integers can be divided, also where NCCL makes them.

        Raises :class:`~bpsx.errors.ConfigError`.
        """
        self._near.check_average(name, dtype, divisor, on is not None)
        if (
            on is None
            or self._config.servers
            or not self._config.distributed
            or on.gpu.divides(dtype)
        ):
            return
        try:
            from bpsx.kernels.cuda.device import THREADS
            from bpsx.kernels.cuda.divide import divider

            with on.gpu:
                kernel = divider(BY_CODE[dtype].name).handle()
        except Exception as e:
            raise ConfigError(
                f"{name!r}: averages of integers on GPUs of one machine need a kernel, which cannot"
                f" be built: {type(e).__name__}: {e}. Install numba-cuda (pip install 'bpsx[cuda]';"
                " versions that work together: docs/start/versions.md), or push floats"
            ) from e
        with on.gpu:
            on.gpu.take_divider(dtype, kernel, THREADS)

    def copy(self, name: str, source: View, target: View) -> None:
        """Queue a copy from one place on the GPU to another on the current stream.

        Raises as :meth:`place`, and for other lengths.
        """
        place = self.place(name, source, target)
        if place is None or source.nbytes != target.nbytes or source.shape != target.shape:
            raise ConfigError(
                f"{name!r}: input is {source.shape}, output {target.shape}, both on a GPU: must be"
                " alike"
            )
        if source.address != target.address and source.nbytes:
            place.gpu.copy(target.address, source.address, source.nbytes, place.streams())

    def rest(self, joined: bool) -> None:
        """This process has called join(), or takes part again: its machine is told.

        NCCL needs all GPUs of a machine once, to come together: who waits for this one's, which has
        never been used, is told that too.
        """
        self._near.rest(joined, self.core.look)
        with self._lock:
            self._gatherings += not joined
            if self._gpu is None and self._near.machine is not None:
                self._near.machine.put_notice(
                    json.dumps({"rests": self._gatherings} if joined else {}).encode()
                )

    def _open(self, name: str, ordinal: int) -> Gpu:
        from bpsx.local._cuda import Gpu
        from bpsx.local.communicator import Meeting

        with self._lock:
            if self._gpu is not None and self._gpu.ordinal != ordinal:
                raise ConfigError(
                    f"{name!r}: this tensor is on GPU {ordinal}, and an earlier one was on GPU"
                    f" {self._gpu.ordinal}: a process has one GPU; start one process for each"
                    " (BYTEPS_LOCAL_SIZE)"
                )
            if self._closed:
                raise ConfigError(f"{name!r}: bpsx was shut down")
            if self._gpu is None:
                gpu = Gpu(ordinal)
                self.core.open_gpu(
                    gpu,
                    self._config.nccl_group or (_GROUP if self._config.servers else _GROUP_ALONE),
                )
                if self._near.machine is not None:
                    most = most_bytes(self._config.partition_bytes, compressed=True)
                    self._meeting = Meeting(
                        self._config,
                        self._near.machine,
                        gpu,
                        most,
                        self._gatherings,
                        self.core.look,
                        self._fail,
                    )
                    self._meeting.start()
                self._gpu = gpu
            return self._gpu

    def _fail(self, text: str) -> None:
        fail = self._session_fails()
        if fail is not None:
            fail(text)

    def close(self) -> None:
        """After the core has been closed. Idempotent."""
        with self._lock:
            self._closed = True
        if self._meeting is not None:
            self._meeting.stop()
            # NCCL may wait in it for somebody who is dead: it is a daemon
            self._meeting.join(1.0)
        if self._gpu is not None and (self._meeting is None or not self._meeting.is_alive()):
            self._gpu.close()
