"""compression_params' momentum is the same in all frameworks, on one worker and on several."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from support.jobs import Job
from support.optional import OPTIONAL, why_missing

#: Workers, servers and processes on each machine.
JOBS = {
    "one worker": (1, 0, 1),
    "one worker and a server": (1, 1, 1),
    "two workers": (2, 1, 1),
    "two processes of one machine": (2, 0, 2),
}
#: Powers of two, so that frameworks may round products or not: the bits are the same.
RATE, DECAY = 0.125, 0.0625
STEPS = 5
#: Elements: those of the larger tensors are compressed, if anything is.
SIZES = {"small": 8, "large": 32}
#: The optimizer's momentum, whether it is Nesterov's already, weight decay, and what
#: compression_params say of it.
CASES: dict[str, tuple[float, bool, float, dict[str, Any]]] = {
    "heavy_ball": (0.9, False, 0.0, {}),
    "nesterov": (0.9, True, 0.0, {}),
    "none_of_its_own": (0.0, False, 0.0, {"mu": 0.9}),
    "decay": (0.9, False, DECAY, {}),
    "decay_onebit": (0.9, False, DECAY, {"compressor": "onebit"}),
}

_COMMON = f"""
    import numpy as np

    RATE, STEPS, CASES, SIZES = {RATE}, {STEPS}, {CASES}, {SIZES}
    found = {{}}


    def gradient(step, size):
        return np.random.default_rng([step, size]).normal(size=size).astype(np.float32)


    def each():
        for size in SIZES.values():
            for case, (momentum, nesterov, decay, more) in CASES.items():
                params = {{"compressor": "topk", "k": size, "momentum": "nesterov", **more}}
                if params["compressor"] == "onebit" and size > SIZES["small"]:
                    continue  # it would lose something
                yield f"{{case}}.{{size}}", size, momentum, nesterov, decay, params
"""
SOURCES = {
    "torch": """
    import torch
    import bpsx.torch as bps

    bps.init()
    for name, size, momentum, nesterov, decay, params in each():
        w = torch.nn.Parameter(torch.ones(size))
        optimizer = torch.optim.SGD(
            [w], lr=RATE, momentum=momentum, nesterov=nesterov, weight_decay=decay
        )
        optimizer = bps.DistributedOptimizer(optimizer, [(name, w)], compression_params=params)
        for step in range(STEPS):
            optimizer.zero_grad()
            (w * torch.from_numpy(gradient(step, size))).sum().backward()
            optimizer.step()
        found[name] = w.tolist()
""",
    "tensorflow": """
    import keras
    import tensorflow as tf
    import bpsx.tensorflow as bps

    bps.init()
    for name, size, momentum, nesterov, decay, params in each():
        w = tf.Variable(tf.ones(size), name=name)
        optimizer = keras.optimizers.SGD(RATE, momentum, nesterov, weight_decay=decay)
        optimizer = bps.DistributedOptimizer(optimizer, compression_params=params)
        for step in range(STEPS):
            optimizer.apply([tf.constant(gradient(step, size))], [w])
        found[name] = w.numpy().tolist()
""",
    "mxnet": """
    import bpsx.mxnet as bps
    import mxnet as mx

    bps.init()
    for name, size, momentum, nesterov, decay, params in each():
        parameter = mx.gluon.Parameter(name, shape=(size,), init=mx.init.One())
        parameter.initialize()
        trainer = bps.DistributedTrainer(
            [parameter],
            "nag" if nesterov else "sgd",
            {"learning_rate": RATE, "momentum": momentum, "wd": decay},
            compression_params=params,
        )
        for step in range(STEPS):
            with mx.autograd.record():
                loss = (parameter.data() * mx.nd.array(gradient(step, size))).sum()
            loss.backward()
            trainer.step(1)
        found[name] = parameter.data().asnumpy().tolist()
""",
}
_END = """
    report(found)
    bps.shutdown()
"""


@functools.cache
def weights(framework: str, job: str) -> list[dict[str, list[float]]]:
    """Return each worker's weights after training, by case and size."""
    if framework in OPTIONAL and (reason := why_missing(framework)):
        pytest.skip(reason)
    workers, servers, processes = JOBS[job]
    env = {"BYTEPS_MIN_COMPRESS_BYTES": "100", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if servers and workers == 1:
        env["BYTEPS_FORCE_DISTRIBUTED"] = "1"
    source = _COMMON + SOURCES[framework] + _END
    alone = workers + servers == 1
    with Job(source, workers, servers, processes=processes, alone=alone, env=env) as running:
        return [found for (found,) in running.results()]


def oracle(name: str, framework: str) -> np.ndarray:
    """Return the weights after Nesterov's momentum of the gradients, in float64.

    With onebit weight decay has one, too, but not Keras's, which is not part of the gradient.
    """
    case, size = name.split(".")[0], int(name.split(".")[1])
    momentum, _, decay, more = CASES[case]
    of_decay = "compressor" in more and framework != "tensorflow"
    w, m, d, mu = np.ones(size), np.zeros(size), np.zeros(size), more.get("mu", momentum)
    for step in range(STEPS):
        g = np.random.default_rng([step, size]).normal(size=size).astype(np.float32)
        m, d = mu * m + g, mu * d + decay * w
        w -= RATE * (g + mu * m + decay * w + of_decay * mu * d)
    return w


@pytest.mark.parametrize("framework", SOURCES)
def test_momentum_is_nesterovs_with_the_same_bits_on_any_number_of_workers(framework: str) -> None:
    first, *others = (found for job in JOBS for found in weights(framework, job))
    for name, found in first.items():
        wanted = oracle(name, framework)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6, err_msg=name)
    assert len(first) == 2 * len(CASES) - 1
    assert all(found == first for found in others)


@pytest.mark.parametrize("framework", ["tensorflow", "mxnet"])
def test_weights_have_the_same_bits_in_all_frameworks(framework: str) -> None:
    """But with weight decay, which Keras subtracts before the gradient."""
    (ours,), (others,) = weights("torch", "one worker"), weights(framework, "one worker")
    assert all(ours[name] == others[name] for name in ours if not name.startswith("decay"))
