"""Jobs of the frameworks that lose a worker: what the survivors have to report."""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import Any

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


def waits_for_death(source: str, *doomed: int, last: int = 7) -> str:
    """Let workers ``doomed`` wait before step ``last``, so that they cannot end before they die."""
    begins = {"stop_in_step(step)\n": "step", 'report(["step", i])\n': "i"}
    (line,) = (line for line in begins if line in source)
    wait = f"; number in {doomed} and {begins[line]} == {last} and hear()\n"
    return source.replace(line, line[:-1] + wait)


def survivors_agree(job: Job, lost: int | Collection[int], workers: int) -> list[float]:
    """Check that all survivors moved all weights by the same in each step; return the moves."""
    dead = [lost] if isinstance(lost, int) else lost
    living = [of for of in range(workers) if of not in dead]
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


# ---- training with ``elastic.run``

REPLACE = {"BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "60"}


def ends(job: Job, *workers: int) -> list[list[Any]]:
    """The last reports of these workers, once they have ended well."""
    statuses = [job.workers[i].wait() for i in workers]
    everything = "\n".join(p.text()[-3000:] for p in job.processes)
    assert statuses == [0] * len(workers), everything
    return [job.workers[i].reports()[-1] for i in workers]


#: Variable of scripts whose lost worker is replaced: before their last steps they commit the same
#: step until so many workers take part.
FULL = "TEST_FULL_SIZE"


def replace_one(job: Job, number: int = signal.SIGKILL) -> list[list[Any]]:
    """Let worker 1 of three get a signal, and another take its place when the others know of it.

    Returns the last reports of the survivors and of the newcomer.
    """
    job.workers[1].signal(number)
    assert job.workers[1].wait() == (0 if number == signal.SIGTERM else -number)
    for survivor, rank in ((0, 0), (2, 1)):
        job.workers[survivor].wait_for_line(f'["reset", {rank}, 2]')
    job.start_worker(1)
    return ends(job, 0, 2, 3)


def lose_sender(job: Job, step: int) -> list[list[Any]]:
    """Let worker 2 of three die, and then rank 0 while it sends the model to one in that place.

    It does so from ``step`` on. Returns the last reports of worker 1 and of the newcomer.
    """
    job.workers[0].wait_for_line(f'["step", {step}]')
    job.workers[2].signal(signal.SIGKILL)
    job.workers[1].wait_for_line('["reset", 1, 2]')
    job.start_worker(2)
    job.workers[0].wait_for_line('["sends"]')
    job.workers[0].signal(signal.SIGKILL)
    return ends(job, 1, 3)


def begun_anew(job: Job) -> list[list[Any]]:
    """The ``["train", ...]`` reports after :func:`replace_one`: of a survivor and the newcomer.

    Both survivors have begun three times, with the same.
    """
    first, other, new = (
        [r for r in job.workers[i].reports() if r[0] == "train"] for i in (0, 2, 3)
    )
    assert len(first) == 3 and [r[2:] for r in first] == [r[2:] for r in other]
    return [first[-1], new[0]]


def assert_commits_agree(job: Job, *workers: int) -> list[int]:
    """Assert that these workers have said the same with each ``["commit", step, ...]``.

    Each commits the steps one after the other: survivors from 1 on, newcomers from the step after
    which they have joined. Returns the first step of each worker.
    """
    said: dict[int, list[Any]] = {}
    firsts = []
    for i in workers:
        commits = [r for r in job.workers[i].reports() if r[0] == "commit"]
        steps = [r[1] for r in commits]
        assert steps == list(range(steps[0], steps[0] + len(steps))), job.workers[i].text()
        firsts.append(steps[0])
        for _, step, *more in commits:
            assert said.setdefault(step, more) == more, (step, job.workers[i].text())
    return firsts
