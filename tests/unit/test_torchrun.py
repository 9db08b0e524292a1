"""What torchrun's variables mean."""

from __future__ import annotations

import pytest

from bpsx.config import torchrun_variables
from bpsx.errors import ConfigError
from bpsx.torchrun import Machines, machines, place

GIVEN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "MASTER_ADDR": "far", "MASTER_PORT": "29500",
         "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}


def read(monkeypatch, **changes):
    for name in (*GIVEN, "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**GIVEN, **changes}.items():
        monkeypatch.setenv(name, value)
    return place(torchrun_variables())


def test_a_place(monkeypatch):
    found = read(monkeypatch)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)
    assert (found.master_addr, found.master_port, found.attempt) == ("far", 29500, "job/2")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_all_have_to_be_there(monkeypatch, name):
    assert read(monkeypatch, **{name: ""}) is None


@pytest.mark.parametrize("name", ["GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"])
def test_others_need_not(monkeypatch, name):
    assert read(monkeypatch, **{name: ""}) is not None


@pytest.mark.parametrize("name", ["DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK"])
def test_bpsx_place_wins(monkeypatch, name):
    assert read(monkeypatch, **{name: "0"}) is None


@pytest.mark.parametrize(("name", "value"), [("RANK", "8"), ("RANK", "x"), ("RANK", "-1"), ("LOCAL_RANK", "4"), ("WORLD_SIZE", "0"),
                                             ("MASTER_PORT", "tcp://10.0.0.1:80"), ("MASTER_PORT", "0"), ("LOCAL_WORLD_SIZE", "1.5")])
def test_what_cannot_be_is_named(monkeypatch, name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r}|{name}={value}: allowed"):
        read(monkeypatch, **{name: value})


@pytest.mark.parametrize(("local", "expected"), [
    ([(0, 2), (1, 2)], Machines(1, 2, False)),
    ([(0, 2), (1, 2), (0, 2), (1, 2)], Machines(2, 2, False)),
    ([(0, 1), (0, 1), (0, 1)], Machines(3, 1, False)),
    ([(0, 2), (1, 2), (0, 1)], Machines(3, 1, True)),
    ([(0, 1), (0, 2), (1, 2)], Machines(3, 1, True)),
    ([(0, 2), (0, 2), (1, 2), (1, 2)], Machines(4, 1, True)),     # ranks that do not run machine by machine
])
def test_machines(local, expected):
    assert machines(local) == expected
