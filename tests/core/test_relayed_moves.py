"""Random runs of cores and lanes whose messages are passed on in random order, while lanes are
lost: sums, broadcasts, failed rounds, joins, second losses.
"""

from __future__ import annotations

import pytest

from core.relayed import Script, run_some

#: Options of a run -> its arguments.
KINDS = {
    "two workers": {"workers": 2},
    "three workers": {"workers": 3, "tensors": 4},
    "fixed order": {"workers": 3, "tensors": 4, "fixed_order": True},
    "scheduled": {"workers": 2, "scheduled": True},
    "overtaking": {"workers": 2, "reorder": 0.2},
    "many losses": {"workers": 2, "lanes": 6, "losses": 5},
    "newcomers": {"workers": 2, "lanes": 5, "newcomers": 3, "losses": 0},
    "three workers and newcomers": {"workers": 3, "tensors": 8, "newcomers": 2, "lanes": 5},
    "newcomers, overtaking": {"workers": 2, "lanes": 6, "newcomers": 3, "reorder": 0.3},
    "newcomers, scheduled": {"workers": 2, "lanes": 5, "newcomers": 3, "scheduled": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_workers_get_the_same_right_outcomes(kind):
    run_some(Script, KINDS[kind])
