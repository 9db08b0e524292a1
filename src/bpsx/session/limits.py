"""Limits on the names and sizes of declared tensors."""

from __future__ import annotations

from typing import Any

from bpsx.errors import ConfigError
from bpsx.planning.placement import PARTS_PER_TENSOR
from bpsx.scheduler.messages import MAX_NAME


def check_name(name: Any, what: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` if the scheduler cannot accept ``name``.

    ``what``: the start of the error's message.
    """
    try:
        length = len(name.encode()) if isinstance(name, str) else 0
    except UnicodeEncodeError:  # half of a surrogate pair
        length = 0
    if not 0 < length <= MAX_NAME:
        raise ConfigError(
            f"{what}: name {repr(name)[:60]}: must be a string of 1 to {MAX_NAME} bytes of UTF-8"
        )


def check_new(name: str, nbytes: int, partition_bytes: int) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` if a tensor of ``nbytes`` bytes is not allowed."""
    check_name(name, "a tensor to send")
    most = PARTS_PER_TENSOR * partition_bytes
    if nbytes > most:
        raise ConfigError(
            f"tensor {name!r} has {nbytes} bytes; at most {most} are possible with"
            f" BYTEPS_PARTITION_BYTES={partition_bytes}"
        )


def padded_length(length: int) -> int:
    """Round ``length`` up to the next step of a series that grows by a factor of about 1.25.

    A declaration is kept until the job ends, so lengths that change must not be declared as they
    are. The series reaches 10^9 in 90 steps.
    """
    step = 0
    while step < length:
        step += max(1, step // 4)
    return step
