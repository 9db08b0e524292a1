"""Worker functions of test_mxnet_training.py: gluon's Trainer and the Module API.

Each trains on two workers and, for comparison, alone on the joined batch.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import bpsx.mxnet as bps
from bpsx.api.verbs import session
from bpsx.mxnet import checkpoint

WORKERS, ROWS, STEPS = 2, 8, 5
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def data(step: int, rank: int | None = None) -> tuple[Any, Any]:
    """Return the batch of worker ``rank``, or the joined batch for None."""
    rng = np.random.default_rng(step)
    x, y = (
        rng.normal(size=(WORKERS * ROWS, 1, 8, 8)).astype("f4"),
        rng.integers(0, 5, WORKERS * ROWS),
    )
    part = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return mx.nd.array(x[part]), mx.nd.array(y[part])


def network(
    prefix: str, seed: int = 0, hybrid: bool = True, contexts: Any = None, deferred: bool = False
) -> Any:
    mx.random.seed(seed)
    np.random.seed(seed)
    net = gluon.nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(
            gluon.nn.Conv2D(4, 3, activation="relu", in_channels=0 if deferred else 1),
            gluon.nn.Flatten(),
            gluon.nn.Dense(16, activation="relu", in_units=0 if deferred else 144),
            gluon.nn.Dense(5, in_units=0 if deferred else 16),
        )
    net.initialize(mx.init.Xavier(), ctx=contexts)
    if hybrid:
        net.hybridize()
    return net


def weights(net: Any) -> list[np.ndarray]:
    return [p.data(p.list_ctx()[0]).asnumpy() for p in net.collect_params().values()]


def backward(net: Any, x: Any, y: Any) -> None:
    """Run forward and backward on each of the network's devices, with its part of the batch."""
    contexts = net.collect_params().list_ctx()
    for a, b in zip(
        gluon.utils.split_and_load(x, contexts),
        gluon.utils.split_and_load(y, contexts),
        strict=True,
    ):
        with autograd.record():
            loss = LOSS(net(a), b)
        loss.backward()


def alone(
    optimizer: Any, options: Any, *, net: Any = None, steps: int = STEPS, every: int = 1
) -> list[np.ndarray]:
    """Train on the joined batch without bpsx."""
    net = net or network("alone_")
    trainer = gluon.Trainer(net.collect_params(), optimizer, dict(options), kvstore=None)
    for step in range(steps):
        backward(net, *data(step))
        if (step + 1) % every == 0:
            trainer.step(every * WORKERS * ROWS)
            net.collect_params().zero_grad()
    return weights(net)


def ours(
    prefix: str,
    optimizer: Any,
    options: Any,
    *,
    net: Any = None,
    steps: int = STEPS,
    first: int = 0,
    **more: Any,
) -> list[np.ndarray]:
    net = net or network(prefix)
    trainer = bps.DistributedTrainer(net.collect_params(), optimizer, dict(options), **more)
    for step in range(first, steps):
        backward(net, *data(step, bps.rank()))
        trainer.step(ROWS)
    return weights(net)


SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", SGD),
    "nag": ("nag", SGD),
    "adam": ("adam", {"learning_rate": 0.01}),
    "clipped": ("sgd", {**SGD, "clip_gradient": 0.01}),
    "rmsprop": ("rmsprop", {"learning_rate": 0.01}),
    "lamb": ("lamb", {"learning_rate": 0.01}),
}


def job_equality() -> Any:
    found = {name: (alone(*case), ours(f"{name}_", *case)) for name, case in CASES.items()}
    found["not hybrid"] = (
        alone("sgd", SGD),
        ours("plain_", "sgd", SGD, net=network("plain_", hybrid=False)),
    )
    found["two devices"] = (
        alone("sgd", SGD),
        ours("devices_", "sgd", SGD, net=network("devices_", contexts=[mx.cpu(0), mx.cpu(1)])),
    )
    schedule = {
        "learning_rate": 0.1,
        "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1),
    }
    other = {
        "learning_rate": 0.1,
        "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1),
    }
    found["schedule"] = alone("sgd", schedule), ours("schedule_", "sgd", other)
    return found


def job_deferred() -> Any:
    """Train a network whose shapes are known only after the first forward pass.

    The workers start with different weights, and all continue with worker 1's.
    """
    net = network("deferred_", seed=bps.rank(), deferred=True)
    trainer = bps.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.0}, root_rank=1
    )
    backward(net, *data(0, bps.rank()))
    before = weights(net)
    trainer.step(ROWS)
    return before, weights(net)


def job_parts() -> Any:
    """Call allreduce_grads(), clip, then update(), with the grad_req values null and add."""
    net, plain = network("parts_"), network("parts_alone_")
    for n in (net, plain):
        params = n.collect_params()
        params.setattr("grad_req", "add")
        next(iter(params.values())).grad_req = "null"
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", dict(SGD))
    for step in range(4):
        backward(net, *data(step, bps.rank()))
        if step % 2:
            trainer.allreduce_grads()
            trainer.update(2 * ROWS)
            net.collect_params().zero_grad()
    return alone("sgd", SGD, net=plain, steps=4, every=2), weights(net)


def job_thawed() -> Any:
    """Train a Parameter only from the third step on; compression holds the momentum of all
    Parameters.
    """
    found = []
    for i, params in enumerate(({"compressor": "onebit", "momentum": "nesterov"}, None)):
        net = network(f"thawed{i}_")
        frozen = next(iter(net.collect_params().values()))
        frozen.grad_req = "null"
        trainer = bps.DistributedTrainer(
            net.collect_params(), "sgd", {**SGD, "wd": 0.0}, compression_params=params
        )
        for step in range(STEPS):
            if step == 2:
                frozen.grad_req = "write"
            backward(net, *data(step, bps.rank()))
            trainer.step(ROWS)
        found.append(weights(net))
    return found


def job_uneven_batches() -> Any:
    """Train with batches of different sizes; each worker's gradient is the mean over its own batch.

    Compression holds the momentum.
    """
    net = gluon.nn.Dense(2, in_units=3, use_bias=False, prefix="uneven_")
    net.initialize(mx.init.Zero())
    params = {"compressor": "onebit", "momentum": "nesterov"}
    trainer = bps.DistributedTrainer(
        net.collect_params(), "sgd", dict(SGD, wd=0.0), compression_params=params
    )
    for rows in ((3, 5), (1, 40)):
        with autograd.record():
            loss = net(mx.nd.ones((rows[bps.rank()], 3)) * (1 + bps.rank())).sum()
        loss.backward()
        trainer.step(rows[bps.rank()])
    return net.weight.data().asnumpy()


def job_stale() -> Any:
    """Train with one branch that only one worker uses, and one that no worker uses."""
    found = []
    branches = [gluon.nn.Dense(2, in_units=3, prefix=f"branch{i}_") for i in range(3)]
    for branch in branches:
        branch.initialize(mx.init.One())
    params = {name: p for branch in branches for name, p in branch.collect_params().items()}
    trainer = bps.DistributedTrainer(params, "sgd", {"learning_rate": 1.0})
    for step in range(2):
        with autograd.record():
            out = branches[0](mx.nd.ones((1, 3))).sum()
            if bps.rank() == step:
                out = out + branches[1](mx.nd.ones((1, 3))).sum()
        out.backward()
        trainer.step(1, ignore_stale_grad=True)
        found.append([branch.weight.data().asnumpy().copy() for branch in branches])
    try:
        trainer.step(1)
    except UserWarning as e:
        return found, str(e)[:60]
    return found, ""


def job_overflow() -> Any:
    """An infinity on one worker must reach all workers, as MXNet's loss scaling requires."""

    class Scaler:
        loss_scale = 1.0

        def has_overflow(self, params: Any) -> bool:
            return not all(np.isfinite(p.grad().asnumpy()).all() for p in params)

    net = network("overflow_")
    trainer = bps.DistributedTrainer(
        net.collect_params(),
        "sgd",
        dict(SGD),
        compression_params={"compressor": "onebit", "momentum": "nesterov"},
    )
    trainer._amp_loss_scaler = Scaler()
    backward(net, *data(0, bps.rank()))
    trainer.step(ROWS)
    before = weights(net)
    backward(net, *data(1, bps.rank()))
    if bps.rank() == 1:
        for p in net.collect_params().values():
            p.grad()[:] = np.inf
    trainer.step(ROWS)
    after = weights(net)
    backward(net, *data(2, bps.rank()))
    trainer.step(ROWS)
    return before, after, weights(net)


def job_as_scripts_do() -> Any:
    """Use static memory of hybridized blocks and data-loading processes, and save states before the
    first step, also those of an updater.
    """
    found = {"alone": alone("sgd", SGD)}
    net = network("static_")
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = bps.DistributedTrainer(
        net.collect_params(), "sgd", dict(SGD), compression_params={"fp16": False}
    )
    with tempfile.NamedTemporaryFile() as file:
        trainer.save_states(file.name)
        trainer.load_states(file.name)
    pictures = gluon.data.ArrayDataset(
        *(
            mx.nd.concat(*part, dim=0)
            for part in zip(*(data(step, bps.rank()) for step in range(STEPS)), strict=True)
        )
    )
    for x, y in gluon.data.DataLoader(pictures, ROWS, num_workers=2):
        backward(net, x, y)
        trainer.step(ROWS)
    found["static"] = weights(net)
    updater = mx.optimizer.get_updater(bps.DistributedOptimizer(mx.optimizer.create("sgd", **SGD)))
    other = mx.optimizer.get_updater(bps.DistributedOptimizer(mx.optimizer.create("adam")))
    array = mx.nd.ones((3,))
    updater(0, mx.nd.ones((3,)), array)
    other.set_states(updater.get_states(dump_optimizer=True))
    found["updater"] = [
        type(other.optimizer).__name__,
        type(other.optimizer._optimizer).__name__,
        other.optimizer.momentum,
        list(other.states),
    ]
    other(0, mx.nd.ones((3,)), array)
    array.wait_to_read()
    return found


def job_files_of_the_root() -> Any:
    """Load a checkpoint that worker 0 wrote before the first step.

    All workers load the states first; then worker 0 alone loads the weights.
    """
    net, other = network("root_", seed=bps.rank()), network("other_", seed=7)
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    with tempfile.TemporaryDirectory() as folder:
        states, params = f"{folder}/states", f"{folder}/params"
        saves = (
            trainer
            if bps.rank() == 0
            else gluon.Trainer(
                network("states_").collect_params(), "sgd", {"learning_rate": 0.0}, kvstore=None
            )
        )
        saves.save_states(states)
        other.save_parameters(params)
        trainer.load_states(states)
        if bps.rank() == 0:
            net.load_parameters(params)
    backward(net, *data(0, bps.rank()))
    trainer.step(ROWS)
    return weights(other), weights(net)


def job_another_optimizer() -> Any:
    """Load states of SGD, whose momentum compression holds, into a trainer made for Adam.

    The trainer must continue as SGD.
    """
    taken = {"compressor": "topk", "k": 0.5, "momentum": "nesterov", "ef": "vanilla"}

    def steps(net: Any, trainer: Any, numbers: range) -> list[np.ndarray]:
        for step in numbers:
            backward(net, *data(step, bps.rank()))
            trainer.step(ROWS)
        return weights(net)

    first, second = network("sgds_"), network("adams_")
    one = bps.DistributedTrainer(first.collect_params(), "sgd", dict(SGD), compression_params=taken)
    two = bps.DistributedTrainer(
        second.collect_params(), "adam", compression_params={**taken, "mu": SGD["momentum"]}
    )
    with tempfile.TemporaryDirectory() as folder:
        steps(first, one, range(2))
        steps(second, two, range(1))
        one.save_states(f"{folder}/states")
        for old, new in zip(
            first.collect_params().values(), second.collect_params().values(), strict=True
        ):
            new.set_data(old.data())
        two.load_states(f"{folder}/states")
    return steps(first, one, range(2, 4)), steps(second, two, range(2, 4))


class Counting(mx.lr_scheduler.LRScheduler):  # type: ignore[misc]
    """Scheduler that counts how often it is asked for the rate."""

    calls = 0

    def __call__(self, num_update: int) -> float:
        self.calls += 1
        return float(self.base_lr)


def job_schedules() -> Any:
    """Check that the scheduler is called as often as by gluon's Trainer, and use compression_params
    that name a frozen Parameter.
    """
    counts = []
    for kind in (gluon.Trainer, bps.DistributedTrainer):
        net = network(f"schedule_{kind.__name__}_".lower())
        first, *_ = net.collect_params().values()
        first.grad_req = "null"
        more = (
            {"kvstore": None}
            if kind is gluon.Trainer
            else {"compression_params": {first.name: {"compressor": "topk", "k": 1}}}
        )
        scheduler = Counting(0.1)
        trainer = kind(
            net.collect_params(), "sgd", {"learning_rate": 0.1, "lr_scheduler": scheduler}, **more
        )
        before = first.data().asnumpy()
        for step in range(3):
            backward(net, *data(step, bps.rank()))
            trainer.step(ROWS)
        assert (first.data().asnumpy() == before).all()
        counts.append(scheduler.calls)
    return counts


def job_two_trainers() -> Any:
    """Two trainers have Parameters of the same name with different shapes."""
    small, large = (gluon.nn.Dense(n, in_units=3, prefix="same_") for n in (2, 4))
    for net in (small, large):
        net.initialize(mx.init.One())
        trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
        with autograd.record():
            loss = net(mx.nd.ones((1, 3)) * (bps.rank() + 1)).sum()
        loss.backward()
        trainer.step(1)
    return [net.weight.data().asnumpy() for net in (small, large)]


def job_module() -> Any:
    """Use the Module API alone and with DistributedOptimizer, also on two devices per worker."""

    def fit(optimizer: Any, rank: int | None, devices: int = 1) -> dict[str, np.ndarray]:
        x = mx.sym.FullyConnected(
            mx.sym.Activation(
                mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="one"),
                act_type="relu",
            ),
            num_hidden=5,
            name="two",
        )
        module = mx.mod.Module(
            mx.sym.SoftmaxOutput(x, name="softmax", normalization="batch"),
            context=[mx.cpu(i) for i in range(devices)],
        )
        rng = np.random.default_rng(1)
        rows = ROWS if rank is not None else WORKERS * ROWS
        features, labels = (
            rng.normal(size=(4, WORKERS, ROWS, 6)).astype("f4"),
            rng.integers(0, 5, (4, WORKERS, ROWS)),
        )
        part = slice(None) if rank is None else slice(rank, rank + 1)
        batches = mx.io.NDArrayIter(
            features[:, part].reshape(-1, 6),
            labels[:, part].reshape(-1).astype("f4"),
            rows,
            label_name="softmax_label",
        )
        start = {
            name: mx.nd.array(np.random.default_rng(i).normal(size=shape) / 3)
            for i, (name, shape) in enumerate(
                (
                    ("one_weight", (8, 6)),
                    ("one_bias", (8,)),
                    ("two_weight", (5, 8)),
                    ("two_bias", (5,)),
                )
            )
        }
        module.fit(
            batches,
            num_epoch=2,
            optimizer=optimizer,
            kvstore="local" if devices > 1 else None,
            arg_params=start,
            eval_metric="acc",
        )
        return {name: value.asnumpy() for name, value in module.get_params()[0].items()}

    plain = mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9)
    inner = mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9)
    optimizer = bps.DistributedOptimizer(inner)
    # Each device divides by its own batch size, and their gradients are summed.
    two = bps.DistributedOptimizer(
        mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, rescale_grad=1 / 2)
    )
    result = fit(plain, None), fit(optimizer, bps.rank()), fit(two, bps.rank(), 2)
    optimizer.set_learning_rate(0.25)
    optimizer.rescale_grad = 0.5
    return (
        *result,
        (
            inner.lr,
            inner.rescale_grad,
            optimizer.learning_rate,
            optimizer.momentum,
            isinstance(optimizer, mx.optimizer.Optimizer),
        ),
    )


def job_loop() -> Any:
    """Use an updater in a training loop of the script, also with several indices per call."""
    found = []
    for several in (False, True):
        updater = mx.optimizer.get_updater(
            bps.DistributedOptimizer(mx.optimizer.create("adam", learning_rate=0.1))
        )
        arrays = [mx.nd.ones((3,)) * i for i in range(3)]
        for step in range(3):
            grads = [mx.nd.ones((3,)) * (bps.rank() + step + i) for i in range(3)]
            if several:
                updater(list(range(3)), grads, arrays)
            else:
                for i in range(3):
                    updater(i, grads[i], arrays[i])
        plain = mx.optimizer.get_updater(mx.optimizer.create("adam", learning_rate=0.1))
        wanted = [mx.nd.ones((3,)) * i for i in range(3)]
        for step in range(3):
            for i in range(3):
                plain(i, mx.nd.ones((3,)) * (0.5 + step + i), wanted[i])
        found.append([(w.asnumpy(), a.asnumpy()) for w, a in zip(wanted, arrays, strict=True)])
    return found


RESUMED: dict[str, Any] = {
    "onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov"},
    "topk": {"compressor": "topk", "k": 0.05, "ef": "corrected", "momentum": "nesterov"},
    "randomk": {"compressor": "randomk", "k": 0.2, "ef": "sparse", "seed": 5},
    "none": None,
    "dithering": {"compressor": "dithering", "k": 4, "seed": 5, "ef": "vanilla"},
    "powersgd": {"compressor": "powersgd", "rank": 1, "ef": "vanilla", "momentum": "nesterov"},
}


def job_saved_at_once() -> Any:
    """Save right after a step, before waiting for any of its results."""
    net = network("at_once_")
    trainer = bps.DistributedTrainer(
        net.collect_params(),
        "sgd",
        dict(SGD),
        compression_params={"compressor": "topk", "k": 0.05, "ef": "vanilla"},
    )
    found = []
    for step in range(3):
        backward(net, *data(step, bps.rank()))
        trainer.step(ROWS)
        kept = []
        for _ in range(2):
            with tempfile.NamedTemporaryFile() as file:
                trainer.save_states(file.name)
                kept.append(checkpoint.read(file.name))
            mx.nd.waitall()
        found.append(
            [
                {
                    (i, key): np.asarray(value)
                    for i, state in saved.items()
                    for key, value in state.items()
                }
                for saved in kept
            ]
        )
    return found


def _by_hand(decay_has_momentum: bool) -> list[np.ndarray]:
    """Compute training on the joined batch by hand, with Nesterov momentum of the gradients and, on
    request, of weight decay.
    """
    net, rate, mu, wd = network("by_hand_"), SGD["learning_rate"], SGD["momentum"], SGD["wd"]
    now = weights(net)
    momenta, decays = ([np.zeros_like(w) for w in now] for _ in range(2))
    for step in range(STEPS):
        backward(net, *data(step))
        for i, p in enumerate(net.collect_params().values()):
            gradient = p.grad().asnumpy() / (WORKERS * ROWS)
            momenta[i] = mu * momenta[i] + gradient
            decays[i] = mu * decays[i] + wd * now[i]
            now[i] = now[i] - rate * (
                gradient + mu * momenta[i] + wd * now[i] + decay_has_momentum * mu * decays[i]
            )
            p.set_data(mx.nd.array(now[i]))
    return now


def _half(params: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Train a float16 weight with a float32 master copy and gradients 1 and 3 on the workers.

    Returns the weight and its expected value.
    """
    parameter = gluon.Parameter("half_weight", shape=(4,), dtype="float16", init=mx.init.One())
    parameter.initialize()
    trainer = bps.DistributedTrainer(
        [parameter], mx.optimizer.SGD(multi_precision=True, **SGD), compression_params=params
    )
    weight, momentum, decay, mu, wd, rate = (
        1.0,
        0.0,
        0.0,
        SGD["momentum"],
        SGD["wd"],
        SGD["learning_rate"],
    )
    for _ in range(STEPS):
        with autograd.record():
            loss = parameter.data() * (1.0 + 2 * bps.rank())
        loss.backward()
        trainer.step(1)
        momentum, decay = mu * momentum + 2.0, mu * decay + wd * float(np.float16(weight))
        weight -= rate * (2.0 + mu * momentum + wd * weight + mu * decay)
    found = [trainer._updaters[0].states[0][-1].asnumpy(), parameter.data().asnumpy().astype("f4")]
    return found, [np.full(4, weight), np.full(4, weight)]


def job_decay() -> Any:
    """Use compressors on tensors that are too small for them, so nothing is lost.

    With onebit, weight decay has a momentum, too. NAG is compared with MXNet's own.
    """
    params: dict[str, Any] = {"compressor": "onebit", "momentum": "nesterov"}
    plain = {**SGD, "wd": 0.0}
    return {
        "onebit": (ours("decay_", "sgd", SGD, compression_params=params), _by_hand(True)),
        "topk": (
            ours(
                "topk_decay_",
                "sgd",
                SGD,
                compression_params={**params, "compressor": "topk", "k": 3},
            ),
            _by_hand(False),
        ),
        "nag": (ours("nag_decay_", "nag", plain, compression_params=params), alone("nag", plain)),
        "several devices": (
            ours(
                "devices_decay_",
                "sgd",
                SGD,
                compression_params=params,
                net=network("devices_decay_", contexts=[mx.cpu(0), mx.cpu(1)]),
            ),
            _by_hand(True),
        ),
        "half precision": _half(params),
        "mu": (
            ours(
                "mu_decay_",
                "sgd",
                {**SGD, "momentum": 0.0},
                compression_params={**params, "mu": 0.9},
            ),
            _by_hand(True),
        ),
    }


def job_async() -> Any:
    """Train asynchronously: servers add changes of weights, from gluon's Trainer and from an
    updater.
    """
    net = gluon.nn.Dense(2, in_units=3, use_bias=False, prefix="async_")
    net.initialize(mx.init.Constant(bps.rank() + 1.0))
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    for _ in range(3):
        with autograd.record():
            loss = net(mx.nd.ones((1, 3))).sum()
        loss.backward()
        trainer.step(1)
    net.weight.data().wait_to_read()
    updater, other = (
        mx.optimizer.get_updater(
            bps.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
        )
        for _ in range(2)
    )
    array, another = (
        mx.nd.ones((3,)) * 5 * (bps.rank() + 1),
        mx.nd.ones((3,)) * 50 * (bps.rank() + 1),
    )
    for _ in range(3):
        updater("mine", mx.nd.ones((3,)), array)
        other("mine", mx.nd.ones((3,)), another)
    array.wait_to_read()
    another.wait_to_read()
    devices = gluon.nn.Dense(2, in_units=3, use_bias=False, prefix="async_devices_")
    devices.initialize(mx.init.Zero(), ctx=[mx.cpu(0), mx.cpu(1)])
    of_devices = bps.DistributedTrainer(devices.collect_params(), "sgd", {"learning_rate": 1.0})

    def step_on_devices(factor: float) -> None:
        for i, ctx in enumerate((mx.cpu(0), mx.cpu(1))):
            with autograd.record():
                loss = devices(mx.nd.ones((1, 3), ctx=ctx) * (1 + 9 * i) * factor).sum()
            loss.backward()
        of_devices.step(1)
        mx.nd.waitall()

    step_on_devices(1.0)
    session().barrier()
    with autograd.record():
        loss = (net(mx.nd.zeros((1, 3)))).sum()
    loss.backward()
    trainer.step(1)
    updater("mine", mx.nd.zeros((3,)), array)
    other("mine", mx.nd.zeros((3,)), another)
    step_on_devices(0.0)
    half = mx.optimizer.get_updater(
        bps.DistributedOptimizer(mx.optimizer.create("sgd", multi_precision=True))
    )
    told = []
    for call in (
        trainer.allreduce_grads,
        lambda: trainer.update(1),
        lambda: half(0, mx.nd.ones((3,), dtype="float16"), mx.nd.ones((3,), dtype="float16")),
        lambda: bps.DistributedTrainer(
            net.collect_params(), "sgd", compression_params={"compressor": "onebit"}
        ).step(1),
    ):
        try:
            call()
        except Exception as e:
            told.append(str(e))
    return (
        net.weight.data().asnumpy(),
        array.asnumpy(),
        another.asnumpy(),
        devices.weight.data(mx.cpu(1)).asnumpy(),
        told,
    )


def job_gradients() -> Any:
    """Train a small convolutional network for a few steps with each compression.

    Returns the gradients that each worker pushed, and the results that it got.
    """
    found = {}
    natural = {"compressor": "dithering", "k": 3, "partition": "natural", "normalize": "l2"}
    cases: dict[str, Any] = {**RESUMED, "half": {"fp16": True}, "natural": natural}
    for case, params in cases.items():
        net = network(f"oracle_{case}_")
        schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
        optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, lr_scheduler=schedule)
        trainer = bps.DistributedTrainer(net.collect_params(), optimizer, compression_params=params)
        rounds = []
        for step in range(5):
            backward(net, *data(step, bps.rank()))
            given = {name: p.grad().asnumpy() for name, p in net.collect_params().items()}
            trainer.allreduce_grads()
            rounds.append(
                (given, {name: p.grad().asnumpy() for name, p in net.collect_params().items()})
            )
            trainer.update(ROWS)
        found[case] = params, rounds
    return found, int(os.environ["BYTEPS_MIN_COMPRESS_BYTES"])
