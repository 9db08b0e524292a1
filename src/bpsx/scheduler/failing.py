"""Tells the scheduler why a node cannot start, so that the other nodes need not wait for it.

``python -m bpsx.scheduler.failing`` sends the message, with the reason on its standard input. A
separate process does so because the node may lack memory or threads, and ZeroMQ aborts a process in
which it cannot start its own threads. Best effort: errors are ignored.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import zmq

from bpsx.config import Config, child_environment
from bpsx.errors import BpsxError, in_short
from bpsx.scheduler import messages
from bpsx.scheduler.sockets import open_socket
from bpsx.system.address import is_ipv6, tcp_url
from bpsx.system.host import own_host, scheduler_address

#: Limits for the whole process, and for the scheduler's reply.
_LONGEST_SECONDS, _ANSWER_MS = 10.0, 3000
_MOST_REASON = 4000
#: Options that identify and locate a node. Others are left out, as they may be the invalid ones.
_NEEDED = {
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_NUM_WORKER",
    "DMLC_NUM_SERVER",
    "DMLC_WORKER_ID",
    "DMLC_NODE_HOST",
    "DMLC_INTERFACE",
    "BYTEPS_LOCAL_RANK",
    "BYTEPS_LOCAL_SIZE",
    "BPSX_SECRET",
    "BPSX_SECRET_FILE",
    "BPSX_INSECURE",
}


def tell(role: str, error: BaseException, config: Config | None = None) -> None:
    """Tell the scheduler that this process, a ``role``, cannot start because of ``error``.

    ``config``: the node's, if it could be read; otherwise the environment locates the scheduler.

    Raises nothing; takes at most 10 seconds.
    """
    with contextlib.suppress(Exception):
        known = _known(role) if config is None else config
        if (
            known.root_uri is None
            or not known.root_port
            or not known.distributed
            and role == "worker"
        ):
            return
        fields = {
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": known.root_uri,
            "DMLC_PS_ROOT_PORT": str(known.root_port),
            **({} if known.worker_id is None else {"DMLC_WORKER_ID": str(known.worker_id)}),
            "DMLC_NUM_WORKER": str(known.num_worker),
            "BYTEPS_LOCAL_RANK": str(known.local_rank),
            "BYTEPS_LOCAL_SIZE": str(known.local_size),
        }
        subprocess.run(
            [sys.executable, "-P", "-m", "bpsx.scheduler.failing", str(os.getpid())],
            env=child_environment(**fields),
            check=False,
            input=in_short(error)[:_MOST_REASON].encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LONGEST_SECONDS,
        )


@contextlib.contextmanager
def told(role: str) -> Iterator[None]:
    """Context manager that tells the scheduler of an exception that stops a ``role``'s start."""
    try:
        yield
    except Exception as e:
        tell(role, e)
        raise


def _known(role: str) -> Config:
    return Config({k: v for k, v in child_environment().items() if k in _NEEDED}, role=role)


def _message(config: Config, pid: int, reason: str) -> bytes:
    numbered = config.worker_id is not None or config.num_worker == 1
    fields: dict[str, Any] = {
        "role": config.role,
        "rank": -1 if config.role != "worker" or not numbered else config.rank,
        "host": own_host(config),
        "pid": pid,
        "reason": reason,
        "config": {"BYTEPS_LOCAL_SIZE": config.local_size},
    }
    return messages.encode("CANNOT", **fields)


def main() -> int:
    """Send the reason on standard input; returns 0 if the scheduler replied."""
    try:
        config = _known(child_environment()["DMLC_ROLE"])
        address = scheduler_address(config)
        context = zmq.Context(1)
        link = open_socket(context, zmq.DEALER, config)
        link.setsockopt(zmq.IPV6, int(is_ipv6(address)))
        in_vain = link.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        link.connect(tcp_url(address, config.root_port))
        link.send(_message(config, int(sys.argv[1]), sys.stdin.read()))
        poller = zmq.Poller()
        for end in (link, in_vain):
            poller.register(end, zmq.POLLIN)
        answered = link in dict(poller.poll(_ANSWER_MS))
        context.destroy(0)
    except (BpsxError, zmq.ZMQError, OSError):
        return 1
    return 0 if answered else 1


if __name__ == "__main__":
    sys.exit(main())
