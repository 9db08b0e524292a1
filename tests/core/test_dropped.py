"""Random runs of cores and lanes that lose workers and lanes, with messages in random order."""

from __future__ import annotations

import pytest

from core.dropped import Shrinking, Stepping
from core.relayed import run_some

#: Options of a run -> its arguments.
KINDS = {
    "one of two": {"workers": 2, "losses": 0},
    "one of three": {"workers": 3, "tensors": 4, "losses": 0},
    "two of four": {"workers": 4, "tensors": 3, "losses": 0, "drops": 2},
    "workers and lanes": {"workers": 3, "tensors": 4, "losses": 2, "drops": 2},
    "fixed order": {"workers": 4, "tensors": 3, "fixed_order": True, "drops": 2},
    "scheduled": {"workers": 3, "tensors": 3, "scheduled": True},
    "overtaking": {"workers": 3, "tensors": 3, "reorder": 0.2, "drops": 2},
    "newcomers": {"workers": 3, "tensors": 8, "lanes": 5, "newcomers": 3, "losses": 0},
    "all": {"workers": 4, "lanes": 6, "newcomers": 3, "reorder": 0.2, "drops": 2, "losses": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_survivors_get_the_same_outcomes_with_a_lost_worker_or_without(kind):
    run_some(Shrinking, KINDS[kind])


#: The same, for runs in groups.
STEPS = {
    "one of three": {"workers": 3, "losses": 0},
    "two of four": {"workers": 4, "tensors": 4, "losses": 0, "drops": 2},
    "workers and lanes": {"workers": 3, "losses": 2, "drops": 2},
    "overtaking": {"workers": 3, "reorder": 0.2},
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_lost_worker_counts_in_all_tensors_of_a_step_or_in_none(kind):
    run_some(Stepping, STEPS[kind])
