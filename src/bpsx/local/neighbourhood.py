"""A worker process among those of its machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from bpsx.config import Config
from bpsx.dtypes import BY_CODE, BY_NAME
from bpsx.errors import ConfigError
from bpsx.kernels import loading
from bpsx.local._machine import Machine, QuietEndpoint
from bpsx.local.handshake import meet
from bpsx.planning.stages import MachineRole
from bpsx.transports import open_endpoint
from bpsx.transports.base import Endpoint


class Neighbourhood:
    """This process's role among the worker processes of its machine.

    With ``BYTEPS_LOCAL_SIZE`` > 1 they sum among themselves first, and the largest local rank, the
    root, speaks to the servers for all. Otherwise each process speaks to the servers itself, and
    :attr:`machine` is None.

    The control thread calls :meth:`hear`; one thread calls the other methods.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.place = MachineRole.DIRECT
        self.machine: Machine | None = None
        if config.shares_machine:
            root, member = (
                (MachineRole.ROOT, MachineRole.MEMBER)
                if config.servers
                else (MachineRole.ONLY_ROOT, MachineRole.ONLY_MEMBER)
            )
            self.place = root if config.local_rank == config.local_size - 1 else member

    @property
    def has_servers(self) -> bool:
        """Whether servers sum what this machine's processes push."""
        return self.place not in (MachineRole.ONLY_ROOT, MachineRole.ONLY_MEMBER)

    @property
    def has_lanes(self) -> bool:
        """Whether this process speaks to servers."""
        return self.place in (MachineRole.DIRECT, MachineRole.ROOT)

    @property
    def sender(self) -> int:
        """Sender number by which servers know this process: its rank, or its machine's number."""
        return int(
            self._config.rank if self.place is MachineRole.DIRECT else self._config.worker_id or 0
        )

    def speaks_for(self, worker: int) -> bool:
        """Whether this process speaks to the servers for worker number ``worker``."""
        each = 1 if self.place is MachineRole.DIRECT else self._config.local_size
        return self.has_lanes and worker // each == self._config.rank // each

    def kernels_loading(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the root's kernels compile while other processes still start.

        See :func:`bpsx.kernels.loading`.
        """
        if self.place in (MachineRole.DIRECT, MachineRole.MEMBER, MachineRole.ONLY_MEMBER):
            return contextlib.nullcontext()
        return loading(BY_NAME["float32"].code)

    def open_endpoint(self) -> Endpoint | QuietEndpoint:
        """Open the endpoint on which this process sleeps.

        If the process speaks to servers, it also sends by this endpoint.

        Raises :class:`~bpsx.errors.TransportError`.
        """
        return (
            QuietEndpoint()
            if self.place in (MachineRole.MEMBER, MachineRole.ONLY_MEMBER)
            else open_endpoint(self._config)
        )

    def meet(self, job: int, meeting: int, wake: int, look: Callable[[], None]) -> None:
        """Meet the machine's other processes, if there are any; anew if another meeting was off.

        See :func:`bpsx.local.handshake.meet`.
        """
        if self.place is not MachineRole.DIRECT:
            self.close()
            alone = not self._config.servers
            self.machine = meet(self._config, job, meeting, wake, alone, look)

    def check_average(self, name: str, dtype: int, divisor: int, on_gpu: bool) -> None:
        """Refuse averages that would be wrong. Raises :class:`~bpsx.errors.ConfigError`."""
        if (
            on_gpu
            and self.place in (MachineRole.ONLY_ROOT, MachineRole.ONLY_MEMBER)
            and divisor > 1
            and BY_CODE[dtype].itemsize == 1
        ):
            raise ConfigError(
                f"{name!r}: {BY_CODE[dtype].name} cannot be averaged on GPUs: NCCL's sum would wrap"
                " first; sum it (average=False) or use a wider type"
            )
        if (
            self.place is not MachineRole.DIRECT
            and self._config.servers
            and divisor > 1
            and BY_CODE[dtype].itemsize == 1
        ):
            raise ConfigError(
                f"{name!r}: {BY_CODE[dtype].name} cannot be averaged over machines with several"
                " processes: their sums would wrap first; sum it (average=False), use a wider"
                " type, or set BPSX_LOCAL_REDUCE=0"
            )

    def hear(self, message: dict[str, Any]) -> bool:
        """Handle LEFT, JOINED or CLEAR about this machine's processes; return whether it was one.

        The caller must then have the core check its state.
        """
        kind, machine = message["type"], self.machine
        if machine is None or kind not in ("LEFT", "JOINED", "CLEAR"):
            return False
        if kind == "CLEAR":
            machine.all_joined()
            return True
        local_rank = message["rank"] - self._config.rank + self._config.local_rank
        (machine.left if kind == "LEFT" else machine.joined)(local_rank)
        return True

    def announce_joined(self, on: bool, look: Callable[[], None]) -> None:
        """Mark this process as joined, or as taking part again.

        For a root, the scheduler's messages do that, in order with those about the other processes.
        ``look``: the core's method.
        """
        if self.machine is not None and self.place in (MachineRole.MEMBER, MachineRole.ONLY_MEMBER):
            self.machine.set_joined(on)
            look()

    def close(self) -> None:
        """Release the machine, after the core has been closed. Idempotent."""
        if self.machine is not None:
            self.machine.close()
