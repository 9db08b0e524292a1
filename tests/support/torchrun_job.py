"""Real torchrun agents for tests, as processes of one machine, with all processes they start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

DEADLINE = 240


class Torchrun:
    """One torchrun with ``each`` processes per imitated machine, all on this machine.

    ``by_hand``: start the workers as torchrun would, without torchrun and its store. Leaving the
    block ends all remaining processes.

    ``options`` are torchrun's. ``endpoint`` makes its rendezvous a c10d one at that host, or
    "standalone"; by default it is static, at ``master``. ``prefixes[i]`` goes before the command of
    machine i.
    """

    def __init__(
        self,
        folder: Path,
        source: str,
        *arguments: str,
        each: tuple[int, ...] = (2,),
        by_hand: bool = False,
        options: Sequence[str] = (),
        endpoint: str = "",
        master: str = "127.0.0.1",
        prefixes: Sequence[Sequence[str]] = (),
        **environment: str,
    ) -> None:
        script = folder / "script.py"
        script.write_text(textwrap.dedent(source))
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_", "PS_"))
        }
        if "BPSX_CACHE_DIR" in os.environ:
            clean["BPSX_CACHE_DIR"] = os.environ["BPSX_CACHE_DIR"]
        self._mark = f"TEST_MARK={folder}"  # identifies this test's processes
        self._env = {
            **clean,
            "OMP_NUM_THREADS": "1",
            "BPSX_RENDEZVOUS_TIMEOUT": "150",
            "BYTEPS_SOCKET_PATH": str(folder),
            "TEST_MARK": str(folder),
            **environment,
        }
        self._folder, self._command = folder, [str(script), *arguments]
        self._each, self._options, self._endpoint = each, options, endpoint
        self._master, self._prefixes = master, prefixes
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self._port = str(s.getsockname()[1])
        reader, self._writer = os.pipe()
        self.output = os.fdopen(reader, errors="replace")
        self.processes = self._by_hand(each) if by_hand else self._agents(each)
        os.close(self._writer)

    def _start(
        self, command: list[str], prefix: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*prefix, sys.executable, *command],
            env={**self._env, **environment},
            stdout=self._writer,
            stderr=self._writer,
            start_new_session=True,
            cwd=self._folder,
        )

    def _agents(self, each: tuple[int, ...]) -> list[subprocess.Popen[bytes]]:
        return [self._agent(each, machine) for machine in range(len(each))]

    def _agent(self, each: tuple[int, ...], machine: int) -> subprocess.Popen[bytes]:
        if self._endpoint == "standalone":
            way = ["--standalone"]
        elif self._endpoint:
            way = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self._endpoint}:{self._port}"]
        else:
            way = ["--master-addr", self._master, "--master-port", self._port]
        words = {
            "--nnodes": len(each),
            "--node-rank": machine,
            "--nproc-per-node": each[machine],
            "--monitor-interval": 0.1,
        }
        options = [str(word) for pair in words.items() for word in pair]
        return self._start(
            ["-m", "torch.distributed.run", *way, *options, *self._options, *self._command],
            self._prefixes[machine] if self._prefixes else (),
        )

    def _by_hand(self, each: tuple[int, ...]) -> list[subprocess.Popen[bytes]]:
        places = [(group, local, n) for group, n in enumerate(each) for local in range(n)]
        return [
            self._start(
                self._command,
                RANK=str(rank),
                WORLD_SIZE=str(len(places)),
                LOCAL_RANK=str(local),
                LOCAL_WORLD_SIZE=str(n),
                GROUP_RANK=str(group),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=self._port,
            )
            for rank, (group, local, n) in enumerate(places)
        ]

    def lose(self, machine: int) -> None:
        """Kill all processes of ``machine``, also scheduler and servers that it has started."""
        os.kill(self.processes[machine].pid, signal.SIGKILL)
        for pid in self._ours(f"GROUP_RANK={machine}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_again(self, machine: int) -> None:
        """Start the agent of ``machine`` once more, after :meth:`lose`."""
        self.processes[machine].wait(DEADLINE)
        self._writer = os.open(f"/proc/self/fd/{self.output.fileno()}", os.O_WRONLY)
        self.processes[machine] = self._agent(self._each, machine)
        os.close(self._writer)

    def __enter__(self) -> Torchrun:
        return self

    def wait(self) -> tuple[list[int], str]:
        """Return the exit statuses and all output.

        Waits until the last process that could write to the output has ended, including other
        processes that the workers started.
        """
        text = self.output.read()
        return [process.wait(DEADLINE) for process in self.processes], text

    def left(self) -> list[str]:
        """Return the command lines of this test's processes that still exist."""
        found = []
        for pid in self._ours():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                found.append(words.replace(b"\0", b" ").decode())
        return found

    def _ours(self, *variables: str) -> list[int]:
        """Return the process ids of this test's processes that have ``variables``, too."""
        wanted, found = {text.encode() for text in (self._mark, *variables)}, []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted <= set(
                    (entry / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(entry.name))
        return found

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.output.close()
