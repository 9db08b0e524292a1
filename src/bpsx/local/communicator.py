"""This process's GPU, and how those of a machine's processes come together for NCCL.

Nothing of this is imported before the first tensor on a GPU.
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
from bpsx.local.topology import Card, Plan, plan

log = logging.getLogger("bpsx.gpus")
#: Between two looks at the others' notice boards: nothing tells that something has been written
#: there.
_LOOK_AGAIN = 0.005


class Meeting(threading.Thread):
    """Makes the communicator of a machine's GPUs, while the job goes on: its first tensors on a GPU
    wait for that.

    Each process writes on its notice board which GPU it has. The root reads all, plans, and writes
    the plan with NCCL's id. All join; when all have said so, the root begins. ``most``: bytes of a
    partition; ``gatherings``: how often all workers have joined so far. ``fail`` is called with a
    text if that cannot be, ``done`` when it is.
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
        super().__init__(name="bpsx-nccl", daemon=True)
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
        """Give up, unless NCCL is at it."""
        self._stopping.set()

    def run(self) -> None:
        """Come together; tell how it went."""
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
            log.info("%d GPUs, %d of them together: %s", self._size, found.group, found.why)
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

    def _decide(self, notices: Sequence[dict[str, Any]]) -> Plan:
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
        """What a process has written, once it has said ``word``.

        Raises :class:`~bpsx.errors.DeviceError` for what has failed there.
        """
        while not self._stopping.is_set():
            text = self._machine.notice(local_rank)
            notice: dict[str, Any] = json.loads(text) if text else {}
            if "error" in notice:
                raise DeviceError(f"local rank {local_rank}: {notice['error']}")
            # What is left from a gathering that is over, its control thread is about to take away.
            if notice.get("rests", -1) >= self._gatherings:
                raise DeviceError(
                    f"local rank {local_rank}: it has called join() before its first tensor on a"
                    " GPU, and NCCL needs all GPUs of a machine to begin: use one on each process"
                    " first"
                )
            if word in notice:
                return notice
            time.sleep(_LOOK_AGAIN)
        raise _StoppedError


class _StoppedError(Exception):
    """The session is closing."""


def load_nccl(gpu: Gpu) -> None:
    """Have NCCL loaded, by CuPy, which brings it.

    Raises :class:`~bpsx.errors.ConfigError` naming the package that is missing.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as e:
        raise ConfigError(
            f"several GPUs on one machine are added by NCCL, which bpsx takes from CuPy ({e}): pip"
            " install cupy-cuda13x (or cupy-cuda12x), or set BPSX_LOCAL_REDUCE=0 to let every"
            " process speak to the servers itself"
        ) from e
    log.debug("NCCL %s through CuPy", nccl.get_version())
    gpu.open_nccl()


def switch_of(bus: str) -> str:
    """The PCI bridge above the one that a GPU hangs on, as Linux shows it: what GPUs behind one
    switch have in common.

    "": not known.
    """
    try:
        path = Path(f"/sys/bus/pci/devices/{bus}").resolve(strict=True)
    except OSError:
        return ""
    # .../root port/switch's upstream port/switch's downstream port/GPU; without a switch,
    # .../root port/GPU
    return str(path.parents[1]) if len(path.parents) > 3 else ""


def linked(buses: Sequence[str]) -> bool | None:
    """Whether NVLink joins each of these GPUs with each, by NVML; None if nobody can tell."""
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
