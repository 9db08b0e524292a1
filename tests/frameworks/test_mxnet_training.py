"""gluon and the Module API on two workers give the results of one worker on the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bpsx.compression.factors import saves_bytes
from bpsx.compression.spec import compression, mix, stream
from bpsx.dtypes import FLOAT_CODES
from bpsx.kernels.reference_low_rank import LowRank
from frameworks.mxnet_scripts import run
from support.mxnet_job import Finished, each, run_job
from support.oracle import Sums

pytestmark = pytest.mark.timeout(300)
WORK = str(Path(__file__).with_name("mxnet_training_work.py"))
STATES = str(Path(__file__).with_name("mxnet_states_work.py"))
NUMPY = str(Path(__file__).with_name("mxnet_numpy_work.py"))
PARTITION = 8192  # of compressed tensors: twice the size of others
JOBS = [
    "job_equality",
    "job_deferred",
    "job_parts",
    "job_thawed",
    "job_uneven_batches",
    "job_stale",
    "job_overflow",
    "job_as_scripts_do",
    "job_files_of_the_root",
    "job_another_optimizer",
    "job_schedules",
    "job_two_trainers",
    "job_module",
    "job_loop",
    "job_decay",
]


def close(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(
        np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True)
    )


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(WORK, JOBS, tmp_path_factory.mktemp("training"))
    assert finished.status == 0, finished.output[-3000:]
    return finished


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(
        WORK,
        ["job_gradients", "job_saved_at_once"],
        tmp_path_factory.mktemp("compressed"),
        BYTEPS_MIN_COMPRESS_BYTES="200",
        BYTEPS_PARTITION_BYTES=str(PARTITION // 2),
    )
    assert finished.status == 0, finished.output[-3000:]
    return finished


def test_training_equals_one_worker_on_the_joined_batch(job: Finished) -> None:
    for found in each(job, "job_equality"):
        assert len(found) == 9
        for name, (alone, ours) in found.items():
            assert close(alone, ours), name
    first, second = each(job, "job_equality")
    assert all(same(first[name][1], second[name][1]) for name in first)


def test_the_first_step_begins_with_the_roots_weights(job: Finished) -> None:
    results = each(job, "job_deferred")
    root = results[1][0]
    assert not same(results[0][0], root) and all(same(after, root) for _, after in results)


def test_gradients_and_updates_by_themselves(job: Finished) -> None:
    for alone, ours in each(job, "job_parts"):
        assert close(alone, ours)


def test_batches_of_different_sizes(job: Finished) -> None:
    """The gradients 1 and 2 average to 1.5 whatever the batch sizes; Nesterov momentum is applied
    to that.
    """
    first, second = each(job, "job_uneven_batches")
    assert np.array_equal(first, second) and np.allclose(
        first, -0.1 * (1.5 * 1.9 + 1.5 + 0.9 * (1.5 + 0.9 * 1.5))
    )


def test_parameters_that_are_trained_later(job: Finished) -> None:
    """Compression's Nesterov momentum makes the weights differ from uncompressed training, but all
    workers must have the same.
    """
    (first, plain), (second, _) = each(job, "job_thawed")
    assert same(first, second) and all(
        not np.allclose(a, b) and np.abs(a - b).max() < 0.1
        for a, b in zip(first, plain, strict=True)
    )


def test_parameters_that_not_all_use(job: Finished) -> None:
    for found, told in each(job, "job_stale"):
        for step, (used, once, never) in enumerate(found, 1):
            assert (used == 1 - step).all() and (once == 1 - step / 2).all() and (never == 1).all()
        assert told.startswith("Gradient of Parameter `branch")


def test_an_overflow_on_one_worker_is_one_on_all(job: Finished) -> None:
    for before, after, later in each(job, "job_overflow"):
        assert (
            same(before, after)
            and not same(after, later)
            and all(np.isfinite(w).all() for w in later)
        )


def test_static_memory_data_loaders_and_updaters_work(job: Finished) -> None:
    for found in each(job, "job_as_scripts_do"):
        assert close(found["alone"], found["static"])
        assert found["updater"] == ["DistributedOptimizer", "SGD", 0.9, [0]]


def test_files_that_one_worker_writes_and_reads(job: Finished) -> None:
    for saved, loaded in each(job, "job_files_of_the_root"):
        assert same(saved, loaded)


def test_states_of_another_optimizer(job: Finished) -> None:
    for one, two in each(job, "job_another_optimizer"):
        assert same(one, two)


def test_schedulers_are_called_as_often_as_by_gluon(job: Finished) -> None:
    for plain, ours in each(job, "job_schedules"):
        assert plain == ours > 0


def test_parameters_of_one_name(job: Finished) -> None:
    for small, large in each(job, "job_two_trainers"):
        assert (
            small.shape == (2, 3)
            and large.shape == (4, 3)
            and (small == -0.5).all()
            and (large == -0.5).all()
        )


def test_the_module_api(job: Finished) -> None:
    for alone, ours, on_two_devices, seen in each(job, "job_module"):
        assert close(list(alone.values()), list(ours.values())) and close(
            list(alone.values()), list(on_two_devices.values())
        )
        assert seen == (0.25, 0.5, 0.25, 0.9, True)


def test_a_loop_with_an_updater(job: Finished) -> None:
    for found in each(job, "job_loop"):
        assert all(np.allclose(want, got) for pairs in found for want, got in pairs)


def test_momentum_and_weight_decay_are_handed_over(job: Finished) -> None:
    for found in each(job, "job_decay"):
        for case, (ours, wanted) in found.items():
            assert (
                close(ours, wanted)
                if case != "half precision"
                else np.allclose(ours, wanted, rtol=5e-4)
            ), case


def test_arrays_of_mxnet_numpy(tmp_path: Path) -> None:
    """Include the momentum and weight decay of mxnet.numpy arrays."""
    finished = run_job(NUMPY, ["job_numpy_arrays"], tmp_path)
    assert finished.status == 0, finished.output[-3000:]
    for found in each(finished, "job_numpy_arrays"):
        for dtype, (ours, wanted) in found.items():
            assert np.allclose(ours, wanted, rtol=5e-3 if dtype == "float16" else 1e-5), (
                dtype,
                ours,
                wanted,
            )


def test_saved_states_contain_compressions_state(tmp_path: Path) -> None:
    env = {"CHECKPOINTS": str(tmp_path), "BYTEPS_MIN_COMPRESS_BYTES": "200"}
    whole = run_job(STATES, ["job_whole"], tmp_path / "whole", **env)
    resumed = run_job(STATES, ["job_second_half", "job_plain_reads"], tmp_path / "resumed", **env)
    assert whole.status == resumed.status == 0, whole.output[-3000:] + resumed.output[-3000:]
    for want, got in zip(each(whole, "job_whole"), each(resumed, "job_second_half"), strict=True):
        assert len(want) == 6
        for case in want:
            assert same(want[case], got[case]), case
    for rates, told in each(resumed, "job_plain_reads"):
        assert rates == [0.05] * 12 and told.startswith(
            "ConfigError: the compression state of 7 bytes cannot be read"
        )


def test_all_take_the_options_that_the_root_has_loaded(tmp_path: Path) -> None:
    job = run_job(STATES, ["job_states_of_the_root"], tmp_path / "job", CHECKPOINTS=str(tmp_path))
    assert job.status == 0, job.output[-3000:]
    found = each(job, "job_states_of_the_root")
    for weights, options in found:
        assert same(weights, found[0][0]) and options == [0.001, 0.5, 0.25, 4.0]


def test_states_that_are_saved_at_once_are_whole(compressed: Finished) -> None:
    for steps in each(compressed, "job_saved_at_once"):
        for at_once, later in steps:
            assert (
                sorted(at_once) == sorted(later)
                and len(at_once) > 10
                and all(np.array_equal(at_once[key], later[key]) for key in later)
            )


def test_compressed_sums_are_the_oracles(compressed: Finished) -> None:
    results = each(compressed, "job_gradients")
    least = results[0][1]
    for case, (params, _) in results[0][0].items():
        rounds = [found[case][1] for found, _ in results]
        for name in rounds[0][0][0]:
            given, got = ([[step[i][name] for step in worker] for worker in rounds] for i in (0, 1))
            if case == "powersgd":
                _check_factored(name, params, given, got, least)
            else:
                _check(case, name, params, given, got, least)


def _check_factored(
    name: str,
    params: dict[str, Any],
    given: list[list[np.ndarray]],
    got: list[list[np.ndarray]],
    least: int,
) -> None:
    """As :func:`_check`, for PowerSGD of rank 1 with Nesterov's momentum."""
    chosen, shape = compression({**params, "mu": 0.9}), given[0][0].shape
    small = given[0][0].nbytes < least or not saves_bytes(chosen, FLOAT_CODES["float32"], shape)
    seed = mix(0, stream(f"Gradient.{name}".encode(), 0))
    oracle = LowRank(len(given), shape[0], int(np.prod(shape[1:])), 1, seed)
    momenta = [np.zeros(shape, np.float32) for _ in given]
    for step in range(len(given[0])):
        pushed = [worker[step] for worker in given]
        momenta = [np.float32(0.9) * m + g for m, g in zip(momenta, pushed, strict=True)]
        pushed = [g + np.float32(0.9) * m for m, g in zip(momenta, pushed, strict=True)]
        want = sum(pushed) if small else oracle.step(pushed).reshape(shape)
        for worker in got:
            assert np.array_equal(worker[step], got[0][step]), "the same bits on all workers"
        assert np.abs(got[0][step] - want).max() < 1e-4 * np.abs(pushed).max(), (name, step)


def _check(
    case: str,
    name: str,
    params: Any,
    given: list[list[np.ndarray]],
    got: list[list[np.ndarray]],
    least: int,
) -> None:
    """Check the results ``got`` for the gradients ``given``, both indexed by worker and step."""
    shape, n = given[0][0].shape, given[0][0].size
    chosen = compression({**params, "mu": 0.9} if params and params.get("momentum") else params)
    small = not params or (chosen.compressor != "" and given[0][0].nbytes < least)
    sums = Sums(f"Gradient.{name}", chosen, n, np.float32, len(given), PARTITION)
    momenta = [np.zeros(n, np.float32) for _ in given]
    rates = [0.1, 0.1, 0.05, 0.05, 0.025]
    for step in range(len(given[0])):
        pushed = [worker[step].reshape(-1) for worker in given]
        if not small:
            want = sums.round(pushed, 1, rates[step - 1] / rates[step] if step else 1.0)
        else:
            if chosen.momentum:
                momenta = [np.float32(0.9) * m + g for m, g in zip(momenta, pushed, strict=True)]
                pushed = [g + np.float32(0.9) * m for m, g in zip(momenta, pushed, strict=True)]
            want = pushed[0] + pushed[1]
        for worker in got:
            assert np.array_equal(worker[step], got[0][step]), "the same bits on all workers"
        differ = ~np.isclose(got[0][step], want.reshape(shape), rtol=1e-5, atol=1e-7)
        assert differ.mean() < 5e-3, (
            case,
            name,
            step,
            differ.sum(),
            got[0][step][differ][:4],
            want.reshape(shape)[differ][:4],
        )


def test_asynchronous_training_of_weights_in_other_layouts_and_of_numpy_arrays() -> None:
    """MKL-DNN reorders weights of convolutions; npx.set_np() changes the class of weights."""
    status, lines, output = run(
        """
bps.init()
def train(net, x):
    net.initialize(mx.init.Constant(1.0))
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    net(x)
    for _ in range(3):
        with autograd.record():
            loss = net(x).sum()
        loss.backward()
        trainer.step(1)
    print(sorted({float(w) for w in net.weight.data().asnumpy().ravel()}))

train(gluon.nn.Conv2D(32, 3, in_channels=16, use_bias=False), mx.nd.ones((1, 16, 3, 3)))
mx.npx.set_np()
train(gluon.nn.Dense(2, in_units=3, use_bias=False), mx.np.ones((1, 3)))
""",
        1,
        BYTEPS_ENABLE_ASYNC="1",
        BYTEPS_FORCE_DISTRIBUTED="1",
    )
    assert (status, lines) == (0, {0: ["[-2.0]"] * 2}), output


def test_asynchronous_training_adds_steps_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    finished = run_job(
        WORK, ["job_async"], tmp_path_factory.mktemp("async"), BYTEPS_ENABLE_ASYNC="1"
    )
    assert finished.status == 0, finished.output[-3000:]
    for weight, array, another, devices, told in each(finished, "job_async"):
        assert (
            (weight == 1.0 - 6).all()
            and (array == 5.0 - 6).all()
            and (another == 50.0 - 6).all()
            and (devices == -22).all()
        )
        assert (
            "call step()" in told[0]
            and "call step()" in told[1]
            and "multi_precision=True" in told[2]
            and "compression_params cannot be used" in told[3]
        )
