"""A worker's session: owner of its configuration, core, transport endpoint and link to the
scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from bpsx import errors
from bpsx.compression.manager import Compressing, Remembered
from bpsx.compression.spec import CompressionSpec
from bpsx.config import Config
from bpsx.core._handle import Handle, Item, Request
from bpsx.core._tensor import CommitGroup
from bpsx.dtypes import BY_CODE, BY_NAME, FLOAT_CODES, dtype_named
from bpsx.errors import Status
from bpsx.local.devices import Devices, OnGpu, Streams, View
from bpsx.scheduler.client import SchedulerLink
from bpsx.session.boundaries import Change
from bpsx.session.company import Company
from bpsx.session.decisions import Decisions
from bpsx.session.entry import enter
from bpsx.session.limits import check_name, check_new
from bpsx.session.link_probe import Array, measure
from bpsx.session.liveness import Liveness
from bpsx.session.refusals import mine
from bpsx.session.states import CLOSING, OVER, Event, Life
from bpsx.telemetry._recorder import monotonic_ns
from bpsx.telemetry.throughput import Speed, Speedometer
from bpsx.transports.base import UNKNOWN_TRIP, shortest_round_trips

log = logging.getLogger("bpsx.session.session")
BARRIER = "bpsx.barrier"
#: Seconds between two boundaries of a worker that waits for an agreement.
_AGREE_SECONDS = 0.01


class Session(Liveness):
    """A worker's part of a job. Thread-safe.

    :meth:`close` ends it; it cannot be used again. ``order`` and ``remembered``: the indices of
    names and the state of compression that a suspended session left. ``again``: whether this
    process has been in an earlier job.

    Raises :class:`~bpsx.errors.ConfigError`, :class:`~bpsx.errors.RendezvousError` or
    :class:`~bpsx.errors.TransportError` on construction.
    """

    def __init__(
        self,
        config: Config,
        order: dict[str, int] | None = None,
        remembered: Remembered | None = None,
        again: bool = False,
    ) -> None:
        # A suspended session passes its order on, like ``remembered``.
        super().__init__(dict(order or {}))
        resources = enter(config, again)
        config = resources.config
        self._core, self._endpoint = resources.core, resources.endpoint
        self._near, self._lanes = resources.near, resources.lanes
        self._link, self.reporter = resources.link, resources.reporter
        self._decisions = Decisions(
            resources.servers, keep=resources.link is not None and resources.link.outlives_scheduler
        )
        self._decisions.joins, self._epoch = resources.joins, resources.epoch
        self._decisions.terms = resources.terms
        self.entries = self._decisions.entries
        self._adopt_names(resources.names)
        self.config, self.job, self.continued = config, resources.job, resources.continued
        self.number, self._company = config.rank, Company(config.rank, resources.numbers)
        self.shrinks = resources.shrinks
        # A timeline numbers a tensor's steps by its rounds, and a successor's rounds begin anew.
        keeps_size = self.shrinks or self._near.machine or config.trace_on
        self._tells_peaks = resources.probes and not keeps_size
        self.local_rank: int = config.local_rank
        self.local_size: int = config.local_size
        self._async: bool = config.asynchronous
        self._reason = ""  # why this worker left work undone, as its goodbye says
        self._speedometer = Speedometer()
        # A reference to the session would keep the session alive.
        latest, company, near = self._latest, self._company, self._near
        self.compressing = Compressing(
            config,
            self._near,
            self._core,
            lambda name: latest[name].tensor if name in latest else None,
            remembered,
            leads=(lambda: near.speaks_for(company.number(0, ""))) if self.shrinks else None,
        )
        self.devices = Devices(config, self._near, self._core, self._gpu_failed)
        try:
            with self._lock:  # messages wait until the session has begun
                self._listen()
                self._life.move(Event.BEGUN)
            with self._life.changed:  # a newcomer has come when its TERM has been handled
                self._life.changed.wait_for(lambda: self._company.has_me or self.state in OVER)
        except BaseException as e:
            self._life.move(Event.CANNOT_BEGIN)
            resources.abandon(e)
            raise
        if resources.probes and self._link is not None:
            try:
                self._tell_rate(self._link, len(resources.numbers))
            except BaseException as e:  # Ctrl-C, too: only this method could still close it
                self.close(f"init() ended by {type(e).__name__}")
                raise

    def _tell_rate(self, link: SchedulerLink, workers: int) -> None:
        """Measure the links together with the other workers, and tell the scheduler."""

        def sum_(name: str, array: Array) -> None:
            place, code = (array.ctypes.data, array.nbytes), BY_NAME[str(array.dtype)].code
            request = Request(name, place, place, will_wait=True, owner=array)
            self.submit(request, array.shape, code, array.nbytes).wait()

        log.debug("measures the links, together with the other workers")
        try:
            rate, round_trip = measure(sum_, workers, time.perf_counter)
        except errors.BpsxError as e:  # it has ended the job, and the next verb raises it
            log.info("the links could not be measured: %s", e)
        else:
            trips = shortest_round_trips(self._endpoint, self._lanes.servers)
            known = max(trips.values(), default=0.0)
            trip = round_trip if known == UNKNOWN_TRIP else known
            link.send("RATE", rate=int(rate), round_trip=int(trip * 1e6))
            self._endpoint.fit_buffers(rate)

    # ---- the verbs

    @property
    def rank(self) -> int:
        """This worker's place among the living ones: it changes when another is lost."""
        return self._company.rank

    @property
    def size(self) -> int:
        """Number of living workers."""
        return self._company.size

    def number_of(self, rank: int, what: str) -> int:
        """The number of the worker in place ``rank``, which never changes.

        Raises :class:`~bpsx.errors.ConfigError`, which names ``what``, if there is none any more.
        """
        return self._company.number(rank, what)

    def group_of(
        self, names: Iterable[str], group: CommitGroup | None = None
    ) -> CommitGroup | None:
        """Let the push_pulls of ``names`` count as a whole, from one :meth:`seal` to the next.

        That is, the results of none are used before those of all are there. ``group``: one that
        they join; otherwise they are a new one. None: the job ends when a worker is lost.
        """
        if not self.shrinks:
            return None
        found = CommitGroup(self._core) if group is None else group
        self._core.groups.update(dict.fromkeys(names, found))
        return found

    def disband(self, names: Iterable[str]) -> None:
        """Take ``names`` out of their groups. Push_pulls that have begun stay in them."""
        for name in names:
            self._core.groups.pop(name, None)

    def seal(self, group: CommitGroup | None) -> None:
        """End a group: all push_pulls of a step have begun, and may be waited for. Idempotent."""
        if group is not None and self.state not in (Life.LEAVING, Life.CLOSED):
            group.seal()
            self._core.notify()

    def _seal_all(self) -> None:
        """End all groups, so that their push_pulls end, even of an incomplete step."""
        for group in self._core.all_groups:
            self.seal(group)

    def require_all(self, what: str) -> None:
        """End the job with an error when a worker is lost: ``what`` cannot go on without it.

        Raises :class:`~bpsx.errors.PeerLostError` if one has been lost already.
        """
        if self.shrinks:
            self._company.needed_by = self._company.needed_by or what
            if self.size < self.config.size:
                raise errors.PeerLostError(
                    f"{what} needs all {self.config.size} workers, of which {self.size} are left"
                )

    @property
    def order(self) -> dict[str, int]:
        """Index of every declared name, as :meth:`declare` returns it."""
        with self._lock:
            return dict(self._order)

    def declare(
        self, name: str, compression: CompressionSpec | None = None, anew: bool = False
    ) -> int:
        """Register ``name`` on this worker: fix its index and, if given, its compression.

        Does not contact the scheduler; the name's first push_pull does. Returns the index of
        ``name`` in the order in which this worker first saw names, which never changes.

        ``compression``: compression of the name's sums from now on, the
        same on all workers from the same push_pull on; None leaves it as it was. ``anew``: for an
        optimizer, see :meth:`bpsx.compression.manager.Compressing.begin`. Raises
        :class:`~bpsx.errors.ConfigError` for an invalid name, and for compression in asynchronous
        training.
        """
        check_name(name, "declare")
        if anew:
            self.compressing.begin(name, compression)
        with self._lock:
            if compression is not None:
                self.compressing.declare(name, compression)
            return self._order.setdefault(name, len(self._order))

    def push_pull(
        self,
        name: str,
        source: View,
        target: View,
        *,
        average: bool,
        priority: int = 0,
        will_wait: bool = False,
        rate: float = -1.0,
        result: object = None,
    ) -> Handle:
        """Sum ``source`` over all workers into ``target``, which may be the same memory.

        Returns at once. The handle keeps both views' owners alive until the result has arrived and
        the transport has released the memory. Until the result has arrived, nothing else may change
        ``source`` or use ``target``.

        ``average``: divide the sum by the number of workers. A larger ``priority`` is more urgent.
        ``will_wait``: hint that the caller waits at once, so no thread is woken to drive. ``rate``:
        the learning rate, for names whose compression has ef="corrected"; -1: none. ``result``:
        returned by the handle's wait.

        Raises :class:`~bpsx.errors.ConfigError` for a dtype that cannot be summed, and for a source
        and a target that differ in shape or dtype.
        """
        try:
            if source.shape != target.shape or source.dtype != target.dtype:
                raise errors.ConfigError(
                    f"{name!r}: input is {source.dtype} {source.shape}, output {target.dtype}"
                    f" {target.shape}; dtype and shape must be equal"
                )
            dtype = BY_NAME.get(source.dtype) or dtype_named(source.dtype, repr(name))
            on_host = source.gpu < 0 and target.gpu < 0
            on = None if on_host else self.devices.place(name, source, target)
            request = Request(
                name,
                (source.address, source.nbytes),
                (target.address, target.nbytes),
                divisor=self.size if average else 1,
                asynchronous=self._async,
                priority=priority,
                will_wait=will_wait,
                rate=rate,
                owner=(source.owner, target.owner),
                result=result,
                on=on,
            )
        except BaseException:
            self._count_refused(name)
            raise
        return self.submit(request, source.shape, dtype.code, source.nbytes)

    def push_pull_all(
        self, items: list[Item], gpu: int, streams: Streams, stream: int, *, average: bool
    ) -> None:
        """Begin :meth:`push_pull` of many tensors in place, at a fraction of its cost per tensor.

        All are on GPU ``gpu``, and CUDA's stream ``stream`` has written them. ``streams`` returns
        the stream of the caller that waits.

        Sets each item's ``begun`` to its handle, or to the exception that :meth:`push_pull` would
        raise: some items may begin and others not. Raises only the errors that concern all items.
        """
        self._threads.add(threading.get_ident())
        try:
            on = self.devices.place_on(items[0].name, gpu, streams, stream)
        except BaseException:
            for item in items:
                self._count_refused(item.name)
            raise
        divisor = self.size if average else 1
        # Known tensors need no declaration.
        quick = not (self.compressing.any or self._async or self._life.halted)
        self._core.submit_all(items, self._latest if quick else {}, FLOAT_CODES, divisor, on)
        for item in items:
            if item.begun is not None:
                self._calls += 1
            else:
                item.begun = self._begin(item, divisor, on)

    def push_pull_known(self, item: Item, average: bool) -> bool:
        """Begin :meth:`push_pull` of a known host tensor in place, at a fraction of its cost.

        It is meant for many small tensors. The tensor must have been summed before with the same
        declaration. Sets the item's ``begun`` to its handle and returns True.

        Returns False, and has done nothing, if names, element types, compression or join() require
        :meth:`push_pull`.
        """
        if self.compressing.any or self._async or self._life.halted:
            return False
        self._threads.add(threading.get_ident())
        self._calls += 1
        if self._core.submit_known(item, self._latest, FLOAT_CODES, self.size if average else 1):
            return True
        self._calls -= 1
        return False

    def _begin(self, item: Item, divisor: int, on: OnGpu) -> Handle | Exception:
        span = (item.address, item.nbytes)
        try:
            request = Request(
                item.name,
                span,
                span,
                divisor=divisor,
                asynchronous=self._async,
                priority=item.priority,
                owner=item.owner,
                on=on,
            )
            handle = self.submit(request, item.shape, BY_NAME[item.dtype].code, item.nbytes)
        except Exception as e:
            return e.with_traceback(None)
        handle.by_stream = True
        return handle

    def broadcast(
        self,
        name: str,
        view: View,
        root: int,
        *,
        result: object = None,
        asynchronous: bool | None = None,
    ) -> Handle:
        """Overwrite ``view`` on all workers with its contents on worker ``root``. Returns at once.

        Raises :class:`~bpsx.errors.ConfigError` for a root that does not exist.
        """
        try:
            if not 0 <= root < self.size:
                raise errors.ConfigError(
                    f"{name!r}: root rank {root}; expected 0 to {self.size - 1}"
                )
            number = self.number_of(root, repr(name))
            dtype, on = dtype_named(view.dtype, repr(name)), self.devices.place(name, view, view)
        except BaseException:
            self._count_refused(name)
            raise
        span = (view.address, view.nbytes)
        request = Request(
            name,
            span if number == self.number else None,
            span,
            divisor=number,
            broadcast=True,
            asynchronous=self._async if asynchronous is None else asynchronous,
            owner=view.owner,
            result=result,
            on=on,
        )
        return self.submit(request, view.shape, dtype.code, view.nbytes)

    def barrier(self) -> None:
        """Wait until every worker has called this method as often as this worker has."""
        request = Request(BARRIER, (0, 0), (0, 0), priority=2**30, will_wait=True)
        self.submit(request, (), BY_NAME["uint8"].code, 0).wait()

    def pass_boundary(self) -> Change:
        """Say that the script is between two steps: other workers may enter the job now.

        All workers must call it equally often. Waits if some enter, until they have. Returns who
        has entered or was lost since the last call. One thread may call it at a time. Raises the
        error that has ended the job. If ``left`` is set in what it returns, this worker is in the
        job no more.
        """
        change = self._pass_boundary()
        if self._link is not None and not change.left:
            self._boundaries.note_synced(self._link.send)
        return change

    @property
    def may_leave(self) -> bool:
        """Whether :meth:`leave` can let this worker leave, as far as the options say."""
        return self.shrinks or self._link is None and self.config.may_lose_workers

    def leave(self, why: str) -> bool:
        """Ask to leave the running job at the next boundary; returns at once.

        ``why``: for the log. Returns False if the job does not go on without workers, or has ended.
        Any thread and signal handlers may call it.
        """
        if not self.may_leave or self.state in (*OVER, Life.DEPARTED):
            return False
        self._note_wish(why)
        self._ask_to_leave()
        return True

    def expect_boundaries(self) -> None:
        """Note that the script has boundaries: rank and size change only there, from now on."""
        with self._life.changed:
            self._boundaries.used = True

    def _pass_boundary(self) -> Change:
        link = self._link
        if link is None or not self.shrinks:
            return Change(left=bool(self._why_leave))
        change = self._boundaries.pass_one(self._settle, link.send, self._names_for_newcomers)
        if self.state in OVER:
            self._raise_job_error()
        return change

    def await_agreement(self) -> Change:
        """Pass boundaries after a loss, until all workers agree on the living workers.

        Returns the change at the last boundary. Raises the error that has ended the job.
        """
        change = Change()
        while not (self._company.all_shown and not change.leaving or change.left):
            change = self._pass_boundary()
            time.sleep(_AGREE_SECONDS)
        return change

    def _settle(self) -> None:
        """Wait until nothing of this worker is under way."""
        self._seal_all()
        self._core.waiters.everything_ns = monotonic_ns()
        try:
            while self._unfinished() and self.state not in OVER:
                self._core.wait_for_progress(0.05)
        finally:
            self._core.waiters.everything_ns = 0

    def join(self) -> int:
        """Wait until all workers have joined: see :func:`bpsx.join`.

        Returns the rank that joined last. Raises the error that has ended the job meanwhile.
        """
        link = self._link
        if link is None:
            return self.rank
        self._seal_all()
        self.devices.announce_joined(True)
        self._core.waiters.everything_ns = monotonic_ns()  # join() waits for all in progress
        try:
            last = self._joining.run(
                self._unfinished,
                self._core.wait_for_progress,
                lambda kind: link.send(kind, generation=self._decisions.joins),
            )
        finally:
            self._core.waiters.everything_ns = 0
        if last < 0:
            self._raise_job_error()
        return self._company.place(last, "join(): the worker that was the last to join")

    def _raise_job_error(self) -> None:
        """Raise the error that has ended the job, as any further call does."""
        self.barrier()

    def submit(self, request: Request, shape: tuple[int, ...], dtype: int, nbytes: int) -> Handle:
        """Begin a push_pull or a broadcast.

        Known tensors of :meth:`push_pull_all` and :meth:`push_pull_known` do not come here.
        ``dtype``: the dtype's code. ``nbytes``: size of the tensor in bytes.
        """
        name = request.name
        if self._life.halted:
            self._joining.raise_halted(repr(name))
        self._threads.add(threading.get_ident())
        self._calls += 1
        mine.asked += 1
        try:
            codec = self._codec_of(request, shape, dtype, nbytes)
            declared = self._latest.get(name)
            tensor = None if declared is None else declared.take(shape, dtype, codec)
            if tensor is not None:
                return self._core.submit(tensor, request)
            check_new(name, nbytes, self.config.partition_bytes)
            if codec is not None:
                on = request.on
                self.compressing.check(name, dtype, nbytes, codec, on.gpu if on else None)
            handle = self._core.prepare(request, nbytes)
            if self._link is None:
                begin = monotonic_ns()
                # A single worker: the sum equals its input.
                self._core.copy_through(handle, nbytes)
                self.reporter.copied(name, begin, nbytes)
                return handle
            with self._lock:
                self._submit_slow(handle, name, shape, dtype, nbytes, codec)
            return handle
        except BaseException:
            self._renew(name)
            raise

    def _codec_of(
        self, request: Request, shape: tuple[int, ...], dtype: int, nbytes: int
    ) -> CompressionSpec | None:
        """Return the compression of the request's tensor, or None if it is not compressed.

        It also checks the arguments that depend on compression, and adds the momentum that
        compression keeps. Raises :class:`~bpsx.errors.ConfigError`.
        """
        if request.broadcast:
            return None
        name = request.name
        codec = self.compressing.of(name, dtype, nbytes, shape)
        if codec is not None and codec.ef == "corrected" and not 0 <= request.rate < float("inf"):
            raise errors.ConfigError(
                f"{name!r}: ef='corrected' needs the learning rate of each push_pull, a number of"
                f" at least 0, not {request.rate!r}"
            )
        if self.compressing.any:
            request.source, request.owner, request.on = self.compressing.with_momentum(
                name, dtype, nbytes, codec, request.source, request.owner, request.on
            )
        if request.divisor > 1 and BY_CODE[dtype].integer:
            self.devices.check_average(name, dtype, request.divisor, request.on)
        return codec

    def _count_refused(self, name: str) -> None:
        """Count a push_pull of ``name`` that was refused before :meth:`submit`."""
        if not self._life.halted:
            self._calls += 1
            mine.asked += 1
            self._renew(name)

    def speed(self) -> Speed:
        """Return MB/s of tensors and on the wire since the last call: see :class:`Speed`.

        Only time in which work was in progress counts. All fields are zero without telemetry.
        """
        return (
            self._speedometer.read(self._core.counters())
            if self.config.telemetry
            else Speed(0.0, 0.0)
        )

    def counters(self) -> dict[str, int]:
        """Return the amounts moved since init: see :meth:`bpsx._core.Core.counters`."""
        return dict(self._core.counters())

    @property
    def failure(self) -> str:
        """Why the job has failed, or why this worker left work undone; or an empty string."""
        return self._reason or self._failure

    @property
    def failure_raised(self) -> bool:
        """Whether the script has received an exception for the failure of the job."""
        return bool(self._core.failure_raised)

    # ---- leaving

    def close(self, failure: str = "", waited: float = 0.0) -> None:
        """Leave the job: wait for work in progress, say goodbye, free everything. Idempotent.

        ``failure``: why this worker ends with work undone; the other workers get this text.
        Waits for work until ``waited`` and the wait make ``BPSX_SHUTDOWN_TIMEOUT`` seconds; then
        for the scheduler's reply as long as :meth:`Link.leave` says. Does not raise.
        """
        with self._lock:
            if self.state in CLOSING:
                return
            self._life.move(Event.CLOSE_CALLED)
        self._core.waiters.everything_ns = monotonic_ns()
        try:
            self._take_leave(failure, self.config.shutdown_timeout - waited)
        finally:
            self.reporter.close()
            self._end_pending(
                Status.SHUTDOWN, "bpsx was shut down while this operation was under way"
            )
            if self._late is not None:
                self._late.close()
            self._core.close()
            if self._link is not None:
                self._link.stop()
            self._endpoint.close()
            self._core.reap()
            self.devices.close()
            self._near.close()
            self._life.move(Event.FREED)

    def _take_leave(self, failure: str, patience: float) -> None:
        """Wait at most ``patience`` seconds for work in progress, and tell the scheduler how it
        ended.
        """
        self._seal_all()
        end = time.monotonic() + patience
        while (
            self.state is Life.ENDING
            and not (failure or self._core.failed)
            and self._unfinished()
            and time.monotonic() < end
        ):
            self._core.wait_for_progress(0.05)
        left = self._unfinished()
        with self._lock:  # the control thread may have learnt of a failure meanwhile
            failure = failure or self._failure or self._core.failed
            if left and not failure:
                failure = f"left with {left} push_pulls under way"
            self._reason = failure
            self._life.move(Event.WORK_ENDS)
        if self._link is not None and not self._link.leave(failure, self.config.shutdown_timeout):
            log.warning(
                "the scheduler did not reply to the goodbye within %g s",
                self.config.shutdown_timeout,
            )

    def _unfinished(self) -> int:
        # Waiting push_pulls first: those that move to the core meanwhile count twice, not never.
        waiting = sum(len(d.pending) for d in list(self._declared.values()))
        return waiting + int(self._core.unsettled)
