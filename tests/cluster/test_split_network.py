"""A network splits, and each side has a scheduler at the job's address: one job goes on at most."""

from __future__ import annotations

import pytest
from network import Network, needed

from bench.network import run
from support.jobs import TRANSPORTS, Job, Process

pytestmark = [needed, pytest.mark.timeout(150)]
#: Worker n adds 10**n, so the digits of a sum show which workers it contains.
STEPPING = """
    import bpsx, numpy as np, select

    bpsx.init()
    number, stop, seen = bpsx.rank(), 0.0, None
    report("running")
    while not stop:
        mine = 1.0 if select.select([sys.stdin], [], [], 0.01)[0] else 0.0
        stop = float(bpsx.push_pull(np.full(1, mine), name="stop", average=False)[0])
        found = bpsx.push_pull(np.full(30_000, 10.0**number), name="x", average=False)
        assert (found == found[0]).all()
        if found[0] != seen:
            seen = found[0]
            report(["sum", int(seen)])
    report(["end", bpsx.size()])
    bpsx.shutdown()
"""
ENV = {
    "BPSX_SECRET": "5bd6a3f0" * 8,
    "BPSX_ELASTIC": "shrink",
    "BPSX_SCHEDULER_WAIT": "8",
    "PS_HEARTBEAT_INTERVAL": "0.5",
    "PS_HEARTBEAT_TIMEOUT": "2",
}
PLACES = ["bridge", "scheduler", "elsewhere"]
PLACES += [f"worker {i}" for i in range(4)] + [f"server {i}" for i in range(2)]


class Split(Job):
    """A job of four workers and two servers, each in a network namespace of its own."""

    def __init__(self, network: Network, transport: str) -> None:
        self.network, self._place = network, "scheduler"
        self.first: Process | None = None
        env = {**ENV, **TRANSPORTS[transport]}
        host = network.address["scheduler"]
        super().__init__(STEPPING, workers=4, servers=2, host=host, env=env)

    def command(self, name: str, words: list[str]) -> list[str]:
        place = self._place if name == "scheduler" else name
        return [*self.network.prefix(place), *words]

    def split(self, beyond: list[str]) -> None:
        """Put ``beyond`` on a bridge of their own, with another scheduler."""
        network, hub = self.network, self.network.namespace("bridge")
        beyond = [*beyond, "elsewhere"]
        run("ip", "-n", hub, "link", "add", "net1", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "net1", "up")
        for name in beyond:
            port = f"port{PLACES.index(name) - 1}"
            run("ip", "-n", hub, "link", "set", port, "master", "net1")
        address = f"{network.address['scheduler']}/24"
        run("ip", "-n", network.namespace("elsewhere"), "addr", "add", address, "dev", "net0")
        for name in beyond:
            run("ip", "-n", network.namespace(name), "neigh", "flush", "all")
        self._place = "elsewhere"
        assert self.scheduler is not None
        self.first, self.scheduler.name = self.scheduler, "scheduler here"
        self.start_scheduler(int(self.port))

    @property
    def processes(self) -> list[Process]:
        """With the scheduler on this side, so that a failed test prints what it has said."""
        return [*super().processes, *([self.first] if self.first else [])]


@pytest.mark.parametrize(
    ("beyond", "goes_on", "transport"),
    [
        ([1, 2, 3], "beyond", "zmq"),
        ([3], "here", "tcp"),
        ([0, 1], "beyond", "tcp"),
        ([2, 3], "here", "zmq"),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, list) else value,
)
def test_one_side_goes_on_and_the_other_one_says_why_it_does_not(beyond, goes_on, transport):
    with Network(PLACES) as network, Split(network, transport) as job:
        for worker in job.workers:
            worker.wait_for_line('["sum", 1111]')
        here = [i for i in range(4) if i not in beyond]
        job.split([*(f"worker {i}" for i in beyond), "server 1"])
        living, ended = (beyond, here) if goes_on == "beyond" else (here, beyond)
        total = sum(10**i for i in living)
        for i in living:
            job.workers[i].wait_for_line(f'["sum", {total}]')
        for i in ended:
            job.workers[i].wait_for_line("Error: ", 40)
            assert job.workers[i].wait() == 1, job.workers[i].text()
            # No sum has been made without the others.
            assert [r for r in job.workers[i].reports() if r[0] == "sum"] == [["sum", 1111]]
        job.workers[living[0]].say("stop")
        for i in living:
            assert job.workers[i].wait() == 0, job.workers[i].text()
            assert job.workers[i].reports()[-1] == ["end", len(living)]
        if goes_on == "beyond":
            assert job.first is not None
            assert "as many workers are silent as are left, or more" in job.first.text()
        for process in job.processes:
            process.wait()
