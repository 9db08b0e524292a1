"""bpsx-run on a worker machine: several processes, their cores, gdb."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import (
    FOR_EVER,
    HUB,
    IS_MET,
    JOIN,
    MEETS,
    PY,
    SERVER,
    TELL,
    Launcher,
    finish,
    launching,
    local_words,
    python,
    wait_for,
    words,
)

WORKER = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "1",
    "DMLC_NUM_SERVER": "1",
    "DMLC_NUM_WORKER": "2",
    "DMLC_WORKER_ID": "0",
}
ALONE = {**WORKER, "DMLC_NUM_WORKER": "1"}
SHOW = "import os; e = os.environ; print(e['BYTEPS_LOCAL_RANK'], e['BYTEPS_LOCAL_SIZE'])"
gdb = pytest.mark.skipif(shutil.which("gdb") is None, reason="no gdb here")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        made.environment.pop("NVIDIA_VISIBLE_DEVICES", None)
        yield made


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "0,1,5"}, 3),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, 2),
        ({"BYTEPS_LOCAL_SIZE": "2"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "none", "BYTEPS_LOCAL_SIZE": "2"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "BYTEPS_LOCAL_SIZE": "2"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1", "BYTEPS_LOCAL_SIZE": "2"}, 2),
    ],
)
def test_one_process_per_device(launcher: Launcher, environment: dict[str, str], size: int) -> None:
    job = launcher.start(
        words(*python(SHOW)),
        {**WORKER, "DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "1", **environment},
    )
    assert finish(job) == (0, [f"[worker 1.{i}] {i} {size}" for i in range(size)], [])


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NVIDIA_VISIBLE_DEVICES": ""},
        {"NVIDIA_VISIBLE_DEVICES": "void"},
        {"NVIDIA_VISIBLE_DEVICES": "3"},
    ],
)
def test_a_single_process_speaks_for_itself(
    launcher: Launcher, environment: dict[str, str]
) -> None:
    assert finish(launcher.start(words(*python(SHOW)), {**WORKER, **environment})) == (
        0,
        ["0 1"],
        [],
    )


def test_a_given_local_rank_is_started_alone(launcher: Launcher) -> None:
    given = {
        "NVIDIA_VISIBLE_DEVICES": "0,1,2,3",
        "BYTEPS_LOCAL_SIZE": "4",
        "BYTEPS_LOCAL_RANK": "2",
    }
    assert finish(launcher.start(words(*python(SHOW)), {**WORKER, **given})) == (0, ["2 4"], [])


def test_all_devices_are_counted(launcher: Launcher, tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia/gpus").is_dir():
        pytest.skip("this machine has GPUs, so its count is not ours to choose")
    (programs := tmp_path / "bin").mkdir()
    (programs / "nvidia-smi").write_text(
        "#!/bin/sh\n[ \"$1\" = -L ] && printf 'GPU 0: X (UUID: a)\\nGPU 1: X (UUID: b)\\n'\n"
    )
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    every = {**WORKER, "NVIDIA_VISIBLE_DEVICES": "all"}
    assert finish(launcher.start(words(*python(SHOW)), {**every, "PATH": path})) == (
        0,
        ["[worker 0.0] 0 2", "[worker 0.1] 1 2"],
        [],
    )
    (programs / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    status, out, err = finish(launcher.start(words(*python(SHOW)), {**every, "PATH": path}))
    assert (status, out) == (0, ["0 1"])
    assert (
        len(err) == 1
        and "NVIDIA_VISIBLE_DEVICES=all" in err[0]
        and "bpsx-run starts one process" in err[0]
    )


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "0,,1"}, "an entry is empty"),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0,1", "BYTEPS_LOCAL_SIZE": "3"},
            "has 2 entries but BYTEPS_LOCAL_SIZE=3",
        ),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0,1", "BYTEPS_VISIBLE_CPU_CORES": "0"},
            "1 lists for 2 worker processes",
        ),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0,1", "BYTEPS_VISIBLE_CPU_CORES": "0:9999"},
            "may not use 9999",
        ),
        (
            {"NVIDIA_VISIBLE_DEVICES": "0,1", "BYTEPS_VISIBLE_CPU_CORES": "0;1"},
            "BYTEPS_VISIBLE_CPU_CORES='0;1': expected lists",
        ),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1", "DMLC_WORKER_ID": ""}, "DMLC_WORKER_ID"),
        (
            {"BYTEPS_ENABLE_GDB": "1", "PATH": "/nowhere"},
            "BYTEPS_ENABLE_GDB=1: gdb is not on the PATH",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    launcher: Launcher, environment: dict[str, str], named: str
) -> None:
    status, out, err = finish(launcher.start(words(*python(SHOW)), {**WORKER, **environment}))
    assert (status, out) == (2, [])
    assert len(err) == 1 and named in err[0]


def test_the_worst_status_and_the_others_end(launcher: Launcher) -> None:
    worker = (
        "import os, signal, sys\ne = os.environ\n"
        + TELL
        + "if e['BYTEPS_LOCAL_RANK'] == '1':\n  "
        + f"{MEETS}  sys.exit(6)\n{IS_MET}"
        + FOR_EVER
    )
    job = launcher.start(
        words("--grace", "0.2", *python(worker)),
        {**WORKER, "NVIDIA_VISIBLE_DEVICES": "0,1", "GATE": str(launcher.gate())},
    )
    status, out, err = finish(job)
    assert status == 6
    assert "[worker 0.0] got 15" in out
    assert "worker 0.1 exited with status 6" in err[0]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_signals_reach_all(launcher: Launcher, number: signal.Signals) -> None:
    job = launcher.start(
        words(*python("import os, signal\n" + TELL + FOR_EVER)),
        {**WORKER, "NVIDIA_VISIBLE_DEVICES": "0,1"},
    )
    wait_for(job, "[worker 0.0] ready", "[worker 0.1] ready")
    job.send_signal(number)
    status, out, _ = finish(job)
    assert (status, out) == (5, [f"[worker 0.{i}] got {number}" for i in (0, 1)])


MACHINE = """
import sys
from bpsx.launch.job import Job
from bpsx.launch.single_role import SingleRole

commands = {"scheduler": [sys.executable, "-c", sys.argv[1]]}
sys.exit(
    Job(
        SingleRole(("python3", "-c", sys.argv[2]), 2, (frozenset(), frozenset()), alone=True),
        commands,
    ).run()
)
"""


def test_a_single_machine_starts_its_own_scheduler(launcher: Launcher) -> None:
    # The stand-in counts machines, but two processes connect.
    hub = HUB.replace('int(e["DMLC_NUM_WORKER"])', "2")
    show = (
        JOIN + "print(e['DMLC_NUM_SERVER'], e['DMLC_PS_ROOT_URI'], e['DMLC_NODE_HOST'],"
        " len(e['BPSX_SECRET']) > 40)"
    )
    job = launcher.start([PY, "-c", MACHINE, hub, show], {"DMLC_ROLE": "worker"})
    assert finish(job) == (0, [f"[worker 0.{i}] 0 127.0.0.1 127.0.0.1 True" for i in (0, 1)], [])


def test_a_machine_with_servers_starts_no_scheduler(launcher: Launcher) -> None:
    job = launcher.start(
        words(*python("import os; print(os.environ['DMLC_PS_ROOT_PORT'])")),
        {**ALONE, "NVIDIA_VISIBLE_DEVICES": "0,1", "BYTEPS_FORCE_DISTRIBUTED": "1"},
    )
    assert finish(job) == (0, ["[worker 0.0] 1", "[worker 0.1] 1"], [])


def test_a_single_machine_sums_without_the_users_servers_and_scheduler(launcher: Launcher) -> None:
    """The first example in BytePS' readme: one machine, two GPUs, and an address without a
    listener.
    """
    total = (
        "import numpy, bpsx; bpsx.init(); print(bpsx.push_pull(numpy.full(3, bpsx.rank() + 1.0),"
        " 'a', average=False)[-1])"
    )
    job = launcher.start(
        words(*python(total)),
        {
            **ALONE,
            "NVIDIA_VISIBLE_DEVICES": "0,1",
            "DMLC_PS_ROOT_URI": "10.0.0.1",
            "DMLC_INTERFACE": "eth0",
        },
    )
    assert finish(job) == (0, ["[worker 0.0] 3.0", "[worker 0.1] 3.0"], [])


def test_a_command_without_bpsx_succeeds_on_a_single_machine(launcher: Launcher) -> None:
    job = launcher.start(words(*python(SHOW)), {**ALONE, "NVIDIA_VISIBLE_DEVICES": "0,1"})
    assert finish(job)[:2] == (0, ["[worker 0.0] 0 2", "[worker 0.1] 1 2"])
    failing = launcher.start(
        words(*python("import os; os._exit(int(os.environ['BYTEPS_LOCAL_RANK']))")),
        {**ALONE, "BYTEPS_LOCAL_SIZE": "2"},
    )
    assert finish(failing)[0] == 1


def test_local_with_several_processes_per_machine(launcher: Launcher) -> None:
    hub = HUB.replace('int(e["DMLC_NUM_WORKER"])', "4")
    job = launcher.job(
        "print(me, e['BYTEPS_LOCAL_RANK'], e['BYTEPS_LOCAL_SIZE'], e['DMLC_NUM_WORKER'])",
        scheduler=hub,
        processes=2,
    )
    assert finish(job) == (0, [f"[worker {i}.{k}] {i} {k} 2 2" for i in (0, 1) for k in (0, 1)], [])


def test_a_real_job_with_several_processes_per_machine(launcher: Launcher) -> None:
    total = (
        "import numpy, bpsx; bpsx.init(); a = numpy.full(3000, bpsx.rank() + 1,"
        " 'float32');print(bpsx.rank(), bpsx.size(), bpsx.local_rank(), bpsx.push_pull(a, name='a',"
        " average=False)[-1]); bpsx.shutdown()"
    )
    job = launcher.start(local_words("--processes", "2", PY, "-c", total))
    assert finish(job) == (
        0,
        [f"[worker {i}.{k}] {2 * i + k} 4 {k} 10.0" for i in (0, 1) for k in (0, 1)],
        [],
    )


def test_local_makes_a_secret_unless_there_is_one(launcher: Launcher) -> None:
    show = (
        "import hashlib; print(len(e.get('BPSX_SECRET', '')), hashlib.sha256(e.get('BPSX_SECRET',"
        " '').encode()).hexdigest()[:8])"
    )
    first, second = (finish(launcher.job(show, server=SERVER)) for _ in range(2))
    told = {line.split("] ")[1] for line in first[1]}
    assert len(told) == 1 and told.pop().startswith("43 ")
    assert first[1] != second[1]
    given = finish(
        launcher.job(
            "print(e['BPSX_SECRET'])",
            workers=1,
            environment={"BPSX_SECRET": "mine, and long enough"},
        )
    )
    assert given == (0, ["[worker 0] mine, and long enough"], [])


# ---- cores


def affinity(launcher: Launcher, environment: dict[str, str]) -> list[set[int]]:
    show = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
    status, out, err = finish(launcher.start(words(*python(show)), {**WORKER, **environment}))
    assert (status, err) == (0, [])
    return [
        set(json.loads(line.split("] ")[-1] if line.startswith("[w") else line)) for line in out
    ]


OURS = os.sched_getaffinity(0)
two_cores = pytest.mark.skipif(len(OURS) < 2, reason="needs two CPUs")


@two_cores
def test_processes_are_bound_to_different_cores(launcher: Launcher) -> None:
    from bpsx.launch.numa import topology

    if len(topology(OURS)) < 2:
        pytest.skip("needs two physical cores")
    first, second = affinity(launcher, {"NVIDIA_VISIBLE_DEVICES": "0,1"})
    assert first and second and not first & second and first | second <= OURS
    assert affinity(launcher, {"NVIDIA_VISIBLE_DEVICES": "0,1", "BYTEPS_NUMA_ON": "0"}) == [
        OURS,
        OURS,
    ]


@two_cores
def test_processes_are_bound_to_the_configured_cores(launcher: Launcher) -> None:
    low, high, *_ = sorted(OURS)
    lists = {"NVIDIA_VISIBLE_DEVICES": "0,1", "BYTEPS_VISIBLE_CPU_CORES": f"{high}:{low},{high}"}
    assert affinity(launcher, lists) == [{high}, {low, high}]
    assert affinity(launcher, {"BYTEPS_VISIBLE_CPU_CORES": str(high)}) == [{high}]
    assert affinity(launcher, {"BYTEPS_CPU_BLACKLIST": str(low)}) == [OURS - {low}]
    assert affinity(
        launcher,
        {
            "BYTEPS_VISIBLE_CPU_CORES": f"{low}:{high}",
            "BYTEPS_LOCAL_SIZE": "2",
            "BYTEPS_LOCAL_RANK": "1",
        },
    ) == [{high}]


def test_a_single_process_keeps_the_launchers_affinity(launcher: Launcher) -> None:
    assert affinity(launcher, {}) == [OURS]


@two_cores
def test_the_log_says_at_level_info_which_cores_a_process_has(launcher: Launcher) -> None:
    low, high, *_ = sorted(OURS)
    job = launcher.start(
        words(*python("pass")),
        {
            **WORKER,
            "NVIDIA_VISIBLE_DEVICES": "0,1",
            "BYTEPS_VISIBLE_CPU_CORES": f"{low}:{high}",
            "BYTEPS_LOG_LEVEL": "info",
        },
    )
    assert finish(job)[2] == [
        f"bpsx-run: local rank 0 runs on CPUs {low}",
        f"bpsx-run: local rank 1 runs on CPUs {high}",
    ]


# ---- gdb


@gdb
@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("print('out')", 0),
        ("print('out'); raise SystemExit(7)", 7),
        ("print('out'); raise SystemExit(255)", 255),
        ("print('out', flush=True); import os; os.kill(os.getpid(), 15)", 128 + 15),
        ("print('out', flush=True); import os; os.kill(os.getpid(), 9)", 128 + 9),
        ("print('out', flush=True); import os; os.abort()", 128 + 6),
        ("print('out', flush=True); import ctypes; ctypes.string_at(0)", 128 + 11),
    ],
)
def test_the_status_under_gdb(launcher: Launcher, text: str, status: int) -> None:
    found, out, err = finish(
        launcher.start(words(*python(text)), {**WORKER, "BYTEPS_ENABLE_GDB": "1"})
    )
    assert (found, out) == (status, ["out"])
    crashed = status in (128 + 6, 128 + 11)
    assert any(line.startswith("#0 ") for line in err) == crashed, err
    assert any(line.startswith("Thread 1 ") for line in err) == crashed


@gdb
def test_arguments_and_input_under_gdb(launcher: Launcher) -> None:
    text = "import sys; print(sys.argv[1:], sys.stdin.read())"
    job = launcher.start(
        words(PY, "-c", text, "a b", "$HOME", "'\"", ""),
        {**WORKER, "BYTEPS_ENABLE_GDB": "1"},
        stdin=-1,
    )
    out, _ = job.communicate(b"input")
    assert (job.returncode, out) == (0, b"['a b', '$HOME', '\\'\"', ''] input\n")


@gdb
@pytest.mark.parametrize("devices", ["", "0,1"])
def test_signals_under_gdb(launcher: Launcher, devices: str) -> None:
    job = launcher.start(
        words(*python("import os, signal\n" + TELL + FOR_EVER)),
        {**WORKER, "BYTEPS_ENABLE_GDB": "1", "NVIDIA_VISIBLE_DEVICES": devices},
    )
    names = ["[worker 0.0] ", "[worker 0.1] "] if devices else [""]
    wait_for(job, *(f"{name}ready" for name in names))
    job.terminate()
    status, out, _ = finish(job)
    assert (status, out) == (5, [f"{name}got 15" for name in names])


@gdb
def test_a_killed_launcher_leaves_no_gdb(launcher: Launcher) -> None:
    job = launcher.start(
        words(*python("import signal\n" + FOR_EVER)), {**WORKER, "BYTEPS_ENABLE_GDB": "1"}
    )
    wait_for(job, "ready")
    job.kill()
    assert job.stdout
    assert job.stdout.read() == b""


@gdb
def test_a_server_runs_under_gdb_too(launcher: Launcher) -> None:
    environment = {
        "DMLC_ROLE": "server",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "1",
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "BPSX_RENDEZVOUS_TIMEOUT": "0.5",
        "BYTEPS_ENABLE_GDB": "1",
    }
    status, _, err = finish(launcher.start(words(), environment))
    assert status == 1
    assert any("bpsx server: " in line for line in err) and any(
        "[Inferior 1" in line for line in err
    )
