"""The job secret: its sources, the keys derived from it, and that it never appears in output."""

from __future__ import annotations

import os

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from bpsx import secret
from bpsx.config import Config, cache_dir, reference
from bpsx.errors import ConfigError
from bpsx.system.host import require_trust

GOOD = "correct horse battery staple"
_PARTS = st.lists(
    st.one_of(st.binary(max_size=9), st.text(max_size=9), st.integers(0, 2**64 - 1)), max_size=4
)


def test_a_secret_is_new_each_time_and_long_enough():
    assert secret.make() != secret.make() and secret.accept(secret.make(), "x")


@given(_PARTS, _PARTS)
def test_no_two_lists_of_parts_give_the_same(one, other):
    alike = [(type(p), p) for p in one] == [(type(p), p) for p in other]
    assert (secret.derive(b"k", "p", *one) == secret.derive(b"k", "p", *other)) is alike


def test_each_input_changes_the_derived_key():
    found = {
        secret.derive(k, p, *rest)
        for k in (b"", b"k")
        for p in ("a", "b")
        for rest in ((), (b"x",), ("x",), (1,))
    }
    assert len(found) == 16 and all(len(f) == 32 for f in found)
    proofs = {
        secret.lane_proof(k, j, a, n)
        for k in (b"", b"k")
        for j in (1, 2)
        for a in ("h:1", "h:2")
        for n in (b"1", b"2")
    }
    assert len(proofs) == 16


@given(st.binary(max_size=40))
def test_a_key_is_spelled_as_zeromq_spells_it(key):
    assert z85.encode(secret.derive(key, "x")) == secret.curve_key(key, "x")
    assert len(zmq.curve_public(secret.curve_key(key, "x"))) == 40


@pytest.mark.parametrize("text", ["short", "x" * 15, "x" * 4097])
def test_a_secret_of_the_wrong_size_is_refused_and_not_shown(text):
    with pytest.raises(ConfigError, match="BPSX_SECRET.*16 to 4096.*create one with") as caught:
        _ = Config({"BPSX_SECRET": text}).secret_bytes
    assert text not in str(caught.value)


def test_the_secret_comes_from_a_variable_or_a_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("  " + GOOD + "\n")
    file.chmod(0o600)
    assert Config({}).secret_bytes == b""
    assert (
        Config({"BPSX_SECRET": GOOD}).secret_bytes
        == GOOD.encode()
        == Config({"BPSX_SECRET_FILE": str(file)}).secret_bytes
    )
    assert (
        Config({"BPSX_SECRET": GOOD[::-1], "BPSX_SECRET_FILE": str(file)}).secret_bytes
        == GOOD[::-1].encode()
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_is_refused(tmp_path, mode):
    file = tmp_path / "secret"
    file.write_text(GOOD)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"its owner only.*{mode:04o}") as caught:
        Config({"BPSX_SECRET_FILE": str(file), "DMLC_ROLE": "worker"}).check()
    assert GOOD not in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff" * 40)
    (tmp_path / "bytes").chmod(0o600)
    for name, text in (
        ("missing", "No such file"),
        ("", "directory|not a regular"),
        ("bytes", "UTF-8"),
    ):
        with pytest.raises(ConfigError, match=text):
            _ = Config({"BPSX_SECRET_FILE": str(tmp_path / name)}).secret_bytes


def test_the_secret_is_not_shown(tmp_path):
    config = Config({"BPSX_SECRET": GOOD})
    assert GOOD not in repr(config) and GOOD not in str(config) and GOOD not in reference()


@pytest.mark.parametrize(
    ("address", "env", "refused"),
    [
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("192.0.2.1", {}, True),
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("192.0.2.1", {"BPSX_SECRET": GOOD}, False),
        ("192.0.2.1", {"BPSX_INSECURE": "1"}, False),
    ],
)
def test_a_job_that_others_can_reach_needs_one(address, env, refused, caplog):
    config = Config({"DMLC_ROLE": "scheduler", **env})
    if not refused:
        require_trust(config, address)
        return
    with pytest.raises(
        ConfigError, match="this scheduler uses.*BPSX_SECRET.*token_urlsafe.*BPSX_INSECURE=1"
    ):
        require_trust(config, address)


def test_a_cache_that_others_may_change_is_refused(tmp_path):
    """Whoever may write compiled kernels can run code here."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="BPSX_CACHE_DIR"):
        cache_dir({"BPSX_CACHE_DIR": str(folder)})
    made = cache_dir({"BPSX_CACHE_DIR": str(tmp_path / "new")})
    assert os.stat(made).st_mode & 0o777 == 0o700
