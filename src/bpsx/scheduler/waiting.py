"""How long a node waits for the scheduler's word; messages for people who wait meanwhile."""

from __future__ import annotations

import sys

from bpsx.config import Config
from bpsx.scheduler.sockets import speaks_zeromq
from bpsx.system.address import is_loopback, join_host_port
from bpsx.transports.reach import unreachable

_SECONDS = 1.0
_NUMERIC = frozenset("0123456789.:[]%abcdefABCDEF")


#: Seconds that a broken data connection waits for the scheduler's message about a death.
VERDICT_SECONDS = 1.0


def patience(config: Config, elastic: bool) -> float:
    """Seconds for which the scheduler may explain a broken data connection.

    A machine without power is noticed by its silence, on each connection at another time. The times
    differ by up to an interval of the heartbeats. The scheduler may have fallen silent, too, later
    than that machine. Its silence then shows that there is no verdict. In a job that cannot go on,
    the time only decides which error is shown.
    """
    if not elastic or config.heartbeat_interval <= 0:
        return VERDICT_SECONDS
    silence: float = config.heartbeat_interval + config.heartbeat_timeout
    return float(VERDICT_SECONDS + config.heartbeat_interval + silence)


def why_silent(address: str, port: int) -> str:
    """Explain why the scheduler at ``address`` (numeric) does not reply.

    Takes up to two seconds.
    """
    where = join_host_port(address, port)
    why = unreachable([where], _SECONDS).get(where, "")
    if why.startswith("refused"):
        text = "no process listens there yet, or a firewall rejects the connection"
    elif why:
        text = why
    elif not speaks_zeromq(address, port, _SECONDS):
        text = "the process that listens there is not a scheduler"
    else:
        text = "it accepts connections but does not reply: it is stopped or busy"
    if why and is_loopback(address):
        text += (
            f"; {address} is a loopback address, which means this machine: for a scheduler on"
            " another machine, set DMLC_PS_ROOT_URI to an address that other machines can reach"
        )
    return text


def loopback_hint(config: Config) -> str:
    """Hint for a scheduler that waits in vain on a loopback address; empty on other addresses."""
    if not is_loopback(config.root_uri):
        return ""
    return (
        f" (the scheduler listens on loopback, DMLC_PS_ROOT_URI={config.root_uri}, which other"
        " machines cannot reach)"
    )


def doubtful_name(config: Config) -> str:
    """Warning if the scheduler's own host name resolves to loopback, as in Debian's /etc/hosts.

    Empty if all is well.
    """
    host = config.root_uri
    if (
        not host
        or host.lower().split(".")[0] == "localhost"
        or set(host) <= _NUMERIC
        or not is_loopback(host)
    ):
        return ""
    return (
        f"DMLC_PS_ROOT_URI={host} is a loopback address on this machine (see /etc/hosts), so"
        " processes on other machines cannot reach this scheduler: set it to an address that they"
        " can reach"
    )


def introduce(config: Config, where: str) -> None:
    """Print to standard error what this process is and which nodes it waits for.

    ``where``: the scheduler's address.
    """
    if not config.announce:
        return
    workers = f"{config.num_worker} worker{' machines' if config.num_worker > 1 else ' machine'}"
    servers = f"{config.num_server} server{'s' if config.num_server != 1 else ''}"
    limit = f"for at most {config.rendezvous_timeout:g} s (BPSX_RENDEZVOUS_TIMEOUT)"
    if config.role == "scheduler":
        text = f"listening on {where}, waiting for {workers} and {servers} {limit}"
    else:
        text = (
            f"joining the job of {workers} and {servers} at the scheduler {where}, waiting {limit}"
        )
    print(f"bpsx {config.role}: {text}", file=sys.stderr, flush=True)
