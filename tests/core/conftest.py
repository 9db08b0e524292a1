"""The scripted lane of test_lane.py, for it and its sisters."""

from __future__ import annotations

import pytest

from core.test_lane import Rig


@pytest.fixture
def rig():
    made: list[Rig] = []

    def make(workers: int = 2, **options) -> Rig:
        made.append(Rig(workers, **options))
        return made[-1]

    yield make
    for r in made:
        r.close()
