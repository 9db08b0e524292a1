"""This machine: its address, limits, signals and malloc settings."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from bpsx import errors
from bpsx.config import Config, runtime_dir
from bpsx.secret import HOW_TO
from bpsx.system.address import (
    interface_address,
    is_ipv6,
    is_loopback,
    own_address_towards,
    resolve,
)
from bpsx.system.threads import NamedThread

#: Descriptors that a worker or a server of a small job opens, as counted, and a few to spare.
_LEAST_DESCRIPTORS = 32
log = logging.getLogger("bpsx.system.host")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def scheduler_address(config: Config) -> str:
    """Resolve the scheduler's address.

    A name that does not resolve yet, as of a pod that is still starting, is retried until the
    rendezvous deadline.

    Raises :class:`~bpsx.errors.RendezvousError` at the deadline.
    """
    now = time.monotonic()
    end, report = now + config.rendezvous_timeout, now + 5
    while True:
        try:
            address = resolve(config.root_uri, config.root_port)
            require_trust(config, address)
            return address
        except OSError as e:
            if time.monotonic() + 1 >= end:
                raise errors.RendezvousError(
                    f"DMLC_PS_ROOT_URI={config.root_uri!r}: cannot resolve the scheduler's"
                    f" address: {e}"
                ) from e
            if time.monotonic() >= report:
                report = time.monotonic() + 10
                log.warning(
                    "DMLC_PS_ROOT_URI=%s: cannot resolve the scheduler's address yet: %s",
                    config.root_uri,
                    e,
                )
        time.sleep(1)


def own_host(config: Config) -> str:
    """The address at which this node listens and that it advertises.

    It is DMLC_NODE_HOST, else the address of DMLC_INTERFACE, else the one that faces the scheduler.
    """
    if config.node_host:
        if config.root_uri and is_loopback(config.node_host) and not is_loopback(config.root_uri):
            log.warning(
                "DMLC_NODE_HOST=%s is a loopback address, but the scheduler's address %s is not:"
                " other machines cannot reach this process",
                config.node_host,
                config.root_uri,
            )
        return str(config.node_host)
    try:
        if config.interface:
            return interface_address(
                config.interface, bool(config.root_uri) and is_ipv6(scheduler_address(config))
            )
        return own_address_towards(scheduler_address(config), config.root_port)
    except errors.RendezvousError:
        raise
    except OSError as e:
        raise errors.ConfigError(
            f"cannot determine this process's own address (DMLC_INTERFACE={config.interface!r},"
            f" scheduler {config.root_uri}): {e}; set DMLC_NODE_HOST"
        ) from e


def machine() -> str:
    """Identity of the machine: equal for processes that can sum in shared memory.

    It names the booted system, the network namespace and the folder of the processes' sockets.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        boot, network = os.uname().nodename, 0
    folder = os.stat(runtime_dir())
    return f"{boot} {network} {folder.st_dev} {folder.st_ino}"


def require_trust(config: Config, address: str) -> None:
    """Refuse a job without a secret at an ``address`` that other machines can reach.

    Raises :class:`~bpsx.errors.ConfigError`. With ``BPSX_INSECURE=1``, it logs a warning instead.
    """
    if config.secret_bytes or is_loopback(address):
        return
    if not config.insecure:
        raise errors.ConfigError(
            f"this {config.role} uses {address}, which other machines can reach, but the job has"
            " no secret: set BPSX_SECRET to the same secret for all processes of the job, or"
            f" BPSX_SECRET_FILE ({HOW_TO}), or BPSX_INSECURE=1 if you trust everyone on the"
            " network"
        )
    log.warning(
        "this %s uses %s without a job secret (BPSX_INSECURE=1): anyone who can reach it can read"
        " and change the training",
        config.role,
        address,
    )


def allow_descriptors() -> None:
    """Raise this process's limit of open files and connections to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


#: Signals that have a meaning only for scripts, such as a batch system's warning.
SCRIPT_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def heed_signals(
    role: str,
    end: Callable[[signal.Signals], None],
    serving: Callable[[], bool],
    grace: float,
    leave: Callable[[], bool] = lambda: False,
) -> None:
    """Install the signal handlers of a scheduler or a server, which workers may still need.

    Only for the main thread. SIGINT calls ``end``, unless the caller ignores SIGINT. SIGTERM calls
    ``end`` at once unless ``serving()``, else after ``grace`` seconds or on the second SIGTERM: a
    batch system sends it to every process of a job, and workers then save. ``leave`` is called at
    the first such SIGTERM and returns whether this process may leave the running job earlier.
    SIGHUP, SIGUSR1 and SIGUSR2 are for scripts and are ignored. ``end`` and ``leave`` run in a
    signal handler.
    """
    waiting = False

    def at(number: int, _: FrameType | None) -> None:
        nonlocal waiting
        if number == signal.SIGTERM and not waiting and grace and serving():
            waiting = True
            signal.setitimer(signal.ITIMER_REAL, grace)
            what = "leaves when others have its keys, and serves" if leave() else "serves"
            # Not through the log, which this handler may have interrupted.
            os.write(
                2,
                f"bpsx {role}: got SIGTERM: it {what} workers for {grace:g} s more "
                "(BPSX_TERM_GRACE); a second SIGTERM ends it now\n".encode(),
            )
        else:
            end(signal.SIGTERM if number == signal.SIGALRM else signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        # Shells ignore SIGINT for background jobs.
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, at)
    for number in SCRIPT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The parent may have blocked them until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SCRIPT_SIGNALS)


def require_descriptors(role: str, more: int = 0) -> None:
    """Check that this process may open the files and connections that ``role`` needs at least.

    ``more``: number of descriptors that it needs beyond those of a role with default settings.
    Libraries that run out of descriptors abort, hang, or fail far from the cause.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    least = _LEAST_DESCRIPTORS + more
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor is left, or no /proc
        taken = limit if limit < least else 0
    if taken + least > limit:
        raise errors.ConfigError(
            f"this {role} may have {limit} open files and connections (ulimit -n) and has {taken};"
            f" it needs at least {least} more, plus one for each peer: raise the"
            " limit, for example ulimit -n 1024"
        )


@functools.cache
def _mallopt() -> Any:
    """Return glibc's ``mallopt``, or None. Cached, as every look-up leaks some memory."""
    return getattr(ctypes.CDLL(None), "mallopt", None)


def hold(lifeline: int, orphaned: Callable[[], None]) -> None:
    """Call ``orphaned``, on its own thread, when the peer of the socket ``lifeline`` closes."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(lifeline, 1):
                pass
        orphaned()

    NamedThread(target=watch, name="bpsx-lifeline", daemon=True).start()


def keep_memory(megabytes: int) -> None:
    """Make glibc's malloc keep up to this much freed memory. Without glibc, do nothing."""
    mallopt = _mallopt()
    if megabytes and mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, megabytes << 20)
