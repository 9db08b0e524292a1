# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The worker's core as Python sees it.

:class:`Core` runs the state machine of all partitions over one transport endpoint. The work is done
in ``core/*.pxd`` without the GIL, which this module compiles; this file itself only converts
and hands over.
"""
import contextlib
import os
import threading

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memmove, memset
from posix.unistd cimport close as close_descriptor

from bpsx.core.gpu.device cimport Device
from bpsx.core.gpu.copies cimport forget_gpu, prepare_gpu
from bpsx.core.local.neighbour cimport Machine as CMachine
from bpsx.core.loop cimport (
    background, codec_thread, end_all, pause, return_coded, kick, submit, tell_news, wait_for,
)
from bpsx.core.partition cimport (
    ENDED, RELEASED, EndCallback, Partition, Task, Term,
)
from bpsx.core.gpu.pinned_pool cimport free_places
from bpsx.core.late cimport allocate_lanes, count_living
from bpsx.core.logs cimport release_snapshots
from bpsx.core.moves cimport end_lanes, forget_rounds
from bpsx.core.process cimport own_pid
from bpsx.core.receive cimport pump_in
from bpsx.core.send cimport send_ping
from bpsx.core.state cimport Core as CCore, Pool
from bpsx.core.busy cimport busy_ns
from bpsx.core.codec.pool cimport pool_free, pool_new, pool_next, pool_stop
from bpsx.core.gpu.reclaim cimport take_reaped, unreaped
from bpsx.core.stage cimport run_callbacks, take_callbacks
from bpsx.core.status cimport DONE, E_DEVICE, E_SHUTDOWN
from bpsx.core._terms cimport new_term
from bpsx.core.targets cimport free_terms
from bpsx.core.notify cimport tell_failed, tell_failing, tell_joined, tell_known, tell_term
from bpsx.system.sync cimport (
    atomic_load, atomic_store, lock, monitor_destroy, monitor_init, notify_all, now_ns, unlock,
    wait_until,
)
from bpsx.core.trace.watch cimport Watch
from bpsx.core.transitions cimport move_task
from bpsx.core.wire cimport NONCE_BYTES, PROOF_BYTES
from bpsx.core._handle cimport Handle, Item, Request, new_handle
from bpsx.core._tensor cimport Tensor, queue_kernels
from bpsx.transports.abi cimport Endpoint

from bpsx import errors
from bpsx.core._tensor import waiting
from bpsx.core.waiters import Waiters
from bpsx.secret import lane_proof
from bpsx.system.threads import NamedThread


cdef Pool *new_pool(int threads) except NULL:
    """Allocate a pool. Raises MemoryError."""
    cdef Pool *pool = pool_new(threads)
    if pool == NULL:
        raise MemoryError("no memory for the compression threads")
    return pool


@cython.no_gc_clear
cdef class Core:
    """State machine of a worker's partitions over one endpoint.

    Owned by the session; all methods are thread-safe.
    """
    cdef CCore c
    cdef object endpoint, capsule, thread, machine, watch, gpu, coder
    cdef readonly object waiters    # which threads wait for which handles: see waiters.py
    cdef readonly int pid       # creator: a forked child must not touch the parent's sockets
    cdef set tensors
    cdef object preparing       # held while a tensor gets what it needs for gradients on a GPU
    # Groups of push_pulls that are committed together, by the names of their tensors.
    cdef readonly dict groups
    cdef readonly list all_groups
    cdef list workers           # the pool's threads
    cdef str failure
    cdef bint closed, greeted
    cdef readonly bint failure_raised     # whether a failure has been raised in the script

    def __cinit__(
        self, endpoint, *, int rank, uint64_t job, lanes, int64_t credit, double spin_us,
        machine=None, bint telemetry=True, watch=None, double ahead_ms=0, beside=(),
        bint elastic=False, bint shrinks=False, bint asynchronous=False, uint32_t senders=1,
        int living=-1, ended=(), uint32_t joins=0, dict trips={},
    ):
        """``endpoint``: an object with ``abi()``; ``lanes``: the server's number for each lane;
        ``credit``: bytes in flight per lane, 0 for no bound; ``ahead_ms``: bound on what is in
        flight to each server, as milliseconds of the slowest server's link, 0 for no bound;
        ``beside``: the servers on this machine; ``machine``: a
        :class:`bpsx.local._machine.Machine` if the machine's processes share the work, and
        ``rank`` is then the machine's number; ``telemetry``: count the bytes of completed tensors;
        ``watch``: a :class:`bpsx.telemetry._recorder.Watcher`; ``elastic``: keep the latest results
        for other workers, as a server may be lost; ``shrinks``: go on without workers that are
        lost; ``asynchronous``: lanes keep values; ``senders``: places for workers, of which
        ``living`` are taken, -1: all; ``ended``: lanes that are lost; ``joins``: those that had
        ended when this worker came; ``trips``: seconds of servers' round trips, by number.
        """
        memset(&self.c, 0, sizeof(CCore))
        self.c.moving.told = -1
        self.c.wait_for = wait_for
        self.c.lanes.late.pause, self.c.lanes.late.ping = pause, send_ping
        self.c.lanes.late.end_lanes = end_lanes
        if monitor_init(&self.c.monitor) != 0:
            raise MemoryError("cannot create a mutex")
        self.pid = own_pid()
        self.preparing = threading.RLock()
        self.endpoint, self.capsule = endpoint, endpoint.abi()
        self.c.endpoint = <Endpoint *>PyCapsule_GetPointer(self.capsule, b"bpsx.Endpoint")
        self.c.settings.rank = rank
        self.c.settings.processes = 1
        if machine is not None:
            self.machine = machine.abi()
            self.c.machine = <CMachine *>PyCapsule_GetPointer(self.machine, b"bpsx.Machine")
            self.c.settings.processes = self.c.machine.size
        self.c.settings.job = job
        self.c.settings.credit = credit
        self.c.settings.ahead_ns = <int64_t>(min(ahead_ms, 1e9) * 1e6)
        self.c.settings.spin_ns = <int64_t>(spin_us * 1000)
        self.c.settings.telemetry = telemetry
        self.c.settings.elastic, self.c.settings.shrinks = elastic, elastic and shrinks
        self.c.settings.asynchronous = asynchronous
        self.c.settings.senders = senders
        self.c.inbox.joins = self.c.moving.joins = joins
        self.c.moving.living = senders if living < 0 else living
        if elastic:
            self.c.moving.told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.watch = watch
        if watch is not None:
            self.c.watch = <Watch *>PyCapsule_GetPointer(watch.abi(), b"bpsx.Watch")
        self._make_lanes(list(lanes), beside, ended, trips)
        self.tensors, self.groups, self.all_groups = set(), {}, []
        self.waiters = Waiters()

    cdef _make_lanes(self, list servers, beside, ended, dict trips):
        cdef uint32_t i, n = <uint32_t>len(servers)
        self.c.lanes.n_servers = max(servers, default=0) + 1
        if not allocate_lanes(&self.c, max(n, self.c.lanes.n_servers)):
            raise MemoryError("no memory for the lanes")
        self.c.lanes.n = n
        for i in range(n):
            self.c.lanes.at[i].server = &self.c.lanes.servers[<uint32_t>servers[i]]
            self.c.lanes.at[i].server.beside = servers[i] in beside
        for server, trip in trips.items():
            self.c.lanes.servers[<uint32_t>server].trip_ns = <int64_t>(1e9 * trip)
        for i in ended:
            self.c.lanes.at[i].lost = self.c.lanes.at[i].mute = self.c.lanes.at[i].ready = True
            self.c.lanes.at[i].server.lost = True
            self.c.lanes.n_ready += 1
        count_living(&self.c)

    def open_gpu(self, gpu not None, uint32_t group=1) -> None:
        """Let the core use a :class:`bpsx.local._cuda.Gpu`. Call before the first tensor on it.

        ``group``: largest number of collectives in one group.
        """
        self.gpu = gpu
        for tensor in list(self.tensors):
            self._put_on(tensor, gpu)
        if not prepare_gpu(
            &self.c, <Device *>PyCapsule_GetPointer(gpu.abi(), b"bpsx.Device"), group
        ):
            raise MemoryError("no memory for the queue of NCCL calls")

    def greet(self, deadline_s: float, addresses=(), bytes secret=b"") -> list:
        """Check that every lane is alive and knows ``secret``; return the lanes that did not
        prove it in time.

        Call before :meth:`start`; call again to continue waiting. ``addresses``: each lane's own
        address, which its proof covers.
        """
        cdef int64_t end = now_ns() + <int64_t>(deadline_s * 1e9)
        if not self.greeted:
            self.greeted = True
            self._ping_lanes(addresses, secret)
        while self.c.lanes.n_ready < self.c.lanes.n and now_ns() < end:
            with nogil:
                if pump_in(&self.c) == 0:
                    self.c.endpoint.wait(self.c.endpoint.self, 50)
            PyErr_CheckSignals()
        return [i for i in range(self.c.lanes.n) if not self.c.lanes.at[i].ready]

    cdef _ping_lanes(self, addresses, bytes secret):
        """Ping all lanes, and note the proof that each must reply with."""
        cdef bytes nonce, proof
        cdef uint32_t i
        for i in range(self.c.lanes.n):
            if self.c.lanes.at[i].ready:
                continue
            nonce = os.urandom(NONCE_BYTES)
            proof = lane_proof(secret, self.c.settings.job, addresses[i], nonce)
            memcpy(self.c.lanes.at[i].proof, <char *>proof, PROOF_BYTES)
            send_ping(&self.c, i, nonce)

    def start(self) -> None:
        """Start the background thread, which drives whenever no caller does."""
        self.thread = NamedThread(target=self._run, name="bpsx-core", daemon=True)
        self.thread.start()

    def open_pool(self, int threads, uint64_t copies_from=0) -> None:
        """Start the threads that compress. Idempotent.

        Call before the first tensor that is compressed. ``copies_from``: the threads also copy
        answers of at least so many bytes, 0: none. Call before :meth:`start` for that, and not in
        an asynchronous job, where a newer value may replace an answer.
        """
        self.c.settings.copies_from = max(self.c.settings.copies_from, copies_from)
        if self.c.pool != NULL:
            return
        self.c.pool = new_pool(threads)
        self.workers = [
            NamedThread(target=self._compress, args=(i,), name=f"bpsx-codec-{i}", daemon=True)
            for i in range(self.c.pool.n_threads)
        ]
        for worker in self.workers:
            worker.start()

    def open_coders(self) -> None:
        """Start the thread that queues compression kernels. Idempotent.

        Call after :meth:`open_gpu`, before the first tensor that is compressed on the GPU.
        """
        if self.c.gpu.coders == NULL:
            self.c.gpu.coders = new_pool(1)
            self.coder = NamedThread(target=self._code, name="bpsx-coder", daemon=True)
            self.coder.start()

    def _code(self) -> None:
        cdef Partition *p
        while True:
            with nogil:
                p = pool_next(self.c.gpu.coders, 0)
            if p == NULL:
                return
            try:
                queue_kernels(&self.c, p)
            except Exception as e:
                self.fail(
                    E_DEVICE,
                    f"{p.tensor.name.at[:p.tensor.name.size].decode()!r} cannot be compressed on "
                    f"the GPU: {e}"
                )
            with nogil:
                return_coded(&self.c, self.c.gpu.coders, 0, p)

    def _compress(self, uint32_t me) -> None:
        with nogil:
            codec_thread(&self.c, me)

    def _run(self) -> None:
        with nogil:
            background(&self.c)

    def submit(self, Tensor tensor not None, Request request not None) -> Handle:
        """Begin a push_pull of a placed tensor."""
        handle = self.prepare(request, tensor.nbytes)
        self.release(handle, tensor, request.will_wait)
        return handle

    def prepare(self, Request request not None, uint64_t nbytes) -> Handle:
        """Return the handle of a push_pull whose tensor may not be placed yet.

        :meth:`release` begins it, :meth:`end` ends it.
        """
        cdef Handle handle = new_handle(
            self, &self.c, request.name, request.divisor, request.priority, request.owner,
            request.result
        )
        self.reap()
        handle.task.broadcast, handle.task.asynchronous = request.broadcast, request.asynchronous
        handle.task.rate = request.rate
        handle.task.is_codec_state = request.is_codec_state
        handle.take_memory(request, nbytes)
        if request.on is not None:
            self._put_handle_on(handle, request.on)
        handle.join_group(self.groups)
        return handle

    cdef _put_handle_on(self, Handle handle, on):
        gpu, streams, moment = on
        if moment is None:
            moment = gpu.moment(streams(), handle.name)
        handle.task.gpu.stream, handle.task.gpu.input_number = moment.stream, moment.number
        handle.task.gpu.input_event = <void *><uintptr_t>moment.event
        self._put_handle_with(handle, gpu, streams, moment, gpu.event())

    cdef void _put_handle_with(self, Handle handle, gpu, streams, moment, uintptr_t event) noexcept:
        handle.gpu, handle.streams, handle.moment, handle.task.on_gpu = gpu, streams, moment, True
        handle.event = event
        handle.task.gpu.end_event = <void *>event

    def release(self, Handle handle not None, Tensor tensor not None, bint will_wait=False) -> None:
        """Hand a prepared handle to the driver."""
        if self._attach(handle, tensor):
            with nogil:
                submit(&self.c, &handle.task, &handle.task, 1, will_wait)

    def submit_known(self, Item item not None, dict declared, dict codes, uint32_t divisor) -> bool:
        """Begin a push_pull of one item in place, on the host and uncompressed.

        The item gets its handle before anything can interrupt the caller; the handle has no result.
        Returns False, with nothing done, unless the item is ``declared`` with its present shape and
        dtype, and ``codes`` has its element type.
        """
        cdef Handle handle
        cdef Tensor tensor
        self.reap()
        tensor = item.known_as(declared, codes)
        if tensor is None:
            return False
        handle = item.take_spare()
        handle.fill(self, &self.c, item.name, divisor, item.priority, item.owner, None)
        handle.join_group(self.groups)
        handle.task.input = handle.task.output = <char *><uintptr_t>item.address
        self._attach(handle, tensor)
        item.begun = handle
        with nogil:
            submit(&self.c, &handle.task, &handle.task, 1, False)
        return True

    def submit_all(self, list items, dict declared, dict codes, uint32_t divisor, on) -> None:
        """Begin push_pulls of ``items`` (:class:`bpsx.core._handle.Item`) in place, all at once.

        ``on``: the GPU, a function that returns the current stream, and the moment at which all
        items are ready.

        Skips items that are not ``declared`` with their present shape and dtype, that are
        compressed, or whose element type is not in ``codes``. The others get their handles before
        anything can interrupt the caller; these handles have no result. Memory of the items is
        freed in the order of streams, so it is released once the stream that made it waits for the
        end.
        """
        cdef Handle handle
        cdef Tensor tensor
        cdef Item item
        cdef Task *first = NULL
        cdef Task *last = NULL
        cdef uint32_t i, n = 0
        gpu, streams, moment = on
        self.reap()
        cdef uint64_t stream = moment.stream, number = moment.number, ready = moment.event
        cdef list events = gpu.events(len(items))  # before tensors are counted: it may fail
        cdef list made = [], tensors = [(<Item?>of).known_as(declared, codes) for of in items]
        for i in range(<uint32_t>len(items)):
            handle = None
            if tensors[i] is not None:
                item = items[i]
                handle = new_handle(
                    self, &self.c, item.name, divisor, item.priority, item.owner, None
                )
                handle.by_stream = True
                handle.task.input = handle.task.output = <char *><uintptr_t>item.address
                handle.task.gpu.stream, handle.task.gpu.input_number = stream, number
                handle.task.gpu.input_event = <void *>ready
                self._put_handle_with(handle, gpu, streams, moment, events.pop())
            made.append(handle)
        for event in events:
            gpu.give(event)
        for i in range(<uint32_t>len(items)):
            item = items[i]
            item.begun = made[i]
            if item.begun is not None:
                (<Handle>item.begun).join_group(self.groups)
        for handle, tensor in zip(made, tensors):
            if handle is not None and self._attach(handle, tensor):
                if n == 0:
                    first = &handle.task
                else:
                    last.next = &handle.task
                last = &handle.task
                n += 1
        if n:
            with nogil:
                submit(&self.c, first, last, n, False)

    cdef bint _attach(self, Handle handle, Tensor tensor) except -1:
        """Attach a tensor to a handle. False if that failed; then the handle has ended."""
        self.tensors.add(tensor)        # the core refers to it for the rest of its life
        if handle.gpu is not None and tensor.gpu is None and not self._put_on(tensor, handle.gpu):
            self.end(handle, E_DEVICE, self.failed)
            return False
        if tensor.c.matrix != NULL and not self._place_matrix(handle, tensor):
            return False
        handle.tensor = tensor
        tensor.by_graph = tensor.by_graph or handle.by_graph
        handle.task.tensor = &tensor.c
        Py_INCREF(handle)
        return True

    cdef bint _put_on(self, Tensor tensor, gpu) except -1:
        """Put a tensor on the GPU. On failure fail the whole core and return False. Any thread."""
        try:
            with self.preparing:
                tensor.put_on(gpu)
        except (errors.DeviceError, MemoryError) as e:
            self.fail(E_DEVICE, str(e))
            return False
        return True

    cdef bint _place_matrix(self, Handle handle, Tensor tensor) except -1:
        """Prepare a matrix for the first push_pull where its gradient is. As _attach().

        A failure fails the core: the other workers count this push_pull, and this one does not.
        """
        try:
            with self.preparing:
                if tensor.factor_on(handle.gpu):
                    self.open_coders()
        except (errors.BpsxError, MemoryError) as e:
            self.fail(E_DEVICE, str(e))
            self.end(handle, E_DEVICE, self.failed)
            return False
        return True

    def copy_through(self, Handle handle not None, uint64_t nbytes) -> None:
        """Do the push_pull of a single worker: copy input to output, and end."""
        if handle.gpu is not None:
            self._copy_on_gpu(handle, nbytes)
        elif handle.task.input != NULL and handle.task.input != handle.task.output:
            memmove(handle.task.output, handle.task.input, nbytes)
        self.c.counters.tasks += 1
        self.end(handle, DONE, None)

    cdef _copy_on_gpu(self, Handle handle, uint64_t nbytes):
        stream = handle.streams()
        if handle.task.gpu.stream != <uint64_t>stream:  # such as that of a kernel of ours
            handle.gpu.wait(stream, <uintptr_t>handle.task.gpu.input_event)
        if handle.task.input != NULL and handle.task.input != handle.task.output and nbytes:
            handle.gpu.copy(
                <uintptr_t>handle.task.output, <uintptr_t>handle.task.input, nbytes, stream
            )
        handle.gpu.record(<uintptr_t>handle.task.gpu.end_event, stream)

    def end(self, Handle handle not None, int status, str detail) -> None:
        """End a prepared handle that was never released."""
        cdef EndCallback *callbacks
        handle.failure = detail
        lock(&self.c.monitor)
        callbacks = take_callbacks(&handle.task, NULL)
        move_task(&handle.task, ENDED)
        atomic_store(&handle.task.status, status)
        if self.c.role.waiters:
            notify_all(&self.c.monitor)
        if self.c.role.parked:
            self.c.endpoint.wake(self.c.endpoint.self)
        unlock(&self.c.monitor)
        handle.leave_group()
        with nogil:
            run_callbacks(callbacks, status)

    def abi(self):
        """Return a capsule with the C :c:struct:`Core`, valid as long as this object."""
        return PyCapsule_New(&self.c, b"bpsx.Core", NULL)

    def fail_tensor(self, Tensor tensor not None, int status, str detail) -> None:
        """End every push_pull of ``tensor``, present and future. The first failure wins."""
        self.tensors.add(tensor)        # the driver refers to it, though none may have been begun
        if tensor.failure is None:
            tensor.failure = detail
        tell_failing(&self.c, &tensor.c, status)

    def fail(self, int status, str detail) -> None:
        """End every push_pull, present and future. The first failure wins."""
        if tell_failed(&self.c, status):
            self.failure = detail

    def notify(self) -> None:
        """Make the driver check for changes that it cannot see by itself."""
        tell_news(&self.c)

    @property
    def mute(self) -> int:
        """The first lane to which sending failed and that no term has named lost; -1: none."""
        cdef uint32_t i
        for i in range(self.c.lanes.n):     # unsynchronized reads while the driver works
            if self.c.lanes.at[i].mute and not self.c.lanes.at[i].lost:
                return <int>i
        return -1

    @property
    def moved_descriptor(self) -> int:
        """Readable when :meth:`take_moved` has something to return; -1: the core is not elastic."""
        return self.c.moving.told

    def begin_term(
        self, uint32_t term, list moves not None, bint missed=False,
        list yields not None=[], uint32_t living=0, bint enters=False  # no-cython-lint
    ) -> None:
        """Hand the loss of lanes or workers, or slots that lanes yield, to the driver; any thread.

        ``moves``: pairs of a lost lane and its targets, which are pairs of a lane and its first
        slot: see docs/internals/elastic.md. ``missed``: a worker has left before, so no lane takes
        the keys, and none is awaited. ``yields``: for lanes that live, triples of the lane, the
        number of its slots, and their at most 64 targets; those on the lane itself stay.
        ``living``: number of senders from now on if workers have been lost or, with ``enters``,
        enter; else 0. Raises :class:`ValueError` for lanes that do not exist.
        """
        if not self.c.settings.elastic or self.c.endpoint.drop == NULL:
            raise ValueError("this core cannot move partitions to other lanes")
        if living and not self.c.settings.shrinks or living > self.c.settings.senders:
            raise ValueError(f"this core cannot go on with {living} of {self.c.settings.senders}")
        lost = [(lane, 0xFFFFFFFF, list(targets)) for lane, targets in moves]
        given = [(lane, limit, list(targets)) for lane, limit, targets in yields]
        tell_term(&self.c, new_term(self.c.lanes.n, term, lost, missed, given, living, enters))

    def take_moved(self) -> list:
        """Return the terms whose keys have all been taken since the last call, the oldest first.

        Each is (number, partitions that have moved and had been used, bytes pushed again). Any
        thread.
        """
        cdef Term *term
        found = []
        if self.c.moving.told < 0:
            return found
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.c.moving.told)
        lock(&self.c.monitor)
        term = self.c.moving.over
        while term != NULL and not term.taken:
            term.taken = True
            found.append((term.number, term.partitions, term.again))
            term = term.next
        unlock(&self.c.monitor)
        return found[::-1]

    def all_joined(self) -> None:
        """Tell the driver that all workers have joined and go on; any thread.

        Push_pulls that are submitted later count their rounds from here.
        """
        tell_joined(&self.c)

    @property
    def failed(self) -> str:
        """Reason for which the core has failed, or an empty string."""
        if not self.c.failed:
            return ""
        from_gpu = self.gpu.failure if self.gpu is not None and self.c.failed == E_DEVICE else ""
        return self.failure or from_gpu or errors.explain(<int>self.c.failed, "", 0, 0)

    @property
    def status(self) -> int:
        """The status with which everything ends since the core failed, or 0."""
        return <int>self.c.failed

    def adopt(self, Tensor tensor not None) -> None:
        """Adopt a tensor that the machine's other processes push, without pushing it."""
        self.tensors.add(tensor)
        if self.gpu is not None:
            self._put_on(tensor, self.gpu)
        tell_known(&self.c, &tensor.c)

    @property
    def outstanding(self) -> int:
        """Number of push_pulls under way."""
        return atomic_load(&self.c.busy.outstanding)

    def cut_off(self) -> list:
        """After :meth:`fail`: end GPU work that waits for other processes.

        Overwrites the results of tasks that are done but whose work on the GPU has not ended, since
        it never will, and returns their names.
        """
        cdef Task *task
        if self.gpu is None:
            return []
        lock(&self.c.monitor)
        handles, task = [], self.c.ended.on_gpu
        while task != NULL:
            handles.append(<Handle>task.handle)
            task = task.next
        unlock(&self.c.monitor)
        lost = [handle for handle in handles if not handle.done()]
        self.gpu.spoil([(<Handle>handle)._output() for handle in lost])
        self.gpu.abort()
        return [handle.name for handle in lost]

    @property
    def unsettled(self) -> int:
        """:attr:`outstanding`, plus those done whose memory the GPU or the transport still uses."""
        self.reap()
        return self.outstanding + (unreaped(&self.c) if self.gpu is not None else 0)

    def waiting(self, age_s: float) -> list:
        """See :func:`bpsx.core._tensor.waiting`."""
        return waiting(self.tensors, age_s, self.waiters.everything_ns)

    def gauges(self) -> dict:
        """Return the push_pulls under way, partitions that wait to be sent, and bytes handed to the
        transport and not yet written out. In case a server is lost: the bytes of results that are
        kept, of compressed pushes that are logged, and of servers' snapshots that are held.
        """
        cdef uint32_t i
        queued, in_flight = 0, 0
        for i in range(self.c.lanes.n):     # unsynchronized reads while the driver works
            queued += self.c.lanes.at[i].queue.size
            in_flight += atomic_load(&self.c.lanes.at[i].in_flight)
        return {
            "outstanding": self.outstanding, "queued": queued, "in_flight": in_flight,
            "logged": self.c.counters.logged, "held": self.c.counters.held,
            "kept": self.c.counters.kept
        }

    def counters(self) -> dict:
        """Return totals since the start: bytes, messages, completed push_pulls."""
        return {
            "push_pulls": self.c.counters.tasks, "tensor_bytes": self.c.counters.bytes,
            "bytes_sent": self.c.counters.sent, "bytes_received": self.c.counters.received,
            "messages_sent": self.c.counters.messages_out,
            "messages_received": self.c.counters.messages_in,
            "malformed": self.c.counters.malformed, "stale": self.c.counters.stale,
            "busy_ns": busy_ns(&self.c)
        }

    def take_peak(self) -> int:
        """Return the largest rate of answers since the last call, in bytes per second. Any thread.

        0: too few have arrived.
        """
        cdef int64_t rate = atomic_load(&self.c.counters.peak.rate)
        atomic_store(&self.c.counters.peak.rate, 0)
        return rate

    def close(self) -> None:
        """End what is under way with :class:`ShutdownError`, and stop the thread.

        Close the endpoint *after* this. Idempotent.
        """
        if self.closed:
            return
        self.closed = True
        self.fail(E_SHUTDOWN, "bpsx was shut down while this operation was under way")
        cdef int64_t end = now_ns() + 2_000_000_000
        while self.thread is not None and self.c.busy.outstanding and now_ns() < end:
            self.wait_for_progress(0.01)
        lock(&self.c.monitor)
        atomic_store(&self.c.role.stopping, 1)
        notify_all(&self.c.monitor)
        self.c.endpoint.wake(self.c.endpoint.self)
        unlock(&self.c.monitor)
        if self.thread is not None:
            self.thread.join()
        # A caller that waits may be driving: the endpoint must not be closed under it.
        with nogil:
            lock(&self.c.monitor)
            while self.c.role.driving:
                wait_until(&self.c.monitor, now_ns() + 1_000_000)
            unlock(&self.c.monitor)
            end_all(&self.c)
            forget_rounds(&self.c)
            release_snapshots(&self.c)
        if self.c.gpu != NULL and self.c.gpu.coders != NULL:
            pool_stop(self.c.gpu.coders)
            self.coder.join()
        if self.c.pool != NULL:
            pool_stop(self.c.pool)
            for worker in self.workers:
                worker.join()
        if self.gpu is not None and self.gpu.usable:
            # The GPU's context may outlive this session.
            with contextlib.suppress(errors.DeviceError), self.gpu:
                free_places(&self.c.gpu.places, self.c.gpu.device)
                for tensor in self.tensors:
                    (<Tensor>tensor).take_off()

    def wait_for_progress(self, seconds: float) -> None:
        """Let outstanding work proceed for a moment, whichever thread drives."""
        cdef Handle none = Handle.__new__(Handle)
        cdef int64_t until = now_ns() + <int64_t>(seconds * 1e9)
        with nogil:
            wait_for(&self.c, &none.task, until)
        self.kick()

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.c.lanes.n):
            free(self.c.lanes.at[i].queue.items)
            free(self.c.lanes.at[i].acks)
        free_terms(self.c.moving.over)
        free_terms(self.c.moving.terms)
        free_terms(self.c.inbox.terms)
        if self.c.moving.told >= 0:
            close_descriptor(self.c.moving.told)
        free(self.c.lanes.at)
        free(self.c.lanes.servers)
        free(self.c.lanes.living)
        free(self.c.table.at)
        forget_gpu(&self.c)
        pool_free(self.c.pool)
        monitor_destroy(&self.c.monitor)

    def kick(self) -> None:
        """Wake another thread to drive, if there is anything to do."""
        lock(&self.c.monitor)
        if self.c.busy.outstanding or self.c.inbox.news:
            kick(&self.c)
        unlock(&self.c.monitor)

    def reap(self) -> None:
        """Drop the references to finished handles whose memory neither the transport nor the GPU
        uses any more.
        """
        cdef Task *task
        if self.c.ended.on_host == NULL and self.c.ended.on_gpu == NULL:
            return
        task = take_reaped(&self.c)
        dropped = []
        while task != NULL:
            move_task(task, RELEASED)
            dropped.append(<Handle>task.handle)
            Py_DECREF(<Handle>task.handle)
            task = task.next
        for handle in dropped:
            (<Handle>handle)._release_buffers()
            (<Handle>handle).owner = None

    def error_of(self, Handle handle not None) -> Exception:
        """Return the exception for a handle that has failed."""
        cdef int status = <int>handle.task.status
        if self.c.failed and self.c.failed == status:
            self.failure_raised = True
        self.waiters.unraised_names.discard(handle.name)
        detail = (
            handle.failure
            if handle.failure is not None or handle.tensor is None
            else handle.tensor.failure
        )
        if detail is None and self.c.failed == status:
            detail = self.failure
        if detail is None and status == E_DEVICE and self.gpu is not None:
            detail = self.gpu.failure or None
        if detail is None:
            codec = "" if handle.tensor is None else handle.tensor.codec.decode()
            detail = errors.explain(
                status, handle.name, handle.task.error.a, handle.task.error.b, codec,
                handle.task.broadcast, handle.task.divisor
            )
        return errors.from_status(status, detail)
