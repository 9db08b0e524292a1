"""Worker functions of test_mxnet_training.py that save and load a Trainer's states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from mxnet import gluon
from mxnet_training_work import RESUMED, ROWS, SGD, backward, data, network, weights

import bpsx.mxnet as bps


def _trained(case: str, begin: int, end: int) -> list[np.ndarray]:
    """Train from ``begin`` to ``end``, starting from this worker's checkpoint unless ``begin`` is
    0.

    Writes a checkpoint after four steps.
    """
    net = network(f"{case}_", seed=begin)
    trainer = bps.DistributedTrainer(
        net.collect_params(), "sgd", {**SGD, "learning_rate": 0.1}, compression_params=RESUMED[case]
    )
    file = str(Path(os.environ["CHECKPOINTS"], f"{case}.{bps.rank()}"))
    if begin:
        net.load_parameters(f"{file}.weights")
        trainer.load_states(file)
    for step in range(begin, end):
        trainer.set_learning_rate(0.1 / (1 + step // 3))
        backward(net, *data(step, bps.rank()))
        trainer.step(ROWS)
        if step == 3:
            net.save_parameters(f"{file}.weights")
            trainer.save_states(file)
    return weights(net)


def job_whole() -> Any:
    return {case: _trained(case, 0, 8) for case in RESUMED}


def job_second_half() -> Any:
    return {case: _trained(case, 4, 8) for case in RESUMED}


def job_states_of_the_root() -> Any:
    """Worker 0 alone loads a checkpoint, which has its own learning rate, momentum and decay."""
    net = network("rooted_", seed=bps.rank())
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    if bps.rank() == 0:
        file = str(Path(os.environ["CHECKPOINTS"], "rooted"))
        saved = {"learning_rate": 0.001, "momentum": 0.5, "wd": 0.25, "clip_gradient": 4.0}
        other = gluon.Trainer(
            network("saved_").collect_params(), "sgd", saved, kvstore=None, update_on_kvstore=False
        )
        other.save_states(file)
        trainer.load_states(file)
    for step in range(3):
        backward(net, *data(step, bps.rank()))
        trainer.step(ROWS)
    used = trainer._optimizer
    return weights(net), [used.lr, used.momentum, used.wd, used.clip_gradient]


def job_plain_reads() -> Any:
    """gluon's own Trainer loads files that contain bpsx's part, and bpsx's trainer loads gluon's
    files.
    """
    found = []
    for case in RESUMED:
        file = str(Path(os.environ["CHECKPOINTS"], f"{case}.{bps.rank()}"))
        net = network(f"{case}_reads_")
        plain = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=None)
        plain.load_states(file)
        found.append(plain.learning_rate)
        plain.save_states(f"{file}.plain")
        other = bps.DistributedTrainer(
            net.collect_params(), "sgd", dict(SGD), compression_params=RESUMED[case]
        )
        other.load_states(f"{file}.plain")
        backward(net, *data(0, bps.rank()))
        other.step(ROWS)
        found.append(other.learning_rate)
        weights(net)
    Path(f"{file}.broken").write_bytes(
        Path(f"{file}.plain").read_bytes() + b"garbage" + (7).to_bytes(8, "little") + b"bpsx.mx1"
    )
    try:
        other.load_states(f"{file}.broken")
    except Exception as e:
        return found, f"{type(e).__name__}: {e}"
    return found, "nothing"
