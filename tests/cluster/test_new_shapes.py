"""Memory of servers and workers when each push has a new shape, as with varying batch lengths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.jobs import TRANSPORTS, Job, Process

#: Shapes pushed before the first measurement of memory, and before the second.
FIRST, LAST = 20, 120
#: Room for four tensors. Processes grow by 4 MiB at most; a server that could not reuse freed
#: memory grew by 34 to 180 MiB.
MOST_BYTES = 16 << 20

WORK = f"""
import bpsx, numpy as np, random
bpsx.init()
sizes = random.Random(1).sample(range(500_000, 1_500_000), {LAST})
data = np.ones(max(sizes), np.float32)
out = np.ones_like(data)
for i, size in enumerate(sizes):
    bpsx.push_pull(data[:size], "x", output=out[:size])
    if i + 1 in ({FIRST}, {LAST}):
        report(i + 1)
        hear()
bpsx.shutdown()
"""


def private(process: Process) -> int:
    """Return the process's private resident bytes."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.popen.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_new_shapes_need_no_new_memory(transport: str) -> None:
    with Job(WORK, workers=2, env=TRANSPORTS[transport]) as job:
        watched = [*job.servers, *job.workers]
        found = []
        for pushed in (FIRST, LAST):
            for worker in job.workers:
                worker.wait_for_line(str(pushed))
            found.append([private(process) for process in watched])
            for worker in job.workers:
                worker.say("go on")
        job.results()
    for process, before, after in zip(watched, *found):
        assert after - before < MOST_BYTES, (
            f"{process.name} has grown from {before >> 20} to {after >> 20} MiB"
        )
