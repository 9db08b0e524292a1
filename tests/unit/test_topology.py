"""Which GPUs reduce together, and which of them gets the sum."""

from __future__ import annotations

import pytest

from bpsx.errors import ConfigError
from bpsx.local.topology import Card, ReducePlan, plan


def cards(*switches: str) -> list[Card]:
    return [Card(f"0000:{i:02x}:00.0", "Pretend", switch) for i, switch in enumerate(switches)]


def grouped(found: ReducePlan) -> tuple[int, tuple[int, ...]]:
    return found.group, found.roots


@pytest.mark.parametrize(
    ("switches", "linked", "group"),
    [
        ("aabb", False, 2),
        ("aaaa", False, 4),
        ("abcd", False, 1),
        ("aabbcc", False, 2),
        ("aaabbb", False, 3),
        ("aabb", True, 4),  # NVLink is faster than any switch
        ("aabb", None, 4),  # unknown whether there is NVLink
        ("aabbb", False, 5),  # switches with different numbers of GPUs: treated as unknown
        ("aab", False, 3),
        ("abab", False, 4),  # the processes of a switch are not consecutive
        ("abba", False, 4),
        ("aabbaa", False, 6),
        ("a", False, 1),
    ],
)
def test_gpus_of_a_pcie_switch_form_a_group_unless_linked(
    switches: str, linked: bool | None, group: int
) -> None:
    assert grouped(plan(cards(*switches), linked)) == (group, ())


def test_a_switch_that_is_not_known_is_no_switch() -> None:
    assert grouped(plan(cards("a", "a", "", ""), False)) == (4, ())
    assert grouped(plan(cards("", "", "", ""), False)) == (4, ())


def test_the_users_settings_take_precedence() -> None:
    four = cards(*"aabb")
    assert grouped(plan(four, True, switch_size=1)) == (1, ())
    assert grouped(plan(four, False, switch_size=4)) == (4, ())
    assert grouped(plan(four, False, roots=(3, 1))) == (4, (3, 1))
    assert (
        "BYTEPS_REDUCE_ROOTS" in plan(four, False, roots=(3, 1)).why
        and "BYTEPS_PCIE_SWITCH_SIZE" in plan(four, True, switch_size=2).why
    )


@pytest.mark.parametrize("more", [{}, {"roots": (0,)}, {"switch_size": 2}])
def test_without_servers_all_reduce_together(more: dict) -> None:
    assert grouped(plan(cards(*"aabb"), False, alone=True, **more)) == (4, ())


@pytest.mark.parametrize("size", [3, 5, 8])
def test_groups_are_whole(size: int) -> None:
    with pytest.raises(ConfigError, match=f"BYTEPS_PCIE_SWITCH_SIZE={size}.*the 4 GPUs"):
        plan(cards(*"aabb"), None, switch_size=size)


@pytest.mark.parametrize("alone", [False, True])
def test_two_processes_with_one_gpu_are_named(alone: bool) -> None:
    found = cards(*"aabb")
    found[3] = found[1]
    with pytest.raises(
        ConfigError, match=r"local ranks 1 and 3 use the same GPU \(Pretend at 0000:01:00.0\)"
    ):
        plan(found, True, alone=alone)
