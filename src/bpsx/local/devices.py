"""Placement of tensors: host memory, or this process's GPU.

The GPU is opened for the first tensor on it.
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
from bpsx.local.neighbourhood import Neighbourhood
from bpsx.planning.partitioner import most_bytes

if TYPE_CHECKING:
    from bpsx.local._cuda import Gpu, Moment
    from bpsx.local.communicator import NcclSetup

#: Bytes of a bucket of gradients. NCCL is near its best rate with this size; a larger bucket only
#: starts later.
_BATCH = 50 << 20
#: Most collectives in one NCCL group, with servers and without.
_GROUP, _GROUP_ALONE = 4, 64
#: Returns the stream on which the caller currently works, as CUDA's handle.
Streams = Callable[[], int]


class View(Protocol):
    """A tensor as a framework passes it; see :class:`bpsx.plugin.adapter.TensorView`."""

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
    """Place of a tensor on a GPU, as :meth:`bpsx._core.Core.prepare` takes it."""

    gpu: Gpu
    streams: Streams
    #: When the input is ready; None: when the current stream has finished its queued work.
    moment: Moment | None = None


class Devices:
    """The GPU of a session. Thread-safe."""

    def __init__(
        self, config: Config, near: Neighbourhood, core: Core, fail: Callable[[str], None]
    ) -> None:
        """Create the devices, without opening a GPU.

        ``fail``: a method of the session. It is called with a text, on another thread, if the GPUs
        of this machine cannot form a communicator.
        """
        self._config, self._near = config, near
        # A weak reference: the session owns this object, and a closed session shall be freed at
        # once.
        self._session_fails = weakref.WeakMethod(fail)
        self._core = core
        self._lock = threading.Lock()
        self._gpu: Gpu | None = None
        self._setup: NcclSetup | None = None
        self._closed = False
        self._gatherings = 0  # number of times that all workers have joined

    def place(self, name: str, source: View, target: View) -> OnGpu | None:
        """Return the place of a tensor: None for host memory.

        Raises :class:`~bpsx.errors.ConfigError` if its output is elsewhere, or on a second GPU.
        """
        if source.gpu < 0 and target.gpu < 0:
            return None
        if source.gpu != target.gpu or source.streams is None:
            where = [
                "the host's memory" if gpu < 0 else f"GPU {gpu}" for gpu in (source.gpu, target.gpu)
            ]
            raise ConfigError(
                f"{name!r}: input is in {where[0]}, output in {where[1]}: both must be in the same"
                " memory"
            )
        return self.place_on(name, source.gpu, source.streams)

    def place_on(
        self, name: str, ordinal: int, streams: Streams, stream: int | None = None
    ) -> OnGpu:
        """Return the place of tensors on a GPU; ``name`` is the first of them.

        ``stream``: stream that makes the tensors; None: the current one at the time.

        Raises :class:`~bpsx.errors.ConfigError` for a second GPU, or if the stream is being
        captured into a CUDA graph.
        """
        gpu = self._gpu
        if gpu is None or gpu.ordinal != ordinal:
            gpu = self._open(name, ordinal)
        return OnGpu(gpu, streams, None if stream is None else gpu.moment(stream, name))

    @property
    def batch_bytes(self) -> int:
        """Size in bytes at which a bucket of gradients is worth starting."""
        return self._config.partition_bytes if self._config.servers else _BATCH

    def check_average(self, name: str, dtype: int, divisor: int, on: OnGpu | None) -> None:
        """Ensure that sums of this integer type can be divided, also where NCCL computes them.

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
                f"{name!r}: averages of integers on GPUs of one machine need a kernel, which"
                f" cannot be built: {type(e).__name__}: {e}. Install numba-cuda (pip install"
                " 'bpsx[cuda]'; versions that work together: docs/start/versions.md), or push"
                " floating-point tensors"
            ) from e
        with on.gpu:
            on.gpu.take_divider(dtype, kernel, THREADS)

    def copy(self, name: str, source: View, target: View) -> None:
        """Queue a copy within the GPU on the current stream.

        Raises as :meth:`place`, and if the lengths differ.
        """
        place = self.place(name, source, target)
        if place is None or source.nbytes != target.nbytes or source.shape != target.shape:
            raise ConfigError(
                f"{name!r}: input has shape {source.shape}, output {target.shape}: on a GPU, both"
                " must have the same shape and size"
            )
        if source.address != target.address and source.nbytes:
            place.gpu.copy(target.address, source.address, source.nbytes, place.streams())

    def announce_joined(self, joined: bool) -> None:
        """Tell the machine's processes that this one has called join(), or takes part again.

        NCCL needs all GPUs of a machine once, to create the communicator. If this process's GPU has
        never been used, processes that wait for it are notified too.
        """
        self._near.announce_joined(joined, self._core.notify)
        with self._lock:
            self._gatherings += not joined
            if self._gpu is None and self._near.machine is not None:
                self._near.machine.put_notice(
                    json.dumps({"rests": self._gatherings} if joined else {}).encode()
                )

    def _open(self, name: str, ordinal: int) -> Gpu:
        from bpsx.local._cuda import Gpu
        from bpsx.local.communicator import NcclSetup

        with self._lock:
            if self._gpu is not None and self._gpu.ordinal != ordinal:
                raise ConfigError(
                    f"{name!r}: this tensor is on GPU {ordinal}, and an earlier one was on GPU"
                    f" {self._gpu.ordinal}: a process can use only one GPU; start one process per"
                    " GPU (BYTEPS_LOCAL_SIZE)"
                )
            if self._closed:
                raise ConfigError(f"{name!r}: bpsx was shut down")
            if self._gpu is None:
                gpu = Gpu(ordinal)
                self._core.open_gpu(
                    gpu,
                    self._config.nccl_group or (_GROUP if self._config.servers else _GROUP_ALONE),
                )
                if self._near.machine is not None:
                    most = most_bytes(self._config.partition_bytes, compressed=True)
                    self._setup = NcclSetup(
                        self._config,
                        self._near.machine,
                        gpu,
                        most,
                        self._gatherings,
                        self._core.notify,
                        self._fail,
                    )
                    self._setup.start()
                self._gpu = gpu
            return self._gpu

    def _fail(self, text: str) -> None:
        fail = self._session_fails()
        if fail is not None:
            fail(text)

    def close(self) -> None:
        """Release the GPU, after the core has been closed. Idempotent."""
        with self._lock:
            self._closed = True
        if self._setup is not None:
            self._setup.stop()
            # The thread may be within NCCL, waiting for a dead process; it is a daemon.
            self._setup.join(1.0)
        if self._gpu is not None and (self._setup is None or not self._setup.is_alive()):
            self._gpu.close()
