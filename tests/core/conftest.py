"""Fixture with the scripted peer that a test module runs against."""

from __future__ import annotations

import pytest

import core.test_lane as lane


@pytest.fixture
def rig(request):
    """Return a factory of the module's own ``Rig``, or of the scripted lane of test_lane.py."""
    kind = getattr(request.module, "Rig", lane.Rig)
    made = []

    def make(*numbers, **options):
        made.append(kind(*numbers, **options))
        return made[-1]

    yield make
    for r in made:
        r.close()
