"""Observing a running job: find it, query its scheduler, and the command ``bpsx-run trace``."""

from __future__ import annotations

import argparse
import math
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from bpsx.config import Config, child_environment
from bpsx.errors import ConfigError, RendezvousError
from bpsx.launch import job_registry
from bpsx.scheduler import messages
from bpsx.scheduler.sockets import (
    REFUSALS,
    REFUSED,
    no_secret_in_common,
    open_socket,
    speaks_zeromq,
)
from bpsx.scheduler.waiting import why_silent
from bpsx.system.address import is_ipv6, join_host_port, tcp_url
from bpsx.system.host import scheduler_address
from bpsx.telemetry import timeline

#: Time limits, in seconds: for the scheduler's reply, and for the nodes to write their timelines.
ANSWER, WRITTEN = 5.0, 30.0


def find(scheduler: str | None, job: int | None) -> Config:
    """Locate a job's scheduler.

    The order is: ``scheduler`` ("HOST:PORT"), DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, this user's
    only local job. ``job``: process id of the launcher of a local job, to choose among several.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    if scheduler is not None:
        host, _, port = scheduler.rpartition(":")
        if not host or not port.isascii() or not port.isdigit():
            raise ConfigError(f"--scheduler {scheduler!r}: expected HOST:PORT")
        return Config(child_environment(DMLC_PS_ROOT_URI=host.strip("[]"), DMLC_PS_ROOT_PORT=port))
    if job is None:
        here = Config()
        if here.root_uri and here.root_port:
            return here
    jobs = [r for r in job_registry.running() if job in (None, r.pid)]
    if not jobs:
        raise ConfigError(
            "no job found: "
            + (
                f"this user has no running bpsx-run with process id {job}"
                if job is not None
                else (
                    "this user has no running bpsx-run; give --scheduler HOST:PORT, or set"
                    " DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
                )
            )
        )
    if len(jobs) > 1:
        raise ConfigError(
            "several jobs run here; choose one with --job: "
            + "; ".join(f"{r.pid} ({' '.join(r.command)[:60]})" for r in jobs)
        )
    found = jobs[0]
    secret = {"BPSX_SECRET": found.secret} if found.secret else {}
    return Config(
        child_environment(
            DMLC_PS_ROOT_URI=found.address, DMLC_PS_ROOT_PORT=str(found.port), **secret
        )
    )


#: States of nodes of a VIEW that are not in the job any more: in good order, or not.
ENDED = ("left", "lost")


class Observer:
    """An observer's connection to a job's scheduler. An observer is not part of the job.

    A context manager; not thread-safe.
    """

    def __init__(self, config: Config) -> None:
        """Connect to the scheduler that ``config`` names.

        Raises :class:`~bpsx.errors.RendezvousError` if its name cannot be resolved.
        """
        self.where = join_host_port(config.root_uri, config.root_port)
        self._config, self._refusals = config, 0
        self._address = address = scheduler_address(config)
        self._context: zmq.Context[Any] = zmq.Context(1)
        self._socket = open_socket(self._context, zmq.DEALER, config)
        self._monitor = self._socket.get_monitor_socket(REFUSED)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
        self._socket.connect(tcp_url(address, config.root_port))

    def ask(self, *, trace: int = 0, timeout: float = ANSWER) -> dict[str, Any]:
        """Return the job's present state: the VIEW that ``scheduler/observers.py`` makes.

        ``trace``: make all nodes record for this many seconds; -1 ends recordings started that way.
        ``timeout``: seconds.

        Raises :class:`~bpsx.errors.RendezvousError` when no reply comes in time, or the scheduler
        refuses.
        """
        while self._socket.poll(0):
            self._socket.recv_multipart()  # late replies to earlier requests
        self._socket.send(messages.encode("OBSERVE", protocol=messages.PROTOCOL, trace=trace))
        end = time.monotonic() + timeout
        while True:
            self._await_answer(end, timeout)
            try:
                message = messages.decode(self._socket.recv())
            except messages.BadMessage as e:
                raise RendezvousError(f"{self.where} is not a scheduler of bpsx: {e}") from e
            if message["type"] == "REFUSED":
                raise RendezvousError(
                    f"refused by the scheduler at {self.where}: {message.get('reason')}"
                )
            if message["type"] == "VIEW":
                return message

    def port_is_closed(self) -> bool:
        """Whether the scheduler's port is closed."""
        try:
            with socket.create_connection((self._address, self._config.root_port), timeout=2.0):
                return False
        except TimeoutError:
            return False
        except OSError:
            return True

    def _await_answer(self, end: float, timeout: float) -> None:
        """Wait for a message until ``end``.

        Raises :class:`~bpsx.errors.RendezvousError` at ``end``, or earlier if the scheduler fails
        our handshakes.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not self._socket.poll(0):
            if not poller.poll(max(0, int((end - time.monotonic()) * 1000))):
                raise RendezvousError(
                    f"no answer from a scheduler at {self.where} within {timeout:g} s: "
                    + why_silent(self._address, self._config.root_port)
                )
            while self._monitor.poll(0):
                self._monitor.recv_multipart()
                self._refusals += 1
            if self._refusals >= REFUSALS:
                self._refusals = 0
                if speaks_zeromq(self._address, self._config.root_port):
                    raise RendezvousError(
                        f"the scheduler at {self.where} {no_secret_in_common(self._config)}"
                    )

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(0)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a job."""
    parser.add_argument(
        "--scheduler",
        metavar="HOST:PORT",
        help=(
            "the job's scheduler (default: DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, else the job of"
            " this user's only bpsx-run)"
        ),
    )
    parser.add_argument(
        "--job", type=int, metavar="PID", help="process id of the bpsx-run that started the job"
    )


def _trace_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bpsx-run trace",
        description="Record a timeline of a running job, or merge the timelines of its processes.",
        epilog=(
            "Each process writes into its own BYTEPS_TRACE_DIR, on its own machine; see"
            " docs/run/tracing.md."
        ),
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="record for N seconds (1..3600) from now on; Ctrl-C ends the recording early",
    )
    what.add_argument(
        "--merge",
        type=Path,
        metavar="DIR",
        help="merge all comm.json in DIR and below into DIR/merged.json",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="with --merge: write this file instead"
    )
    add_job_arguments(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run ``bpsx-run trace``; returns the exit status.

    Raises :class:`~bpsx.errors.BpsxError`.
    """
    parser = _trace_parser()
    options = parser.parse_args(arguments)
    if options.merge is not None:
        return timeline.tell_merge(options.merge, options.output, "bpsx-run: error")
    if not 1 <= options.seconds <= 3600:
        parser.error(f"--seconds {options.seconds:g}: expected 1..3600")
    with Observer(find(options.scheduler, options.job)) as observer:
        return _record(observer, math.ceil(options.seconds))


def timelines(
    observer: Observer, seconds: int, ends_early: bool = False
) -> Iterator[tuple[tuple[str, int], dict[str, Any] | None]]:
    """Make the job's processes record; yields each (role, rank) with what it has written.

    Processes that have written nothing in time come last, with None. Ctrl-C ends the recording;
    with ``ends_early`` it is then used as it is.

    Raises :class:`~bpsx.errors.RendezvousError` if there is nothing to record, or the job ends.
    """
    view = observer.ask(trace=seconds)
    if view["state"] != "running":
        raise RendezvousError(
            f"the job at {observer.where} is {view['state']}: there is nothing to record"
        )
    before = view["traced_count"]
    missing = {(n["role"], n["rank"]) for n in view["nodes"] if n["state"] == "running"}
    print(f"recording {len(missing)} processes for {seconds} s", file=sys.stderr)
    end = time.monotonic() + seconds + WRITTEN
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        observer.ask(trace=-1)
        if not ends_early:
            raise
    while missing and time.monotonic() < end:
        try:
            traced = observer.ask()["traced"]
        except RendezvousError as e:
            raise RendezvousError(
                f"the job ended ({e}); its timelines are in BYTEPS_TRACE_DIR"
            ) from e
        for item in traced:
            who = (item["role"], item["rank"])
            if item["number"] >= before and who in missing:
                missing.remove(who)
                yield who, item
        time.sleep(0.5)
    for who in sorted(missing):
        yield who, None


#: Reason for which a process has recorded nothing.
RECORDS_ALREADY = "is already recording: bpsx.trace_start() or another bpsx-run trace started that"


def _record(observer: Observer, seconds: int) -> int:
    """Make the job's processes record, and print what each has written."""
    failed = False
    for (role, rank), item in timelines(observer, seconds, ends_early=True):
        failed = failed or item is None or not item["path"]
        if item is None:
            print(f"bpsx-run trace: {role} {rank} has not written its timeline", file=sys.stderr)
            continue
        written = f"{item['records']} events in {item['path']}" if item["path"] else RECORDS_ALREADY
        print(f"{role} {rank} ({item['host']}): {written}", flush=True)
    return int(failed)
