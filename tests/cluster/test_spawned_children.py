"""Children spawned by multiprocessing import their parent's script: init() at its top level fails
with the cause and the remedy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs import Job, run
from support.torchrun_job import Torchrun

SCRIPT = """
import multiprocessing, sys
import bpsx{framework} as bps
def say(text):
    sys.stderr.write(text + "\\n")
def work():
    say("the child's work")
try:
    bps.init()
except Exception as e:
    say(f"child: {{type(e).__name__}}: {{e}}")
    sys.exit(3)
if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=work)
    child.start()
    child.join()
    bps.barrier()
    say(f"worker {{bps.rank()}}: status of its child {{child.exitcode}}")
    bps.shutdown()
"""
WORKER = """
import runpy
runpy.run_path({path!r}, run_name="__main__")
"""


def told(lines: list[str], rank: int) -> str:
    """Return the message of worker ``rank``'s child."""
    return next(line for line in lines if line.startswith(f"child: JobOverError: worker {rank}:"))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_init_at_the_top_of_a_script_is_refused_in_its_children(
    method: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(framework="", method=method))
    with Job(WORKER.format(path=str(script))) as job:
        job.results()
        for rank, worker in enumerate(job.workers):
            assert any(f"worker {rank}: status of its child" in line for line in worker.errors), (
                worker.text()
            )
            line = told(worker.errors, rank)
            assert (
                f"is a child of worker {rank}'s process" in line
                and 'if __name__ == "__main__":' in line
            ), line


def test_under_torchrun(tmp_path: Path) -> None:
    """Under torchrun, a child of worker 0 would otherwise start another job at torchrun's store,
    and wait for it.
    """
    with Torchrun(
        tmp_path, SCRIPT.format(framework=".torch", method="spawn"), each=(2,), by_hand=True
    ) as job:
        statuses, text = job.wait()
    assert statuses == [0, 0], text
    for rank in (0, 1):
        assert 'if __name__ == "__main__":' in told(text.splitlines(), rank), text
        assert f"worker {rank}: status of its child 3" in text, text


def test_init_in_the_work_of_a_child_is_refused(tmp_path: Path) -> None:
    """The import is over by then, so the guard would not help."""
    script = tmp_path / "train.py"
    script.write_text("""
import bpsx, multiprocessing, sys
def work():
    try:
        bpsx.init()
    except bpsx.JobOverError as e:
        sys.stderr.write(f"child: JobOverError: {e}\\n")
if __name__ == "__main__":
    bpsx.init()
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    bpsx.barrier()
""")
    with Job(WORKER.format(path=str(script))) as job:
        job.results()
        for rank, worker in enumerate(job.workers):
            assert "call init() only in the parent" in told(worker.errors, rank), worker.text()


def test_in_a_job_of_one_worker_children_may_call_init(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(framework="", method="spawn"))
    assert run(
        WORKER.format(path=str(script)) + "report('well')", workers=1, servers=0, alone=True
    ) == [["well"]]
