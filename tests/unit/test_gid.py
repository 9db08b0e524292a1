"""Which RDMA adapter, port and GID are chosen; folders stand for machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from bpsx.errors import TransportError
from bpsx.transports.rdma import gid as gids

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:0211:22ff:fe33:4455"


def mapped(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def put(
    root: Path,
    adapter: str,
    table: list[tuple[str, str]],
    *,
    port: int = 1,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
) -> None:
    """Create a port with these GIDs, each with its type, in the kernel's format."""
    at = root / adapter / "ports" / str(port)
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (at / folder).mkdir(parents=True)
    (at / "state").write_text(state + "\n")
    (at / "link_layer").write_text(layer + "\n")
    for i in range(len(table) + 20):
        value, kind = table[i] if i < len(table) else (ZERO, "")
        (at / "gids" / str(i)).write_text(value + "\n")
        if kind:
            (at / "gid_attrs" / "types" / str(i)).write_text(kind + "\n")
            (at / "gid_attrs" / "ndevs" / str(i)).write_text("eth0\n")


def roce(address: str) -> list[tuple[str, str]]:
    """Return the GIDs of a card with one address."""
    return [
        (LINK_LOCAL, "IB/RoCE v1"),
        (LINK_LOCAL, "RoCE v2"),
        (mapped(address), "IB/RoCE v1"),
        (mapped(address), "RoCE v2"),
    ]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    put(tmp_path, "mlx5_0", roce("10.0.0.7"))
    put(tmp_path, "mlx5_1", roce("10.1.0.7"))
    return tmp_path


def chosen(host: str, root: Path, adapter: str = "", index: int | None = None) -> tuple[str, int]:
    port, gid = gids.choose(host, adapter, index, root)
    return port.name, gid.index


@pytest.mark.parametrize(
    ("host", "name"),
    [("10.0.0.7", "mlx5_0:1"), ("10.1.0.7", "mlx5_1:1"), ("::ffff:10.1.0.7", "mlx5_1:1")],
)
def test_the_adapter_of_the_own_address_and_the_newer_version(
    two: Path, host: str, name: str
) -> None:
    assert chosen(host, two) == (name, 3)


def test_an_own_ipv6_address(tmp_path: Path) -> None:
    put(
        tmp_path,
        "mlx5_0",
        [*roce("10.0.0.7"), ("fd00:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")],
    )
    assert chosen("[fd00::1]", tmp_path) == ("mlx5_0:1", 4)


def test_a_gap_in_the_table_is_no_end(tmp_path: Path) -> None:
    put(
        tmp_path,
        "mlx5_0",
        [(LINK_LOCAL, "IB/RoCE v1"), *[(ZERO, "")] * 5, (mapped("10.0.0.7"), "RoCE v2")],
    )
    assert chosen("10.0.0.7", tmp_path) == ("mlx5_0:1", 6)


def test_an_address_without_a_gid_uses_the_only_port_with_a_routable_gid(tmp_path: Path) -> None:
    put(tmp_path, "rxe0", [(LINK_LOCAL, "RoCE v2"), (mapped("192.0.2.1"), "RoCE v2")])
    assert chosen("127.0.0.1", tmp_path) == ("rxe0:1", 1)


def test_infiniband_uses_the_ports_own_gid(tmp_path: Path) -> None:
    put(
        tmp_path,
        "mlx5_0",
        [("fe80:0000:0000:0000:0002:c903:0000:1234", "IB/RoCE v1")],
        layer="InfiniBand",
    )
    assert chosen("10.0.0.7", tmp_path) == ("mlx5_0:1", 0)


def test_given_adapter_and_gid_are_used(two: Path) -> None:
    assert chosen("10.0.0.7", two, "mlx5_1") == ("mlx5_1:1", 3)
    assert chosen("10.0.0.7", two, "mlx5_1:1", 0) == ("mlx5_1:1", 0)
    assert chosen("10.0.0.7", two, index=2) == ("mlx5_0:1", 2)


@pytest.mark.parametrize(
    ("host", "adapter", "index", "text"),
    [
        (
            "192.0.2.9",
            "",
            None,
            (
                "belongs to 192.0.2.9, because no GID matches: name the adapter with"
                " BPSX_RDMA_DEVICE; active ports: mlx5_0:1 .*GID 3 10.0.0.7 RoCE v2.*mlx5_1:1"
            ),
        ),
        (
            "10.0.0.7",
            "mlx5_9",
            None,
            "BPSX_RDMA_DEVICE=mlx5_9: no active port has that name; active ports: mlx5_0:1",
        ),
        (
            "10.0.0.7",
            "mlx5_1",
            7,
            "BPSX_RDMA_GID_INDEX=7: no GID has that index; active ports: mlx5_0:1",
        ),
    ],
)
def test_an_unknown_adapter_is_named_with_the_active_ports(
    two: Path, host: str, adapter: str, index: int | None, text: str
) -> None:
    with pytest.raises(TransportError, match=text):
        gids.choose(host, adapter, index, two)


def test_no_adapter_and_no_active_port(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="this machine has no RDMA adapter"):
        gids.ports(tmp_path / "none")
    put(tmp_path, "mlx5_0", [], state="1: DOWN")
    with pytest.raises(
        TransportError, match="no port of an RDMA adapter is active: mlx5_0:1 is DOWN"
    ):
        gids.ports(tmp_path)
