"""Keeps frameworks apart: a process of the tests may load at most one of them.

PyTorch (with its compiler, Triton) and TensorFlow each bring a copy of LLVM: a process with both
can crash on import. The processes that run the tests have PyTorch. TensorFlow and MXNet are for
processes that a test starts: their tests import them in ``*_work.py``, or under ``if WORKER:``.
"""

from __future__ import annotations

import sys

#: Framework -> one of its modules, which no other package imports on its own.
FRAMEWORKS = ("torch", "tensorflow", "mxnet")
#: The framework that a process that runs the tests may load.
IN_PYTEST = "torch"


def loaded() -> list[str]:
    """Return the frameworks that this process has loaded."""
    return [name for name in FRAMEWORKS if name in sys.modules]


def assert_only(allowed: str) -> None:
    """Raise AssertionError if this process has loaded any framework except ``allowed``."""
    others = [name for name in loaded() if name != allowed]
    assert not others, (
        f"this process has loaded {' and '.join(others)}; it may have {allowed} only. "
        "Use another framework in a process that the test starts; see tests/support/apart.py"
    )
