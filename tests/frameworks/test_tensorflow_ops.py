"""push_pull and broadcast as TensorFlow operations. ``job_*`` functions run in the workers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import pytest

from bpsx.api.verbs import session
from bpsx.dtypes import BY_NAME
from bpsx.errors import BpsxError
from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import tensorflow as tf

    import bpsx.tensorflow as bps
    from bpsx.tensorflow import op_library

WORKERS = 2
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (2, 3, 5), (3, 0, 2), (300_000,)]


def error_of(act: Any) -> str:
    try:
        act()
    except (BpsxError, tf.errors.OpError) as e:
        return f"{type(e).__name__}: {e}"
    return "none"


# ---- run in the workers


def values(shape: tuple[int, ...], rank: int) -> np.ndarray:
    return (np.arange(int(np.prod(shape)), dtype=np.int64) % 13 + rank).reshape(shape)


def job_all_types_and_shapes() -> Any:
    """Sums and averages: eagerly, and traced with known and unknown shapes."""
    found: dict[Any, Any] = {}
    for name in BY_NAME:
        for shape in SHAPES:
            mine = tf.cast(values(shape, bps.rank()), name)

            def both(x: tf.Tensor, key: str = f"{name}{shape}") -> Any:
                return bps.push_pull(x, op=bps.Sum, name=f"sum {key}"), bps.push_pull(
                    x, average=True, name=f"average {key}"
                )

            unknown = tf.function(both, input_signature=[tf.TensorSpec(None, name)])
            got = [both(mine), tf.function(both)(mine), unknown(mine)]
            assert all(t.shape == shape and t.dtype == name for pair in got for t in pair)
            found[name, shape] = [[tf.cast(t, tf.float64).numpy() for t in pair] for pair in got]
    return found


def job_inputs_are_left_alone() -> Any:
    """The result may reuse an input's memory only if nothing else refers to the input."""
    kept = tf.constant([1.0, 2.0]) + 0
    bps.push_pull(kept, name="kept")
    variable = tf.Variable([1.0, 2.0])
    bps.push_pull(variable, name="kept")

    @tf.function
    def twice(x: tf.Tensor) -> Any:
        y = x * 2
        return (
            bps.push_pull(y, op="Sum", name="y"),
            y + 0,
            bps.push_pull(y, op="Sum", name="y again"),
        )

    return kept.numpy(), variable.numpy(), [t.numpy() for t in twice(kept)]


def job_in_flight_at_once() -> Any:
    """Worker 0 starts sixteen exchanges in a function; worker 1 calls them singly, in reverse
    order.

    This deadlocks if worker 0 waits for one exchange before it starts the next.
    """
    names = [f"flight {i}" for i in range(16)]
    if bps.rank() == 1:
        return [
            float(bps.push_pull(tf.constant(float(i)), op=bps.Sum, name=names[i]))
            for i in reversed(range(16))
        ]

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return [bps.push_pull(x + i, op=bps.Sum, name=names[i]) for i in range(16)]

    return [float(t) for t in reversed(step(tf.constant(0.0)))]


def job_nothing_is_pruned_or_merged() -> Any:
    """Each call runs all of four equal exchanges, two of them unused, and one of a constant."""
    before = session().counters()["push_pulls"]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        bps.push_pull(x, op=bps.Sum, name="unseen")
        bps.push_pull(x, op=bps.Sum, name="unseen")
        bps.push_pull(tf.constant([1.0]), op=bps.Sum, name="constant")
        return bps.push_pull(x, op=bps.Sum, name="unseen") + bps.push_pull(
            x, op=bps.Sum, name="unseen"
        )

    got = [float(step(tf.constant(float(i)))) for i in range(3)]
    return got, session().counters()["push_pulls"] - before


def job_one_name_in_a_function() -> Any:
    """Exchange three tensors of one name; their inputs become ready in different orders."""

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        slow = tf.linalg.trace(tf.linalg.matmul(tf.ones((400, 400)) * x, tf.ones((400, 400)))) * 0
        late = [slow, x * 0, x * 0] if bps.rank() == 0 else [x * 0, x * 0, slow]
        return [bps.push_pull(x + i + late[i], op=bps.Sum, name="thrice") for i in range(3)]

    return [[float(t) for t in step(tf.constant(10.0 * k))] for k in range(5)]


def job_loops_and_branches() -> Any:
    """Exchange in independent loop iterations, every other one slow, and in both branches of a
    condition.
    """

    @tf.function
    def loop(n: tf.Tensor) -> tf.Tensor:
        found = tf.TensorArray(tf.float32, n)
        for i in tf.range(n):
            x = tf.cast(i, tf.float32)
            if tf.equal(i % 2, bps.rank()):
                x += 0 * tf.linalg.trace(
                    tf.linalg.matmul(tf.ones((300, 300)) * x, tf.ones((300, 300)))
                )
            found = found.write(i, bps.push_pull(x, op=bps.Sum, name="in a loop"))
        return found.stack()

    @tf.function
    def branch(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(
            x > 0,
            lambda: bps.push_pull(x, op=bps.Sum, name="above"),
            lambda: bps.push_pull(x, name="below"),
        )

    return loop(tf.constant(40)).numpy(), [float(branch(tf.constant(x))) for x in (3.0, -4.0)]


def job_gradients() -> Any:
    """Differentiate a sum, an average and a broadcast; then a second derivative."""
    rank = bps.rank()
    x = tf.constant([1.0, 2.0]) + rank
    found = []
    for run in (lambda f: f, tf.function):

        def of(f: Any, run: Any = run) -> Any:
            def both(x: tf.Tensor) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = tf.reduce_sum(f(x) * tf.constant([1.0, 10.0]) * (rank + 1.0))
                return tape.gradient(y, x)

            return run(both)(x).numpy()

        found.append(
            [
                of(lambda x: bps.push_pull(x, op=bps.Sum, name="g")),
                of(lambda x: bps.push_pull(x, name="g a")),
                of(lambda x: bps.broadcast(x, 1, name="g b")),
            ]
        )
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(bps.push_pull(x**3, op=bps.Sum, name="cubes"))
        first = inner.gradient(y, x)
    return found, outer.gradient(first, x).numpy()


def job_gradients_in_a_session() -> Any:
    """A session executes only what is requested.

    So the gradient of a broadcast is an exchange also on workers where it is zero.
    """
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as sess:
        x = v1.placeholder(tf.float32, (2,))
        found = [
            tf.gradients(f(x) * (bps.rank() + 1.0), x)[0]
            for f in (
                lambda x: bps.push_pull(x, op=bps.Sum, name="s"),
                lambda x: bps.push_pull(x, name="s a"),
                lambda x: bps.broadcast(x, 1, name="s b"),
            )
        ]
        return [sess.run(g, {x: [1.0, 2.0]}) for g in found]


def job_without_names() -> Any:
    """Unnamed eager calls are matched by kind, those in functions by position, whatever the order
    of tracing.
    """

    @tf.function
    def a(x: tf.Tensor) -> tf.Tensor:
        return bps.push_pull(x * 2, op=bps.Sum)

    @tf.function
    def b(x: tf.Tensor) -> tf.Tensor:
        return bps.push_pull(x * 3, op=bps.Sum)

    one, two = tf.constant(1.0), tf.constant([1.0, 2.0])
    for f in (a, b) if bps.rank() == 0 else (b, a):
        f.get_concrete_function(one)
    eager = (
        bps.push_pull(one, op=bps.Sum),
        bps.push_pull(two, op=bps.Sum),
        bps.push_pull(one + 1, op=bps.Sum),
    )
    return [float(a(one)), float(b(one))], [t.numpy() for t in eager]


def job_traced_again() -> Any:
    """Count declared names: retracing with known shapes declares none, each new shape one."""

    def step(x: tf.Tensor, y: Any) -> tf.Tensor:
        return bps.push_pull(x, op=bps.Sum, name="again") * y

    counts, function = [], tf.function(step, reduce_retracing=False)
    for k in range(6):
        # A Python number is traced for each value.
        assert float(function(tf.constant(1.0), k)) == 2 * k
        counts.append(len(session().order))
    return counts, function.experimental_get_tracing_count()


def job_v1_session() -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
        x = tf.compat.v1.placeholder(tf.float32, (None,))
        y = bps.push_pull(x, op=bps.Sum, name="v1")
        v = tf.compat.v1.get_variable("v", initializer=tf.constant([1.0, 2.0]) * (bps.rank() + 1))
        sess.run(tf.compat.v1.global_variables_initializer())
        first = sess.run(y, {x: [1.0, 2.0 + bps.rank()]})
        sess.run(bps.broadcast_global_variables(1))
        seen = [first, sess.run(v)]
    with tf.Graph().as_default():
        tf.compat.v1.train.get_or_create_global_step()
        v = tf.compat.v1.get_variable("w", initializer=tf.constant([3.0]) * (bps.rank() + 1))
        with tf.compat.v1.train.MonitoredTrainingSession(
            hooks=[bps.BroadcastGlobalVariablesHook(0)]
        ) as sess:
            seen.append(sess.run(v))
    return seen


def job_saved_model() -> Any:
    """Save and load a model that contains a sum."""

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None,), tf.float32)])
        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            return bps.push_pull(x, op=bps.Sum, name="saved", priority=3)

    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(Model(), folder)
        return tf.saved_model.load(folder)(tf.constant([1.0, bps.rank()])).numpy()


def job_sparse() -> Any:
    """Sum rows of all workers with varying counts, also none, eagerly and in one function."""
    rank = bps.rank()
    function = tf.function(
        lambda v, i: bps.push_pull(
            tf.IndexedSlices(v, i, tf.constant([9, 2])), name="rows in a function"
        ),
        input_signature=[tf.TensorSpec((None, 2)), tf.TensorSpec((None,), tf.int32)],
    )
    found = []
    for n in ((1, 3), (0, 2), (5, 5), (0, 0), (100, 1)):
        rows, indices = tf.ones((n[rank], 2)) * (rank + 1), tf.range(n[rank]) % 9
        eager = bps.push_pull(
            tf.IndexedSlices(rows, indices, tf.constant([9, 2])),
            op=bps.Sum,
            name="rows",
            compression=bps.Compression.fp16,
        )
        traced = function(rows, indices)
        assert eager.values.dtype == tf.float32 and eager.indices.dtype == tf.int32
        found.append(
            [(s.values.numpy(), s.indices.numpy(), s.dense_shape.numpy()) for s in (eager, traced)]
        )
    return found


def job_broadcast() -> Any:
    """Broadcast every dtype, as a value and into variables."""
    rank = bps.rank()
    found = {}
    for name in [
        *BY_NAME,
        "bool",
        "int16",
        "uint16",
        "uint32",
        "uint64",
        "complex64",
        "complex128",
    ]:
        mine = tf.cast(values((2, 3), 0 if rank == 1 else 7), name)
        variable = tf.Variable(mine)
        bps.broadcast_variables([variable], 1, scope=f"{name} ")
        found[name] = [
            np.asarray(tf.cast(bps.broadcast(mine, 1, name=f"b {name}"), tf.complex128)),
            np.asarray(tf.cast(variable, tf.complex128)),
        ]
    pair = [
        tf.Variable(float(rank), name="same"),
        tf.Variable([rank, rank], name="same"),
        tf.Variable(tf.zeros((0, 2))),
    ]
    tf.function(lambda: bps.broadcast_variables(pair, 1))()
    return found, [v.numpy().tolist() for v in pair]


def job_refused() -> Any:
    """Reject arguments at the call, or at execution where only that can check; then continue."""
    rank = bps.rank()
    calls = [
        lambda: bps.push_pull(tf.constant(["text"])),
        lambda: bps.push_pull(tf.constant([True])),
        lambda: bps.push_pull(tf.constant(1j)),
        lambda: bps.push_pull(object()),
        lambda: bps.push_pull(tf.sparse.from_dense([1.0])),
        lambda: bps.push_pull(1.0, op=bps.Sum, average=True),
        lambda: bps.push_pull(1.0, op="Product"),
        lambda: bps.push_pull(1.0, op=bps.Adasum),
        lambda: bps.push_pull(1.0, average=2),
        lambda: bps.push_pull(1.0, name=""),
        lambda: bps.push_pull(1.0, priority=2**31),
        lambda: bps.push_pull(1.0, compression="fp16"),
        lambda: bps.push_pull(1.0, enable_async=True),
        lambda: bps.broadcast(1.0, 2),
        lambda: bps.broadcast(tf.constant("text"), 0),
        lambda: bps.broadcast_variables([tf.constant(1.0)], 0),
        lambda: bps.broadcast_global_variables(0),
        lambda: bps.DistributedGradientTape("tape"),
        lambda: bps.push_pull(1.0, scope=3),
        lambda: bps.broadcast_variables([], 0, scope=None),
        lambda: bps.broadcast_variables(tf.Variable([1.0]), 0),
        lambda: bps.broadcast_variables(object(), 0),
        lambda: bps.push_pull([tf.zeros(2), tf.zeros(3)]),
        lambda: bps.BroadcastGlobalVariablesHook("a"),
        lambda: bps.DistributedGradientTape(tf.GradientTape(), sparse_as_dense="no"),
        lambda: bps.DistributedGradientTape(tf.GradientTape(), compression_params="onebit"),
        lambda: bps.DistributedGradientTape(
            tf.GradientTape(), compression_params={"compressor": "zip"}
        ),
    ]
    told = [error_of(call) for call in calls]
    raw = [
        lambda: op_library.broadcast([tf.ones(2)], ["raw"], -1),
        lambda: op_library.push_pull(
            [tf.ones(2)], tf.constant([], tf.float64), ["raw"], [0], False
        ),
        lambda: op_library.push_pull([tf.ones(2)], -1.0, ["raw", "two"], [0, 0], False),
    ]
    told += [error_of(call) for call in raw]
    different = tf.function(lambda: bps.push_pull(tf.zeros(3 + rank), name="different"))
    told += [error_of(lambda: bps.push_pull(tf.zeros(3 + rank), name="shape")), error_of(different)]
    return told, float(bps.push_pull(1.0, op=bps.Sum, name="after"))


def job_compiled() -> Any:
    """In XLA-compiled code: all dtypes, unused results, one name three times, a broadcast, a
    gradient.
    """
    rank, before = bps.rank(), session().counters()["push_pulls"]

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor) -> Any:
        bps.push_pull(x, op=bps.Sum, name="unseen by XLA")
        found = [
            bps.push_pull(tf.cast(x, name), op=bps.Sum, name=f"compiled {name}", priority=3)
            for name in BY_NAME
        ]
        thrice = [bps.push_pull(x + i, name='thrice "compiled" \\ \n') for i in range(3)]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(bps.push_pull(x, op=bps.Sum, name="compiled g") * (rank + 1.0))
        return (
            found,
            thrice,
            bps.broadcast(tf.cast(x, tf.complex64), 1, name="compiled b"),
            tape.gradient(y, x),
        )

    for _ in range(2):
        found = tf.nest.map_structure(
            lambda t: t.numpy(), step(tf.constant([[1.0, 2.0]]) * (rank + 1))
        )
    count = session().counters()["push_pulls"] - before
    unknown = tf.function(
        lambda x: bps.push_pull(x, name="no shape"),
        jit_compile=True,
        input_signature=[tf.TensorSpec([None], tf.float32)],
    )
    different = tf.function(
        lambda: bps.push_pull(tf.zeros(3 + rank), name="different, compiled"), jit_compile=True
    )
    try:
        unknown(tf.ones(2))
        told = []
    except Exception as e:  # AutoGraph raises another exception with the same text
        told = [str(e)]
    return found, count, [*told, error_of(different)]


def job_unknown_callbacks() -> Any:
    """Pretend that TensorFlow's callbacks have another type.

    A call fails with a clear error, the check at import would fail too, and later calls work.
    """
    from bpsx.tensorflow import _ops

    _ops.distrust(True)
    told = [error_of(lambda: bps.push_pull(1.0, name="distrusted"))]
    with contextlib.suppress(ImportError):
        op_library.check_callbacks()
        told.append("loaded")
    _ops.distrust(False)
    op_library.check_callbacks()
    return told, float(bps.push_pull(1.0, op=bps.Sum, name="trusted"))


JOBS = [name for name in dir() if name.startswith("job_")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = run_job(__file__, JOBS, tmp_path_factory, WORKERS, BYTEPS_PARTITION_BYTES="400000")
    assert done.status == 0, done.output
    return done


# ---- expected results


@pytest.mark.parametrize("name", BY_NAME)
def test_all_types_and_shapes(job, name):
    for found in each(job, "job_all_types_and_shapes"):
        for shape in SHAPES:
            total = values(shape, 0) + values(shape, 1)
            mean = total // 2 if BY_NAME[name].integer else total / 2
            for sums, averages in found[name, shape]:
                np.testing.assert_array_equal(sums, total)
                np.testing.assert_array_equal(averages, mean)


def test_inputs_are_left_alone(job):
    for kept, variable, (first, double, second) in each(job, "job_inputs_are_left_alone"):
        assert kept.tolist() == variable.tolist() == [1, 2]
        assert first.tolist() == second.tolist() == [4, 8] and double.tolist() == [2, 4]


def test_all_of_a_function_are_in_flight_at_once(job):
    assert each(job, "job_in_flight_at_once") == [[2.0 * i for i in reversed(range(16))]] * 2


def test_nothing_is_pruned_or_merged(job):
    assert each(job, "job_nothing_is_pruned_or_merged") == [([0.0, 4.0, 8.0], 15)] * 2


def test_operations_of_one_name_run_in_the_same_order_on_all_workers(job):
    assert (
        each(job, "job_one_name_in_a_function")
        == [[[20.0 * k + 2 * i for i in range(3)] for k in range(5)]] * 2
    )


def test_loops_and_branches(job):
    for loop, branches in each(job, "job_loops_and_branches"):
        np.testing.assert_array_equal(loop, 2 * np.arange(40))
        assert branches == [6.0, -4.0]


def test_gradients(job):
    for rank, (found, second) in enumerate(each(job, "job_gradients")):
        for total, mean, broadcast in found:
            assert total.tolist() == [3, 30] and mean.tolist() == [1.5, 15]
            assert broadcast.tolist() == ([3, 30] if rank == 1 else [0, 0])
        # The inner gradient is 2 * 3 x^2 on each worker: it contains the workers' sum of ones,
        # whose own derivative is zero.
        np.testing.assert_allclose(second, 12 * (np.array([1, 2]) + rank))


def test_gradients_in_a_session(job):
    for rank, (total, mean, broadcast) in enumerate(each(job, "job_gradients_in_a_session")):
        assert total.tolist() == [3, 3] and mean.tolist() == [1.5, 1.5]
        assert broadcast.tolist() == ([3, 3] if rank == 1 else [0, 0])


def test_without_names(job):
    for functions, eager in each(job, "job_without_names"):
        assert functions == [4, 6]
        assert [t.tolist() for t in eager] == [2, [2, 4], 4]


def test_a_retraced_function_declares_nothing_new(job):
    for counts, traces in each(job, "job_traced_again"):
        assert traces == 6 and set(counts) == {counts[0]}


def test_v1_sessions(job):
    for first, broadcast, hooked in each(job, "job_v1_session"):
        assert first.tolist() == [2, 5] and broadcast.tolist() == [2, 4] and hooked.tolist() == [3]


def test_saved_models(job):
    assert [r.tolist() for r in each(job, "job_saved_model")] == [[2, 1]] * 2


def test_indexed_slices_of_all_workers_are_joined(job):
    for found in each(job, "job_sparse"):
        for n, (eager, traced) in zip(
            ((1, 3), (0, 2), (5, 5), (0, 0), (100, 1)), found, strict=True
        ):
            rows = np.concatenate([np.ones((n[0], 2)), 2 * np.ones((n[1], 2))])
            indices = [i % 9 for k in n for i in range(k)]
            for (values, where, shape), divisor in ((eager, 1), (traced, 2)):
                np.testing.assert_array_equal(values, rows / divisor)
                assert where.tolist() == indices and shape.tolist() == [9, 2]


def test_broadcast(job):
    for found, pair in each(job, "job_broadcast"):
        for name, (value, variable) in found.items():
            wanted = values((2, 3), 0).astype(bool if name == "bool" else np.complex128)
            np.testing.assert_array_equal(value, wanted, name)
            np.testing.assert_array_equal(variable, wanted, name)
        assert pair == [1.0, [1, 1], []]


def test_refused(job):
    for told, after in each(job, "job_refused"):
        expected = [
            "UnsupportedDType: push_pull: dtype string",
            "tf.cast(tensor, tf.uint8)",
            "tf.math.real",
            "UnsupportedTensor: push_pull: cannot convert object to a tensor",
            "SparseTensor cannot be sent",
            "give only one of them",
            "op='Product': expected Average or Sum",
            "op=Adasum",
            "average=2",
            "name must be",
            "priority=2147483648",
            "compression='fp16'",
            "BYTEPS_ENABLE_ASYNC=1",
            "root_rank=2: expected 0 to 1",
            "dtype string cannot be sent",
            "element 0 is a",
            "broadcast_variables()",
            "expected a tf.GradientTape, not str",
            "scope=3: must be a string",
            "scope=None: must be a string",
            "is a ResourceVariable; expected a list of variables",
            "is a object; expected a list",
            "cannot convert list to a tensor",
            "root_rank='a': expected 0 to 1",
            "sparse_as_dense must be True or False, not 'no'",
            "compression_params is a str",
            "compression_params: compressor='zip'",
            "root_rank must be",
            "learning rate must be one number",
            "one name per tensor",
        ]
        for text, part in zip(told, expected, strict=False):
            assert part in text
        for text in told[len(expected) :]:
            assert (
                text.startswith("InvalidArgumentError")
                and "MismatchError" in text
                and "(3,)" in text
                and "(4,)" in text
            ), text
        assert after == 2


def test_compiled_by_xla(job):
    for (found, thrice, broadcast, gradient), count, (unknown, different) in each(
        job, "job_compiled"
    ):
        assert [f.tolist() for f in found] == [[[3, 6]]] * len(BY_NAME)
        assert [t.tolist() for t in thrice] == [[[1.5 + i, 3 + i]] for i in range(3)]
        assert broadcast.tolist() == [[2, 4]] and gradient.tolist() == [[3, 3]]
        assert count == 2 * (len(BY_NAME) + 7)
        assert "'no shape' has the shape (None,), but XLA needs known shapes" in unknown
        assert different.startswith("InvalidArgumentError") and "MismatchError" in different


def test_callbacks_that_are_not_known_are_not_touched(job):
    for told, after in each(job, "job_unknown_callbacks"):
        assert (
            len(told) == 1
            and told[0].startswith("FailedPreconditionError")
            and "in a different way" in told[0]
        )
        assert after == 2


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (
            "sys.modules['tensorflow'] = None",
            "bpsx.tensorflow needs TensorFlow 2.21 or newer: pip install tensorflow",
        ),
        (
            (
                "sys.modules['tensorflow'] = types.ModuleType('tensorflow');"
                " sys.modules['tensorflow'].__version__ = '2.9.1'"
            ),
            "this is 2.9.1",
        ),
    ],
)
def test_a_tensorflow_that_is_missing_or_old_is_named(before, told):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, types; {before}; import bpsx.tensorflow"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 1
        and told in done.stderr.splitlines()[-1]
        and "ImportError" in done.stderr
    )
