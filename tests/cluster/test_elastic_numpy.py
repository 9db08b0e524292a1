"""Training with ``bpsx.elastic`` and NumPy."""

from __future__ import annotations

import signal

import pytest

from support.jobs import Job

TRAINING = """
    import bpsx, time, numpy as np

    bpsx.init()

    @bpsx.elastic.run
    def train(state):
        report(["train", bpsx.rank(), bpsx.size(), state.step, state.note])
        while state.step < 120:
            state.weights += bpsx.push_pull(np.ones(1000), name="g", average=True)
            state.step += 1
            report(["step", state.step])
            time.sleep(0.005)
            state.commit()

    state = bpsx.State(step=0, weights=np.zeros(1000), note=["a", 1])
    train(state)
    report(["end", bpsx.rank(), bpsx.size(), state.step, float(state.weights.sum())])
    bpsx.shutdown()
"""


REPLACE = {"BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "30"}


def test_with_replace_no_step_is_made_with_fewer():
    with Job(TRAINING, workers=3, servers=2, env=REPLACE) as job:
        job.workers[0].wait_for_line('["step", 10]')
        job.workers[1].signal(signal.SIGKILL)
        assert job.scheduler is not None
        job.scheduler.wait_for_line("all workers have stopped, and wait for another in the place")
        stopped = len(job.workers[0].reports())
        job.start_worker(1)
        living = [job.workers[i] for i in (0, 2, 3)]
        assert [w.wait() for w in living] == [0] * 3, living[0].text()
        assert [r for r in job.workers[0].reports() if r[0] == "train" and r[2] != 3] == []
        assert job.workers[0].reports()[stopped][0] == "train"
        assert {tuple(w.reports()[-1][2:]) for w in living} == {(3, 120, 120_000.0)}


def test_with_replace_a_job_ends_if_nobody_joins():
    env = {**REPLACE, "BPSX_ELASTIC_WAIT": "0.3"}
    with Job(TRAINING, workers=2, servers=1, env=env) as job:
        job.workers[0].wait_for_line('["step", 10]')
        job.workers[1].signal(signal.SIGKILL)
        assert job.workers[0].wait() != 0
        assert "no other worker has joined in the place of worker 1 within 0.3 s" in (
            job.workers[0].text()
        )


def test_each_worker_is_replaced_in_turn():
    # The last steps wait until both are replaced.
    source = TRAINING.replace(
        "            state.weights +=",
        """            if state.step == 100 and not state.told:
                state.told = bool(bpsx.push_pull(np.ones(1) * told_to_end(), name="told")[0])
                time.sleep(0.005)
                state.commit()
                continue
            state.weights +=""",
    ).replace('note=["a", 1]', 'note=["a", 1], told=False')
    with Job(source, workers=2, servers=2, env={"BPSX_ELASTIC": "shrink"}) as job:
        newest = 0
        for lost, step in ((0, 10), (1, 20)):
            job.workers[lost].wait_for_line(f'["step", {step}]')
            job.workers[lost].signal(signal.SIGKILL)
            job.start_worker(lost)
            newest = len(job.workers) - 1
            job.workers[newest].wait_for_line('["train"')
        job.tell_to_end()
        living = job.workers[2:]
        assert [w.wait() for w in living] == [0, 0], living[0].text()
        reports = [w.reports()[-1] for w in living]
        assert sorted(r[1] for r in reports) == [0, 1]
        # An average of ones: each of the 120 steps has counted, once.
        assert {tuple(r[2:]) for r in reports} == {(2, 120, 120_000.0)}
        first = living[0].reports()[0]
        assert first[0] == "train" and first[3] >= 10 and first[4] == ["a", 1]


ENDS = """
    import bpsx, numpy as np

    bpsx.init()
    rank = bpsx.rank()

    @bpsx.elastic.run
    def train(state):
        while state.step < 40:
            {extra}
            bpsx.push_pull(np.ones(100), name="g")
            state.step += 1
            report(["step", state.step])
            state.commit()

    try:
        train(bpsx.State(step=0))
    except bpsx.BpsxError as e:
        report([type(e).__name__, str(e)])
        raise
    report("end")
    bpsx.shutdown()
"""


@pytest.mark.parametrize("elastic", ["servers", "shrink", "replace"])
@pytest.mark.parametrize("how", ["sys.exit(3)", "return"])
def test_a_worker_that_ends_before_the_others_ends_the_job(elastic, how):
    """It has left in good order: no other broadcast helps, so the others must not try for ever."""
    source = ENDS.format(extra=f"if rank == 1 and state.step == 20: {how}")
    env = {"BPSX_ELASTIC": elastic, "BPSX_ELASTIC_WAIT": "30"}
    with Job(source, workers=3, servers=2, env=env) as job:
        assert job.workers[1].wait() == (0 if how == "return" else 3)
        for survivor in (job.workers[0], job.workers[2]):
            assert survivor.wait() == 1, survivor.text()
            assert survivor.reports()[-2] == ["step", 20]
            # The one that hears of it later may hear first that the other has failed of it.
            assert "worker 1 has left the job without pushing it" in survivor.reports()[-1][1]


def test_what_needs_all_workers_is_an_error_after_a_loss():
    extra = "if state.step == 30: adapter.session().require_all('gathering objects')"
    source = ENDS.format(extra=extra)
    source = source.replace("import bpsx,", "from bpsx.plugin import adapter; import bpsx,")
    with Job(source, workers=3, servers=2, env={"BPSX_ELASTIC": "shrink"}) as job:
        job.workers[0].wait_for_line('["step", 5]')
        job.workers[1].signal(signal.SIGKILL)
        for survivor in (job.workers[0], job.workers[2]):
            assert survivor.wait() == 1, survivor.text()
            assert survivor.reports()[-1][0] == "PeerLostError"
            assert "gathering objects needs all 3 workers, of which 2 are" in survivor.text()
