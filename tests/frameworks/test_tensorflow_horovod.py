"""Horovod's API for TensorFlow on three workers: results compared with NumPy, and gradients.

Functions named ``job_*`` run in the workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import tensorflow as tf

    import bpsx.tensorflow.horovod as hvd

pytestmark = pytest.mark.timeout(300)
WORKERS = 3
OPS = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}
#: NumPy names of the dtypes that servers can sum, and of those that can be gathered and broadcast.
SUMMED = ["float16", "float32", "float64", "uint8", "int8", "int32", "int64"]
PASSED_ON = [*SUMMED, "uint16", "int16", "bool"]


def given(rank: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Return worker ``rank``'s array."""
    return np.random.default_rng(1000 * seed + rank).standard_normal(shape or (3, 4))


def everybody(*shape: int, seed: int = 0) -> np.ndarray:
    return np.stack([given(r, *shape, seed=seed) for r in range(WORKERS)])


def mine(*shape: int, seed: int = 0) -> Any:
    return tf.constant(given(hvd.rank(), *shape, seed=seed))


def integers(rank: int) -> np.ndarray:
    """Return integers whose sums are partly negative and not divisible by the number of workers."""
    return np.array([-7 - rank, 5 + rank, -1, 2 * rank])


def typed(rank: int, dtype: str) -> np.ndarray:
    return (
        (np.arange(4) + rank) % 2 == 0 if dtype == "bool" else (np.arange(4) + rank).astype(dtype)
    )


def traced(function: Any) -> Any:
    """Return what ``function`` returns when tf.function traces it."""
    return tf.function(function, autograph=False)()


#: Upper bound of the rows that any verb of losses() returns.
MOST = 40


# ---- sums


def job_allreduce() -> Any:
    x, n, found = mine(), tf.constant(integers(hvd.rank())), {}
    for way, run in (("eager", lambda f: f()), ("traced", traced)):
        for name in OPS:
            op = getattr(hvd, name)
            found[name, way] = run(
                lambda op=op, name=name: hvd.allreduce(x, op=op, name=f"op.{name}")
            )
        found["scaled", way] = run(
            lambda: hvd.allreduce(
                x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, name="scaled"
            )
        )
        found["fp16", way] = run(
            lambda: hvd.allreduce(x, compression=hvd.Compression.fp16, name="half")
        )
        found["integers", way] = run(lambda: hvd.allreduce(n, name="n"))
        found["integers scaled", way] = run(
            lambda: hvd.allreduce(n, op=hvd.Sum, prescale_factor=0.5, name="n scaled")
        )
        group = run(lambda: hvd.grouped_allreduce([x, n, x * 2], op=hvd.Sum, name="group"))
        found["group", way] = group[2]
        assert [t.dtype for t in group] == [tf.float64, tf.int64, tf.float64]
    found["default", "eager"] = hvd.allreduce(x)
    found["average=False", "eager"] = hvd.allreduce(x, False)
    found["variable", "eager"] = hvd.allreduce(tf.Variable(x))
    assert hvd.grouped_allreduce([]) == []
    types = {}
    for dtype in SUMMED:
        total = hvd.allreduce(tf.constant(typed(hvd.rank(), dtype)), op=hvd.Sum)
        least = hvd.allreduce(tf.constant(typed(hvd.rank(), dtype)), op=hvd.Min)
        mean = hvd.allreduce(tf.constant(typed(hvd.rank(), dtype)))
        types[dtype] = [(t.dtype.name, t.numpy().tolist()) for t in (total, least, mean)]
    return {key: value.numpy() for key, value in found.items()}, types


def job_slices() -> Any:
    """Sum IndexedSlices with ``rank`` rows, eagerly and in functions; then a gradient."""
    rank = hvd.rank()
    rows = tf.constant(given(rank, rank, 2))
    slices = tf.IndexedSlices(rows, tf.range(rank), tf.constant([4, 2]))
    found = {}
    for way, run in (("eager", lambda f: f()), ("traced", traced)):
        for name, op in (("Sum", hvd.Sum), ("Average", hvd.Average)):
            total = run(lambda op=op, name=name: hvd.allreduce(slices, op=op, name=f"rows.{name}"))
            found[name, way] = tf.convert_to_tensor(total).numpy()
    pair = hvd.grouped_allreduce([slices, tf.ones(2)], op=hvd.Sum, postscale_factor=2.0)
    found["group", "eager"] = tf.convert_to_tensor(pair[0]).numpy()
    with tf.GradientTape() as tape:
        tape.watch(rows)
        again = tf.IndexedSlices(rows, tf.range(rank), tf.constant([4, 2]))
        loss = tf.reduce_sum(hvd.allreduce(again, op=hvd.Sum).values) * (rank + 1.0)
    return found, tape.gradient(loss, rows).numpy()


def job_unnamed() -> Any:
    """Unnamed calls are matched by order, and do not create names without bound."""
    from bpsx.plugin import adapter

    declared = []
    for step in range(12):
        for shape in ((2,), (2, 2), (2,)):
            total = hvd.allreduce(mine(*shape, seed=step), op=hvd.Sum)
            np.testing.assert_allclose(total, everybody(*shape, seed=step).sum(axis=0))
        hvd.allgather(mine(1 + (step + hvd.rank()) % 4, 2))
        hvd.broadcast(mine(2), 0)
        hvd.reducescatter(mine(5))
        hvd.alltoall(mine(WORKERS + step % 3)[step % 3 :])
        declared.append(len(adapter.session()._declared))
    return declared


# ---- gathers and broadcasts


def job_gathers() -> Any:
    rank, found = hvd.rank(), {}
    for way, run in (("eager", lambda f: f()), ("traced", traced)):
        x = mine(rank, 2)  # worker 0 has no rows
        found["allgather", way] = run(lambda x=x: hvd.allgather(x, name="rows"))
        pair = run(lambda x=x: hvd.grouped_allgather([x, 2 * x], name="two"))
        found["grouped allgather", way] = pair[1]
        found["broadcast", way] = run(lambda: hvd.broadcast(mine(), 1, name="b"))
        whole = mine(5, 2)
        found["reducescatter", way] = run(
            lambda w=whole: hvd.reducescatter(w, op=hvd.Sum, name="r")
        )
        group = run(lambda w=whole: hvd.grouped_reducescatter([w, w], postscale_factor=2.0))
        found["grouped reducescatter", way] = group[1]
        even = mine(2 * WORKERS, 3)
        found["alltoall", way] = run(lambda e=even: hvd.alltoall(e, name="even"))
        splits = [(rank + r) % 3 for r in range(WORKERS)]
        rows = mine(sum(splits) + 1, 2)  # the last row is not sent
        pair = run(lambda r=rows, s=splits: hvd.alltoall(r, s, name="uneven"))
        found["uneven", way], found["received", way] = pair
        assert pair[1].dtype == tf.int32
    later = tf.function(
        hvd.alltoall,
        input_signature=[tf.TensorSpec([None, 2], tf.float64), tf.TensorSpec([None], tf.int64)],
    )
    found["uneven", "later"], found["received", "later"] = later(
        rows, tf.constant(splits, tf.int64)
    )
    evenly = tf.function(hvd.alltoall, input_signature=[tf.TensorSpec([None, 3], tf.float64)])
    found["alltoall", "later"] = evenly(even)
    types = {}
    for dtype in PASSED_ON:
        x = tf.constant(typed(rank, dtype))
        results = [
            hvd.allgather(x[: rank + 1]),
            hvd.broadcast(x, 2),
            hvd.alltoall(x, [1] * WORKERS)[0],
        ]
        types[dtype] = [(t.dtype.name, t.numpy().tolist()) for t in results]
    return {key: value.numpy() for key, value in found.items()}, types


def job_variables() -> Any:
    """broadcast_variables and broadcast_ in eager code, in functions and in a v1 graph."""
    rank = float(hvd.rank())
    first, second = tf.Variable([rank, 1.0]), tf.Variable(hvd.rank())
    found = {}
    assert hvd.broadcast_variables([first, second], root_rank=2, inplace=True) is None
    found["eager"] = [first.numpy().tolist(), int(second)]
    first.assign([rank, rank])
    values = hvd.broadcast_([first, second], 1, name="in place")
    found["in place"] = [first.numpy().tolist(), values[0].numpy().tolist()]
    first.assign([rank, rank])
    values = tf.function(lambda: hvd.broadcast_([first], 2))()
    found["traced"] = [first.numpy().tolist(), values[0].numpy().tolist()]
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[rank])
        hook = hvd.BroadcastGlobalVariablesHook(1)
        scalars = [
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
        ]
        put = hvd.broadcast_([variable], 2)
        told = hvd.broadcast_object_fn(0)([hvd.rank()])
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            found["hook"] = session.run(variable).tolist()
            found["scalars"] = [int(n) for n in session.run(scalars)]
            variable.load([rank], session._tf_sess())
            session.run(put)
            found["graph"], found["object"] = session.run(variable).tolist(), told
    return found


def job_objects() -> Any:
    rank = hvd.rank()
    value = {"rank": rank, "tensor": tf.constant([rank, 2], tf.bfloat16), "array": np.arange(rank)}
    plain = hvd.broadcast_object(value, root_rank=2, name="plain")
    gathered = hvd.allgather_object([rank] * rank)
    pickled = hvd.broadcast_object(ValueError("of", rank) if rank == 1 else None, 1)
    assert isinstance(plain["tensor"], tf.Tensor) and plain["tensor"].dtype == tf.bfloat16
    said = pytest.raises(TypeError, lambda: hvd.allgather_object(lambda: rank))
    told = plain["rank"], plain["tensor"].numpy().tolist(), plain["array"].tolist()
    return told, gathered, pickled.args, str(said.value)


# ---- gradients


def losses() -> list[Any]:
    """Verbs to be differentiated."""
    rank, size = hvd.rank(), hvd.size()
    return [
        lambda x: hvd.allreduce(
            x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25, name="g0"
        ),
        lambda x: hvd.allreduce(x, name="g1"),
        lambda x: hvd.grouped_allreduce([x, x * x], op=hvd.Sum, name="g2")[1],
        lambda x: hvd.allgather(x[: rank + 1], name="g3"),
        lambda x: hvd.grouped_allgather([x, 2 * x], name="g4")[1],
        lambda x: hvd.broadcast(x, size - 1, name="g5"),
        lambda x: hvd.reducescatter(x, op=hvd.Sum, name="g6"),
        lambda x: hvd.reducescatter(x, postscale_factor=2.0, name="g7"),
        lambda x: hvd.grouped_reducescatter([x, 2 * x])[1],
        lambda x: hvd.alltoall(x[:size], name="g9"),
        lambda x: hvd.alltoall(x, [5 - rank] + [0] * (size - 2) + [rank], name="g10")[0],
    ]


def job_gradients() -> Any:
    """Gradients of sum(weights * verb(x)) with different weights on each worker, eagerly and in
    functions.
    """
    found: dict[str, list[Any]] = {"eager": [], "traced": []}
    weights = tf.constant(given(hvd.rank(), MOST, 2, seed=7))
    for verb in losses():

        def gradient(verb: Any = verb) -> Any:
            x = mine(5, 2)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = verb(x)
                loss = tf.reduce_sum(y * weights[: tf.shape(y)[0]])
            return tape.gradient(loss, x)

        found["eager"].append(gradient().numpy())
        found["traced"].append(traced(gradient).numpy())
    x = mine()
    with tf.GradientTape() as tape:
        tape.watch(x)
        least = hvd.allreduce(x, op=hvd.Min)
    said = pytest.raises(RuntimeError, lambda: tape.gradient(least, x))
    return found, str(said.value)


# ---- failures and join


def job_failure() -> Any:
    """The workers' shapes differ: every worker gets an error of both classes; functions raise
    TensorFlow's class.
    """
    told = []
    for kind in (hvd.HorovodInternalError, tf.errors.InvalidArgumentError, RuntimeError):
        with pytest.raises(kind) as caught:
            hvd.allreduce(tf.ones([hvd.rank() + 2]), name=f"differs as {kind.__name__}")
        told.append((type(caught.value).__name__, str(caught.value)))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        traced(lambda: hvd.allreduce(tf.ones([hvd.rank() + 2]), name="differs in a function"))
    return told, caught.value.message


def job_join() -> Any:
    """Worker 0 has more data than the others; after join() all continue together."""
    if hvd.rank() == 0:
        total = hvd.allreduce(tf.ones(2), op=hvd.Sum, name="more")
        np.testing.assert_allclose(total, [1.0, 1.0])
    last = hvd.join()
    hvd.barrier()
    return int(last), last.dtype.name


JOBS = [name for name in dir() if name.startswith("job_")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = run_job(__file__, JOBS, tmp_path_factory, WORKERS)
    assert done.status == 0, done.output[-5000:]
    return done


def near(found: Any, expected: Any, tolerance: float = 1e-11) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# ---- expected results


def test_allreduce(job: Finished) -> None:
    x, n = everybody(), np.stack([integers(r) for r in range(WORKERS)])
    expected = {name: np_op(x, axis=0) for name, np_op in OPS.items()} | {
        "scaled": 1.5 * x.sum(axis=0),
        "default": x.mean(axis=0),
        "average=False": x.sum(axis=0),
        "variable": x.mean(axis=0),
        "group": 2 * x.sum(axis=0),
        "integers": np.trunc(n.sum(axis=0) / WORKERS),
        "integers scaled": np.trunc(n * 0.5).sum(axis=0),
    }
    for found, _ in each(job, "job_allreduce"):
        for (name, way), value in found.items():
            if name == "fp16":
                near(value, x.mean(axis=0), 2e-3)
                assert value.dtype == np.float64
            else:
                near(value, expected[name])
            np.testing.assert_array_equal(value, each(job, "job_allreduce")[0][0][name, way])


def test_element_types(job: Finished) -> None:
    for found, _ in zip(each(job, "job_allreduce"), range(WORKERS), strict=True):
        for dtype in SUMMED:
            total, least, mean = found[1][dtype]
            assert total == (dtype, [3, 6, 9, 12]) and least == (dtype, [0, 1, 2, 3])
            assert mean == (dtype, [1, 2, 3, 4])
    for rank, (_, types) in enumerate(each(job, "job_gathers")):
        for dtype in PASSED_ON:
            arrays = [typed(r, dtype) for r in range(WORKERS)]
            rows, copy, turned = types[dtype]
            assert rows == (
                dtype,
                np.concatenate([a[: r + 1] for r, a in enumerate(arrays)]).tolist(),
            )
            assert copy == (dtype, arrays[2].tolist())
            assert turned == (dtype, [a[rank] for a in arrays])


def test_indexed_slices(job: Finished) -> None:
    total = np.zeros((4, 2))
    for rank in range(WORKERS):
        total[:rank] += given(rank, rank, 2)
    for rank, (found, gradient) in enumerate(each(job, "job_slices")):
        for way in ("eager", "traced"):
            near(found["Sum", way], total)
            near(found["Average", way], total / WORKERS)
        near(found["group", "eager"], 2 * total)
        near(gradient, np.full((rank, 2), np.mean([1.0, 2.0, 3.0])))


def test_calls_without_a_name(job: Finished) -> None:
    for declared in each(job, "job_unnamed"):
        assert declared[3] == declared[-1], "names are not made without end"


def test_gathers(job: Finished) -> None:
    sums, rows = everybody(5, 2).sum(axis=0), [given(r, r, 2) for r in range(WORKERS)]
    splits = [[(r + s) % 3 for s in range(WORKERS)] for r in range(WORKERS)]
    for rank, (found, _) in enumerate(each(job, "job_gathers")):
        uneven = [
            given(r, sum(splits[r]) + 1, 2)[sum(splits[r][:rank]) : sum(splits[r][: rank + 1])]
            for r in range(WORKERS)
        ]
        expected = {
            "allgather": np.concatenate(rows),
            "grouped allgather": 2 * np.concatenate(rows),
            "broadcast": given(1),
            "reducescatter": np.array_split(sums, WORKERS)[rank],
            "grouped reducescatter": np.array_split(2 * sums / WORKERS, WORKERS)[rank],
            "alltoall": np.concatenate(
                [given(r, 6, 3)[2 * rank : 2 * rank + 2] for r in range(WORKERS)]
            ),
            "uneven": np.concatenate(uneven),
            "received": [row[rank] for row in splits],
        }
        for (name, _), value in found.items():
            near(value, expected[name])


def test_variables(job: Finished) -> None:
    for rank, found in enumerate(each(job, "job_variables")):
        assert found["eager"] == [[2.0, 1.0], 2] and found["in place"] == [[1.0, 1.0]] * 2
        assert found["traced"] == [[2.0, 2.0]] * 2 and found["hook"] == [1.0]
        assert found["scalars"] == [rank, WORKERS, 0, 1, 1]
        assert found["graph"] == [2.0] and found["object"] == [0]


def test_objects(job: Finished) -> None:
    for plain, gathered, pickled, said in each(job, "job_objects"):
        assert plain == (2, [2, 2], [0, 1]) and pickled == ("of", 1)
        assert gathered == [[], [1], [2, 2]] and "function cannot be pickled" in said


def expected_gradients(rank: int) -> list[np.ndarray]:
    """Horovod's derivatives, in the order of :func:`losses`."""
    size, all_weights = WORKERS, everybody(MOST, 2, seed=7)

    def weights(rows: int) -> np.ndarray:
        return all_weights[:, :rows]

    x, own = given(rank, 5, 2), weights(5)
    begin, total = rank * (rank + 1) // 2, size * (size + 1) // 2
    uneven, even = np.zeros((5, 2)), np.zeros((5, 2))
    uneven[: rank + 1] = weights(total).mean(axis=0)[begin : begin + rank + 1]
    parts = np.array_split(x, size)
    scattered = np.concatenate([all_weights[r, : len(part)] for r, part in enumerate(parts)])
    even[:size] = weights(size)[:, rank]
    # alltoall with splits: worker 0 gets 5 - r rows from each worker r, the last worker r rows.
    before, before_last = sum(5 - r for r in range(rank)), sum(range(rank))
    first, last = all_weights[0], all_weights[size - 1]
    back = np.concatenate(
        [first[before : before + 5 - rank], last[before_last : before_last + rank]]
    )
    return [
        0.5 * own.sum(axis=0),
        own.mean(axis=0),
        2 * x * own.sum(axis=0),
        uneven,
        2 * weights(5 * size).mean(axis=0)[5 * rank : 5 * rank + 5],
        own.mean(axis=0) * (rank == size - 1),
        size * scattered,
        2 * scattered,
        2 * scattered,
        even,
        back,
    ]


@pytest.mark.parametrize("way", ["eager", "traced"])
def test_gradients_are_horovods(job: Finished, way: str) -> None:
    for rank, (found, said) in enumerate(each(job, "job_gradients")):
        for gradient, expected in zip(found[way], expected_gradients(rank), strict=True):
            near(gradient, expected)
        assert said.startswith("allreduce with op=hvd.Min has no derivative")


def test_failures_are_horovods_and_tensorflows(job: Finished) -> None:
    for told, in_function in each(job, "job_failure"):
        for name, text in told:
            assert name == "MismatchError" and text.startswith("tensor 'allreduce.differs as ")
        assert "MismatchError: tensor 'allreduce.differs in a function'" in in_function


def test_join(job: Finished) -> None:
    assert len(set(each(job, "job_join"))) == 1 and each(job, "job_join")[0][1] == "int32"
