"""Sockets that a killed job has left in the folder where the processes of a machine meet are
removed.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from support.jobs import Job


def left(folder: Path, name: str, age: float) -> tuple[Path, socket.socket]:
    path = folder / name
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return path, made


def test_only_sockets_without_a_listener_are_removed() -> None:
    source = "import bpsx\nhear()\nbpsx.init()\nreport(bpsx.local_size())"
    with Job(source, workers=2, servers=0, processes=2) as job:
        folder = Path(job._folder.name) / f"bpsx-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        dead, a = left(folder, "job-dead.sock", 1000)
        young, b = left(folder, "job-young.sock", 0)
        alive, c = left(folder, "job-alive.sock", 1000)
        c.listen()
        a.close()
        for worker in job.workers:
            worker.say("")
        assert job.results() == [[2], [2]]
        assert not dead.exists()
        assert young.exists()
        assert alive.exists()
        b.close()
        c.close()
