"""Checks that a new node's options match those of the nodes already there, whatever their roles.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bpsx.config import frame_bound

_SAME = ("BYTEPS_ENABLE_ASYNC", "DMLC_ENABLE_RDMA", "BPSX_ELASTIC", "BPSX_ELASTIC_WAIT")


def disagreement(
    role: str, config: Mapping[str, Any], others: Iterable[tuple[str, Mapping[str, Any]]]
) -> str:
    """Return why a node with these options cannot work with ``others``; empty if it can.

    ``others``: pairs of role and options. Each set of options has been checked on its own.
    """
    for other, theirs in others:
        if config["BPSX_ENCRYPT"] != theirs["BPSX_ENCRYPT"]:
            return (
                f"BPSX_ENCRYPT={config['BPSX_ENCRYPT']} on this {role}, {theirs['BPSX_ENCRYPT']}"
                f" on a {other}: must be the same on all processes"
            )
        for name in _SAME:
            if config.get(name) != theirs.get(name):
                return (
                    f"{name}={config.get(name)} on this {role}, {theirs.get(name)} on a {other}:"
                    " must be the same on all workers and servers"
                )
        if role == other:
            continue
        worker, server = (config, theirs) if role == "worker" else (theirs, config)
        size = worker["BYTEPS_PARTITION_BYTES"]
        sent, taken = frame_bound(size), frame_bound(server["BYTEPS_PARTITION_BYTES"])
        if sent > taken:
            return (
                f"a worker with BYTEPS_PARTITION_BYTES={size} may send messages of {sent} bytes,"
                f" but a server accepts at most {taken}: set BYTEPS_PARTITION_BYTES on the"
                " servers, too"
            )
    return ""
