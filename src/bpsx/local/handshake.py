"""Handshake of the processes of a machine.

Each process sends its memory and its wake-up descriptor to the root, and the root sends all to all.
They meet at a Unix socket in the user's private folder, named after the job's random number, the
machine and, if the machine joins the running job, the meeting of its workers. The root removes the
socket as soon as all processes have connected.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bpsx.config import Config, runtime_dir
from bpsx.errors import ConfigError, RendezvousError
from bpsx.local._machine import Machine

_GREETING = struct.Struct("=8sII")
_MAGIC = b"bpsx-2\0\0"
_SLICE = 0.1  # seconds that one wait lasts before `look` is called again
_UCRED = struct.Struct("3i")
#: Age in seconds after which a socket without a listener counts as left behind. The owner of a
#: younger one may be about to listen.
_YOUNG = 60.0


def meet(
    config: Config, job: int, meeting: int, wake: int, alone: bool, look: Callable[[], None]
) -> Machine:
    """Meet this machine's other processes; return a :class:`Machine` with all mapped.

    ``meeting``: that at which the machine joins the running job, or 0. ``wake``: descriptor that
    ends this process's sleep. ``look`` is called repeatedly, and may raise to give up. Raises
    :class:`~bpsx.errors.RendezvousError` naming the missing local ranks,
    :class:`~bpsx.errors.ConfigError`.
    """
    size, me = config.local_size, config.local_rank
    # All processes have the same tensors, so together their shares cannot exceed the machine's
    # memory. Twice that costs address space only.
    room = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // size
    machine = Machine(
        size=size,
        me=me,
        first_rank=(config.worker_id or 0) * size,
        alone=alone,
        name=f"bpsx-{os.getuid()}-{job:x}-{me}",
        room=room,
    )
    name = f"{job} {config.worker_id or 0} {meeting}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:20]
    path = runtime_dir() / f"job-{digest}.sock"
    end = time.monotonic() + config.rendezvous_timeout
    try:
        (_host if me == size - 1 else _visit)(machine, path, size, me, wake, end, look)
    except BaseException:
        machine.close()
        path.unlink(missing_ok=True)  # a killed root leaves it behind
        raise
    return machine


def _host(
    machine: Machine,
    path: Path,
    size: int,
    me: int,
    wake: int,
    end: float,
    look: Callable[[], None],
) -> None:
    """The root's part: collect all processes' descriptors, then send them to all."""
    guests: dict[int, tuple[socket.socket, int, int]] = {}
    with _listening(path) as listener, contextlib.ExitStack() as stack:
        while len(guests) < size - 1:
            look()
            if time.monotonic() >= end:
                missing = ", ".join(str(i) for i in range(size - 1) if i not in guests)
                raise RendezvousError(
                    f"local rank {missing} did not connect to {path}: do all processes with this"
                    " DMLC_WORKER_ID run on one machine, as one user, with the same"
                    " BYTEPS_SOCKET_PATH?"
                )
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                continue
            stack.enter_context(guest)
            rank, descriptors = _receive(guest, size, end, look)
            if rank in guests or rank == me:
                raise RendezvousError(
                    f"two processes have BYTEPS_LOCAL_RANK={rank} on this machine"
                )
            guests[rank] = (guest, *descriptors)
        everybody = {
            **{r: (segment, bell) for r, (_, segment, bell) in guests.items()},
            me: (machine.descriptor, wake),
        }
        for rank, (guest, *_) in guests.items():
            for other, descriptors in everybody.items():
                if other != rank:
                    _send(guest, other, size, descriptors, end, look)
        for rank, (_, segment, bell) in guests.items():
            machine.meet(rank, segment, bell)
            os.close(segment)


def _visit(
    machine: Machine,
    path: Path,
    size: int,
    me: int,
    wake: int,
    end: float,
    look: Callable[[], None],
) -> None:
    """The other processes' part."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as link,
        _address(path) as address,
    ):
        link.settimeout(_SLICE)
        while True:
            look()
            try:
                link.connect(address)
                break
            except OSError as e:
                if e.errno not in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
                    raise ConfigError(f"BYTEPS_SOCKET_PATH: cannot reach {path}: {e}") from e
                if time.monotonic() >= end:
                    raise RendezvousError(
                        f"local rank {size - 1} does not listen at {path}: do all processes with"
                        " this DMLC_WORKER_ID run on one machine, as one user, with the same"
                        " BYTEPS_SOCKET_PATH?"
                    ) from e
            # No event signals that a socket has appeared; the root starts at about the same time.
            time.sleep(0.01)
        _send(link, me, size, (machine.descriptor, wake), end, look)
        for _ in range(size - 1):
            rank, (segment, bell) = _receive(link, size, end, look)
            machine.meet(rank, segment, bell)
            os.close(segment)


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield a socket address for ``path`` through a descriptor of its folder.

    A socket's address has 107 bytes at most.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Yield a listening socket at ``path``, which is removed afterwards.

    A socket left behind by a killed job with the same number is replaced.
    """
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener,
        _address(path) as address,
    ):
        path.unlink(missing_ok=True)
        _sweep(path.parent)
        try:
            listener.bind(address)
            listener.listen(1024)
            listener.settimeout(_SLICE)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove the sockets of jobs that were killed during the handshake."""
    for path in folder.glob("job-*.sock"):
        with contextlib.suppress(OSError), _address(path) as address:
            if time.time() - path.stat().st_mtime < _YOUNG:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
                probe.setblocking(False)
                if probe.connect_ex(address) == errno.ECONNREFUSED:
                    path.unlink()


def _send(
    link: socket.socket,
    rank: int,
    size: int,
    descriptors: tuple[int, int],
    end: float,
    look: Callable[[], None],
) -> None:
    link.settimeout(10)
    while True:
        try:
            socket.send_fds(link, [_GREETING.pack(_MAGIC, rank, size)], list(descriptors))
            return
        except OSError as e:
            # A user may have as many descriptors in flight as a process may have open. On large
            # machines the other processes must read first.
            if e.errno != errno.ETOOMANYREFS or time.monotonic() >= end:
                raise RendezvousError(
                    f"a process on this machine left while the job was gathering: {e}"
                ) from e
        look()
        time.sleep(_SLICE)


def _receive(
    link: socket.socket, size: int, end: float, look: Callable[[], None]
) -> tuple[int, tuple[int, int]]:
    """Return a process's local rank, and its memory and wake-up descriptors.

    Raises :class:`RendezvousError`.
    """
    _, uid, _ = _UCRED.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid not in (os.getuid(), 0):
        raise RendezvousError(
            f"a process of user {uid} connected to the socket of user {os.getuid()}'s job"
        )
    link.settimeout(_SLICE)
    while True:
        look()
        try:
            data, found, _, _ = socket.recv_fds(link, _GREETING.size, 2, socket.MSG_CMSG_CLOEXEC)
            break
        except TimeoutError:
            if time.monotonic() >= end:
                raise RendezvousError(
                    "a process on this machine connected but sent nothing"
                ) from None
        except OSError as e:
            raise RendezvousError(
                f"a process on this machine left while the job was gathering: {e}"
            ) from e
    if len(data) != _GREETING.size or len(found) != 2:
        for descriptor in found:
            os.close(descriptor)
        raise RendezvousError(
            "a process on this machine left while the job was gathering"
            if not data
            else (
                "a process that is not part of the job connected to the socket of this machine's"
                " processes"
            )
        )
    magic, rank, theirs = _GREETING.unpack(data)
    if magic != _MAGIC or theirs != size or not 0 <= rank < size:
        raise RendezvousError(
            f"local rank {rank} has BYTEPS_LOCAL_SIZE={theirs}, this process {size}: must be the"
            " same on all processes of a machine"
        )
    return rank, (found[0], found[1])
