"""The cached process id."""

from __future__ import annotations

import os

from bpsx.core._handle import own_pid


def test_a_forked_child_has_its_own() -> None:
    assert own_pid() == os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(own_pid() != os.getpid())
    assert os.waitpid(child, 0)[1] == 0
    assert own_pid() == os.getpid()
