"""The wait for the gradients of a step; see ``_settling.pyx``."""

from typing import Any

from bpsx.torch._gradients import Managed

def pushed_of(managed: list[Managed]) -> list[Managed]:
    """Return the parameters whose gradients are in flight."""

def missing_of(managed: list[Managed]) -> list[Managed]:
    """Return the parameters that are trained, wanted and not in flight.

    A push that could not start is dropped and counts as missing.
    """

def restart(managed: list[Managed], passes: int) -> None:
    """Reset the count of backward passes, and release averages, whose memory may be needed."""

def all_together(managed: list[Any]) -> bool:
    """Return whether every gradient is this worker's own and in flight in a GPU bucket."""

def settle(managed: list[Managed]) -> list[Managed]:
    """Wait for gradients that are :func:`all_together` and put them into ``grad``.

    Returns the parameters whose gradients need the slow path (failed, written to or reallocated).
    """

def settle_here(managed: list[Managed]) -> list[Managed]:
    """Wait for gradients that hooks have started quickly on the host, and put them into ``grad``.

    Returns the other parameters, and those whose gradient failed, was written to or reallocated.
    """

def any_under_way(managed: list[Managed]) -> bool:
    """Return whether a gradient is in flight or due to be pushed."""

def used_of(managed: list[Managed]) -> list[bool]:
    """Return for each parameter whether this worker has a gradient."""

def frozen_of(managed: list[Managed]) -> list[Managed]:
    """Return the parameters that this worker has frozen and does not push."""

def want_all(managed: list[Managed]) -> None:
    """Mark every parameter as having a gradient on some worker."""
