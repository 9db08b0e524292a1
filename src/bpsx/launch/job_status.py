"""Ends of a job's processes, and the results: exit status and last line."""

from __future__ import annotations

from collections import Counter

from bpsx.launch.child import Child, signal_name
from bpsx.launch.scheduler_state import SchedulerState


class JobStatus:
    """The children of a job and their ends. ``forgiving``: see :class:`~bpsx.launch.backend.Plan`.

    ``ended``: in the order in which they ended. ``stop``: received signals that end the job.
    ``complete``: whether all processes have been started. ``trouble``: why the job could not be
    started, and the exit status for it. ``lost``: servers and workers that died while the job may
    have gone on without them. ``again``: processes that were started in the place of such.
    ``late``: workers that had to be ended as they came when the job was over. ``hung``: processes
    that had to be ended as the job had lost them. ``restarted``: schedulers that died and were
    started again.
    """

    def __init__(self, forgiving: bool) -> None:
        self.children: list[Child] = []
        self.ended: list[Child] = []
        self.lost: list[Child] = []
        self.again: list[Child] = []
        self.late: list[Child] = []
        self.hung: list[Child] = []
        self.restarted: list[Child] = []
        self.stop: list[int] = []
        self.complete = False
        self.trouble: tuple[str, int] | None = None
        self.scheduler = SchedulerState()
        self._forgiving = forgiving

    @property
    def workers(self) -> list[Child]:
        """The children that are workers."""
        return [child for child in self.children if child.role == "worker"]

    @property
    def helpers(self) -> list[Child]:
        """Scheduler and servers."""
        return [child for child in self.children if child.role != "worker"]

    @property
    def halted(self) -> bool:
        """Whether no further process should be started."""
        return bool(self.stop or self.trouble)

    @property
    def survived(self) -> list[Child]:
        """The servers and workers that died, or had to be ended, and did not end the job; dead
        schedulers, too.

        A scheduler on this machine says so at once. Elsewhere, its exit status of 0 does at the
        end.
        """
        ended_well = any(c.role == "scheduler" and c.status == 0 for c in self.children)
        blame = self.scheduler.blame()
        told = self.scheduler.lost() - ({(blame.role, blame.pid)} if blame else set())
        return self.restarted + [
            c
            for c in self.children
            if c.role != "scheduler"
            and (c.status or c.overdue)
            and (
                (c.role, c.process.pid) in told
                or c in self.late
                or (ended_well and (c in self.lost or c in self.again))
            )
        ]

    def exit_status(self, written: bool) -> int:
        """The exit status for the job. ``written``: whether all output has been written."""
        if self.trouble:
            return self.trouble[1]
        survived = self.survived
        bad = [c for c in self.workers if (c.status or c in self.hung) and c not in survived]
        if self._forgiving and not (self.stop or bad):
            return 0
        # The status of a child that bpsx-run had to end says nothing about the cause.
        overdue = any(child.overdue for child in self.children if child not in survived)
        if self.stop:
            return (
                self._own()
                if self.complete and written and not overdue
                else max(self._own(), 128 + self.stop[0])
            )
        return self._own() or int(overdue)

    def _own(self) -> int:
        """The largest status of the children that ended by themselves, if that ended the job."""
        survived = self.survived
        return max(
            (c.status or 0 for c in self.children if not (c.overdue or c in survived)), default=0
        )

    def report(self) -> str:
        """Text that lists the failures, the cause first."""
        if self.trouble:
            return self.trouble[0]
        blamed, cause = self._blamed()
        survived = self.survived
        failed = [c for c in self.children if (c.status or c.overdue) and c not in survived]
        parts = [child.story() for child in self.ended if child in failed and child is not blamed]
        if blamed is not None and blamed.status is not None:
            parts.insert(
                0, blamed.story() + ("" if blamed.status else " before the others were done")
            )
            if cause:
                parts.insert(0, f"{blamed.name} failed: {cause}")
        if self.stop:
            parts.insert(0, f"received {signal_name(self.stop[0])}")
        elif not self._own() and self.scheduler.forming():
            parts.insert(0, self._absent())
        elif all(child.overdue and child.role != "worker" for child in failed):
            parts.append(
                "all workers had exited with status 0"
                + ("" if self.scheduler.text() else ": does the command call bpsx.init()?")
            )
        return "; ".join([*parts, *self.losses()])

    def losses(self) -> list[str]:
        """Return a text for each death of a process that the job has survived."""
        # A process that was still starting when the job ended was no loss.
        lost = [c for c in self.survived if not (c.overdue and (c in self.again or c in self.late))]
        stories = Counter(
            (child.story(), child.role == "scheduler" and "was started again") for child in lost
        )
        return [
            story
            + (f" ({n} times)" if n > 1 else "")
            + f", and {then or 'the job went on without it'}"
            for (story, then), n in stories.items()
        ]

    def _blamed(self) -> tuple[Child | None, str]:
        """The child that the scheduler names as the cause of the job's end, and its exception.

        The child is None if there is none or bpsx-run itself was the cause. The exception is "" if
        unknown.
        """
        blame = self.scheduler.blame()
        if blame is None or self.stop:
            return None, ""
        if blame.role == "worker":
            # Not by pid: a worker's command may be a shell script that runs the actual process.
            same = self.workers
            if blame.rank >= len(same):
                return None, ""
            # The latest that was started in its place.
            name = same[blame.rank].name
            return [child for child in same if child.name == name][-1], blame.cause
        same = [child for child in self.children if child.role == blame.role]
        return next((child for child in same if child.process.pid == blame.pid), None), ""

    def _absent(self) -> str:
        """Text for a job that cannot form, as workers ended with status 0 before it had formed."""
        gone = [child.name for child in self.workers if child.status == 0 and not child.overdue]
        if len(gone) == len(self.workers):
            return "no worker called bpsx.init(): all exited with status 0 without joining the job"
        return (
            f"{', '.join(gone)} exited with status 0 without joining the job, which cannot form"
            f" without {'it' if len(gone) == 1 else 'them'}"
        )
