"""Jobs of the frameworks that lose a worker: what the survivors have to report."""

from __future__ import annotations

from support.jobs import Job

SHRINK = {"BPSX_ELASTIC": "shrink"}
#: For workers' source: ``die_in_step()`` kills this process once it has got some of a step's sums.
DYING = """
import os, signal, threading, time

def die_in_step(answers=2):
    from bpsx.api.lifecycle import session

    def watch():
        before = session().counters()["messages_received"]
        while session().counters()["messages_received"] < before + answers:
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
"""


def survivors_agree(job: Job, lost: int, workers: int) -> list[float]:
    """Check that all survivors moved all weights by the same in each step; return the moves."""
    living = [of for of in range(workers) if of != lost]
    found = []
    for of in living:
        assert job.workers[of].wait() == 0, job.workers[of].text() + job.scheduler.text()
        *steps, place = job.workers[of].reports()
        assert place == [living.index(of), len(living)]
        found.append([one for one in steps if one[0] != "step"])
    assert all(moves == found[0] for moves in found)
    assert all(len(step) == 1 for step in found[0]), found[0]
    assert job.scheduler.wait() == 0
    return [step[0] for step in found[0]]
