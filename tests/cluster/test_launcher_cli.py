"""The command line of bpsx-run: wrong arguments, the worker role, and jobs with the real scheduler
and server.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import (
    DEAF,
    FOR_EVER,
    PY,
    TELL,
    Launcher,
    finish,
    launching,
    local_words,
    python,
    read_terminal,
    wait_for,
    words,
)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


WORKER = {"DMLC_ROLE": "worker"}


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["true"], {}, "DMLC_ROLE"),
        ([], {}, "bpsx-run --local COMMAND. For help: bpsx-run --help"),
        (["trace", "--scheduler", "x", "--seconds", "1"], {}, "HOST:PORT"),
        (["true"], {"DMLC_ROLE": "boss"}, "DMLC_ROLE"),
        (["true"], {"DMLC_ROLE": "server"}, "DMLC_PS_ROOT_URI"),
        (["true"], {**WORKER, "DMLC_NUM_WORKER": "2"}, "DMLC_PS_ROOT_PORT"),
        (["true"], {**WORKER, "DMLC_NUM_WORKER": "two"}, "DMLC_NUM_WORKER"),
        (["true"], {**WORKER, "BYTEPS_LOCAL_RANK": "3"}, "BYTEPS_LOCAL_RANK"),
        ([], WORKER, "COMMAND"),
        (["--local"], {}, "COMMAND"),
        (["--local", "--workers", "0", "true"], {}, "--workers"),
        (["--local", "--servers", "0", "true"], {}, "--servers"),
        (["--local", "--port", "x", "true"], {}, "--port"),
        (["--local", "--grace", "-1", "true"], {}, "--grace"),
        (["--local", "--grace", "nan", "true"], {}, "--grace"),
        (["--local", "--wrokers", "2", "true"], {}, "--wrokers"),
        (["--workers", "2", "true"], WORKER, "--local"),
        (["--processes", "2", "true"], WORKER, "--local"),
        (["--port", "2", "true"], WORKER, "--local"),
        (["--env", "A=b", "true"], WORKER, "hostfile"),
        (["--local", "--hostfile", "x", "true"], {}, "exclude"),
        (["--hostfile", "/no/such/file", "true"], {}, "/no/such/file: No such file"),
        (["--hostfile", "/dev/null"], {}, "COMMAND"),
        (["--hostfile", "/dev/null", "true"], {}, "/dev/null: no worker"),
        (["--hostfile", "/dev/null", "--env", "A", "true"], {}, "NAME=VALUE"),
        (["--local", "--processes", "0", "true"], {}, "--processes"),
        (["--local", "true"], {"BYTEPS_PARTITION_BYTES": "big"}, "BYTEPS_PARTITION_BYTES"),
    ],
)
def test_a_mistake_is_named(
    launcher: Launcher, arguments: list[str], environment: dict[str, str], named: str
) -> None:
    status, out, err = finish(launcher.start(words(*arguments), environment))
    assert (status, out) == (2, [])
    assert any("error: " in line and named in line for line in err)


def test_help_and_version(launcher: Launcher) -> None:
    status, out, _ = finish(launcher.start(words("--help")))
    assert status == 0
    text = "\n".join(out)
    for word in (
        "--local",
        "--hostfile",
        "doctor",
        "NVIDIA_VISIBLE_DEVICES",
        "BYTEPS_NUMA_ON",
        "BYTEPS_NUMA_DEFAULT_QUOTA",
        "BYTEPS_VISIBLE_CPU_CORES",
        "BYTEPS_CPU_BLACKLIST",
        "BYTEPS_ENABLE_GDB",
        "BPSX_SECRET",
        "PYTHONUNBUFFERED=1",
        "Exit status",
    ):
        assert word in text
    status, out, _ = finish(launcher.start(words("--version")))
    assert status == 0
    assert out[0].startswith("bpsx ")


def test_a_variable_without_effect_under_local_is_named(launcher: Launcher) -> None:
    single = words("--local", "--workers", "1", "--servers", "0", "true")
    assert finish(launcher.start(single, {"NVIDIA_VISIBLE_DEVICES": "0,1"})) == (
        0,
        [],
        [
            "bpsx-run: warning: NVIDIA_VISIBLE_DEVICES has no effect with --local: use"
            " --processes N (now 1)"
        ],
    )


def test_it_starts_quickly_and_with_one_thread(launcher: Launcher) -> None:
    """Heavy modules would start threads, which makes code between fork and exec unsafe."""
    look = (
        "import bpsx.launch.__main__, bpsx.launch.job, os, sys;print(*{'numpy', 'zmq', 'torch',"
        " 'numba', 'asyncio'} & set(sys.modules), len(os.listdir('/proc/self/task')))"
    )
    assert finish(launcher.start(python(look))) == (0, ["1"], [])


def test_a_worker_is_its_command(launcher: Launcher) -> None:
    text = (
        "import os, sys; print(os.environ['BYTEPS_LOCAL_RANK'], os.environ['BYTEPS_LOCAL_SIZE'],"
        " sys.argv[1:]); sys.exit(7)"
    )
    job = launcher.start(words(PY, "-c", text, "--", "--local", "$HOME"), WORKER)
    assert finish(job) == (7, ["0 1 ['--', '--local', '$HOME']"], [])


def test_a_worker_gets_our_input(launcher: Launcher) -> None:
    job = launcher.start(words("cat"), WORKER, stdin=subprocess.PIPE)
    assert job.communicate(b"\xff\x00")[0] == b"\xff\x00"


def test_a_worker_killed_by_a_signal(launcher: Launcher) -> None:
    assert (
        finish(launcher.start(words(*python("import os; os.kill(os.getpid(), 9)")), WORKER))[0]
        == 128 + 9
    )


def test_a_worker_that_cannot_be_run(launcher: Launcher) -> None:
    status, _, err = finish(launcher.start(words("no-such-command-of-anybody"), WORKER))
    assert status == 127
    assert "no-such-command-of-anybody" in err[0]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_a_worker_gets_our_signals(launcher: Launcher, number: signal.Signals) -> None:
    job = launcher.start(words(*python("import os, signal\n" + TELL + FOR_EVER)), WORKER)
    wait_for(job, "ready")
    job.send_signal(number)
    assert finish(job) == (5, [f"got {number}"], [])


def test_a_worker_dies_with_a_killed_launcher(launcher: Launcher) -> None:
    job = launcher.start(words(*python("import signal\n" + DEAF + FOR_EVER)), WORKER)
    wait_for(job, "ready")
    job.kill()
    assert job.stdout
    assert job.stdout.read() == b""  # ends when the last process that has the pipe open is dead


def test_a_terminals_ctrl_c_reaches_the_worker_once(launcher: Launcher) -> None:
    worker = (
        "import os, signal\ncount = []\nsignal.signal(2, lambda *_: (count.append(0),"
        " os.write(1, b'caught\\n')))\nsignal.signal(15, lambda *_: (os.write(1, b'count %d\\n' %"
        " len(count)), os._exit(0)))\n" + FOR_EVER
    )
    lead = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        " os.execv(sys.argv[1], sys.argv[1:])"
    )
    ours, theirs = os.openpty()
    try:
        job = launcher.start(
            python(lead) + words(*python(worker)),
            WORKER,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        read_terminal(ours, lambda text: b"ready" in text)
        os.write(ours, b"\x03")
        read_terminal(ours, lambda text: b"caught" in text)
        job.terminate()
        text = read_terminal(ours, lambda text: b"count" in text and text.endswith(b"\n"))
        assert b"count 1" in text
        assert job.wait() == 0
    finally:
        os.close(ours)


# ---- real roles

SUM = (
    "import sys, numpy, bpsx; bpsx.init(); a = numpy.full(3000, bpsx.rank() + 1,"
    " 'float32');print(bpsx.rank(), bpsx.size(), bpsx.push_pull(a, name='a', average=False)[-1]);"
    " bpsx.shutdown()"
)


@pytest.mark.parametrize(
    ("workers", "servers", "total"), [(2, 1, 3), (3, 2, 6), (1, 1, 1), (1, 0, 1)]
)
def test_a_whole_job(launcher: Launcher, workers: int, servers: int, total: int) -> None:
    job = launcher.start(
        local_words("--workers", str(workers), "--servers", str(servers), PY, "-c", SUM)
    )
    assert finish(job) == (0, [f"[worker {i}] {i} {workers} {total}.0" for i in range(workers)], [])


def test_a_whole_job_with_a_worker_that_dies(launcher: Launcher) -> None:
    die = SUM.replace("print(", "bpsx.rank() or __import__('os')._exit(3); print(")
    job = launcher.start(local_words("--workers", "2", PY, "-c", die))
    status, _, err = finish(job)
    assert status == 3
    assert any(
        line.startswith("bpsx-run: ") and "worker 0 exited with status 3" in line for line in err
    )


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise SystemExit(4)", 4),
        ("import bpsx, sys; sys.argv[1:] or bpsx.init()\nraise SystemExit(4)", 4),
        ("pass", 1),
    ],
)
def test_a_job_that_can_no_longer_form_is_ended_at_once(
    launcher: Launcher, text: str, status: int
) -> None:
    # The grace time is longer than the test's time limit.
    script = (
        "import os, sys\nif os.environ['DMLC_WORKER_ID'] == '0': sys.argv.append('leave')\n" + text
    )
    found, _, err = finish(launcher.start(local_words("--grace", "1000", *python(script))))
    assert found == status
    assert any(
        line.startswith("bpsx-run: ")
        and "was still waiting for the job to form, got SIGTERM and " in line
        for line in err
    )
    # A process that the launcher itself ends must not be reported as a scheduler error.
    assert not any(line.startswith("[scheduler]") for line in err), err
    none = (
        "bpsx-run: no worker called bpsx.init(): all exited with status 0 without joining the job; "
    )
    assert any(line.startswith(none) for line in err) == (text == "pass"), err


def test_a_worker_that_ends_well_without_joining_is_named_first(launcher: Launcher) -> None:
    script = "import os\nif os.environ['DMLC_WORKER_ID'] == '0':\n import bpsx; bpsx.init()"
    status, _, err = finish(launcher.start(local_words("--grace", "0.5", *python(script))))
    assert status == 1
    assert any(
        line.startswith(
            "bpsx-run: worker 1 exited with status 0 without joining the job, which cannot form"
            " without it; "
        )
        for line in err
    ), err


@pytest.mark.parametrize(
    ("end", "status", "story"),
    [
        (
            "raise ValueError('mine\\n!')",
            1,
            "failed: ValueError: mine !; worker 1 exited with status 1",
        ),
        ("sys.exit(3)", 3, "exited with status 3"),
        ("sys.exit(0)", 1, "exited with status 0 before the others were done"),
        ("os._exit(9)", 9, "exited with status 9"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
)
def test_the_last_line_begins_with_the_process_that_failed_the_job(
    launcher: Launcher, end: str, status: int, story: str
) -> None:
    script = (
        "import os, sys, bpsx, numpy as np; bpsx.init(); bpsx.push_pull(np.ones(4), 'w')\n"
        f"if bpsx.rank() == 1: {end}\nbpsx.push_pull(np.ones(4), 'w')"
    )
    job = launcher.start(local_words("--workers", "3", *python(script)))
    _, err = job.communicate()
    last = err.decode().splitlines()[-1]
    assert job.returncode == status, err.decode()
    assert last.startswith(f"bpsx-run: worker 1 {story}; "), err.decode()


def test_each_role_by_its_own_launcher(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "port"
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "BYTEPS_FORCE_DISTRIBUTED": "1",
    }
    watch = (
        "import ctypes, os, subprocess, sys; libc = ctypes.CDLL(None); fd ="
        " libc.inotify_init();libc.inotify_add_watch(fd, sys.argv[1].encode(), 0x80);"
        " print('watching', flush=True); os.read(fd, 4096)"
    )
    watcher = launcher.start(python(watch) + [str(tmp_path)])
    wait_for(watcher, "watching")
    scheduler = launcher.start(
        words(),
        {**common, "DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_PORT": "0", "BPSX_PORT_FILE": str(file)},
    )
    assert finish(watcher)[0] == 0
    common["DMLC_PS_ROOT_PORT"] = file.read_text().strip()
    server = launcher.start(words("ignored"), {**common, "DMLC_ROLE": "server"})
    worker = launcher.start(words(PY, "-c", SUM), {**common, **WORKER, "DMLC_WORKER_ID": "0"})
    assert [finish(process)[:2] for process in (worker, server, scheduler)] == [
        (0, ["0 1 1.0"]),
        (0, []),
        (0, []),
    ]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--worker", "--workers"),
        ("-n", "--workers"),
        ("-np", "--workers"),
        ("--server=3", "--servers"),
        ("--host-file", "--hostfile"),
        ("--nproc_per_node", "--processes"),
    ],
)
def test_the_error_for_a_misspelt_option_suggests_the_right_one(
    launcher: Launcher, word: str, meant: str
) -> None:
    status, out, err = finish(launcher.start(local_words(word, "2", "python", "train.py")))
    assert (status, out) == (2, [])
    assert any(
        f"unknown option {word.split('=')[0]}; did you mean {meant}?" in line for line in err
    )


def test_an_option_unlike_any_other_gets_no_suggestion(launcher: Launcher) -> None:
    _, _, err = finish(launcher.start(local_words("--zzz", "python", "train.py")))
    assert any(line.endswith("unknown option --zzz") for line in err)


@pytest.mark.parametrize("local", [["--local", "--workers", "1", "--servers", "0"], []])
def test_a_script_in_this_folder(launcher: Launcher, tmp_path: Path, local: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"#!{PY}\nprint('trained')\n")
    status, out, err = finish(launcher.start(words(*local, "train.py"), WORKER, cwd=tmp_path))
    assert (status, out) == (126, [])
    assert "cannot run 'train.py'" in err[0] and "as in bpsx-run … python train.py" in err[0]
    script.chmod(0o755)
    status, out, err = finish(launcher.start(words(*local, "train.py"), WORKER, cwd=tmp_path))
    assert (status, [line.split("] ")[-1] for line in out], err) == (0, ["trained"], [])
