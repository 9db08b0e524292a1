"""Worker functions of test_mxnet_training.py that use mxnet.numpy arrays.

They are in a module of their own, because npx.set_np() changes the Parameters of the whole process.
"""

from __future__ import annotations

import tempfile
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import bpsx.mxnet as bps

SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
STEPS = 6


def _trainer(parameter: Any, **more: Any) -> Any:
    params = {"compressor": "onebit", "momentum": "nesterov"}
    return bps.DistributedTrainer(
        [parameter], mx.optimizer.SGD(**SGD, **more), compression_params=params
    )


def _trained(dtype: str) -> np.ndarray:
    """Train one weight with gradients 1 and 3 on the workers.

    The second half uses a new trainer that has loaded the first trainer's states.
    """
    parameter = gluon.Parameter(f"{dtype}_weight", shape=(4,), dtype=dtype, init=mx.init.One())
    parameter.initialize()
    more = {"multi_precision": True} if dtype == "float16" else {}
    trainer = _trainer(parameter, **more)
    for step in range(STEPS):
        if step == STEPS // 2:
            with tempfile.NamedTemporaryFile() as file:
                trainer.save_states(file.name)
                trainer = _trainer(parameter, **more)
                trainer.load_states(file.name)
        with autograd.record():
            loss = parameter.data() * (1.0 + 2 * bps.rank())
        loss.backward()
        trainer.step(1)
    assert isinstance(parameter.data(), mx.np.ndarray)
    return parameter.data().asnumpy().astype("float32")


def _wanted() -> float:
    weight, momentum, decay, mu, wd = 1.0, 0.0, 0.0, SGD["momentum"], SGD["wd"]
    for _ in range(STEPS):
        momentum, decay = mu * momentum + 2.0, mu * decay + wd * weight
        weight -= SGD["learning_rate"] * (2.0 + mu * momentum + wd * weight + mu * decay)
    return weight


def job_numpy_arrays() -> Any:
    mx.npx.set_np()
    return {dtype: (_trained(dtype), np.full(4, _wanted())) for dtype in ("float32", "float16")}
