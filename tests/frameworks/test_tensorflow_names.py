"""Operations, variables and optimizers that share a name: which of them are exchanged together.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow_models import BATCH, data, mlp

from bpsx.api.verbs import session
from bpsx.errors import ConfigError
from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx.tensorflow as bps
    import bpsx.tensorflow.horovod as hvd
    import bpsx.tensorflow.keras as bpk
    from bpsx.tensorflow.distribute import MirroredStrategy
    from bpsx.tensorflow.xla import UnsupportedCompilation

    LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    v1 = tf.compat.v1

WORKERS = 2


# ---- run in the workers


def late(x: Any, who: int) -> tf.Tensor:
    """Return ``x``, delayed on worker ``who`` by computation without effect.

    The computation may run in any order.
    """
    if bps.rank() != who:
        return x
    y = tf.eye(600) * x
    for _ in range(8):
        y = y @ tf.eye(600)
    return tf.reduce_mean(tf.linalg.diag_part(y))


def job_order() -> Any:
    """Exchange two tensors of one name in a function while each worker is ready for the other one
    first.

    The exchanges are in calls of a function, in branches, in loops, and beside those.
    """
    w = tf.Variable([1.0], name="in order")

    @tf.function
    def mean(x: Any) -> Any:
        return bps.push_pull(x, name="nested")

    @tf.function
    def unnamed(x: Any) -> Any:
        return bps.push_pull(x)

    @tf.function
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return bps.DistributedGradientTape(tape).gradient(loss, [w])[0][0]

    @tf.function
    def deeper(x: Any) -> Any:
        return gradient(x) + 0.0

    def branch(x: Any) -> Any:
        return tf.cond(x > 0, lambda: bps.push_pull(x, name="branch"), lambda: x)

    def loop(x: Any) -> Any:
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, t: (i + 1, t + bps.push_pull(x, name="loop") / 2),
            [0, tf.constant(0.0)],
        )[1]

    ways = {
        "function": (mean, mean),
        "unnamed": (unnamed, unnamed),
        "tape": (gradient, gradient),
        "deeper": (deeper, gradient),
        "branches": (branch, branch),
        "branch and not": (branch, lambda x: bps.push_pull(x, name="branch")),
        "loops": (loop, loop),
        "loop and not": (loop, lambda x: bps.push_pull(x, name="loop")),
    }
    found = {}
    for name, (first, second) in ways.items():
        step = tf.function(
            lambda a, b, first=first, second=second: (first(late(a, 0)), second(late(b, 1)))
        )
        found[name] = [
            [float(t) for t in step(tf.constant(1.0), tf.constant(100.0))] for _ in range(4)
        ]
    return found


def job_compiled() -> Any:
    """The same with XLA: compiled functions called by an uncompiled one, the other way round, and
    twice in one compiled function.
    """
    w = tf.Variable([1.0], name="compiled")

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return bps.DistributedGradientTape(tape).gradient(loss, [w])[0][0]

    found: dict[str, Any] = {}
    inner, outer = tf.function(gradient, jit_compile=True), tf.function(gradient)
    for name, call, options in (
        ("inside", inner, {}),
        ("twice", gradient, {"jit_compile": True}),
        ("outside", outer, {"jit_compile": True}),
    ):
        step = tf.function(lambda a, b, call=call: (call(late(a, 0)), call(late(b, 1))), **options)
        try:
            found[name] = [
                [float(t) for t in step(tf.constant(1.0), tf.constant(100.0))] for _ in range(4)
            ]
        except UnsupportedCompilation as e:
            found[name] = str(e)
    return found


def job_overlap() -> Any:
    """Functions with different names are not ordered: worker 1 calls the second one first."""
    order: list[str] = []

    def seen(x: Any, name: str) -> Any:
        return tf.numpy_function(lambda x: order.append(name) or x, [x], tf.float32, stateful=False)

    @tf.function
    def step(x: Any) -> Any:
        first, second = ("a", "b") if bps.rank() == 0 else ("b", "a")
        found = bps.push_pull(x, name=f"overlap {first}")
        other = bps.push_pull(seen(x * 2, "other"), name=f"overlap {second}")
        return found, other

    return [float(t) for t in step(tf.constant(1.0))]


def job_graph() -> Any:
    """A v1 session runs only the operations that it is asked for.

    Two optimizers share one variable, and two operations share one name.
    """
    found: dict[str, Any] = {}
    with tf.Graph().as_default(), v1.Session() as sess:
        x, z = v1.placeholder(tf.float32, (), name="x"), v1.placeholder(tf.float32, (), name="z")
        one, other = bps.push_pull(x, name="twice"), bps.push_pull(z, name="twice")
        w = v1.get_variable("w", initializer=np.float32(1.0))
        optimizers = [
            bps.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
            )
            for _ in range(2)
        ]
        steps = [o.minimize(w * factor) for o, factor in zip(optimizers, (1.0, 3.0), strict=True)]
        both = [
            tf.cond(
                x > 0,
                lambda: bps.push_pull(x, name="of both"),
                lambda: bps.push_pull(-x, name="of both"),
            )
        ]
        sess.run(v1.global_variables_initializer())
        before = session().counters()["push_pulls"]
        found["alone"] = [
            float(sess.run(other, {z: 3.0 + bps.rank()})),
            float(sess.run(one, {x: 1.0 + bps.rank()})),
        ]
        found["push_pulls"] = session().counters()["push_pulls"] - before
        found["steps"] = [(sess.run(steps[i]), float(sess.run(w)))[1] for i in (1, 1, 0, 1, 0, 1)]
        found["both"] = [
            float(sess.run(both, {x: sign * (1.0 + bps.rank())})[0]) for sign in (1, -1)
        ]
    return found


def job_alike() -> Any:
    """Variables of one name keep separate residuals; a tape and an optimizer of one variable share
    theirs.
    """

    def leftovers(names: tuple[str, str], with_tapes: bool) -> list[float]:
        """Residuals of one variable must not reach the other, whose gradients are a hundred times
        as large.
        """
        pair = [tf.Variable([0.0] * 8, name=name) for name in names]
        params = {"compressor": "topk", "k": 1, "ef": "vanilla"}
        optimizers = [
            bpk.DistributedOptimizer(keras.optimizers.SGD(1.0), compression_params=params)
            for _ in pair
        ]
        sums = []
        for _ in range(3):
            for variable, factor, optimizer in zip(pair, (1.0, 100.0), optimizers, strict=True):
                gradient = factor * tf.range(1.0, 9.0)
                if with_tapes:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(variable * gradient)
                    sums.append(
                        float(
                            tf.reduce_sum(
                                bps.DistributedGradientTape(
                                    tape, compression_params=params
                                ).gradient(loss, variable)
                            )
                        )
                    )
                else:
                    optimizer.apply([gradient], [variable])
                    sums.append(float(tf.reduce_sum(variable)))
        return sums

    return {
        way: (
            leftovers((f"{way} one", f"{way} one"), way == "tapes"),
            leftovers((f"{way} a", f"{way} b"), way == "tapes"),
        )
        for way in ("tapes", "optimizers")
    }


def job_alike_v1() -> Any:
    """Two v1 variables of one name accumulate gradients over two passes.

    One of them has no gradient in the last pass, or none on this worker.
    """

    def train(gradients: Any) -> list[float]:
        a, b = tf.Variable(0.0, name="same"), tf.Variable(0.0, name="same")
        optimizer = bps.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
        )
        for i in range(2):
            used = gradients(i)
            optimizer.minimize(
                lambda used=used: sum(f * v for f, v in zip(used, (a, b), strict=True) if f),
                var_list=[a, b],
            )
        return [float(a), float(b)]

    return (
        train(lambda i: (1.0, 10.0)),
        train(lambda i: (1.0, 10.0 if i == 0 else 0.0)),
        train(lambda i: (1.0, 10.0 if bps.rank() == 0 else 0.0)),
    )


def job_partly() -> Any:
    """Eager gradients that only one worker has: dense ones, rows of an embedding, sums of several
    steps.
    """
    found: dict[str, Any] = {}
    table, plain, nobodys = (
        tf.Variable(tf.ones((4, 2)), name="table"),
        tf.Variable([1.0], name="plain"),
        tf.Variable(1.0, name="nobody's"),
    )
    # Workers know the kinds from the second step on. In the third, the other worker has the rows.
    for step in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(plain)
            if (bps.rank() == 0) == (step < 2):
                loss += tf.reduce_sum(tf.gather(table, [1, 1]))
        rows, dense, none = bps.DistributedGradientTape(tape).gradient(
            loss, [table, plain, nobodys]
        )
        found[f"rows {step}"] = (
            type(rows).__name__,
            tf.convert_to_tensor(rows).numpy().tolist(),
            dense.numpy().tolist(),
            none,
        )
    mixed = tf.Variable(tf.ones((3, 1)), name="mixed")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(mixed, [2])) if bps.rank() == 0 else tf.reduce_sum(mixed)
    found["mixed"] = (
        bps.DistributedGradientTape(tape).gradient(loss, mixed).numpy().ravel().tolist()
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(mixed, [2]))
    found["mixed again"] = (
        tf.convert_to_tensor(bps.DistributedGradientTape(tape).gradient(loss, mixed))
        .numpy()
        .ravel()
        .tolist()
    )
    # Dense on one worker, after only sparse gradients.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [1, 1])) if bps.rank() == 0 else tf.reduce_sum(table)
    found["dense later"] = (
        tf.convert_to_tensor(bps.DistributedGradientTape(tape).gradient(loss, table))
        .numpy()
        .tolist()
    )
    a, b = tf.Variable(0.0, name="acc a"), tf.Variable(0.0, name="acc b")
    by_name = {"acc a": {"compressor": "topk", "k": 1}, "acc b": {"compressor": "topk", "k": 1}}
    optimizer = bpk.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
        compression_params={f"{name}:0": params for name, params in by_name.items()},
    )
    optimizer.build([a, b])
    for step in range(2):
        optimizer.apply(
            [tf.constant(2.0), tf.constant(4.0) if step == 0 or bps.rank() == 0 else None], [a, b]
        )
    found["accumulated"] = float(a), float(b)
    return found


def job_optimizers() -> Any:
    """Objects made from a distributed optimizer stay distributed: copies, and loss scales, even
    nested ones.
    """
    found: dict[str, Any] = {}
    w = tf.Variable([0.0], name="of optimizers")
    gradient = tf.constant([1.0 + bps.rank()])

    def moved(optimizer: Any) -> float:
        w.assign([0.0])
        optimizer.apply([gradient], [w])
        return float(w[0])

    def made() -> Any:
        return bpk.DistributedOptimizer(keras.optimizers.SGD(1.0), op=bps.Sum)

    for name, again in {
        "copy": copy.copy,
        "deep copy": copy.deepcopy,
        "pickle": lambda o: pickle.loads(pickle.dumps(o)),
        "configuration": lambda o: type(o).from_config(o.get_config()),
        "class": lambda o: type(o)(**o.get_config()),
    }.items():
        found[name] = moved(again(made()))
    inner = made()
    scaled = [keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0) for _ in range(2)]
    found["scaled"] = [moved(optimizer) for optimizer in (*scaled, inner)]
    optimizer, model = bpk.DistributedOptimizer(keras.optimizers.SGD(0.1)), mlp()
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    inputs, labels = data()
    counts = []
    for _ in range(2):
        model.compile(optimizer, LOSS)
        before = session().counters()["push_pulls"]
        model.fit(
            inputs[:, bps.rank()].reshape(-1, 6),
            labels[:, bps.rank()].reshape(-1),
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
        )
        counts.append(session().counters()["push_pulls"] - before)
    found["compiled twice"] = counts, float(sum(np.sum(v) for v in model.get_weights()))

    @keras.saving.register_keras_serializable("mine")
    class Mine(keras.optimizers.SGD):
        pass

    with tempfile.TemporaryDirectory() as folder:
        model = mlp()
        model.compile(bpk.DistributedOptimizer(Mine(0.1)), LOSS)
        model.save(Path(folder, "mine.keras"))
        found["registered"] = (
            type(keras.models.load_model(Path(folder, "mine.keras")).optimizer) is Mine
        )
    try:
        made().apply([gradient, gradient], [w])
    except ConfigError as e:
        found["too many"] = str(e)
    return found


def job_async() -> Any:
    """Asynchronous training with weights of one name in separate optimizers, with a TensorFlow
    checkpoint, and with unsupported options.
    """
    pair = [tf.Variable([start], name="same") for start in (1.0, 100.0)]
    for variable in pair:
        optimizer = bpk.DistributedOptimizer(keras.optimizers.SGD(0.0))
        for _ in range(2):
            optimizer.apply([tf.ones(1)], [variable])
    found: dict[str, Any] = {"alike": [float(v[0]) for v in pair]}
    with tf.Graph().as_default(), v1.Session() as sess:
        w = v1.get_variable("async_saved", initializer=np.float32(5.0))
        train = bps.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.0)).minimize(w * 1.0)
        found["saved"] = [v.op.name for v in v1.global_variables()]
        sess.run(v1.global_variables_initializer())
        sess.run(train)
        found["restored"] = float(sess.run(w))
    average = bpk.callbacks.MetricAverageCallback()
    found["metrics"] = []
    for _ in range(2):
        logs = {"loss": 1.0 + bps.rank()}
        average.on_epoch_end(0, logs)
        found["metrics"].append(logs["loss"])
    rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([4, 2]))
    strategy = MirroredStrategy(["CPU:0"])
    with strategy.scope():
        v = tf.Variable([1.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([v])
    told = []
    for call in (
        lambda: bps.push_pull(rows, name="rows"),
        lambda: strategy.run(lambda: optimizer.apply([tf.ones(1)], [v])),
    ):
        try:
            call()
        except ConfigError as e:
            told.append(str(e))
    found["refused"] = told
    found["horovod"] = horovod_in_async()
    return found


def horovod_in_async() -> list[str]:
    """Calls of the Horovod API that are rejected in asynchronous training, where servers hold
    weights and no sums.
    """
    local, passes = (
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), backward_passes_per_step=n)
        for n in (1, 2)
    )
    variables = [tf.Variable([1.0], name=f"horovod {i}") for i in range(2)]
    local.register_local_var(variables[0])
    x, told = tf.ones(4), []
    for call in (
        lambda: hvd.allreduce(x),
        lambda: hvd.reducescatter(x),
        lambda: hvd.allgather(x),
        lambda: hvd.alltoall(x),
        lambda: local.apply([tf.ones(1)], variables[:1]),
        lambda: passes.apply([tf.ones(1)], variables[1:]),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        told.append(str(caught.value))
    return told


JOBS = [name for name in dir() if name.startswith("job_")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = run_job(
        __file__,
        [name for name in JOBS if name != "job_async"],
        tmp_path_factory,
        WORKERS,
        BYTEPS_MIN_COMPRESS_BYTES="0",
    )
    assert done.status == 0, done.output
    return done


# ---- expected results


@pytest.mark.parametrize(
    "way",
    [
        "function",
        "unnamed",
        "tape",
        "deeper",
        "branches",
        "branch and not",
        "loops",
        "loop and not",
    ],
)
def test_operations_of_one_name_are_matched_in_the_order_of_the_code(
    job: Finished, way: str
) -> None:
    for found in each(job, "job_order"):
        assert found[way] == [[1.0, 100.0]] * 4


@pytest.mark.parametrize("way", ["inside", "twice"])
def test_compiled_functions_keep_the_order_of_one_name(job: Finished, way: str) -> None:
    for found in each(job, "job_compiled"):
        assert found[way] == [[1.0, 100.0]] * 4


def test_one_name_twice_in_functions_of_a_compiled_one_is_refused(job: Finished) -> None:
    for found in each(job, "job_compiled"):
        assert "'Gradient.compiled:0' is exchanged twice" in found["outside"]


def test_operations_of_different_names_have_no_order(job: Finished) -> None:
    first, second = each(job, "job_overlap")
    assert first == [1.5, 1.5] and second == [1.5, 1.5]


def test_sessions_run_only_requested_operations(job: Finished) -> None:
    for found in each(job, "job_graph"):
        assert found["alone"] == [3.5, 1.5] and found["push_pulls"] == 2
        assert found["steps"] == [1.0, -5.0, -5.0, -5.0, -7.0, -13.0]
        assert found["both"] == [1.5, 1.5]


@pytest.mark.parametrize("way", ["tapes", "optimizers"])
def test_variables_of_one_name_have_separate_residuals(job: Finished, way: str) -> None:
    for found in each(job, "job_alike"):
        assert found[way][0] == found[way][1]


def test_variables_of_one_name_accumulate_separately(job: Finished) -> None:
    for apart, only_first_pass, only_one_worker in each(job, "job_alike_v1"):
        assert (
            apart == [-2.0, -20.0]
            and only_first_pass == [-2.0, -10.0]
            and only_one_worker == [-2.0, -10.0]
        )


def test_gradients_that_only_one_worker_has(job: Finished) -> None:
    for found in each(job, "job_partly"):
        for step in range(3):
            assert found[f"rows {step}"] == (
                "IndexedSlices",
                [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
                [1.0],
                None,
            )
        assert found["mixed"] == [0.5, 0.5, 1.0] and found["mixed again"] == [0.0, 0.0, 1.0]
        assert found["dense later"] == [[0.5, 0.5], [1.5, 1.5], [0.5, 0.5], [0.5, 0.5]]
        assert found["accumulated"] == (-2.0, -3.0)


def test_copies_and_wrappers_of_a_distributed_optimizer_are_distributed(job: Finished) -> None:
    first, second = each(job, "job_optimizers")
    for name in ("copy", "deep copy", "pickle", "configuration", "class"):
        assert first[name] == second[name] == -3.0, name
    assert first["scaled"] == second["scaled"] == [-3.0] * 3
    # The first step compares the weights.
    assert first["compiled twice"] == second["compiled twice"] and first["compiled twice"][0] == [
        17,
        16,
    ]
    assert first["registered"] and "2 gradients for 1 variables" in first["too many"]


def test_asynchronous_training(tmp_path_factory: pytest.TempPathFactory) -> None:
    done = run_job(__file__, ["job_async"], tmp_path_factory, WORKERS, BYTEPS_ENABLE_ASYNC="1")
    assert done.status == 0, done.output
    for found in each(done, "job_async"):
        assert found["alike"] == [1.0, 100.0]
        assert found["saved"] == ["async_saved"] and found["restored"] == 5.0
        assert found["metrics"] == [1.5, 1.5]
        assert len(found["horovod"]) == 6 and all(
            "BYTEPS_ENABLE_ASYNC=1" in text for text in found["horovod"]
        )
        assert (
            "local variables" in found["horovod"][4]
            and "sums of several passes" in found["horovod"][5]
        )
        assert (
            len(found["refused"]) == 2
            and "dense tensor" in found["refused"][0]
            and "use DistributedOptimizer" in found["refused"][1]
        )
