"""Errors found in the first step: workers use a name for different things, or start with different
weights.
"""

from __future__ import annotations

import pytest

from support.jobs import run
from support.tensorflow_job import QUIET

_START = '''
    import warnings
    import keras
    import numpy as np
    import tensorflow as tf
    import bpsx
    import bpsx.tensorflow as bps
    import bpsx.tensorflow.keras as bpk
    bps.init()
    rank = bps.rank()

    def exchanged(variables, scales):
        """Averages of the gradients, which are scales times 1 and 2 on the two workers."""
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v) * s * (rank + 1.0) for v, s in zip(variables, scales))
        return bps.DistributedGradientTape(tape).gradient(loss, variables)

    def tried(call, *args):
        """What comes out of a call that may be an error."""
        try:
            return call(*args)
        except (bpsx.BpsxError, RuntimeError, tf.errors.OpError) as e:
            return str(e)
'''


def test_variables_out_of_a_set():
    """The variables differ only in their use, and come in another order on each worker."""
    source = (
        _START
        + """
    for way in lambda f: f, tf.function:
        pair = [tf.Variable([0.0, 0.0]) for _ in range(2)]
        order = [0, 1] if rank == 0 else [1, 0]
        for _ in range(2):
            found = way(exchanged)([pair[i] for i in order], [(1.0, 10.0)[i] for i in order])
            report([found[order.index(i)].numpy().tolist() for i in range(2)])
        twins = [tf.Variable([1.0 + i + rank]) for i in range(2)]
        bps.broadcast_variables([twins[i] for i in order], root_rank=0)
        report([float(v[0]) for v in twins])
    bps.shutdown()
    """
    )
    assert run(source, env=QUIET) == [([[[1.5, 1.5], [15.0, 15.0]]] * 2 + [[1.0, 2.0]]) * 2] * 2


@pytest.mark.parametrize(
    ("mode", "ways"), [("0", "tape, function, optimizer, fit"), ("1", "optimizer, fit")]
)
def test_two_models_of_one_name_stepped_in_another_order_are_an_error(mode, ways):
    """Two models have the same names and weights, and worker 1 steps them in the other order.

    The second step must fail on both workers. Also in asynchronous training.
    """
    source = (
        _START
        + """
    def model(way):
        return keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, name=way, kernel_initializer="ones")],
            name=way,
        )


    def tape(m):
        return [g.numpy().tolist() for g in exchanged(m.trainable_variables, (1.0, 1.0))]


    def function(m):
        return (
            tf.function(lambda: exchanged(m.trainable_variables, (1.0, 1.0)))()[1].numpy().tolist()
        )


    def optimizer(m):
        o = bpk.DistributedOptimizer(keras.optimizers.SGD(0.1))
        return o.apply([tf.ones_like(v) for v in m.trainable_variables], m.trainable_variables)


    def fit(m):
        m.compile(bpk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        return m.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0) and None


    for step in WAYS:
        pair = [model(step.__name__) for _ in range(2)]
        first, second = pair if rank == 0 else pair[::-1]
        report(isinstance(tried(step, first), str))
        report([tried(step, second), isinstance(tried(step, second), str)])
    bps.shutdown()
    """
    )
    for found in run(source.replace("WAYS", ways), env={**QUIET, "BYTEPS_ENABLE_ASYNC": mode}):
        assert len(found) == 2 * len(ways.split(", "))
        for early, (text, again) in zip(found[::2], found[1::2], strict=True):
            assert not early and again
            assert (
                "worker 1 has other names of variables than worker 0, or the same names in another"
                " order" in text
            )
            assert (
                "the order in which variables of one name are made, and their gradients first"
                " exchanged must be the same on all workers"
            ) in text


_WEIGHTS = (
    _START
    + """
    def model(seed):
        keras.utils.set_random_seed(seed)
        m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        return m


    def steps(m, how, broadcast):
        variables = m.trainable_variables

        def step(first):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(m(tf.ones((1, 2))))
            for v, g in zip(variables, bps.DistributedGradientTape(tape).gradient(loss, variables)):
                v.assign_sub(g)
            if first and broadcast == "after the first step":
                bps.broadcast_variables(m.variables, root_rank=0)

        run = {
            "eager": step,
            "function": tf.function(step),
            "compiled": tf.function(step, jit_compile=True),
        }[how]
        for i in range(4):
            run(i == 0)


    def fit(m, how, broadcast):
        m.compile(bpk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        callbacks = (
            [bpk.callbacks.BroadcastGlobalVariablesCallback(0)] if broadcast == "before" else []
        )
        m.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0, callbacks=callbacks)


    for how, train in HOWS.items():
        for broadcast in ("before", "equal seeds", "after the first step", "forgotten"):
            if broadcast == "after the first step" and train is fit:
                continue
            m = model(7 + (rank if broadcast != "equal seeds" else 0))
            if broadcast == "before" and train is steps:
                bps.broadcast_variables(m.variables, root_rank=0)
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                error = tried(train, m, how, broadcast)
            report(
                [
                    how,
                    broadcast,
                    error,
                    [str(w.message) for w in heard if "weights" in str(w.message)],
                ]
            )
    bps.shutdown()
"""
)


@pytest.mark.parametrize(
    ("option", "hows"),
    [
        ("warn", '"eager": steps, "function": steps, "compiled": steps, "fit": fit'),
        ("error", '"eager": steps, "fit": fit'),
        ("off", '"function": steps'),
    ],
)
def test_weights_that_differ_before_the_first_step(option, hows):
    source = _WEIGHTS.replace("HOWS", "{" + hows + "}")
    for found in run(source, env={**QUIET, "BPSX_CHECK_WEIGHTS": option}):
        assert len(found) == 4 * hows.count(": steps") + 3 * hows.count(": fit")
        for how, broadcast, error, heard in found:
            alike = (
                broadcast in ("before", "equal seeds")
                or broadcast == "after the first step"
                and option == "warn"
                and how != "compiled"
            )
            if alike or option == "off":
                assert (error, heard) == (None, []), (how, broadcast)
                continue
            (text,) = [error] if option == "error" else heard
            assert (error is None) == (option == "warn")
            assert "worker 1 has other weights than worker 0 before the first step" in text
            assert (
                "Call broadcast_variables(model.variables, root_rank=0), or with Keras' fit give"
                in text
            )


@pytest.mark.parametrize("option", ["warn", "error", "off"])
def test_weights_that_differ_in_a_session(option):
    """A TensorFlow 1 session with a broadcast before or after the first step, or with none."""
    source = (
        _START
        + """
    def trained(how):
        with tf.Graph().as_default():
            w = tf.compat.v1.get_variable(how.replace(" ", "_"), initializer=[1.0 + rank, 2.0])
            optimizer = bps.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
            step = optimizer.minimize(tf.reduce_sum(w) * (rank + 1.0))
            copy = bps.broadcast_global_variables(0)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for i in range(3):
                    if (how, i) in (("before", 0), ("behind", 1)):
                        session.run(copy)
                    session.run(step)

    for how in "before", "behind", "forgotten":
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            error = tried(trained, how)
        report([how, error, [str(w.message) for w in heard if "other weights" in str(w.message)]])
    """
    )
    for worker in run(source, env={**QUIET, "BPSX_CHECK_WEIGHTS": option}):
        assert [how for how, _, _ in worker] == ["before", "behind", "forgotten"]
        for how, error, heard in worker:
            if how != "forgotten" or option == "off":
                assert (error, heard) == (None, []), how
                continue
            (text,) = [error] if option == "error" else heard
            assert "worker 1 has other weights than worker 0 before the first step" in text


def test_only_one_worker_compares_weights_in_a_session():
    """The other takes part, without weights."""
    choose = """
    import os
    os.environ["BPSX_CHECK_WEIGHTS"] = "off" if os.environ["DMLC_WORKER_ID"] == "1" else "error"
"""
    source = (
        choose
        + _START
        + """
    w = tf.compat.v1.get_variable("w", initializer=[1.0 + rank, 2.0])
    optimizer = bps.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    step = optimizer.minimize(tf.reduce_sum(w) * (rank + 1.0))
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(step)
    report("done")
    """
    )
    source = source.replace("bps.init()", "bps.init(); tf.compat.v1.disable_eager_execution()", 1)
    assert run(source, env=QUIET) == [["done"]] * 2
