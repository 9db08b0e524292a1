"""Checks that a new node's options match those of the nodes already there, whatever their roles.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bpsx.config import frame_bound

_SAME = ("BYTEPS_ENABLE_ASYNC", "DMLC_ENABLE_RDMA")


def disagreement(
    role: str, config: Mapping[str, Any], others: Iterable[tuple[str, Mapping[str, Any]]]
) -> str:
    """Return why a node with these options cannot work with ``others``; empty if it can.

    ``others``: pairs of role and options. Each set of options has been checked on its own.
    """
    for other, theirs in others:
        if config["BPSX_ENCRYPT"] != theirs["BPSX_ENCRYPT"]:
            return (
                f"BPSX_ENCRYPT={config['BPSX_ENCRYPT']} there, {theirs['BPSX_ENCRYPT']} at a"
                f" {other}: the same is needed on all processes"
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
                f"a worker has BYTEPS_PARTITION_BYTES={size} and may send messages of {sent} bytes,"
                f" and a server takes at most {taken}: set BYTEPS_PARTITION_BYTES on the"
                " servers, too"
            )
    return ""
