"""PyTorch's variables for the workers that bpsx-run starts."""

from __future__ import annotations

import pytest

from bpsx.config import own_store
from bpsx.launch.local import LocalPlan
from bpsx.launch.single_role import SingleRole
from bpsx.launch.ssh.hostfile import read
from bpsx.launch.ssh.plan import Remote

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
STORE = ("MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in (
        *PLACE,
        *STORE,
        "TORCHELASTIC_RUN_ID",
        "DMLC_WORKER_ID",
        "DMLC_NUM_WORKER",
        "BYTEPS_LOCAL_RANK",
        "BYTEPS_LOCAL_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)


def place(environment):
    return [environment[name] for name in PLACE]


def store(environment):
    return [environment.get(name) for name in STORE]


def test_a_job_on_this_machine():
    """All ranks and one store for all; scheduler and servers get none of these variables."""
    plan = LocalPlan(("true",), workers=2, servers=1, processes=2)
    found = [plan.environment("worker", i, 1, k) for i in range(2) for k in range(2)]
    assert [place(e) for e in found] == [
        [str(i * 2 + k), "4", str(k), "2", str(i), "2"] for i in range(2) for k in range(2)
    ]
    assert {tuple(store(e)) for e in found} == {("127.0.0.1", str(plan.store_port))} and all(
        own_store(e) for e in found
    )
    assert not any(
        name in plan.environment(role, 0, 1)
        for role in ("scheduler", "server")
        for name in (*PLACE, *STORE)
    )


def test_processes_of_one_machine_of_several(monkeypatch):
    """With several machines only the user knows which one has worker 0."""
    monkeypatch.setenv("DMLC_NUM_WORKER", "3")
    monkeypatch.setenv("DMLC_WORKER_ID", "1")
    found = [
        SingleRole(("true",), 2, (frozenset(), frozenset())).environment("worker", k, 1)
        for k in range(2)
    ]
    assert [place(e) for e in found] == [[str(2 + k), "6", str(k), "2", "1", "3"] for k in range(2)]
    assert store(found[0]) == [None, None] and found[0]["TORCHELASTIC_RUN_ID"] == "bpsx-run"


def test_the_only_machine():
    machine = SingleRole(("true",), 2, (frozenset(), frozenset()), alone=True)
    assert store(machine.environment("worker", 1, 1)) == ["127.0.0.1", str(machine.store_port)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"MASTER_ADDR": "far", "MASTER_PORT": "1"}, ["far", "1"]),
        ({"MASTER_PORT": "1"}, ["127.0.0.1", "1"]),
        # Set by an outer bpsx-run, whose store is for its own job.
        (
            {"MASTER_ADDR": "far", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "bpsx-run/far:1"},
            ["127.0.0.1", None],
        ),
    ],
)
def test_the_users_store_is_kept(monkeypatch, given, expected):
    """The user's store is kept; ranks are bpsx's.

    This holds whatever a launcher of one process per machine has set.
    """
    for name, value in {**given, "RANK": "7", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    plan = LocalPlan(("true",))
    found = plan.environment("worker", 1, 1)
    assert store(found) == [expected[0], expected[1] or str(plan.store_port)]
    assert place(found)[:2] == ["1", "2"]
    assert own_store(found) == (len(given) != 2)


@pytest.mark.parametrize(
    ("hosts", "address", "expected"),
    [
        ("n0 server\nn1\nn2\n", "", "n1"),
        ("me@n0 server worker\nn1\n", "10.0.0.1", "10.0.0.1"),
        ("n0 server\nlocalhost\nn2\n", "", None),
        ("localhost server worker\n127.0.0.2\n", "", "localhost"),
    ],
)
def test_over_ssh_the_store_is_on_the_first_workers_host(tmp_path, hosts, address, expected):
    """The store is on the first worker's host, where bpsx-run knows the ranks of its processes."""
    file = tmp_path / "hosts"
    file.write_text(hosts)
    job = Remote(("true",), read([(str(file), "")]), address=address)
    found = [job.environment("worker", i, 1) for i in range(2)]
    assert (
        store(found[0])
        == store(found[1])
        == ([expected, str(job.store_port)] if expected else [None, None])
    )
    assert "RANK" not in found[0] and store(job.environment("server", 0, 1)) == [None, None]


def test_over_ssh_with_a_store_of_the_users(tmp_path, monkeypatch):
    file = tmp_path / "hosts"
    file.write_text("n0 server\nn1\nn2\n")
    monkeypatch.setenv("MASTER_ADDR", "far")
    monkeypatch.setenv("MASTER_PORT", "1")
    found = Remote(("true",), read([(str(file), "")])).environment("worker", 0, 1)
    assert store(found) == ["far", "1"] and not own_store(found)
