"""Frees the memory of the messages that a test has sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import dataplane


@pytest.fixture(autouse=True)
def sent_memory() -> Iterator[None]:
    """Begins first, and so ends when the fixtures of the test have closed their endpoints."""
    yield
    dataplane.forget_all()
