"""Fixtures of the tests with scripted peers."""

from __future__ import annotations

import pytest

from core.rig import Rig


@pytest.fixture
def rig():
    made: list[Rig] = []

    def make(workers: int = 2, **options) -> Rig:
        made.append(Rig(workers, **options))
        return made[-1]

    yield make
    for r in made:
        r.close()
