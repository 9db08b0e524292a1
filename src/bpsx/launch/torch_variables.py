"""PyTorch's variables, as torchrun sets them, for the workers that bpsx-run starts.

With these, ``init_process_group()`` of any backend works. Frameworks that look for several
processes in the environment, such as Accelerate, Transformers and Lightning, recognize the job.
"""

from __future__ import annotations

import contextlib
import secrets
import socket

from bpsx.config import STORE_PORTS, child_environment, own_store, run_id

_TRIES = 50


def torch_variables(
    rank: int, size: int, local_rank: int, local_size: int, store: tuple[str, int] | None
) -> dict[str, str]:
    """The variables of worker ``rank`` of ``size``.

    The worker is process ``local_rank`` of ``local_size`` on its machine.

    ``store``: address and port of PyTorch's store, which worker 0 opens; None if this process does
    not know it. MASTER_ADDR and MASTER_PORT of the user take precedence.
    """
    changes = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(size // local_size),
        # Worker 0 opens the store. An enclosing torchrun would have set this to True.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return {**changes, **store_variables(store)}


def store_variables(store: tuple[str, int] | None) -> dict[str, str]:
    """The address of PyTorch's store, unless the user has set one, and the run's id."""
    now = child_environment()
    ours = own_store(now)
    if store is None:
        return {} if ours else {"TORCHELASTIC_RUN_ID": run_id()}
    # MASTER_ADDR and MASTER_PORT of an enclosing bpsx-run belong to another job.
    address, port = ("", "") if ours else (now.get("MASTER_ADDR", ""), now.get("MASTER_PORT", ""))
    if address and port:
        return {"TORCHELASTIC_RUN_ID": run_id()}
    address, port = address or store[0], port or str(store[1])
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run_id(address, port),
    }


def any_port() -> int:
    """A random port of those that Linux never assigns on its own."""
    return secrets.choice(STORE_PORTS)


def free_port() -> int:
    """A port that is free on this machine now."""
    for _ in range(_TRIES):
        port = any_port()
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
