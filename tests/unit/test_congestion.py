"""The congestion control of plain sockets, as far as this machine has several."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpsx.config import AUTO, Config
from bpsx.errors import TransportError
from bpsx.transports import open_endpoint
from bpsx.transports.sockets import congestion
from unit.test_send_buffers import connected

_ALLOWED = congestion._ALLOWED.read_text().split() if congestion._ALLOWED.exists() else []
_BBR = pytest.mark.skipif(
    not {"bbr", "reno"} <= set(_ALLOWED), reason=f"BBR and reno are not both allowed: {_ALLOWED}"
)


@pytest.fixture
def made() -> Iterator[socket.socket]:
    with connected() as one:
        yield one


def use(made: socket.socket, name: str) -> None:
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def may_use(name: str) -> bool:
    """Whether this process may; the superuser may use more than those allowed."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        try:
            use(tried, name)
        except OSError:
            return False
    return True


@_BBR
def test_bbr_is_replaced_between_near_peers(made: socket.socket) -> None:
    steady = [name for name in ("cubic", "reno") if may_use(name)]
    use(made, "bbr")
    congestion.choose_congestion(made, AUTO)
    assert congestion._name(made).decode() == steady[0]


@_BBR
def test_it_stays_between_far_peers(made: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    use(made, "bbr")
    monkeypatch.setattr(congestion, "round_trip", lambda made: 0.002)
    congestion.choose_congestion(made, AUTO)
    assert congestion._name(made) == b"bbr"


@_BBR
@pytest.mark.parametrize(
    ("before", "given", "after"),
    [("bbr", "system", "bbr"), ("reno", "auto", "reno"), ("reno", "bbr", "bbr")],
)
def test_what_is_given_counts(made: socket.socket, before: str, given: str, after: str) -> None:
    use(made, before)
    congestion.choose_congestion(made, given)
    assert congestion._name(made) == after.encode()


def test_what_is_not_allowed_leaves_the_systems(
    made: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = congestion._name(made)
    monkeypatch.setattr(congestion, "_PAUSES", before)
    monkeypatch.setattr(congestion, "_STEADY", (b"no_such_one",))
    congestion.choose_congestion(made, AUTO)
    assert congestion._name(made) == before


def test_a_name_that_cannot_be_used_is_refused_with_those_that_can(tmp_path: Path) -> None:
    config = Config({"BPSX_CONGESTION": "no_such_one", "DMLC_ROLE": "server"})
    with pytest.raises(TransportError, match="BPSX_CONGESTION=no_such_one: ") as e:
        open_endpoint(config)
    assert all(name in str(e.value) for name in ["auto", "system", *_ALLOWED])
