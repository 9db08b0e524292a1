"""NCCL communicators of the GPUs of a machine's processes.

This module is not imported before the first tensor on a GPU.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bpsx.config import Config
from bpsx.errors import ConfigError, DeviceError
from bpsx.local._cuda import Gpu
from bpsx.local._machine import Machine
from bpsx.local.topology import Card, ReducePlan, plan
from bpsx.system.threads import NamedThread

log = logging.getLogger("bpsx.gpus")
#: Seconds between two polls of the other processes' notice boards; a write there signals no event.
_LOOK_AGAIN = 0.005


class NcclSetup(NamedThread):
    """Thread that creates the NCCL communicator of a machine's GPUs while the job continues.

    The first tensors on a GPU wait for it. Each process writes its GPU to its notice board. The
    root reads all boards, plans the groups, and writes the plan with NCCL's ids. All processes join
    their communicator. When all have reported that, the root starts.

    ``most``: bytes of a partition. ``gatherings``: number of times that all workers have joined so
    far. ``fail`` is called with a text on a failure, ``done`` on success.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        gpu: Gpu,
        most: int,
        gatherings: int,
        done: Callable[[], None],
        fail: Callable[[str], None],
    ) -> None:
        super().__init__(target=self._report, name="bpsx-nccl", daemon=True)
        self._config, self._machine, self._gpu, self._done, self._fail = (
            config,
            machine,
            gpu,
            done,
            fail,
        )
        self._me, self._size, self._most, self._gatherings = (
            config.local_rank,
            config.local_size,
            most,
            gatherings,
        )
        self._notice: dict[str, Any] = {}
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Give up, unless a call of NCCL is running."""
        self._stopping.set()

    def _report(self) -> None:
        """Create the communicator and report the outcome."""
        try:
            self._meet()
            self._done()
        except _StoppedError:
            pass
        except Exception as e:
            if not self._stopping.is_set():
                self._say(error=str(e))
                self._fail(str(e))

    def _meet(self) -> None:
        load_nccl(self._gpu)
        self._say(bus=self._gpu.bus, name=self._gpu.name, switch=switch_of(self._gpu.bus))
        root = self._size - 1
        if self._me == root:
            found = self._decide([self._read(i, "bus") for i in range(self._size)])
            ids = [self._gpu.unique_id().hex() for _ in range(self._size // found.group)]
            self._say(group=found.group, roots=list(found.roots), ids=ids)
            log.info("%d GPUs, in groups of %d: %s", self._size, found.group, found.why)
        agreed = self._read(root, "ids")
        group = int(agreed["group"])
        self._gpu.join(
            bytes.fromhex(agreed["ids"][self._me // group]),
            self._me % group,
            group,
            self._most,
            self._config.nccl_rings,
        )
        self._machine.group_gpus(group, list(agreed["roots"]))
        if self._me == root:
            for i in range(self._size - 1):
                self._read(i, "joined")
        self._gpu.made_ready()
        self._say(joined=True)

    def _decide(self, notices: Sequence[dict[str, Any]]) -> ReducePlan:
        cards = [Card(n["bus"], n["name"], n["switch"]) for n in notices]
        return plan(
            cards,
            linked([card.bus for card in cards]),
            self._config.reduce_roots or (),
            self._config.switch_size,
            not self._config.servers,
        )

    def _say(self, **words: Any) -> None:
        self._notice.update(words)
        self._machine.put_notice(json.dumps(self._notice).encode())

    def _read(self, local_rank: int, word: str) -> dict[str, Any]:
        """Return a process's notice, once it contains ``word``.

        Raises :class:`~bpsx.errors.DeviceError` for a failure in that process.
        """
        while not self._stopping.is_set():
            text = self._machine.notice(local_rank)
            notice: dict[str, Any] = json.loads(text) if text else {}
            if "error" in notice:
                raise DeviceError(f"local rank {local_rank}: {notice['error']}")
            # An older "rests" notice is stale: that process's control thread is about to remove it.
            if notice.get("rests", -1) >= self._gatherings:
                raise DeviceError(
                    f"local rank {local_rank} called join() before its first tensor on a GPU, but"
                    " NCCL needs all GPUs of a machine to start: use a GPU tensor on each process"
                    " first"
                )
            if word in notice:
                return notice
            time.sleep(_LOOK_AGAIN)
        raise _StoppedError


class _StoppedError(Exception):
    """The session is closing."""


def load_nccl(gpu: Gpu) -> None:
    """Load NCCL through CuPy, which provides it.

    Raises :class:`~bpsx.errors.ConfigError` naming the missing package.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as e:
        raise ConfigError(
            f"sums over several GPUs of one machine need NCCL, which bpsx loads from CuPy ({e}):"
            " pip install cupy-cuda13x (or cupy-cuda12x), or set BPSX_LOCAL_REDUCE=0 so that every"
            " process exchanges with the servers itself"
        ) from e
    log.debug("NCCL %s through CuPy", nccl.get_version())
    gpu.open_nccl()


def switch_of(bus: str) -> str:
    """Return the PCI bridge above a GPU's own bridge, as Linux shows it; "" if unknown.

    GPUs behind one switch have it in common.
    """
    try:
        path = Path(f"/sys/bus/pci/devices/{bus}").resolve(strict=True)
    except OSError:
        return ""
    # With a switch: .../root port/switch's upstream port/switch's downstream port/GPU. Without:
    # .../root port/GPU.
    return str(path.parents[1]) if len(path.parents) > 3 else ""


def linked(buses: Sequence[str]) -> bool | None:
    """Return whether NVLink connects every pair of these GPUs, by NVML; None if unknown."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode()) for bus in buses]
            return all(
                pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                == pynvml.NVML_P2P_STATUS_OK
                for i, a in enumerate(handles)
                for b in handles[:i]
            )
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as e:
        log.debug("NVML: %s", e)
        return None
