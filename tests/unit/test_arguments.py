"""Invalid names, priorities and ranks, and which values count as integers.

The session has one worker and sends nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import bpsx
from bpsx.api import verbs
from bpsx.api.arguments import as_integer, checked_root
from bpsx.config import Config
from bpsx.errors import ConfigError
from bpsx.session.session import Session

ARRAY = np.ones(3, np.float32)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    ours = Session(Config(role="worker", num_worker=1, num_server=0))
    monkeypatch.setattr(verbs, "session", lambda: ours)
    yield ours
    ours.close()


@pytest.mark.parametrize(
    "value, expected",
    [
        (3, 3),
        (-(2**70), -(2**70)),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.array(3), 3),
        (True, None),
        (np.True_, None),
        (3.0, None),
        (np.float32(3), None),
        ("3", None),
        (None, None),
        ([3], None),
        (np.array([3, 4]), None),
    ],
    ids=repr,
)
def test_integers_of_python_and_numpy_are_recognised(value: Any, expected: int | None) -> None:
    found = as_integer(value)
    assert found == expected and type(found) is type(expected)


def test_ordinary_values_need_no_masked_arrays() -> None:
    """NumPy's part for them takes longer to import than a small push_pull."""
    source = """
import sys
import numpy as np
from bpsx.api.arguments import check_unmasked
before = "numpy.ma" in sys.modules
for value in (np.ones(3), np.float32(1), 1.0, [1.0], None):
    check_unmasked(value, "x")
assert ("numpy.ma" in sys.modules) == before
"""
    subprocess.run([sys.executable, "-c", source], check=True)


@pytest.mark.parametrize("root", [True, "1", 1.0, None, -1, 3, [1]], ids=repr)
def test_a_root_that_is_no_rank_is_refused(root: Any) -> None:
    with pytest.raises(ConfigError, match="^some verb: root_rank=.*: expected 0 to 2$"):
        checked_root(root, "some verb", 3)
    assert type(checked_root(np.int64(2), "some verb", 3)) is int


@pytest.mark.parametrize("verb", [bpsx.push_pull, bpsx.push_pull_async])
@pytest.mark.parametrize(
    "options, message",
    [
        *(
            (
                {"priority": p},
                "push_pull: priority=.*: expected an integer from -2147483648 to 2147483647",
            )
            for p in ("high", 1.5, None, True, 2**31, -(2**40))
        ),
        ({"name": ""}, "push_pull: name must be a string, not an empty one"),
        ({"name": 5}, "push_pull: name must be a string, not int"),
        ({"name": ["a"]}, "push_pull: name must be a string, not list"),
        ({"name": "\ud800"}, "must be a string of 1 to 4096 bytes of UTF-8"),
        ({"name": "x" * 4097}, "must be a string of 1 to 4096 bytes"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_push_pull(
    alone: Session, verb: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        verb(ARRAY, **options)
    for priority in (np.int64(2**31 - 1), -(2**31)):
        assert bpsx.synchronize(bpsx.push_pull_async(ARRAY, priority=priority)).tolist() == [
            1,
            1,
            1,
        ]


@pytest.mark.parametrize(
    "name", [5, None, "", "\ud800", "ü" * 2049, ["a"]], ids=lambda v: repr(v)[:10]
)
def test_declare(alone: Session, name: Any) -> None:
    with pytest.raises(
        ConfigError, match="^declare: name .*: must be a string of 1 to 4096 bytes of UTF-8$"
    ):
        bpsx.declare(name)
    assert bpsx.declare("ü" * 2048) == 0


def test_broadcast(alone: Session) -> None:
    for root in (True, "0", 0.0, None, 1):
        with pytest.raises(ConfigError, match="^broadcast: root_rank=.*: expected 0 to 0$"):
            bpsx.broadcast(ARRAY, root)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^broadcast: name must be a string, not int"):
        bpsx.broadcast(ARRAY, name=5)  # type: ignore[arg-type]
    assert bpsx.broadcast(ARRAY, np.int64(0)).tolist() == [1, 1, 1]  # type: ignore[arg-type]


def test_the_error_for_a_frameworks_name_says_where_it_is():
    with pytest.raises(
        AttributeError,
        match=(
            r"no attribute 'DistributedOptimizer'; what belongs to a framework is in bpsx\.torch,"
            r" bpsx\.tensorflow"
        ),
    ):
        bpsx.DistributedOptimizer  # noqa: B018
