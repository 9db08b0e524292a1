"""Worker functions of test_mxnet_alike.py: optimizers with state after join(), and half precision
with a scaled loss.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import bpsx.mxnet as bps

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.1, "momentum": 0.9}},
    "adam": {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}},
    "half": {
        "optimizer": "sgd",
        "optimizer_params": {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True},
    },
    "decay": {
        "optimizer": "sgd",
        "optimizer_params": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1},
        "compression_params": {"compressor": "onebit", "momentum": "nesterov"},
    },
}


def _steps(parameter: Any, trainer: Any, first: int, last: int) -> None:
    """Train ``parameter`` on data that differs between workers."""
    for step in range(first, last):
        x = np.random.default_rng([step, bps.rank()]).normal(size=(4, 6))
        with autograd.record():
            loss = ((parameter.data() * mx.nd.array(x, dtype=parameter.dtype)) ** 2).sum()
        loss.backward()
        trainer.step(4)


def job_join() -> Any:
    """Worker 1 joins after two steps and worker 0 makes three more; then both continue from worker
    0's state.
    """
    found = {}
    for case, options in CASES.items():
        parameter = gluon.Parameter(
            f"{case}_weight",
            shape=(6,),
            dtype="float16" if case == "half" else "float32",
            init=mx.init.One(),
        )
        parameter.initialize()
        trainer = bps.DistributedTrainer([parameter], **options)
        _steps(parameter, trainer, 0, 2 if bps.rank() else 5)
        last = bps.join()
        bps.broadcast_parameters({case: parameter}, root_rank=last)
        bps.broadcast_optimizer_state(trainer, root_rank=last)
        before = parameter.data().asnumpy()
        _steps(parameter, trainer, 5, 8)
        found[case] = last, before, parameter.data().asnumpy(), trainer._optimizer.num_update
    return found


def job_half() -> Any:
    """Train with gradients that float16 can hold only because the loss is scaled.

    Returns pairs (weights, expected weights).
    """
    wanted = np.array([1e-4, 2e-6, 1e-7])
    found = {}
    for scale, batch in ((1024.0, 64), (8192.0, 8)):
        parameter = gluon.Parameter(
            f"half{int(scale)}_weight", shape=(3,), dtype="float16", init=mx.init.Zero()
        )
        parameter.initialize()
        optimizer = mx.optimizer.SGD(
            learning_rate=1.0, multi_precision=True, rescale_grad=1 / scale
        )
        trainer = bps.DistributedTrainer([parameter], optimizer)
        for _ in range(2):
            with autograd.record():
                loss = (
                    parameter.data() * mx.nd.array(wanted * batch * scale, dtype="float16")
                ).sum()
            loss.backward()
            trainer.step(batch)
        found[scale] = trainer._updaters[0].states[0][1].asnumpy(), -2 * wanted
    return found
