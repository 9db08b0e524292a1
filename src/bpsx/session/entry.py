"""Entry of a worker into its job: opens a session's resources in order, or closes all again."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bpsx import errors
from bpsx._core import Core
from bpsx.config import Config
from bpsx.kernels.plugins import import_compressors
from bpsx.local.neighbourhood import Neighbourhood
from bpsx.planning.partitioner import whole_pages
from bpsx.scheduler import failing
from bpsx.scheduler.client import SchedulerLink
from bpsx.scheduler.waiting import patience
from bpsx.session.lane_contact import connect_lanes, greet_lanes
from bpsx.session.lanes import Lanes
from bpsx.system.fork import keep_from_children
from bpsx.system.host import keep_memory, own_host, require_descriptors
from bpsx.system.logs import configure
from bpsx.telemetry.reporter import Reporter
from bpsx.transports import io_threads
from bpsx.transports.base import shortest_round_trips
from bpsx.transports.loopback.endpoint import LoopbackEndpoint

connections = logging.getLogger("bpsx.connections")
#: Seconds in which the scheduler says why another process of this machine is gone.
_WHY_SECONDS = 2.0
_MOST_VISITS = 1 << 16  # see bpsx.transports.base.Endpoint.join
_OF_IO_THREAD = 3  # descriptors that each I/O thread opens
_COPIED_APART = 1 << 19  # bytes; the driver copies a smaller answer before another thread wakes
log = logging.getLogger("bpsx.session.session")


@dataclass(frozen=True)
class WorkerResources:
    """Open resources of a worker in a job. The session owns and closes them.

    ``config``: with the number of this worker.
    ``endpoint``: a transport's, or only a place to sleep if another process of the machine speaks
    to the servers. ``link`` is None for a worker without others: it needs neither scheduler nor
    servers. ``servers``: host, pid and lanes of each server. ``continued``: some worker's process
    has been in an earlier job, from which workers may have kept different state. ``probes``: the
    session measures its links before anything else. ``shrinks``: the job goes on without workers
    that it loses. ``numbers``: of the workers, in the order of entry. ``joins``, ``epoch``: number
    of joins that have ended, and of resets after a stall. ``terms``: TERMs of the time before.
    ``names``: see ``told_names.py``. ``opened`` closes all of it.
    """

    config: Config
    core: Core
    endpoint: Any
    near: Neighbourhood
    reporter: Reporter
    lanes: Lanes
    link: SchedulerLink | None
    servers: list[Any]
    job: int
    continued: bool
    probes: bool
    shrinks: bool
    numbers: list[int]
    joins: int
    epoch: int
    terms: list[Any]
    names: str
    opened: ExitStack

    def abandon(self, error: BaseException) -> None:
        """Leave at once, because the session could not begin."""
        with self.opened:
            if self.link is not None:
                _tell(self.link, error)


def enter(config: Config, again: bool) -> WorkerResources:
    """Join the job that ``config`` describes; return when all lanes have replied.

    ``again``: whether this process has been in an earlier job. Raises
    :class:`~bpsx.errors.ConfigError`, :class:`~bpsx.errors.RendezvousError` or
    :class:`~bpsx.errors.TransportError`; then nothing is left open, and the scheduler knows why.
    """
    try:
        config.check()
        configure(config, "worker" if config.asks_for_number else f"worker {config.rank}")
        import_compressors(config.compressors)
        near = Neighbourhood(config)
        if not config.distributed:
            return _alone(config, near, again)
        require_descriptors("worker", _OF_IO_THREAD * io_threads(config))
        keep_memory(config.keep_memory)
        link = SchedulerLink(config)
    except Exception as e:
        failing.tell("worker", e, config)
        raise
    return _enter_job(config, near, link, again)


def _alone(config: Config, near: Neighbourhood, again: bool) -> WorkerResources:
    reporter = Reporter(config, "worker", config.rank, "")
    endpoint = LoopbackEndpoint()
    core = Core(endpoint, rank=0, job=0, lanes=(), credit=0, spin_us=0, telemetry=config.telemetry)
    lanes, opened = Lanes(endpoint, [], [], patience(config, False)), ExitStack()
    for part in (near, endpoint, core):
        opened.callback(part.close)
    return WorkerResources(
        config,
        core,
        endpoint,
        near,
        reporter,
        lanes,
        None,
        [],
        0,
        again,
        False,
        False,
        [0],
        0,
        0,
        [],
        "",
        opened,
    )


def _enter_job(
    config: Config, near: Neighbourhood, link: SchedulerLink, again: bool
) -> WorkerResources:
    with ExitStack() as opened:
        opened.callback(link.stop)
        opened.callback(near.close)
        try:
            asks = config.asks_for_number
            host, rank = own_host(config), -1 if asks else config.rank
            with near.kernels_loading():
                welcome = link.enter_job("worker", rank, host, [], again)
            if asks:
                config, near = _take_number(config, welcome["rank"])
            reporter = Reporter(config, "worker", config.rank, host)
            while True:
                reach = ExitStack()
                try:
                    found = _reach_lanes(config, near, reporter, link, welcome, reach)
                    if "meeting" in welcome:
                        _await_entry(config, link, welcome["meeting"])
                    break
                except _MeetingOff:
                    reach.close()
                    welcome = link.await_welcome()
                    # If the scheduler has lost this newcomer meanwhile, its number may be another.
                    if asks and welcome["rank"] != config.rank:
                        config, near = _take_number(config, welcome["rank"])
                        reporter = Reporter(config, "worker", config.rank, host)
                except BaseException:
                    opened.push(reach)
                    raise
            opened.push(reach)
            endpoint, lanes, core = found
        except BaseException as e:
            _tell(link, e)
            raise
        return WorkerResources(
            config,
            core,
            endpoint,
            near,
            reporter,
            lanes,
            link,
            welcome["servers"],
            welcome["job"],
            welcome["again"],
            welcome.get("probes", False),
            welcome["shrinks"],
            welcome["living"],
            welcome.get("joins", 0),
            welcome.get("epoch", 0),
            welcome.get("terms", []),
            welcome.get("names_told", ""),
            opened.pop_all(),
        )


def _take_number(config: Config, number: int) -> tuple[Config, Neighbourhood]:
    """Take the number that the scheduler has given this worker, the only one on its machine."""
    config = config.numbered(number)
    configure(config, f"worker {number}")
    log.info("the scheduler has given this worker the number %d", number)
    return config, Neighbourhood(config)


class _MeetingOff(Exception):
    """The workers have gone on without this newcomer, which waits for their next meeting."""


def _reach_lanes(
    config: Config,
    near: Neighbourhood,
    reporter: Reporter,
    link: SchedulerLink,
    welcome: dict[str, Any],
    opened: ExitStack,
) -> tuple[Any, Lanes, Core]:
    """Connect to the servers, and return when all lanes have replied. ``opened`` closes all."""
    endpoint = near.open_endpoint()
    opened.callback(endpoint.close)
    lanes = _connect(config, near, endpoint, link, welcome)
    core = _new_core(config, near, endpoint, lanes, reporter, welcome)
    opened.callback(core.close)
    if near.has_lanes:
        if io_threads(config) and not config.asynchronous:
            core.open_pool(config.compress_threads, copies_from=_COPIED_APART)
        lanes.watch()
    keep_from_children([link.address, *lanes.addresses])
    _greet(config, core, lanes, link)
    return endpoint, lanes, core


def _await_entry(config: Config, link: SchedulerLink, meeting: int) -> None:
    """Say that this newcomer has connected, and wait until all go on with it."""
    link.say("READY", meeting=meeting)
    while not any(m["type"] == "TERM" and config.rank in m["entered"] for m in link.early):
        _hear(config, link, link.news(1.0))


def _tell(link: SchedulerLink, error: BaseException) -> None:
    """Tell the others the cause, not only that this worker ended."""
    if isinstance(error, Exception):
        link.give_up(
            str(error)
            if isinstance(error, errors.BpsxError)
            else f"cannot start: {errors.in_short(error)}"
        )


def _connect(
    config: Config, near: Neighbourhood, endpoint: Any, link: SchedulerLink, welcome: dict[str, Any]
) -> Lanes:
    """Meet the machine's other processes, then connect to the lanes if this process sends."""
    addresses = (
        [(server, a) for server, (_, _, found) in enumerate(welcome["servers"]) for a in found]
        if near.has_lanes
        else []
    )
    lanes = Lanes(
        endpoint, addresses, welcome["names"]["server"], patience(config, welcome["elastic"])
    )
    _meet_neighbours(config, near, endpoint, lanes, link, welcome)
    if near.has_lanes:
        # Lanes take each worker of a place for another one.
        visit = secrets.randbelow(_MOST_VISITS - 1) + 1 if "meeting" in welcome else 0
        endpoint.join(welcome["job"], near.sender, visit)
    lanes.lose(welcome.get("ended", ()), "it had ended before this worker entered the job")
    if addresses:
        connect_lanes(
            f"worker {config.rank}",
            lanes.named(),
            lambda i, address: None if lanes.lost(i) else endpoint.connect(i, address),
        )
    return lanes


def _meet_neighbours(
    config: Config,
    near: Neighbourhood,
    endpoint: Any,
    lanes: Lanes,
    link: SchedulerLink,
    welcome: dict[str, Any],
) -> None:
    """Meet the machine's other processes. One that is gone may have been told why before."""

    def look() -> None:
        _hear_of_a_loss(config, lanes, link)

    meeting = welcome.get("meeting", 0)
    try:
        near.meet(welcome["job"], meeting, endpoint.wake_descriptor, look)
    except errors.RendezvousError:
        end = time.monotonic() + _WHY_SECONDS
        while meeting and time.monotonic() < end:
            _hear(config, link, link.news(0.1))
        raise


def _new_core(
    config: Config,
    near: Neighbourhood,
    endpoint: Any,
    lanes: Lanes,
    reporter: Reporter,
    welcome: dict[str, Any],
) -> Core:
    return Core(
        endpoint,
        rank=near.sender,
        job=welcome["job"],
        lanes=lanes.servers,
        beside=lanes.beside,
        spin_us=config.spin_us,
        credit=config.scheduling_credit * whole_pages(config.partition_bytes),
        ahead_ms=config.send_ahead_ms,
        machine=near.machine,
        telemetry=config.telemetry,
        watch=reporter.watchers[0],
        elastic=welcome["elastic"] and near.has_lanes,
        asynchronous=config.asynchronous,
        shrinks=welcome["shrinks"],
        senders=welcome["workers"],
        living=len(welcome["living"]) // welcome["processes"],
        ended=welcome.get("ended", ()),
        joins=welcome.get("joins", 0),
        trips=shortest_round_trips(endpoint, lanes.servers),
    )


def _hear_of_a_loss(config: Config, lanes: Lanes, link: SchedulerLink) -> None:
    """Raise :class:`~bpsx.errors.RendezvousError` if the scheduler reports a death during
    start-up.

    After the death of a server this worker can go on if it needs no more replies from there. The
    link keeps TERM for the session.
    """
    message = link.news()
    _hear(config, link, message)
    if message is None:
        return
    if message["type"] == "TERM":
        lanes.lose((lane for lane, _ in message["moves"]), message["text"])
    if message["type"] == "GONE":
        lanes.lose(message["lanes"], message["text"])


def _hear(config: Config, link: SchedulerLink, message: dict[str, Any] | None) -> None:
    """Raise the error that ``message`` means for a worker that is about to enter the job."""
    kind = message["type"] if message is not None else ""
    if message is None or kind not in ("LOST", "REFUSED", "OFF"):
        return
    if kind == "LOST":
        raise errors.RendezvousError(f"worker {config.rank}: {message['text']}")
    if kind == "REFUSED":
        raise errors.JobOverError(f"worker {config.rank}: {message['reason']}")
    log.warning("worker %d waits for the next meeting: %s", config.rank, message["text"])
    link.early.clear()
    raise _MeetingOff


def _greet(config: Config, core: Core, lanes: Lanes, link: SchedulerLink) -> None:
    """Wait until every lane has replied, while listening to the scheduler for reports of
    deaths.
    """
    named, secret = lanes.named(), config.secret_bytes

    def silent() -> Sequence[int]:
        found: Sequence[int] = core.greet(0.5, lanes.addresses, secret)
        for lane in found:
            if why := lanes.lost(lane):
                raise errors.RendezvousError(
                    f"worker {config.rank}: {named[lane][0]} died before it had replied: {why}"
                )
        return found

    def broken() -> str:
        lanes.take_broken()
        return lanes.verdict()

    greet_lanes(
        f"worker {config.rank}",
        named,
        silent,
        broken,
        lambda: _hear_of_a_loss(config, lanes, link),
        config.rendezvous_timeout,
    )
    if named:
        connections.info("connected to %s", ", ".join(name for name, _ in named))
