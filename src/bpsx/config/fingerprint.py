"""Options that must be the same on all workers, compared at rendezvous."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsx.config import OPTIONS, Config


def fingerprint(config: Config) -> dict[str, Any]:
    """Return the options that all workers must share, by variable; flags as 0 or 1."""
    names = (
        "num_worker",
        "num_server",
        "local_size",
        "local_reduce",
        "max_workers",
        "partition_bytes",
        "key_hash_fn",
        "hash_coefficient",
        "asynchronous",
        "autotune",
        "elastic",
        "elastic_wait",
        "encrypt",
        "mixed_mode",
        "transport",
    )
    values = {o.env: getattr(config, o.field) for o in OPTIONS if o.field in names}
    values |= {
        "DMLC_NUM_SERVER": config.servers,
        "BPSX_ELASTIC_WAIT": config.elastic_wait > 0,
        "BPSX_LOCAL_REDUCE": config.shares_machine,
        "DMLC_ENABLE_RDMA": config.transport_name,
        "BPSX_SERVER_WEIGHT": config.server_weight if config.role == "server" else 1,
    }
    return {env: int(value) if isinstance(value, bool) else value for env, value in values.items()}


def wrong_options(shared: Mapping[str, Any]) -> list[str]:
    """The options of another process's :func:`fingerprint` that are missing or not allowed."""
    names = fingerprint(Config({}))
    options = {o.env: o for o in OPTIONS if o.env in names}
    wrong = []
    for env, option in options.items():
        value = shared.get(env)
        if option.default is None and value is None:
            continue
        try:
            if (
                isinstance(value, bool)
                or not isinstance(value, int | str)
                or option.parse(str(value)) != value
            ):
                raise ValueError
        except ValueError:
            wrong.append(f"{env}={str(value)[:40]!r}")
    return wrong
