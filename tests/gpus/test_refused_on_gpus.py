"""Impossible calls are refused with an error that names them; failures end the job and name the
call.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpus.machines import gpu_job, gpu_run
from support.jobs import Job

WITHOUT_CUPY = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def test_mistakes_of_a_script_are_refused_by_name(pretend: Path) -> None:
    gpu_run(
        """
        bpsx.init()
        x = PretendArray(np.ones(1000, np.float32), main)
        y = np.ones(1000, np.float32)
        push_pull("x", x).wait(60)
        second = cuda.stream()
        cuda.capture(main)
        for ask_for in (
            lambda: push_pull("x", x),
            lambda: push_pull("new", x),
            lambda: broadcast("x", x, 0),
        ):
            text = refused(ask_for)
            assert (
                text.startswith("ConfigError: ")
                and "CUDA graph" in text
                and ("'x'" in text or "'new'" in text)
            ), text
        push_pull("x", x, stream=second).wait(60)  # another stream may be captured meanwhile
        where = [second]
        moving = view(x)._replace(streams=lambda: where[0])
        handle = verbs.session().push_pull("x", moving, moving, average=False)
        where[0] = main
        assert "a stream that waits for a sum is being captured into a CUDA graph" in ask(handle)
        where[0] = second
        handle.wait(60)
        cuda.capture(main, False)
        text = refused(
            lambda: verbs.session().push_pull("two", view(x, gpu=1), view(x, gpu=1), average=False)
        )
        assert text.startswith("ConfigError: 'two'") and "GPU 1" in text and "GPU 0" in text, text
        for pair in ((x, y), (y, x)):
            text = refused(lambda: push_pull("apart", *pair))
            assert text.startswith("ConfigError: 'apart'") and "GPU 0" in text and "host" in text, (
                text
            )
        text = refused(lambda: push_pull("kind", PretendArray(np.ones(5, np.uint32), main)))
        assert text.startswith("UnsupportedDType: 'kind'") and "uint32" in text, text
        assert cuda.alive("contexts") == 2  # ours and bpsx's: nothing on GPU 1
        push_pull("x", x).wait(60)
        bpsx.shutdown()
    """,
        pretend,
        2,
        1,
        1,
        env={"PRETEND_GPUS": 2},
    )


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [((1, 2, 0), ("int8", "uint8")), ((2, 2, 1), ("int8", "uint8"))],
    ids=["alone", "servers"],
)
def test_averages_that_would_be_wrong_are_refused_by_name(
    shape: tuple[int, int, int], kinds: tuple[str, ...], pretend: Path
) -> None:
    gpu_run(
        f"""
        bpsx.init()
        for kind in {kinds}:
            x = PretendArray(np.ones(10, kind), main)
            text = refused(lambda: push_pull(kind, x, average=True))
            assert text.startswith("ConfigError: ") and repr(kind) in text, text
            assert "average=False" in text, text
            push_pull(kind, x).wait(60)
            assert (x.get() == bpsx.size()).all()
            # Also for a known name.
            text = refused(lambda: push_pull(kind, x, average=True))
            assert text.startswith("ConfigError: ") and repr(kind) in text, text
        bpsx.shutdown()
    """,
        pretend,
        *shape,
    )


FIRST = """
    bpsx.init()
    for attempt in range(2):
        report(ask(push_pull(f"x{attempt}", PretendArray(np.ones(1000, np.float32), main))))
    sys.stdin.readline()
    sys.exit(7)
"""


def ended(job: Job, seconds: float = 25.0) -> list[list[str]]:
    """Return all reports after all processes have ended by themselves, each with a failure."""
    end = time.monotonic() + seconds
    for worker in job.workers:
        worker.say("")
    for p in job.processes:
        p.wait(max(0.1, end - time.monotonic()))
    assert all(worker.popen.returncode for worker in job.workers)
    return [worker.reports() for worker in job.workers]


def test_one_gpu_for_two_processes_of_a_machine_is_refused_by_name(pretend: Path) -> None:
    with gpu_job(FIRST, pretend, 2, 2, 1, worker_env={3: {"PRETEND_FIRST_GPU": 0}}) as job:
        for worker in job.workers[2:]:
            worker.wait_for_line("local ranks 0 and 1 use the same GPU (")
        found = ended(job)
    assert all(
        "local ranks 0 and 1 use the same GPU (" in text and "at 0000:00:00.0" in text
        for said in found
        for text in said
    ), found
    assert all(said[0].startswith("DeviceError: ") for said in found[2:]), found
    assert all(text.startswith("PeerLostError: worker") for said in found[:2] for text in said), (
        found
    )


def test_several_gpus_without_cupy_name_the_package(pretend: Path) -> None:
    with gpu_job(FIRST, pretend, 1, 2, 0, worker_env={0: {"PYTHONPATH": WITHOUT_CUPY}}) as job:
        for worker in job.workers:
            worker.wait_for_line("pip install cupy-cuda13x")
        found = ended(job)
    assert all(
        text.startswith("DeviceError: ") and "CuPy" in text for said in found for text in said
    ), found


def test_one_gpu_needs_no_cupy_and_cpu_tensors_need_no_driver(pretend: Path) -> None:
    source = """
        bpsx.init()
        x = PretendArray(np.ones(1000, np.float32), main)
        push_pull("x", x).wait(60)
        assert (x.get() == bpsx.size()).all() and "cupy" not in sys.modules
        bpsx.shutdown()
    """
    gpu_run(source, pretend, 2, 1, 1, env={"PYTHONPATH": WITHOUT_CUPY})
    gpu_run(source, pretend, 1, 2, 1, env={"PYTHONPATH": WITHOUT_CUPY, "BPSX_LOCAL_REDUCE": 0})
    with Job(
        """
        import bpsx, numpy as np
        from bpsx.api import verbs
        from bpsx.plugin.adapter import TensorView
        bpsx.init()
        x = np.ones(1000, np.float32)
        assert (bpsx.push_pull(x, "x", average=False) == 2).all()
        assert "bpsx.local._cuda" not in sys.modules
        view = TensorView(x.ctypes.data, x.nbytes, "float32", x.shape, x, 0, lambda: 0)
        try:
            verbs.session().push_pull("y", view, view, average=False)
        except bpsx.ConfigError as e:
            report(str(e))
        bpsx.push_pull(x, "x")
        bpsx.shutdown()
    """,
        2,
        1,
        env={"LD_LIBRARY_PATH": ""},
    ) as job:
        found = job.results()
    assert all("NVIDIA's driver" in said[0] and "libcuda.so.1" in said[0] for said in found), found
