"""Jobs whose servers are struck in the middle of an operation, for tests of survival.

A job runs one operation of :data:`OPERATIONS` on each worker while its servers are stopped. So the
operation is certainly under way when a server is struck. All sums are compared with float64, and
bit by bit with the sum in the order of ranks.
"""

from __future__ import annotations

import signal
import textwrap
from typing import Any

from support.jobs import TRANSPORTS, Job, Process

#: Heartbeats that soon notice a silent process.
QUICK = {"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "2"}
#: Small partitions, so that tensors need not be large to be cut.
CUT = {"BYTEPS_PARTITION_BYTES": "500000"}
#: What the workers of all jobs share: tensors with their sums, and counted rounds of them.
_COMMON = '''
    import threading, zlib
    import bpsx, numpy as np
    from bpsx.errors import BpsxError, MismatchError

    bpsx.init()
    rank, size = bpsx.rank(), bpsx.size()
    # Elements: sent in batches without and with acknowledgement, whole, and cut.
    STANDARD = {"tiny": 3, "small": 2_000, "large": 30_000, "cut": 300_000}
    rounds, wrong = {}, []
    # To draw each share would cost more than all else. Different parts are multiplied by different
    # numbers, so no two shares are alike, and their sums are rounded.
    drawn = np.random.default_rng(0).standard_normal(400_000, np.float32)

    def share(name, n, round_, of):
        seed = zlib.crc32(f"{name} {round_} {of}".encode())
        begin = seed % (len(drawn) - n)
        return drawn[begin : begin + n] * np.float32(1 + seed / 2**32)

    def begin(name, n):
        """Push the next round of a tensor. Returns a function that awaits and checks the sum."""
        rounds[name] = round_ = rounds.get(name, -1) + 1
        handle = bpsx.push_pull_async(share(name, n, round_, rank), name=name, average=False)
        return lambda: check(name, n, round_, bpsx.synchronize(handle), range(size))

    def add_up(parts):
        """The sum in order, with the rounding of float32."""
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        return total

    def check(name, n, round_, got, ranks):
        each = bpsx.local_size()
        machines = [[of for of in ranks if of // each == m] for m in range(size // each)]
        shares = {of: share(name, n, round_, of) for of in ranks}
        sums = [add_up([shares[of] for of in m]) for m in machines if m]
        exact = np.sum(list(shares.values()), axis=0, dtype=np.float64)
        bits = add_up(sums)
        if not np.allclose(got, exact, rtol=1e-5, atol=1e-5):
            wrong.append(f"{name} of round {round_}: {got[:3]}, not {exact[:3]}")
        elif not np.array_equal(got, bits):
            wrong.append(f"{name} of round {round_}: other bits")

    def exchange(tensors):
        for end in [begin(name, n) for name, n in tensors.items()]:
            end()

    def in_thread(call):
        """Begin a call that blocks. Returns a function that awaits its end."""
        errors = []
        def run():
            try:
                call()
            except BaseException as e:
                errors.append(e)
        thread = threading.Thread(target=run)
        thread.start()
        def end():
            thread.join()
            if errors:
                raise errors[0]
        return end

    def all_of(ends):
        return lambda: [end() for end in ends]

    def begin_all(tensors):
        return all_of([begin(name, n) for name, n in tensors.items()])
'''
#: Operation -> source of ``operation()``, which begins it and returns a function that ends it.
OPERATIONS = {
    "large": 'operation = lambda: begin_all({"cut": STANDARD["cut"], "large": 30_000})',
    "small": 'operation = lambda: begin_all({"tiny": 3, "small": 2_000})',
    "many": """
        many = {f"many{i}": 1 + i * 7 % 1500 for i in range(300)}
        exchange(many)
        operation = lambda: begin_all(many)
    """,
    "new names": 'operation = lambda: begin_all({f"new{i}": 1 << 2 * i for i in range(10)})',
    "barrier": """
        bpsx.barrier()
        operation = lambda: in_thread(bpsx.barrier)
    """,
    "broadcast": """
        def send(round_):
            state = [share("state", n, round_, rank) for n in (0, 5, 3_000, 200_000)]
            for i, a in enumerate(state):
                a = bpsx.broadcast(a, root_rank=1, name=f"state{i}")
                if not np.array_equal(a, share("state", len(a), round_, 1)):
                    wrong.append(f"broadcast of {len(a)} elements in round {round_}")
        send(0)
        operation = lambda: in_thread(lambda: send(1))
    """,
    "failed": """
        def disagree():
            try:
                bpsx.push_pull(np.ones(5), name="apart", average=rank == 0)
                wrong.append("no error")
            except MismatchError:
                pass
        disagree()
        operation = lambda: in_thread(disagree)
    """,
    "join": """
        def uneven(count):
            for i in range(count):
                round_ = rounds["uneven"] = rounds.get("uneven", -1) + 1
                ranks = range(size) if i < 2 else range(1, size)
                got = bpsx.push_pull(
                    share("uneven", 40_000, round_, rank), name="uneven", average=False
                )
                check("uneven", 40_000, round_, got, ranks)
            bpsx.join()
            rounds["uneven"] = 3
        uneven(2 if rank == 0 else 4)
        operation = lambda: in_thread(lambda: uneven(2 if rank == 0 else 4))
    """,
    "idle": "operation = lambda: lambda: None",
}
_COURSE = """
    for _ in range(2):
        exchange(STANDARD)
    report("ready")
    hear()
    end = operation()
    report("begun")
    end()
    report("ended")
    hear()
    exchange(STANDARD)
    exchange({"late": 1_000, "late too": 200_000})
    exchange(STANDARD)
    bpsx.barrier()
    report(wrong)
    bpsx.shutdown()
"""


def source(operation: str) -> str:
    """Return the source of a worker that runs ``operation`` between ordinary steps."""
    body = textwrap.dedent(OPERATIONS[operation])
    return textwrap.dedent(_COMMON) + body + textwrap.dedent(_COURSE)


class Striking(Job):
    """A job whose workers run :func:`source`."""

    def __init__(self, source: str, *given: Any, env: dict[str, str] | None = None, **more: Any):
        super().__init__(source, *given, env={**CUT, **(env or {})}, **more)

    def begin(self, *running: int) -> None:
        """Let all workers begin the operation while all servers but ``running`` are stopped."""
        self.await_line("ready")
        for i, server in enumerate(self.servers):
            if i not in running:
                server.signal(signal.SIGSTOP)
        self.go_on()
        self.await_line("begun")

    def resume(self, *but: Process) -> None:
        """Let all stopped servers run, except some."""
        for server in self.servers:
            if server not in but:
                server.signal(signal.SIGCONT)

    def replace_silent(self) -> None:
        """Wait until the operation has ended without server 0, which then learns of that."""
        self.await_line("goes on with term 1")
        self.await_line("ended")
        self.resume()
        assert self.servers[0].wait() == 1
        assert "this server has been replaced: server " in self.servers[0].text()
        self.end_well(self.servers[0])

    def await_line(self, text: str) -> None:
        """Wait until all workers have said ``text``."""
        for worker in self.workers:
            try:
                worker.wait_for_line(text)
            except AssertionError:
                raise AssertionError(self.everything()) from None

    def go_on(self) -> None:
        """Let all workers go on that wait for this."""
        for worker in self.workers:
            worker.say("go")

    def everything(self) -> str:
        """Return the output of all processes, for the message of a failed test."""
        return "\n".join(p.text() for p in self.processes)

    def end_well(self, *struck: Process, terms: int | None = None) -> None:
        """Let the operation and the steps after it end, in which all sums must be right."""
        assert self.scheduler is not None
        terms = len(struck) if terms is None else terms
        self.await_line("ended")
        if terms:
            self.scheduler.wait_for_line("workers have moved", count=terms)
        self.go_on()
        others = [server for server in self.servers if server not in struck]
        for process in (*self.workers, *others, self.scheduler):
            assert process.wait() == 0, self.everything()
        for worker in self.workers:
            assert worker.reports()[-1] == [], self.everything()
        log = self.scheduler.text()
        assert log.count("workers have moved") == terms, log


class Struck(Striking):
    """Such a job on this machine."""

    def __init__(self, operation: str, transport: str, servers: int = 2, **more: Any) -> None:
        env = {**TRANSPORTS[transport], "BPSX_ELASTIC": "servers", **more.pop("env", {})}
        super().__init__(source(operation), servers=servers, env=env, **more)
