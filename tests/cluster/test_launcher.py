"""bpsx-run --local with stand-ins: jobs that succeed, fail, are stopped or are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import (
    ALL_END_BEFORE_THE_READ,
    DEAF,
    FOR_EVER,
    HELPERS_END_BEFORE_THE_SIGNAL,
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
    read_terminal,
    wait_for,
)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


# ---- successful jobs


def test_every_process_speaks_under_its_name(launcher: Launcher) -> None:
    talk = "print('out'); print('err', file=sys.stderr)\n"
    job = launcher.job(
        talk, scheduler="import sys\n" + talk + HUB, server=JOIN + talk + "link.recv(1)", servers=2
    )
    names = ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    assert finish(job) == (0, [f"[{n}] out" for n in names], [f"[{n}] err" for n in names])


def test_the_environment_of_each_role(launcher: Launcher) -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))\n"
    job = launcher.job(show, scheduler=show + HUB, server=show + SERVER, workers=2, servers=1)
    status, out, _ = finish(job)
    assert status == 0
    seen = {line.split("] ")[0][1:]: json.loads(line.split("] ", 1)[1]) for line in out}
    for name, environment in seen.items():
        assert environment["DMLC_ROLE"] == name.split()[0]
        assert (environment["DMLC_NUM_WORKER"], environment["DMLC_NUM_SERVER"]) == ("2", "1")
        assert (environment["DMLC_PS_ROOT_URI"], environment["DMLC_NODE_HOST"]) == (
            "127.0.0.1",
            "127.0.0.1",
        )
    assert seen["scheduler"]["DMLC_PS_ROOT_PORT"] == "0"
    assert seen["worker 0"]["DMLC_PS_ROOT_PORT"] == seen["server 0"]["DMLC_PS_ROOT_PORT"] != "0"
    assert [seen[f"worker {i}"]["DMLC_WORKER_ID"] for i in (0, 1)] == ["0", "1"]
    assert (seen["worker 1"]["BYTEPS_LOCAL_RANK"], seen["worker 1"]["BYTEPS_LOCAL_SIZE"]) == (
        "0",
        "1",
    )


def test_a_single_worker_needs_no_other_process(launcher: Launcher) -> None:
    job = launcher.job(
        python("import os; print(os.environ['BYTEPS_FORCE_DISTRIBUTED'])"),
        workers=1,
        servers=0,
        scheduler="raise SystemExit(1)",
        server="raise SystemExit(1)",
    )
    assert finish(job) == (0, ["[worker 0] 0"], [])


def test_a_single_worker_with_a_server_uses_it(launcher: Launcher) -> None:
    job = launcher.job("print(e['BYTEPS_FORCE_DISTRIBUTED'])", workers=1)
    assert finish(job) == (0, ["[worker 0] 1"], [])


def test_the_port_folder_is_private_and_gone_when_the_workers_start(launcher: Launcher) -> None:
    look = (
        "import os; f = os.path.dirname(os.environ['BPSX_PORT_FILE']); print(oct(os.stat(f).st_mode"
        " & 0o777), flush=True)\n"
    )
    job = launcher.job("print(os.listdir(e['TMPDIR']))", scheduler=look + HUB, workers=1)
    assert finish(job) == (0, ["[scheduler] 0o700", "[worker 0] []"], [])


def test_a_given_port(launcher: Launcher) -> None:
    show = "import os; print(os.environ['DMLC_PS_ROOT_PORT'], 'BPSX_PORT_FILE' in os.environ)\n"
    job = launcher.job(python(show), scheduler=show, server=show, workers=1, port=1234)
    assert finish(job) == (
        0,
        ["[scheduler] 1234 False", "[server 0] 1234 False", "[worker 0] 1234 False"],
        [],
    )


# ---- output


def test_much_output_of_all_at_once_arrives_whole(launcher: Launcher) -> None:
    worker = """
lines = [
    b"%d " % i + bytes([33 + (i * 7 + k) % 90 for k in range(i % 700)]) + b"\\n"
    for i in range(6000)
]


def speak(stream):
    for i in range(0, 6000, 97):
        stream.write(b"".join(lines[i : i + 97]))
    stream.flush()


other = threading.Thread(target=speak, args=(sys.stderr.buffer,))
other.start()
speak(sys.stdout.buffer)
other.join()
"""
    out, err = (job := launcher.job(worker, workers=2)).communicate()
    assert job.returncode == 0
    expected = [
        b"%d " % i + bytes([33 + (i * 7 + k) % 90 for k in range(i % 700)]) for i in range(6000)
    ]
    for text in (out, err):
        for name in (b"[worker 0] ", b"[worker 1] "):
            assert [
                line.removeprefix(name) for line in text.split(b"\n") if line.startswith(name)
            ] == expected


def test_any_bytes_and_an_unfinished_last_line(launcher: Launcher) -> None:
    worker = "sys.stdout.buffer.write(bytes(range(256)) + b'\\nlast')"
    out, _ = launcher.job(worker, workers=1).communicate()
    low, high = bytes(range(256)).split(b"\n")
    assert out == b"[worker 0] " + low + b"\n[worker 0] " + high + b"\n[worker 0] last\n"


def test_lines_do_not_mix_when_both_outputs_are_one(launcher: Launcher) -> None:
    worker = (
        "for i in range(200): os.write(1, b'o' * 5000 + b'\\n'); os.write(2, b'e' * 5000 + b'\\n')"
    )
    out, _ = launcher.job(worker, options={"stderr": subprocess.STDOUT}).communicate()
    assert sorted(out.splitlines()) == sorted(
        f"[worker {i}] {c * 5000}".encode() for i in (0, 1) for c in "oe" for _ in range(200)
    )


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_on_a_terminal_only(
    launcher: Launcher, environment: dict[str, str], coloured: bool
) -> None:
    ours, theirs = os.openpty()
    try:
        job = launcher.job(
            "print('out'); print('err', file=sys.stderr)",
            environment=environment,
            workers=1,
            options={"stdout": theirs},
        )
        os.close(theirs)
        text = read_terminal(ours)
        _, err = job.communicate()
    finally:
        os.close(ours)
    assert b"out" in text
    assert (b"\x1b[" in text) == coloured
    assert err == b"[worker 0] err\n"


def test_writing_to_a_closed_reader_is_a_broken_pipe(launcher: Launcher) -> None:
    worker = (
        "print('first', flush=True)\ntry:\n while True: print('x' * 999)\nexcept BrokenPipeError:"
        " os._exit(9)"
    )
    job = launcher.job(worker, workers=1)
    wait_for(job, "[worker 0] first")
    assert job.stdout
    job.stdout.close()
    job.stdout = None
    _, err = job.communicate()
    assert job.returncode == 9
    assert err == b"bpsx-run: worker 0 exited with status 9\n"


def test_a_reader_that_stalls_does_not_keep_sigterm_away(
    launcher: Launcher, tmp_path: Path
) -> None:
    fifo = tmp_path / "full"
    os.mkfifo(fifo)
    # Reports over the FIFO when its own pipe, the launcher's buffer and the launcher's output pipe
    # are full, so that nothing moves.
    worker = f"""
import select
os.set_blocking(1, False); poll = select.poll(); poll.register(1, select.POLLOUT)
while poll.poll(300): os.write(1, b'x' * 4095 + b'\\n')
open({str(fifo)!r}, 'w').close()
signal.pause()
"""
    job = launcher.job(worker, workers=1, options={"stdout": (pipe := os.pipe())[1]})
    os.close(pipe[1])
    fifo.read_text()
    job.terminate()
    _, err = job.communicate()
    os.close(pipe[0])
    assert job.returncode == 128 + signal.SIGTERM
    assert err.startswith(b"bpsx-run: received SIGTERM; ")
    assert b"worker 0 was killed by SIGTERM" in err


# ---- failing jobs


def test_the_worst_status_wins_and_the_first_is_named_first(launcher: Launcher) -> None:
    job = launcher.job("if me: link.close(); sys.exit(3)\nelse: sys.exit(0)", workers=2)
    assert finish(job) == (3, [], ["bpsx-run: worker 1 exited with status 3"])


def test_a_signal_counts_as_128_and_more(launcher: Launcher) -> None:
    job = launcher.job(
        "os.kill(os.getpid(), signal.SIGSEGV) if me == 0 else sys.exit(4)", workers=2
    )
    status, _, err = finish(job)
    assert status == 128 + signal.SIGSEGV
    assert len(err) == 1
    assert "worker 0 was killed by SIGSEGV" in err[0]
    assert "worker 1 exited with status 4" in err[0]


def test_a_signal_without_a_name(launcher: Launcher) -> None:
    job = launcher.job(python("import os; os.kill(os.getpid(), 40)"), workers=1, servers=0)
    assert finish(job) == (168, [], ["bpsx-run: worker 0 was killed by signal 40"])


def test_a_server_that_fails(launcher: Launcher) -> None:
    job = launcher.job("link.recv(1)", server=JOIN + "sys.exit(6)", workers=1, grace=0)
    status, _, err = finish(job)
    assert status == 6
    assert re.match(r"bpsx-run: server 0 \(pid \d+\) exited with status 6; ", err[0])


def test_after_a_failure_the_others_get_sigterm(launcher: Launcher) -> None:
    job = launcher.job(
        TELL + f"if me: {MEETS}if me: sys.exit(1)\n{IS_MET}" + FOR_EVER,
        grace=0.3,
        kill_after=5,
        environment={"GATE": str(launcher.gate())},
    )
    status, out, err = finish(job)
    assert status == 1  # not the status of a process that the launcher ended
    assert "[worker 0] got 15" in out
    assert err[0].startswith("bpsx-run: worker 1 exited with status 1; ")
    assert (
        "worker 0 was still running after the grace time (0.3 s), got SIGTERM and exited with"
        " status 5" in err[0]
    )


def test_processes_that_ignore_sigterm_get_sigkill(launcher: Launcher) -> None:
    job = launcher.job(
        DEAF + f"if me: {MEETS}if me: sys.exit(1)\n{IS_MET}" + FOR_EVER,
        grace=0.1,
        environment={"GATE": str(launcher.gate())},
    )
    status, _, err = finish(job)
    assert status == 1
    assert (
        "worker 0 was still running after the grace time (0.1 s), got SIGTERM and was killed by"
        " SIGKILL" in err[0]
    )


def test_a_process_that_ends_within_the_grace_time_is_not_killed(launcher: Launcher) -> None:
    # Worker 0 notices the end of the job by the hub's end, which worker 1's failure causes.
    hub = HUB.replace(
        "for link in workers: link.recv(1)",
        "import select; select.select(workers, [], []); raise SystemExit(1)",
    )
    job = launcher.job(
        "if me: sys.exit(2)\nlink.recv(1); print('saved'); sys.exit(1)", scheduler=hub
    )
    status, out, err = finish(job)
    assert (status, out) == (2, ["[worker 0] saved"])
    assert "worker 1 exited with status 2" in err[0]
    assert "grace" not in err[0]


def test_a_server_that_stays_after_the_workers_is_a_failure(launcher: Launcher) -> None:
    leave = "signal.signal(15, lambda *_: os._exit(0))\n"
    job = launcher.job(
        MEETS,
        server=JOIN + leave + IS_MET + FOR_EVER,
        grace=0.2,
        kill_after=5,
        workers=1,
        environment={"GATE": str(launcher.gate())},
    )
    status, _, err = finish(job)
    assert status == 1
    (line,) = err
    assert re.fullmatch(
        r"bpsx-run: server 0 \(pid \d+\) was still running after the grace time \(0.2 s\), got"
        r" SIGTERM and exited with status 0; all workers had exited with status 0: does the command"
        r" call bpsx.init\(\)\?",
        line,
    ), line


def test_a_server_that_ends_as_its_grace_time_does_is_not_called_late(launcher: Launcher) -> None:
    job = launcher.job("", workers=1, grace=0, prelude=HELPERS_END_BEFORE_THE_SIGNAL)
    assert finish(job) == (0, [], [])


@pytest.mark.parametrize(
    ("ends", "status"), [("raise SystemExit(0)", 1), ("raise SystemExit(7)", 7)]
)
def test_a_scheduler_that_ends_before_it_listens(
    launcher: Launcher, ends: str, status: int
) -> None:
    job = launcher.job("print('never')", scheduler=ends)
    assert finish(job) == (
        status,
        [],
        [f"bpsx-run: scheduler exited with status {ends[-2]} before it listened"],
    )


def test_a_scheduler_that_never_listens(launcher: Launcher) -> None:
    job = launcher.job(
        "print('never')",
        scheduler="import signal; signal.pause()",
        environment={"BPSX_RENDEZVOUS_TIMEOUT": "0.2"},
    )
    assert finish(job) == (
        1,
        [],
        ["bpsx-run: the scheduler did not listen within 0.2 s (BPSX_RENDEZVOUS_TIMEOUT)"],
    )


def test_a_command_that_cannot_be_run(launcher: Launcher, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("text")
    (script := tmp_path / "script").write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    jobs = [launcher.job([name]) for name in ("no-such-command-of-anybody", str(file), str(script))]
    results = [finish(job) for job in jobs]
    assert [status for status, _, _ in results] == [127, 126, 127]
    assert [out for _, out, _ in results] == [[], [], []]
    assert results[0][2] == [
        "bpsx-run: cannot run 'no-such-command-of-anybody': No such file or directory"
    ]


# ---- signals


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_after_a_signal_the_other_roles_outlive_the_workers(
    launcher: Launcher, number: signal.Signals
) -> None:
    last = "print('ready', flush=True); link.recv(1); print('outlived them', flush=True)\n"
    job = launcher.job(
        TELL + FOR_EVER, scheduler="import os, signal\n" + TELL + HUB, server=JOIN + TELL + last
    )
    wait_for(job, "[worker 0] ready", "[worker 1] ready", "[server 0] ready")
    job.send_signal(number)
    status, out, err = finish(job)
    assert status == 5
    assert out == [
        "[server 0] outlived them",
        f"[worker 0] got {number}",
        f"[worker 1] got {number}",
    ]
    stopped = number in (signal.SIGINT, signal.SIGTERM)
    assert err[0].startswith(
        f"bpsx-run: received {number.name}; " if stopped else "bpsx-run: worker "
    )


def test_workers_keep_their_grace_time_after_sigterm(launcher: Launcher, tmp_path: Path) -> None:
    # Worker 1 exits at once with a status. Worker 0 sees that and keeps saving for longer than the
    # grace time of failures.
    os.mkfifo(fifo := tmp_path / "alive")
    save = f"""
import queue
told = queue.SimpleQueue()
signal.signal(15, lambda *_: told.put(1))
held = open({str(fifo)!r}, "wb" if me else "rb")
print("ready", flush=True)
told.get()
if me: sys.exit(3)
held.read(); signal.sigtimedwait([], 0.5); print("saved")
"""
    job = launcher.job(save, grace=0)
    wait_for(job, "[worker 0] ready", "[worker 1] ready")
    job.terminate()
    _, out, err = finish(job)
    assert out == ["[worker 0] saved"]
    assert "worker 1 exited with status 3" in err[-1]
    # Worker 0 ended by itself; the processes that it no longer needed were ended without grace.
    assert "worker 0" not in err[-1]


def test_the_grace_time_is_an_option(launcher: Launcher) -> None:
    job = launcher.job(DEAF + FOR_EVER, workers=1, grace=0, environment={"BPSX_TERM_GRACE": "0.2"})
    wait_for(job, "[worker 0] ready")
    job.terminate()
    status, _, err = finish(job)
    assert status == 128 + signal.SIGTERM
    assert (
        "worker 0 was still running after the grace time (0.2 s), got SIGTERM and was killed by"
        " SIGKILL" in err[-1]
    )


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_batch_systems_warning_ends_no_helper(launcher: Launcher, number: signal.Signals) -> None:
    # Like a batch system: signal every process of the job, including ones that have just started.
    told = f"signal.signal({number}, lambda *_: (print('warned', flush=True), os._exit(0)))\n"
    strike = f"import os, signal\nos.kill(os.getpid(), {number})\nprint('struck', flush=True)\n"
    job = launcher.job(told + FOR_EVER, workers=1, scheduler=strike + HUB, server=strike + SERVER)
    wait_for(job, "[worker 0] ready", "[scheduler] struck", "[server 0] struck")
    job.send_signal(number)
    assert finish(job) == (0, ["[worker 0] warned"], [])


def test_a_signal_reaches_the_processes_that_children_started(launcher: Launcher) -> None:
    worker = (
        "import subprocess\nsubprocess.call([sys.executable, '-c', 'import os, signal\\n' + %r])"
        % (TELL + FOR_EVER)
    )  # noqa: UP031
    job = launcher.job(worker, workers=1)
    wait_for(job, "[worker 0] ready")
    job.terminate()
    _, out, _ = finish(job)
    assert out == ["[worker 0] got 15"]


def test_the_second_ctrl_c_kills(launcher: Launcher) -> None:
    tell = "signal.signal(2, lambda *_: print('once', flush=True))\n"
    job = launcher.job(tell + FOR_EVER, workers=1)
    wait_for(job, "[worker 0] ready")
    job.send_signal(signal.SIGINT)
    wait_for(job, "[worker 0] once")
    job.send_signal(signal.SIGINT)
    status, _, err = finish(job)
    assert status == 128 + signal.SIGKILL
    assert "worker 0 was killed by SIGKILL" in err[-1]


def test_a_process_that_ignores_the_signal_is_killed(launcher: Launcher) -> None:
    job = launcher.job(DEAF + FOR_EVER, workers=1, grace=0.1)
    wait_for(job, "[worker 0] ready")
    job.send_signal(signal.SIGINT)
    status, _, err = finish(job)
    assert status == 128 + signal.SIGINT, "that it had to be killed is said in words"
    assert "worker 0 was still running after the grace time" in err[-1]


def test_stopped_before_it_began(launcher: Launcher) -> None:
    leave = (
        "import signal\nsignal.signal(15, lambda *_: exit(0))\nprint('ready',"
        " flush=True)\nsignal.pause()"
    )
    job = launcher.job("print('never')", scheduler=leave)
    wait_for(job, "[scheduler] ready")
    job.terminate()
    assert finish(job) == (128 + signal.SIGTERM, [], ["bpsx-run: received SIGTERM"])


def test_nohup_is_respected(launcher: Launcher) -> None:
    job = launcher.start(
        [
            "/bin/sh",
            "-c",
            'trap "" HUP; exec "$@"',
            "sh",
            *local_words("--workers", "1", "--servers", "0"),
            PY,
            "-c",
            (
                "import signal; signal.signal(15, lambda *_: exit(3)); print('ready', flush=True);"
                " signal.pause()"
            ),
        ]
    )
    wait_for(job, "[worker 0] ready")
    job.send_signal(signal.SIGHUP)
    job.terminate()
    assert finish(job) == (3, [], ["bpsx-run: received SIGTERM; worker 0 exited with status 3"])


def test_children_die_with_a_killed_launcher(launcher: Launcher, tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    hold = f"import os; held = os.open({str(fifo)!r}, os.O_WRONLY)\n"
    job = launcher.job(
        hold + DEAF + FOR_EVER, scheduler=hold + HUB, server=hold + JOIN + DEAF + FOR_EVER
    )
    with open(fifo, "rb") as alive:  # ends when the last writer is dead
        wait_for(job, "[worker 0] ready", "[worker 1] ready", "[server 0] ready")
        job.kill()
        assert alive.read() == b""


def test_children_that_end_while_another_is_read_are_seen(launcher: Launcher) -> None:
    # The launcher notices the scheduler's end. All other processes then end before it reads their
    # outputs.
    job = launcher.job(
        "link.close(); open(e['GATE']).close()",
        workers=2,
        environment={"GATE": str(launcher.gate())},
        prelude=ALL_END_BEFORE_THE_READ,
    )
    assert finish(job) == (0, [], [])


def test_processes_that_children_leave_behind_are_ended(launcher: Launcher) -> None:
    stray = (
        "import signal; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; print('stray',"
        " flush=True); signal.pause()"
    )
    worker = (
        "import subprocess\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stray!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); child.returncode = 0; print('bye')"
    )
    assert finish(launcher.job(worker, workers=1)) == (0, ["[worker 0] bye"], [])
