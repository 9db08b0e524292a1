"""GPU kernels for compression, with the host's kernels as a fallback where they cannot be built.

Kernels on GPU and host write the same bytes, so workers may compress the same tensor on different
devices.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from bpsx.compression.factors import MadeMatrix
from bpsx.compression.host_factors import FactorsByHost
from bpsx.compression.spec import CompressionSpec, Made, MomentumSpec
from bpsx.dtypes import BY_NAME
from bpsx.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from bpsx.compression.gpu import Coder, MomentumOnGpu
    from bpsx.compression.gpu_factors import FactorsOnGpu
    from bpsx.local._cuda import Gpu
    from bpsx.local.devices import OnGpu

log = logging.getLogger("bpsx.compression.spec")


class MomentumByHost:
    """Nesterov's momentum of a tensor on a GPU, computed on the host.

    The tensor is copied to the host and back while the caller waits. Rounds must not overlap, as
    for :class:`bpsx.compression.spec.MomentumSpec`.
    """

    def __init__(self, gpu: Gpu, dtype: str, n: int) -> None:
        self._gpu, self._host = gpu, MomentumSpec(dtype, n)
        self._given = np.empty(n * BY_NAME[dtype].itemsize, np.uint8)
        self._out = gpu.memory(self._given.nbytes)
        self.taken, self.put = self._host.taken, self._host.put

    def add(self, address: int, mu: float, on: OnGpu) -> tuple[int, OnGpu]:
        """Add momentum to the gradient at ``address`` and wait for the result.

        Returns the address of the elements to send, and their location with the event after which
        they are complete.
        """
        gpu, aside = self._gpu, self._gpu.aside
        gpu.wait(aside, (on.moment or gpu.moment(on.streams(), "momentum")).event)
        gpu.settle(aside)
        gpu.move(self._given.ctypes.data, address, self._given.nbytes)
        made = self._host.add(self._given.ctypes.data, mu)
        gpu.move(self._out, made.ctypes.data, self._given.nbytes)
        return self._out, on._replace(moment=gpu.moment(aside, "momentum"))


if TYPE_CHECKING:
    AnyMomentum = MomentumSpec | MomentumOnGpu | MomentumByHost


class GpuKernels:
    """GPU kernels of one session, called under its lock."""

    def __init__(self) -> None:
        # Bytes and GPU addresses of the scratch memory for encoding and for decoding.
        self._room: tuple[int, tuple[int, int]] = (0, (0, 0))
        # The same for the factors of matrices, which threads of the script make.
        self._factors_room = (0, 0)
        self._lock = threading.Lock()
        self._off = False  # kernels could not be built; do not try again
        self._launched = False
        self._missing: set[str] = set()  # compressors without GPU kernels

    def coders(
        self, gpu: Gpu, name: str, given: CompressionSpec, dtype: str, made: list[Made]
    ) -> list[Coder] | None:
        """Return a coder for each partition of ``name``, all kernels built; None: use the host.

        The session's first failure is logged as a warning with its cause. Raises
        :class:`~bpsx.errors.DeviceError` if the GPU itself has failed.
        """
        if self._off or given.compressor in self._missing:
            return None
        try:
            from bpsx.compression.gpu import Coder, check_launch, room

            wanted = room(given, made)
            if self._room[0] < wanted:  # kernels may use the old memory: it stays until the end
                self._room = wanted, (gpu.memory(wanted), gpu.memory(wanted))
            coders = [Coder(gpu, given, dtype, one, self._room[1]) for one in made]
            for coder in coders:
                coder.build(gpu.aside)
            if not self._launched:
                check_launch(gpu)
                self._launched = True
        except DeviceError:
            raise
        except ConfigError as e:
            self._missing.add(given.compressor)
            log.warning("%r is on the GPU but is compressed on the CPU: %s", name, e)
            return None
        except Exception as e:
            self._fail(name, e)
            return None
        return coders

    def warm_factors(self, gpu: Gpu, dtype: str, feedback: bool) -> None:
        """Build the kernels that :meth:`factors` needs, which takes seconds. Thread-safe."""
        if not self._off:
            with suppress(Exception):  # factors() meets it again, and tells it
                from bpsx.kernels.cuda.low_rank import build

                with gpu:
                    build(dtype, feedback, gpu.aside)

    def factors(
        self, name: str, dtype: str, made: MadeMatrix, gpu: Gpu
    ) -> FactorsOnGpu | FactorsByHost:
        """Return what does a matrix's steps for gradients on a GPU. Thread-safe.

        The session's first failure to build kernels is logged as a warning with its cause. Raises
        :class:`~bpsx.errors.DeviceError` if the GPU itself has failed.
        """
        try:
            if not self._off:
                from bpsx.compression.gpu_factors import FactorsOnGpu, scratch
                from bpsx.kernels.cuda.low_rank import build

                with self._lock:
                    if self._factors_room[0] < scratch(made):  # kernels may use the old memory
                        self._factors_room = scratch(made), gpu.memory(scratch(made))
                    with gpu:
                        build(dtype, made.feedback, gpu.aside)
                    return FactorsOnGpu(gpu, dtype, made, self._factors_room[1])
        except DeviceError:
            raise
        except Exception as e:
            self._fail(name, e)
        return FactorsByHost(gpu, made)

    def momentum(self, name: str, dtype: str, nbytes: int, on: OnGpu | None) -> AnyMomentum:
        """Return the momentum of a tensor that has no encoder to add it, on the tensor's device.

        ``on`` None: the tensor is in host memory.
        """
        n = nbytes // BY_NAME[dtype].itemsize
        if on is None:
            return MomentumSpec(dtype, n)
        try:
            if not self._off:
                from bpsx.compression.gpu import MomentumOnGpu

                return MomentumOnGpu(on.gpu, dtype, n)
        except DeviceError:
            raise
        except Exception as e:
            self._fail(name, e)
        return MomentumByHost(on.gpu, dtype, n)

    def _fail(self, name: str, cause: Exception) -> None:
        """Use the host from now on, and log why."""
        self._off = True
        said = " ".join(str(cause).split()) or "no error text"
        log.warning(
            "cannot build kernels for GPUs, so %r and all later tensors on GPUs are compressed on"
            " the CPU: %s: %s. Training continues, with copies to the host. Kernels for GPUs need"
            " the package numba-cuda: pip install 'bpsx[cuda]' (compatible versions:"
            " docs/start/versions.md)",
            name,
            type(cause).__name__,
            said[:600],
        )
