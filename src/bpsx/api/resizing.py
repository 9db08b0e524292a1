"""The options of a job of another size, after :func:`bpsx.suspend`."""

from __future__ import annotations

from typing import Any

from bpsx import errors
from bpsx.config import Config


def check_size(num_workers: int, num_servers: int) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless a job may have that size."""
    for name, value, least in (("num_workers", num_workers, 1), ("num_servers", num_servers, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 65535:
            raise errors.ConfigError(f"resume: {name}={value!r}; expected {least} to 65535")


def resumed(num_workers: int, num_servers: int, global_rank: int | None) -> Config:
    """Return the environment's options with another size.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    now = Config(role="worker")
    check_size(num_workers, num_servers)
    changes: dict[str, Any] = {"num_worker": num_workers, "num_server": num_servers}
    if global_rank is not None:
        if not isinstance(global_rank, int) or not 0 <= global_rank < num_workers * now.local_size:
            raise errors.ConfigError(
                f"resume: global_rank={global_rank!r}; expected 0 to"
                f" {num_workers * now.local_size - 1}"
            )
        if global_rank % now.local_size != now.local_rank:
            raise errors.ConfigError(
                f"resume: global_rank={global_rank} does not fit this process, which has"
                f" BYTEPS_LOCAL_RANK={now.local_rank}; it must be machine * {now.local_size}"
                f" (BYTEPS_LOCAL_SIZE) + {now.local_rank}"
            )
        changes["worker_id"] = global_rank // now.local_size
    return Config(role="worker", **changes)
