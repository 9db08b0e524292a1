"""The source rules themselves: each one detects a violation."""

from __future__ import annotations

import pytest

from source.test_layers import assert_parts_fit
from source.test_rules import functions, statements
from support import places
from support.places import imports

PYTHON = """
import os, bpsx.api.verbs
from bpsx import errors
from bpsx.session import session as s
from bpsx.system import sync
if True:
    from bpsx.torch.submit import submit
from . import hub
from .messages import check
from .. import placement
from ..transports import base
"""
CYTHON = """
from libc.string cimport memcpy
cimport bpsx.system.sync
from bpsx.core.queue cimport heap_push, heap_pop
from bpsx.core.state cimport (
    Core,
)
from bpsx import errors
import bpsx.config
# from bpsx.session.session import Session
"""


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        (
            "client.py",
            PYTHON,
            {
                "bpsx.api.verbs",
                "bpsx.errors",
                "bpsx.session",
                "bpsx.system.sync",
                "bpsx.torch.submit",
                "bpsx.scheduler.hub",
                "bpsx.scheduler.messages",
                "bpsx.placement",
                "bpsx.transports",
            },
        ),
        (
            "x.pyx",
            CYTHON,
            {
                "bpsx.system.sync",
                "bpsx.core.queue",
                "bpsx.core.state",
                "bpsx.errors",
                "bpsx.config",
            },
        ),
    ],
)
def test_every_kind_of_import_is_seen(tmp_path, monkeypatch, name, text, found):
    path = tmp_path / "src" / "bpsx" / "scheduler" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (tmp_path / "src" / "bpsx" / "system").mkdir()
    (tmp_path / "src" / "bpsx" / "system" / "sync.pxd").touch()
    monkeypatch.setattr(places, "ROOT", tmp_path)
    assert set(imports(path)) == found


def test_functions_are_measured():
    body = "    x = 1\n"
    text = (
        "def a():\n"
        + body * 3
        + "\n\ncdef inline int b(\n    int y,\n) noexcept nogil:\n"
        + body * 2
        + "\n"
        "class C:\n    def c(self):\n"
        + ("    " + body) * 4
        + "\n    async def d(self):\n        pass\n"
    )
    assert [n for _, n in functions(text)] == [4, 5, 5, 2]


def test_statements_are_counted():
    text = "def a():\n    if x:\n        y()\n    def b():\n        return 1\n"
    assert list(statements(text)) == [("a", 4), ("b", 1)]


@pytest.mark.parametrize(
    "parts",
    [
        {"endpoint", "connection", "send", "receive", "queue_pair"},
        {"endpoint", "connection", "send"},
    ],
)
def test_a_part_with_another_name_is_found(parts):
    with pytest.raises(AssertionError, match="tcp: "):
        assert_parts_fit("tcp", parts)
