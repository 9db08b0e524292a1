"""Hosts, ports and the process's own address."""

from __future__ import annotations

import pytest

from bpsx.config import Config
from bpsx.errors import ConfigError
from bpsx.system.address import (
    interface_address,
    is_here,
    is_ipv6,
    is_loopback,
    join_host_port,
    own_address_towards,
    resolve,
    tcp_url,
)
from bpsx.system.host import own_host


def test_ipv6_addresses_are_written_in_brackets():
    assert is_ipv6("::1") and not is_ipv6("127.0.0.1")
    assert join_host_port("::1", 5) == "[::1]:5" and join_host_port("h", 5) == "h:5"
    assert (
        tcp_url("::1", "*") == "tcp://[::1]:*"
        and tcp_url("h", 1) == "tcp://h:1"
        and tcp_url("[::1]", 1) == "tcp://[::1]:1"
    )


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("192.0.2.1", False),
        ("no.such.invalid", False),
    ],
)
def test_loopback_hosts_are_recognized(host, local):
    assert is_loopback(host) is local


def test_own_address():
    assert (
        own_address_towards("127.0.0.1", 1) == "127.0.0.1"
        and own_address_towards("::1", 1) == "::1"
    )
    assert interface_address("lo") == "127.0.0.1" and resolve("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(OSError, match="interfaces here: .*lo"):
        interface_address("no-such-if")


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:5", True),
        ("127.1.2.3:5", True),
        ("[::1]:5", True),
        ("localhost:5", True),
        ("192.0.2.1:5", False),
        ("no.such.invalid:5", False),
    ],
)
def test_addresses_of_this_machine_are_recognised(address, here):
    assert is_here(address) is here


def test_which_address_is_taken():
    base = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1"}
    assert own_host(Config(base)) == "127.0.0.1"
    assert own_host(Config({**base, "DMLC_INTERFACE": "lo"})) == "127.0.0.1"
    assert (
        own_host(Config({**base, "DMLC_INTERFACE": "lo", "DMLC_NODE_HOST": "10.1.2.3"}))
        == "10.1.2.3"
    )
    with pytest.raises(ConfigError, match="DMLC_INTERFACE='no-such-if'.*DMLC_NODE_HOST"):
        own_host(Config({**base, "DMLC_INTERFACE": "no-such-if"}))
