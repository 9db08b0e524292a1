"""Which GPUs of a machine reduce together, and which of them copy to the host.

Pure functions of the given hardware description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bpsx.errors import ConfigError


class Card(NamedTuple):
    """A GPU as its process sees it.

    ``bus``: PCI address. ``name``: model. ``switch``: the PCI bridge that it shares with its
    nearest neighbours; "" if unknown.
    """

    bus: str
    name: str
    switch: str


class ReducePlan(NamedTuple):
    """Grouping of a machine's GPUs.

    ``group``: number of neighbouring local ranks that reduce among themselves; the CPU adds the
    groups' sums. ``roots``: local ranks to which the group reduces, in turn; empty: each GPU of a
    group copies a part. ``why``: reason, for the log.
    """

    group: int
    roots: tuple[int, ...]
    why: str


def plan(
    cards: Sequence[Card],
    linked: bool | None,
    roots: Sequence[int] = (),
    switch_size: int | None = None,
    alone: bool = False,
) -> ReducePlan:
    """Return the grouping of these GPUs, given by local rank.

    ``linked``: whether NVLink connects all of them; None if unknown. ``alone``: there are no
    servers, so nothing is copied to the host.

    Raises :class:`~bpsx.errors.ConfigError` if two processes have the same GPU, or if
    ``switch_size`` does not divide their number.
    """
    size = len(cards)
    _check_cards(cards)
    if alone:
        return ReducePlan(size, (), "no servers, so NCCL sums over all GPUs")
    if roots:
        return ReducePlan(size, tuple(roots), "BYTEPS_REDUCE_ROOTS")
    if switch_size is not None:
        if size % switch_size:
            raise ConfigError(
                f"BYTEPS_PCIE_SWITCH_SIZE={switch_size}: must be a divisor of the {size} GPUs of"
                " this machine"
            )
        return ReducePlan(switch_size, (), "BYTEPS_PCIE_SWITCH_SIZE")
    if linked:
        return ReducePlan(size, (), "NVLink connects all GPUs")
    found = _by_switch([card.switch for card in cards])
    if linked is None or found is None:
        return ReducePlan(size, (), "the connections between the GPUs are unknown")
    return ReducePlan(
        found, (), "one PCIe switch" if found == size else "no NVLink, and several PCIe switches"
    )


def _check_cards(cards: Sequence[Card]) -> None:
    seen: dict[str, int] = {}
    for local_rank, card in enumerate(cards):
        other = seen.setdefault(card.bus, local_rank)
        if other != local_rank:
            raise ConfigError(
                f"local ranks {other} and {local_rank} use the same GPU ({card.name} at"
                f" {card.bus}): give each process its own, for example with"
                " torch.cuda.set_device(bps.local_rank()) or CUDA_VISIBLE_DEVICES; or set"
                " BPSX_LOCAL_REDUCE=0"
            )


def _by_switch(switches: Sequence[str]) -> int | None:
    """Return the number of neighbours per switch, if it is the same for all switches.

    Returns None if it is unknown or differs.
    """
    if not all(switches):
        return None
    size = switches.count(switches[0])
    if len(switches) % size or len(set(switches)) != len(switches) // size:
        return None
    groups = [switches[i : i + size] for i in range(0, len(switches), size)]
    return size if all(len(set(group)) == 1 for group in groups) else None
