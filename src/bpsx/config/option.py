"""One option, and the groups in which the reference lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

JOB = "Job"
TUNING = "Tuning"
FAILURE = "Failure"
LOGGING = "Logging and files"
SEEING = "Observation"
SECURITY = "Security"
LAUNCHER = "Launcher"
GPUS = "GPUs"


@dataclass(frozen=True)
class Option:
    """One option.

    ``parse`` converts the variable's text to the value. It raises :class:`ValueError`, and
    ``allowed`` then says what is valid. ``required``: without a default, a job with servers cannot
    begin.
    """

    field: str
    env: str
    parse: Callable[[str], Any]
    default: Any
    allowed: str
    help: str
    group: str
    required: bool = False
