"""Random runs with compressed tensors that lose workers and lanes, messages in random order."""

from __future__ import annotations

import random

import pytest

from core.dropped_compressed import Compressed, CompressedSteps, OneIsLeft, SlowestStep, SlowStep
from core.relayed import run_some
from support import wire as w

COUNTERS = ["randomk", "dithering", "half", "onebit", "topk"]
SLOW = ["topk-ef", "topk-corrected", "randomk-sparse"]
RESIDUALS = ["onebit-ef", "topk-corrected", "randomk-sparse", "dithering-ef", "topk-ef"]
OTHERS = ["onebit-corrected", "randomk-ef", "randomk", "topk"]
#: Options of a run -> its arguments.
KINDS = {
    "counters, one of two": {"workers": 2, "specs": COUNTERS, "losses": 0},
    "counters, one of three": {"workers": 3, "specs": COUNTERS, "losses": 0},
    "residuals, one of two": {"workers": 2, "specs": RESIDUALS, "losses": 0},
    "residuals, one of three": {"workers": 3, "specs": RESIDUALS, "losses": 0},
    "others, two of four": {"workers": 4, "specs": OTHERS, "losses": 0, "drops": 2},
    "residuals, two of four": {"workers": 4, "specs": RESIDUALS[:4], "losses": 0, "drops": 2},
    "overtaking": {"workers": 3, "specs": RESIDUALS[:4], "losses": 0, "reorder": 0.2},
    "scheduled": {"workers": 3, "specs": OTHERS, "losses": 0, "scheduled": True},
    "lanes in between": {"workers": 4, "specs": RESIDUALS, "patient": True, "drops": 2},
    "lanes at once": {"workers": 4, "specs": RESIDUALS[:4], "drops": 2},
    "counters, all": {"workers": 4, "specs": COUNTERS, "lanes": 6, "newcomers": 2, "drops": 2},
    "all": {"workers": 4, "specs": RESIDUALS, "lanes": 6, "newcomers": 2, "drops": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_bits_of_lanes_that_saw_no_push_that_does_not_count(kind):
    run_some(Compressed, KINDS[kind], 8)


STEPS = {
    "counters": {"workers": 3, "specs": COUNTERS, "losses": 0},
    "residuals": {"workers": 3, "specs": RESIDUALS[:4], "losses": 0},
    "two of four": {"workers": 4, "specs": OTHERS, "losses": 0, "drops": 2},
    "lanes in between": {"workers": 3, "specs": RESIDUALS[:3], "patient": True},
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_lost_worker_counts_in_all_tensors_of_a_step_or_in_none(kind):
    run_some(CompressedSteps, STEPS[kind], 8)


def test_a_sum_that_a_slow_worker_lacks_can_be_repeated_after_its_lane_and_a_worker_are_lost():
    run_some(SlowStep, {"workers": 2, "specs": SLOW}, 8)


def test_a_residual_that_no_process_has_starts_from_zero():
    """Those of keys of which the slow worker has the snapshot go on."""
    resets = kept = 0
    for _ in range(40):
        script = SlowestStep(random.randrange(2**32), workers=3, specs=SLOW)
        try:
            script.run()
            script.check()
            resets += script.resets
            kept += script.kinds[w.LOAD] - script.loaded
        finally:
            script.close()
        if resets and kept:
            break
    assert resets and kept


def test_residuals_stay_if_no_survivor_repeats_the_latest_sums():
    run_some(OneIsLeft, {"specs": RESIDUALS[:4]}, 8)
