"""Jobs whose servers and schedulers are killed one after the other: ``bench chaos``, by a count."""

from __future__ import annotations

import argparse
import importlib
import random
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "transport"), [(2, "shm"), (3, "tcp"), (2, "zmq")])
def test_all_weights_are_those_of_undisturbed_jobs(monkeypatch, workers, transport):
    monkeypatch.syspath_prepend(str(ROOT))
    chaos = importlib.import_module("bench.chaos")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    options = argparse.Namespace(
        minutes=0, kills=6, seed=seed, workers=workers, servers=2, transport=transport, quick=False
    )
    equal, longest = chaos.run(options)
    assert equal.met and equal.samples == (1, 1), equal
    assert longest.met, longest
    killed = re.findall(r"(\d+) (?:servers|schedulers)", longest.note)
    assert len(killed) == 2 and sum(map(int, killed)) == 6, longest
