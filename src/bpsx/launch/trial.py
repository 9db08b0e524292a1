"""Jobs of our own, with which commands try something on this machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bpsx.config import child_environment

#: Variables that apply to such a job, too: they say where files are kept. It gets no other variable
#: of a job.
_KEPT = ("BPSX_CACHE_DIR", "BYTEPS_SOCKET_PATH")
_OURS = ("DMLC_", "BYTEPS_", "BPSX_", "PS_")
_TOLD = 10
#: Worker 0's line of JSON; over ssh its prefix has the host, too.
_ANSWER = re.compile(r"\[worker 0(?: [^\]]*)?\] (\{.*)")


class TrialResult(NamedTuple):
    """Exit status and output of a job. ``status`` None: it did not end in time."""

    status: int | None
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """The last line of JSON that worker 0 has printed; empty without one."""
        found = [made for line in self.out.splitlines() if (made := _ANSWER.match(line))]
        return dict(json.loads(found[-1][1])) if found else {}

    @property
    def telling(self) -> str:
        """The last lines of tracebacks, which name the error; without any, the output's end."""
        lines = self.err.splitlines()
        found = [
            line for line in lines if re.search(r"\w(Error|Exception): |ERROR|^bpsx-run: ", line)
        ]
        return "; ".join(dict.fromkeys((found or lines[-_TOLD:])[:_TOLD])) or "it printed nothing"


def own_python() -> list[str]:
    """The words that run a module with this Python, without the current folder in its path."""
    return [sys.executable, "-P", "-m"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a trial: this process's, without a job's variables, and ``more``."""
    kept = {k: v for k, v in child_environment().items() if not k.startswith(_OURS) or k in _KEPT}
    return {**kept, "BPSX_RENDEZVOUS_TIMEOUT": "60", "PYTHONUNBUFFERED": "1", **more}


def run(
    options: Sequence[str], module: Sequence[str], env: Mapping[str, str], seconds: float
) -> TrialResult:
    """Run a job whose workers run a module with its arguments. ``options``: bpsx-run's."""
    command = [*own_python(), "bpsx.launch", *options, "--grace", "2", "--"]
    with subprocess.Popen(
        [*command, *own_python(), *module],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as trial:
        try:
            out, err = trial.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            trial.send_signal(signal.SIGTERM)
            return TrialResult(None, "", "")
        except BaseException:
            trial.send_signal(signal.SIGTERM)
            raise
    return TrialResult(trial.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
