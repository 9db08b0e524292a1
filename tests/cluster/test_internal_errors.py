"""A defect in the hub or on the control thread ends the job, with an error that names it."""

from __future__ import annotations

import pytest

from support.jobs import Job

#: A scheduler in which JOIN is an event that the job does not expect.
SCHEDULER = """
from bpsx.scheduler import __main__, membership
from bpsx.scheduler.states import JobEvent
membership.Membership.join = lambda self, ident, generation: self._move(JobEvent.EXPIRED)
raise SystemExit(__main__.main())
"""


class DefectiveHub(Job):
    def command(self, name: str, words: list[str]) -> list[str]:
        return [words[0], "-c", SCHEDULER] if name == "scheduler" else words


def test_a_defect_in_the_hub_ends_the_job_and_names_it() -> None:
    with DefectiveHub("""
        import bpsx, numpy as np
        bpsx.init()
        try:
            if bpsx.rank() == 0:
                bpsx.join()
            bpsx.push_pull(np.ones(3), "x")
        except bpsx.PeerLostError as e:
            report(str(e))
    """) as job:
        assert [worker.wait() for worker in job.workers] == [0, 0]  # the error was caught
        for worker in job.workers:
            (text,) = worker.reports()
            assert text == (
                f"the scheduler at 127.0.0.1:{job.port} has failed: InternalError: internal error:"
                " the job in state 'running' cannot take the event 'expired'; please report it,"
                " with the log"
            )
        assert job.scheduler.wait() == 1 and "Traceback" in job.scheduler.text()
        assert [server.wait() for server in job.servers] == [1]


@pytest.mark.parametrize("when", ["before the thread", "later"])
def test_a_defect_on_the_control_thread_ends_the_job_and_names_it(when: str) -> None:
    """ALL_JOINED comes to a worker that has not called join()."""
    with Job(
        """
        import bpsx, numpy as np
        from bpsx.api.verbs import session
        from bpsx.scheduler.client import SchedulerLink
        start, first = SchedulerLink.start, os.environ["DMLC_WORKER_ID"] == "0"
        def with_a_message(link, handle, **more):
            if first and os.environ["WHEN"] == "later":
                ticks = iter([{"type": "ALL_JOINED", "last": 0}])
                tick = more["tick"]
                more["tick"] = lambda: [handle(message) for message in ticks] or tick()
            elif first:
                link.early.append({"type": "ALL_JOINED", "last": 0})
            start(link, handle, **more)
        SchedulerLink.start = with_a_message
        bpsx.init()
        try:
            while True:
                bpsx.push_pull(np.ones(3), "x")
        except bpsx.PeerLostError as e:
            report(str(e))
    """,
        env={"WHEN": when},
    ) as job:
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
        (first,), (second,) = (worker.reports() for worker in job.workers)
        assert first.startswith(
            'internal error on the control thread: InternalError("internal error: a session in'
            " state 'running' cannot take the event 'all joined'"
        )
        assert "worker 0 " in second and "a session in state 'running'" in second
