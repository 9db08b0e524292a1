"""The scripted counterpart that a module tests against."""

from __future__ import annotations

import pytest

import core.test_lane as lane


@pytest.fixture
def rig(request):
    """Makes what the module calls ``Rig``: a core for the worker's side; else the scripted lane of
    test_lane.py, for it and its sisters.
    """
    kind = getattr(request.module, "Rig", lane.Rig)
    made = []

    def make(*numbers, **options):
        made.append(kind(*numbers, **options))
        return made[-1]

    yield make
    for r in made:
        r.close()
