"""Options: defaults, errors that name variable, value and allowed values, and contradictions."""

from __future__ import annotations

import os
import stat

import pytest

from bpsx.config import OPTIONS, Config, cache_dir, faults, reference, runtime_dir
from bpsx.config.fingerprint import fingerprint
from bpsx.config.ignored import NOT_USED
from bpsx.errors import ConfigError

WORKER = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "h",
    "DMLC_PS_ROOT_PORT": "1",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
    "DMLC_WORKER_ID": "1",
}
# A value that each kind of option refuses.
REFUSED = {
    "DMLC_ROLE": "boss",
    "DMLC_PS_ROOT_PORT": "65536",
    "DMLC_NUM_WORKER": "0",
    "DMLC_NUM_SERVER": "-1",
    "DMLC_WORKER_ID": "one",
    "BYTEPS_LOCAL_RANK": "-1",
    "BYTEPS_LOCAL_SIZE": "0",
    "BPSX_LOCAL_REDUCE": "half",
    "BYTEPS_FORCE_DISTRIBUTED": "maybe",
    "BYTEPS_ENABLE_ASYNC": "2",
    "BYTEPS_ENABLE_IPC": "2",
    "DMLC_ENABLE_RDMA": "carrier-pigeon",
    "BYTEPS_RDMA_RX_DEPTH": "15",
    "BYTEPS_RDMA_START_DEPTH": "0",
    "BPSX_RDMA_INBOX_MB": "3",
    "BPSX_RDMA_GID_INDEX": "-1",
    "BYTEPS_PARTITION_BYTES": "4095",
    "BYTEPS_MIN_COMPRESS_BYTES": "-1",
    "BYTEPS_THREADPOOL_SIZE": "0",
    "BPSX_COMPRESSORS": "a.b,./c.py",
    "BYTEPS_KEY_HASH_FN": "md5",
    "BYTEPS_BUILT_IN_HASH_COEF": "0",
    "BYTEPS_ENABLE_MIXED_MODE": "k",
    "BPSX_AUTOTUNE": "auto",
    "BPSX_CONGESTION": "cubic reno",
    "BPSX_SERVER_WEIGHT": "0",
    "BYTEPS_SCHEDULING_CREDIT": "-1",
    "BYTEPS_SERVER_ENGINE_THREAD": "0",
    "BYTEPS_SERVER_ENABLE_SCHEDULE": "2",
    "BYTEPS_ZMQ_NTHREADS": "x",
    "BPSX_IO_THREADS": "65",
    "BPSX_SEND_BUFFER_KB": "63",
    "BPSX_SEND_AHEAD_MS": "-1",
    "BPSX_SPIN_US": "-1",
    "BPSX_FIXED_ORDER": "2",
    "BPSX_KEEP_MEMORY_MB": "1e3",
    "BPSX_RENDEZVOUS_TIMEOUT": "inf",
    "BPSX_GATHER_GRACE": "-1",
    "PS_HEARTBEAT_INTERVAL": "nan",
    "PS_HEARTBEAT_TIMEOUT": "-2",
    "BPSX_STALL_WARN_SECONDS": "0",
    "BPSX_DEADLOCK_SECONDS": "0",
    "BYTEPS_NUMA_ON": "x",
    "BYTEPS_NUMA_DEFAULT_QUOTA": "-1",
    "BYTEPS_VISIBLE_CPU_CORES": "0;1",
    "BYTEPS_REDUCE_ROOTS": "1,1",
    "BYTEPS_PCIE_SWITCH_SIZE": "0",
    "BYTEPS_NCCL_GROUP_SIZE": "0",
    "BYTEPS_NCCL_NUM_RINGS": "-1",
    "BYTEPS_CPU_BLACKLIST": "3-1",
    "BYTEPS_ENABLE_GDB": "gdb",
    "BPSX_ELASTIC": "workers",
    "BPSX_MAX_WORKERS": "-1",
    "BPSX_ELASTIC_WAIT": "-1",
    "BPSX_ELASTIC_LOG": "0",
    "BPSX_SCHEDULER_WAIT": "-1",
    "BPSX_ELASTIC_BALANCE": "2",
    "BPSX_STATE_FD": "-2",
    "BPSX_LIFELINE_FD": "-2",
    "BPSX_SHUTDOWN_TIMEOUT": "soon",
    "BYTEPS_LOG_LEVEL": "loud",
    "BYTEPS_LOG_HIDE_TIME": "perhaps",
    "BPSX_INSECURE": "2",
    "BPSX_ENCRYPT": "2",
    "PS_VERBOSE": "3",
    "PS_KEY_LOG": "2",
    "BYTEPS_DEBUG_SAMPLE_TENSOR": "grad",
    "BYTEPS_SERVER_DEBUG": "2",
    "BYTEPS_SERVER_DEBUG_KEY": "-2",
    "BYTEPS_TELEMETRY_ON": "2",
    "BYTEPS_TRACE_ON": "2",
    "BYTEPS_TRACE_START_STEP": "0",
    "BYTEPS_TRACE_END_STEP": "1",
    "BPSX_METRICS_PORT": "host:port",
    "BPSX_ANNOUNCE": "loudly",
    "BPSX_FULL_TRACEBACKS": "some",
    "BPSX_TERM_GRACE": "-1",
    "BPSX_CHECK_WEIGHTS": "maybe",
    "BPSX_PORTS": "30063-30000",
}
FREE_TEXT = {
    "DMLC_PS_ROOT_URI",
    "DMLC_NODE_HOST",
    "DMLC_INTERFACE",
    "BPSX_CACHE_DIR",
    "BPSX_PORT_FILE",
    "BPSX_RDMA_DEVICE",
    "BPSX_SECRET",
    "BPSX_SECRET_FILE",
    "NVIDIA_VISIBLE_DEVICES",
    "BYTEPS_SOCKET_PATH",
    "BYTEPS_TRACE_DIR",
}


def test_every_option_has_a_case_here():
    assert {o.env for o in OPTIONS} == set(REFUSED) | FREE_TEXT
    assert len({o.env for o in OPTIONS}) == len(OPTIONS) == len({o.field for o in OPTIONS})
    assert not NOT_USED & {o.env for o in OPTIONS}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_malformed_value_names_variable_value_and_expected_values(name):
    option = next(o for o in OPTIONS if o.env == name)
    with pytest.raises(ConfigError) as e:
        Config({**WORKER, name: REFUSED[name]})
    assert (
        name in str(e.value)
        and repr(REFUSED[name]) in str(e.value)
        and option.allowed in str(e.value)
    )


def test_defaults_alone_are_a_configuration():
    config = Config({})
    assert (config.partition_bytes, config.size, config.rank, config.distributed) == (
        2 << 20,
        1,
        0,
        False,
    )
    assert 1 <= config.lanes <= 8 and not config.unknown


@pytest.mark.parametrize(
    ("cores", "given", "lanes"),
    [
        (1, {}, 1),
        (16, {}, 4),
        (32, {}, 8),
        (128, {}, 8),
        (128, {"BYTEPS_SERVER_ENGINE_THREAD": "auto"}, 8),
        (128, {"BYTEPS_SERVER_ENGINE_THREAD": "100"}, 100),
        (128, {"DMLC_ENABLE_RDMA": "1"}, 4),
        (128, {"DMLC_ENABLE_RDMA": "1", "BYTEPS_SERVER_ENGINE_THREAD": "9"}, 9),
    ],
)
def test_lanes_by_default_follow_cores_and_transport(monkeypatch, cores, given, lanes):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert Config({**WORKER, **given}).lanes == lanes


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_variable_counts_as_unset(text):
    assert Config({"BYTEPS_FORCE_DISTRIBUTED": text}).force_distributed is False
    assert Config({"BYTEPS_PARTITION_BYTES": text}).partition_bytes == 2 << 20
    assert Config({"DMLC_PS_ROOT_URI": text}).root_uri is None


@pytest.mark.parametrize("text", ["0", "64", "1048576"])
def test_a_send_buffer_is_the_systems_or_not_too_small(text):
    assert Config({"BPSX_SEND_BUFFER_KB": text}).send_buffer == int(text)
    for wrong in ("-1", "1", "1048577", "0.5"):
        assert any(
            "BPSX_SEND_BUFFER_KB" in fault for fault in faults({"BPSX_SEND_BUFFER_KB": wrong})
        )


@pytest.mark.parametrize(
    "name",
    [
        "BPSX_SECRET_FILE",
        "BYTEPS_TRACE_DIR",
        "BPSX_CACHE_DIR",
        "BYTEPS_SOCKET_PATH",
        "BPSX_PORT_FILE",
    ],
)
def test_the_home_folder_may_be_written_as_a_tilde(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    option = next(o for o in OPTIONS if o.env == name)
    assert getattr(Config({name: "~/x"}), option.field) == str(tmp_path / "x")
    if name == "BPSX_SECRET_FILE":
        (tmp_path / "x").write_text("a secret in the home folder")
        (tmp_path / "x").chmod(0o600)
        assert Config({name: "~/x"}).secret_bytes == b"a secret in the home folder"
    elif name == "BPSX_CACHE_DIR":
        assert cache_dir({name: "~/x"}) == tmp_path / "x"
    elif name == "BYTEPS_SOCKET_PATH":
        assert runtime_dir({name: "~/x"}).parent == tmp_path / "x"


def test_rank_and_size():
    config = Config({**WORKER, "BYTEPS_LOCAL_SIZE": "4", "BYTEPS_LOCAL_RANK": "3"})
    assert (config.rank, config.size, config.distributed) == (7, 8, True)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "tcp"),
        ({"DMLC_ENABLE_RDMA": "auto"}, "tcp"),
        ({"BPSX_ENCRYPT": "1"}, "zeromq"),
        ({"DMLC_ENABLE_RDMA": "auto", "BPSX_ENCRYPT": "1"}, "zeromq"),
        ({"DMLC_ENABLE_RDMA": "0"}, "zeromq"),
        ({"DMLC_ENABLE_RDMA": "1"}, "rdma"),
    ],
)
def test_the_transport_is_the_fastest_that_may_be_used(given, name):
    assert Config(given).transport_name == name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"DMLC_ROLE": None}, "DMLC_ROLE"),
        ({"DMLC_PS_ROOT_URI": None}, "DMLC_PS_ROOT_URI"),
        ({"DMLC_PS_ROOT_PORT": None}, "DMLC_PS_ROOT_PORT"),
        ({"DMLC_NUM_SERVER": None}, "DMLC_NUM_SERVER"),
        ({"DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER=0"),
        ({"DMLC_WORKER_ID": None}, "DMLC_WORKER_ID"),
        ({"DMLC_WORKER_ID": "2"}, "0..1"),
        ({"BYTEPS_LOCAL_RANK": "1"}, "0..0"),
        ({"DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": None}, "DMLC_PS_ROOT_URI"),
        ({"BPSX_ENCRYPT": "1", "DMLC_ENABLE_RDMA": "tcp"}, "BPSX_ENCRYPT=1"),
        ({"DMLC_ROLE": "server", "BPSX_ENCRYPT": "1", "DMLC_ENABLE_RDMA": "tcp"}, "BPSX_ENCRYPT=1"),
        (
            {"BYTEPS_ENABLE_MIXED_MODE": "1", "BYTEPS_KEY_HASH_FN": "djb2"},
            "BYTEPS_KEY_HASH_FN=djb2",
        ),
    ],
)
def test_missing_and_contradictory_options_are_named(change, text):
    environment = {k: v for k, v in {**WORKER, **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        Config(environment).check()


def test_all_faults_are_reported_at_once():
    assert faults({}) == [] == faults(WORKER)
    found = faults(
        {**WORKER, "DMLC_WORKER_ID": "7", "BYTEPS_LOCAL_RANK": "1", "BYTEPS_LOG_LEVEL": "loud"}
    )
    assert [f.split("=")[0] for f in found] == [
        "BYTEPS_LOG_LEVEL",
        "DMLC_WORKER_ID",
        "BYTEPS_LOCAL_RANK",
    ]


def test_a_single_worker_needs_nothing_else():
    Config({"DMLC_ROLE": "worker"}).check()
    with pytest.raises(ConfigError, match="DMLC_PS_ROOT_URI"):
        Config({"DMLC_ROLE": "worker", "BYTEPS_FORCE_DISTRIBUTED": "1"}).check()


def test_unknown_and_idle_names_get_a_warning():
    config = Config(
        {
            "BYTEPS_PARTITON_BYTES": "1",
            "BPSX_NO_SUCH_THING_AT_ALL": "1",
            "BYTEPS_OMP_THREAD_PER_GPU": "1",
            "PATH": "x",
        }
    )
    text = "\n".join(config.unknown)
    assert "BYTEPS_PARTITON_BYTES" in text and "did you mean BYTEPS_PARTITION_BYTES?" in text
    assert (
        "BPSX_NO_SUCH_THING_AT_ALL" in text
        and "BYTEPS_OMP_THREAD_PER_GPU" in text
        and "no effect" in text
    )
    assert len(config.unknown) == 3


def test_given_values_win_and_must_exist():
    assert Config({"DMLC_ROLE": "server"}, role="worker").role == "worker"
    with pytest.raises(ConfigError, match="no_such_field"):
        Config({}, no_such_field=1)
    with pytest.raises(AttributeError, match="no_such_option"):
        _ = Config({}).no_such_option


def test_the_fingerprint_contains_the_options_that_workers_must_share():
    assert fingerprint(Config(WORKER)).keys() == {
        "DMLC_NUM_WORKER",
        "DMLC_NUM_SERVER",
        "BYTEPS_LOCAL_SIZE",
        "BYTEPS_PARTITION_BYTES",
        "BYTEPS_KEY_HASH_FN",
        "BYTEPS_BUILT_IN_HASH_COEF",
        "BPSX_LOCAL_REDUCE",
        "BYTEPS_ENABLE_ASYNC",
        "BPSX_AUTOTUNE",
        "BPSX_ELASTIC",
        "BPSX_ELASTIC_WAIT",
        "BPSX_MAX_WORKERS",
        "BPSX_ENCRYPT",
        "BYTEPS_ENABLE_MIXED_MODE",
        "BPSX_SERVER_WEIGHT",
        "DMLC_ENABLE_RDMA",
    }


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"BPSX_ELASTIC": "off"}, False),
        ({"DMLC_NUM_SERVER": "1"}, False),
        ({"DMLC_NUM_SERVER": "1", "BPSX_ELASTIC_WAIT": "9"}, True),
        ({"DMLC_NUM_SERVER": "0", "BPSX_ELASTIC_WAIT": "9"}, False),
        ({"BYTEPS_ENABLE_ASYNC": "1"}, True),
        ({"DMLC_ENABLE_RDMA": "tcp"}, True),
        ({"DMLC_ENABLE_RDMA": "1"}, True),
    ],
)
def test_a_job_that_may_lose_servers(change: dict[str, str], may: bool) -> None:
    assert Config({**WORKER, "DMLC_NUM_SERVER": "2", **change}).may_lose_servers is may


def test_a_machine_whose_processes_sum_among_themselves_needs_no_server():
    several = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "h",
        "DMLC_PS_ROOT_PORT": "1",
        "BYTEPS_LOCAL_SIZE": "2",
    }
    Config(several).check()
    assert Config({**several, "DMLC_NUM_SERVER": "1"}).servers == 0  # as in BytePS
    for change in (
        {"BPSX_LOCAL_REDUCE": "0"},
        {"BYTEPS_FORCE_DISTRIBUTED": "1"},
        {"DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "0"},
    ):
        with pytest.raises(ConfigError, match="DMLC_NUM_SERVER"):
            Config({**several, **change}).check()
        assert Config({**several, **change, "DMLC_NUM_SERVER": "3"}).servers == 3


def test_the_runtime_folder_is_private(tmp_path):
    folder = runtime_dir({"BYTEPS_SOCKET_PATH": str(tmp_path)})
    assert (
        folder == tmp_path / f"bpsx-{os.getuid()}" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    )
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        runtime_dir({"BYTEPS_SOCKET_PATH": str(tmp_path)})
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="BYTEPS_SOCKET_PATH"):
        runtime_dir({"BYTEPS_SOCKET_PATH": str(tmp_path)})


def test_the_reference_tells_every_option():
    page = reference()
    assert all(f"`{o.env}`" in page and o.help in page for o in OPTIONS) and all(
        f"`{n}`" in page for n in NOT_USED
    )


def test_cache_folder_is_private_and_falls_back(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tempfile.gettempdir", lambda: pytest.fail("looked for where it was not needed")
    )
    folder = cache_dir({"XDG_CACHE_HOME": str(tmp_path)})
    assert folder == tmp_path / "bpsx" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_dir({"BPSX_CACHE_DIR": str(tmp_path / "a" / "b")}) == tmp_path / "a" / "b"
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("bpsx.config.folders.tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    fallback = cache_dir({"XDG_CACHE_HOME": str(blocked)})
    assert fallback.name == f"bpsx-{os.getuid()}" and fallback.stat().st_uid == os.getuid()
    with pytest.raises(ConfigError, match="BPSX_CACHE_DIR"):
        cache_dir({"BPSX_CACHE_DIR": str(blocked / "x")})


@pytest.mark.parametrize(
    "option",
    [o for o in OPTIONS if not callable(o.default) and o.default not in (None, "")],
    ids=lambda o: o.env,
)
def test_a_default_is_a_value_that_one_may_write(option):
    assert getattr(Config({option.env: str(option.default)}), option.field) == getattr(
        Config({}), option.field
    )


@pytest.mark.parametrize(
    "name", [n for n, o in ((o.env, o) for o in OPTIONS) if n not in FREE_TEXT]
)
def test_blanks_around_a_value_are_ignored_and_a_blank_counts_as_unset(name):
    option = next(o for o in OPTIONS if o.env == name)
    known = {"DMLC_ROLE": "worker", "BPSX_SEND_BUFFER_KB": "64"}
    good = known.get(
        name, "1" if option.default is None or callable(option.default) else str(option.default)
    )
    assert getattr(Config({name: f" {good}\t"}), option.field) == getattr(
        Config({name: good}), option.field
    )


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    """Compiled kernels are executed, so a folder that another user controls must not be read."""
    (tmp_path / "bpsx").mkdir()
    monkeypatch.setattr("bpsx.config.folders.tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    assert cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "bpsx"
    us = os.getuid()
    monkeypatch.setattr("bpsx.config.folders.os.getuid", lambda: us + 1)
    for environment in (
        {"XDG_CACHE_HOME": str(tmp_path)},
        {"BPSX_CACHE_DIR": str(tmp_path / "bpsx")},
    ):
        with pytest.raises(ConfigError, match="BPSX_CACHE_DIR"):
            cache_dir(environment)


def test_a_home_without_write_permission_is_no_problem(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file, where not even root can make a folder")
    monkeypatch.setattr("bpsx.config.folders.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir({}) == tmp_path / f"bpsx-{os.getuid()}" and os.access(cache_dir({}), os.W_OK)
