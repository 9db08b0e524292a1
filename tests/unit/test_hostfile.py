"""Hostfiles, the commands for each host, and messages within a remote process's output."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpsx.errors import ConfigError
from bpsx.launch.output_mux import Announcer, Prefixer
from bpsx.launch.ssh.backend import assignment
from bpsx.launch.ssh.client import new_marker
from bpsx.launch.ssh.hostfile import Host, read
from bpsx.launch.ssh.plan import Remote


@pytest.fixture
def write(tmp_path: Path):
    def make(text: str, name: str = "hosts") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return make


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "BPSX_SECRET",
        "BPSX_SECRET_FILE",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "NVIDIA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)


def test_a_hostfile_gives_each_host_its_roles_and_port(write) -> None:
    found = read(
        [
            (
                write(
                    "# all of it\n\nn0:2222 scheduler server=2\nme@n1 server worker\n"
                    "[fd00::1]:22 # a worker\nn2 worker slots=4\n"
                ),
                "",
            )
        ]
    )
    assert (found.scheduler.name, found.scheduler.port) == ("n0", 2222)
    assert [h.name for h in found.servers] == ["n0", "n0", "me@n1"]
    assert [(h.name, h.port) for h in found.workers] == [("me@n1", 0), ("fd00::1", 22), ("n2", 0)]
    assert found.slots == 4
    assert found.workers[2].line.endswith("hosts line 6")


def test_where_the_scheduler_is(write) -> None:
    text = "a worker\nb server\n"
    assert read([(write(text), "")]).scheduler.name == "b"
    assert read([(write(text), "")], "c").scheduler.name == "c"
    assert read([(write(text), "")], "fd00::9").scheduler.name == "fd00::9"
    assert read([(write(text + "d scheduler"), "")], "10.0.0.1").scheduler.name == "d"


def test_without_servers_each_worker_host_has_one(write) -> None:
    found = read([(write("a slots=2\nb slots=2\n"), "")])
    assert [h.name for h in found.servers] == ["a", "b"]
    assert found.scheduler.name == "a"
    assert [h.name for h in read([(write("a\nb\nc server\n"), "")]).servers] == ["c"]


def test_files_by_role(write) -> None:
    found = read([(write("a\nb slots=2\n", "w"), "worker"), (write("c\n", "s"), "server")])
    assert ([h.name for h in found.workers], [h.name for h in found.servers], found.slots) == (
        ["a", "b"],
        ["c"],
        2,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no worker; expected host[:port] followed by"),
        ("a server\n", "no worker"),
        ("a sever worker\n", "line 1: 'sever' is unknown; expected"),
        ("a server=0 worker\n", "line 1: 'server=0': expected server=1..65535"),
        ("a server\nb slots=x\n", "line 2: 'slots=x': expected slots=1..65535"),
        (
            "a scheduler server\nb scheduler worker\n",
            "line 2: a second scheduler; the first is in ",
        ),
        ("a server slots=2\nb slots=3\n", "different slots (2 and 3)"),
        ("a:0 worker\n", "'a:0' is not a host"),
        ("a:b worker\n", "'a:b' is not a host"),
        ("-oProxyCommand=x worker\n", "is not a host"),
        ("me@-x worker\n", "is not a host"),
        ("a@b@c worker\n", "is not a host"),
        ("fd00::1 worker\n", "is not a host"),
    ],
)
def test_a_mistake_in_a_hostfile(write, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read([(write(text), "")])
    assert said in str(error.value) and "hosts" in str(error.value)


def test_a_role_in_a_file_of_one_role(write) -> None:
    with pytest.raises(ConfigError, match="'server': every host of this file is a worker"):
        read([(write("a server\n"), "worker")])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-file: No such file or directory"):
        read([(str(tmp_path / "no-such-file"), "")])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A=b", ("A", "b")),
        ("A:b", ("A", "b")),
        ("A=b:c=d", ("A", "b:c=d")),
        ("A:b=c", ("A", "b=c")),
        ("_1=", ("_1", "")),
    ],
)
def test_assignments(text: str, found: tuple[str, str]) -> None:
    assert assignment(text) == found


@pytest.mark.parametrize("text", ["", "A", "1A=b", "A-B=c", "=x"])
def test_a_malformed_assignment_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected NAME=VALUE or NAME:VALUE"):
        assignment(text)


def remote(write, text: str = "n0 server\nn1 slots=2\nn2\n", **more) -> Remote:
    return Remote(("python", "train.py"), read([(write(text), "")]), **more)


def test_the_variables_passed_to_a_worker(write, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "DMLC_NODE_HOST": "10.9.9.9",
        "BYTEPS_LOCAL_RANK": "3",
        "NCCL_DEBUG": "INFO",
        "KMP_AFFINITY": "k",
        "OMP_NUM_THREADS": "2",
        "HOME_MADE": "x",
        "BYTEPS_PARTITION_BYTES": "8192",
        "DMLC_ROLE": "server",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    job = remote(
        write,
        address="10.0.0.1",
        interface="eth1",
        given={"BYTEPS_PARTITION_BYTES": "4096", "MINE": "y"},
    )
    environment = job.environment("worker", 1, 77)
    expected = {
        "DMLC_ROLE": "worker",
        "DMLC_WORKER_ID": "1",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "77",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "DMLC_INTERFACE": "eth1",
        "BYTEPS_LOCAL_SIZE": "2",
        "BYTEPS_PARTITION_BYTES": "4096",
        "NCCL_DEBUG": "INFO",
        "KMP_AFFINITY": "k",
        "OMP_NUM_THREADS": "2",
        "MINE": "y",
        "BPSX_SECRET": job.secret,
    }
    assert expected.items() <= environment.items()
    assert not {"DMLC_NODE_HOST", "BYTEPS_LOCAL_RANK", "HOME_MADE"} & set(environment)
    assert "BYTEPS_LOCAL_SIZE" not in job.environment("server", 0, 77)


def test_the_secret_is_in_the_request_and_nowhere_else(write) -> None:
    job = remote(write)
    assert len(job.secret) >= 40 and job.secret not in repr(job)
    for process in [job.scheduler(), *job.others(77)]:
        assert json.loads(process.request)["environment"]["BPSX_SECRET"] == job.secret
        assert job.secret not in " ".join(process.command) and job.secret not in repr(process)
        assert "BPSX_SECRET" not in process.environment


@pytest.mark.parametrize("name", ["BPSX_SECRET", "BPSX_SECRET_FILE"])
def test_a_secret_of_the_users_is_kept(write, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "given")
    environment = remote(write).environment("server", 0, 1)
    assert {k: v for k, v in environment.items() if "SECRET" in k} == {name: "given"}


def test_the_ssh_command(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a b")
    job = remote(
        write,
        "me@n0:2022 server\nn1\n",
        ssh="ssh -F 'my file'",
        ssh_port=22022,
        username="you",
        python="/opt/python 3",
    )
    server, worker = (process.command for process in job.others(1))
    assert server[:3] == worker[:3] == ("ssh", "-F", "my file")
    assert "BatchMode=yes" in server and not any("StrictHostKeyChecking" in word for word in server)
    assert server[-5:-1] == ("-p", "2022", "--", "me@n0") and worker[-7:-1] == (
        "-p",
        "22022",
        "-l",
        "you",
        "--",
        "n1",
    )
    assert shlex.split(server[-1]) == [
        "env",
        "PYTHONPATH=/a b",
        "/opt/python 3",
        "-P",
        "-m",
        "bpsx.launch.ssh.agent",
    ]
    assert job._process("w", "worker", 0, Host("n1", 0, ""), 1).name == "w"


def test_loopback_is_no_address_for_others(write) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"the scheduler's address is 127\.0\.0\.1, which 203\.0\.113\.7 .* cannot reach; name"
            r" another with"
        ),
    ):
        remote(write, "127.0.0.1 server\n203.0.113.7\n").check()
    remote(write, "127.0.0.1 server\n203.0.113.7\n", address="203.0.113.1").check()


MARKER = b"\x1eabc "


@given(
    st.lists(
        st.sampled_from([b"x", b"\n", b"\r", b"\x1e", MARKER, b"long line", b"ab"]), max_size=30
    ),
    st.booleans(),
    st.randoms(),
)
def test_messages_do_not_depend_on_where_chunks_end(parts: list[bytes], live: bool, random) -> None:
    data = b"".join(parts)

    def through(chunks: list[bytes]) -> tuple[bytes, list[bytes]]:
        heard: list[bytes] = []
        announcer = Announcer(b"> ", live, MARKER, heard.append)
        return b"".join([*(announcer.feed(chunk) for chunk in chunks), announcer.finish()]), heard

    cuts = sorted(random.sample(range(len(data) + 1), min(4, len(data) + 1)))
    chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
    assert through(chunks) == through([data])


@given(st.binary(max_size=60))
def test_output_without_messages_is_unchanged(data: bytes) -> None:
    marker = new_marker()
    announcer, prefixer = Announcer(b"> ", False, marker, lambda _: None), Prefixer(b"> ")
    assert announcer.feed(data) + announcer.finish() == prefixer.feed(data) + prefixer.finish()


def test_a_message_in_the_middle_of_a_line() -> None:
    heard: list[bytes] = []
    announcer = Announcer(b"> ", False, MARKER, heard.append)
    assert announcer.feed(b"begun" + MARKER + b"up\n and done\n") == b"> begun and done\n"
    assert heard == [b"up"]
