"""The wait for the gradients of a step; see ``_settling.pyx``."""

from typing import Any

from bpsx.torch._gradients import Managed

def pushed_of(managed: list[Managed]) -> list[Managed]:
    """Those whose gradients are on their way."""

def missing_of(managed: list[Managed]) -> list[Managed]:
    """Those that are trained, wanted and not on their way.

    What could not begin is not, and goes again.
    """

def restart(managed: list[Managed], passes: int) -> None:
    """Forget backward passes that have been added up so far, and averages, whose memory may be
    wanted.
    """

def all_together(managed: list[Any]) -> bool:
    """Whether each of them has a gradient of its own on its way, with others on a GPU."""

def settle(managed: list[Managed]) -> list[Managed]:
    """Wait for gradients that are :func:`all_together`, and see that they are where the optimizer
    looks.

    Returns those with which something is the matter, as they are: failed, written to, with other
    memory.
    """

def settle_here(managed: list[Managed]) -> list[Managed]:
    """Wait for gradients on the host that hooks have begun quickly, and see that they are where the
    optimizer looks.

    Return the others, and those that failed, were written to or have other memory.
    """

def any_under_way(managed: list[Managed]) -> bool:
    """Whether a gradient is on its way, or due to be."""

def used_of(managed: list[Managed]) -> list[bool]:
    """Whether this worker has a gradient, of each."""

def frozen_of(managed: list[Managed]) -> list[Managed]:
    """Those that this worker has frozen, and does not push."""

def want_all(managed: list[Managed]) -> None:
    """Some worker has a gradient of each."""
