"""Frameworks are kept apart: a process of the tests has at most one of them.

PyTorch (with its compiler, Triton) and TensorFlow each bring a copy of LLVM: a process with both
can crash on import. The processes that run the tests have PyTorch. TensorFlow and MXNet are for
processes that a test starts: their tests import them in ``*_work.py``, or under ``if WORKER:``.
"""

from __future__ import annotations

import sys

#: A framework by one of its modules that no other package imports by itself.
FRAMEWORKS = ("torch", "tensorflow", "mxnet")
#: What a process that runs the tests may have.
IN_PYTEST = "torch"


def loaded() -> list[str]:
    """The frameworks that this process has."""
    return [name for name in FRAMEWORKS if name in sys.modules]


def assert_only(allowed: str) -> None:
    """Raise AssertionError if this process has any framework but ``allowed``."""
    others = [name for name in loaded() if name != allowed]
    assert not others, (
        f"this process has loaded {' and '.join(others)}; it may have {allowed} only. "
        "Use another framework in a process that the test starts; see tests/support/apart.py"
    )
