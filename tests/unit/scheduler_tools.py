"""Messages that nodes send to the scheduler, and jobs in a given state."""

from __future__ import annotations

import functools

from bpsx.config import Config
from bpsx.config.fingerprint import fingerprint
from bpsx.scheduler.membership import Membership
from bpsx.scheduler.messages import PROTOCOL


def config(workers: int, servers: int, **changes) -> dict:
    return {**_defaults(workers, servers), "BPSX_ELASTIC": "off", **changes}


@functools.cache  # reading all options takes longer than all else that most greetings need
def _defaults(workers: int, servers: int) -> dict:
    return fingerprint(Config({"DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers)}))


def hello(
    role: str, rank: int, workers: int = 2, servers: int = 1, pid: int | None = None, **changes
) -> dict:
    made_up = 100 + rank + (50 if role == "server" else 0)
    return {
        "type": "HELLO",
        "protocol": PROTOCOL,
        "role": role,
        "rank": rank,
        "host": "h",
        "pid": made_up if pid is None else pid,
        "lanes": [f"h:{rank}"] if role == "server" else [],
        "config": config(workers, servers),
        "token": "",
        **changes,
    }


def declare(name: str, shape: list[int], generation: int = 0, dtype: int = 3) -> dict:
    nbytes = 4
    for d in shape:
        nbytes *= d
    return {
        "type": "DECLARE",
        "name": name,
        "generation": generation,
        "nbytes": nbytes,
        "dtype": dtype,
        "shape": shape,
        "codec": "",
        "epoch": 0,
    }


def waiting(*new: list, over: list = (), busy: bool = False, epoch: int = 0) -> dict:
    """A worker's report of what it has pushed.

    Unless an entry says otherwise, the worker has waited for it since it was pushed.
    """
    return {
        "type": "WAITING",
        "new": [[*item, item[3]] if len(item) == 4 else list(item) for item in new],
        "over": list(over),
        "busy": busy,
        "epoch": epoch,
        "calls": 0,
        "last": True,
    }


def members(workers: int = 2, servers: int = 1) -> Membership:
    return Membership(workers, servers, 1, job=9, stall_warn=10, deadlock_after=30)


def running(workers: int = 2, servers: int = 1, **changes) -> Membership:
    """A job that runs; ``changes``: options of all nodes. Servers have one lane each."""
    m = members(workers, servers)
    options = config(workers, servers, **changes)
    for i in range(servers):
        greeting = hello("server", -1, workers, servers, pid=900 + i, config=options)
        m.hello(b"s%d" % i, greeting)
    for r in range(workers * options["BYTEPS_LOCAL_SIZE"]):
        m.hello(b"w%d" % r, hello("worker", r, workers, servers, config=options))
    assert m.state == "running"
    return m


def elastic(workers: int = 2, servers: int = 2, **changes) -> Membership:
    """A job that runs, and that goes on if it loses a server."""
    return running(workers, servers, BPSX_ELASTIC="servers", BPSX_ELASTIC_WAIT=1, **changes)


def late_server(n: int, workers: int = 2, servers: int = 1, **changes) -> dict:
    """The HELLO of a server that joins a job of :func:`elastic`."""
    given = {"BPSX_ELASTIC": "servers", "BPSX_ELASTIC_WAIT": 1, **changes}
    options = config(workers, servers, **given)
    return hello(
        "server", -1, workers, servers, pid=700 + n, config=options, lanes=[f"h:{700 + n}"]
    )


def kinds(outputs) -> dict[bytes, str]:
    return {ident: message["type"] for ident, message in outputs}
