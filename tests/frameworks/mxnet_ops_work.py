"""Worker functions of test_mxnet_ops.py."""

from __future__ import annotations

import os
import threading
from typing import Any

import mxnet as mx
import numpy as np

import bpsx.mxnet as bps
from bpsx.api.verbs import session
from bpsx.mxnet import ops
from support.mxnet_job import values

SUMMED = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
SHAPES = ((5,), (3, 4), (2, 3, 4), (1, 1, 1, 1, 1, 1, 1, 2), (70_000,))
IN_FLIGHT = 16


def given(shape: Any, dtype: str = "float32") -> Any:
    return mx.nd.array(values(shape, bps.rank(), dtype), dtype=dtype)


def job_sums() -> Any:
    found = {}
    for dtype in SUMMED:
        for shape in SHAPES:
            for average in (False, True):
                x = given(shape, dtype)
                bps.byteps_push_pull(x, name=f"sum.{dtype}.{shape}.{average}", is_average=average)
                found[dtype, shape, average] = x.asnumpy()
    return found


def job_bfloat16() -> Any:
    """NumPy has no bfloat16: MXNet represents it as a structure with one field."""
    x = given((3, 4)).astype(np.dtype([("bfloat16", np.uint16)]))
    bps.byteps_push_pull(x, is_average=False)
    return mx.nd.amp_cast(x, dtype="float32").asnumpy()


def job_numpy_arrays() -> Any:
    """Exchange mx.np arrays, also an empty and a 0-dimensional one."""
    with mx.util.np_shape(True):
        arrays = [
            mx.np.array(values((2, 3), bps.rank())),
            mx.np.zeros((0, 3)),
            mx.np.array(1.0 + bps.rank()),
        ]
        for i, x in enumerate(arrays):
            bps.byteps_push_pull(x, name=f"np.{i}", is_average=False)
        return [x.asnumpy() for x in arrays]


def job_in_flight() -> Any:
    """Start the exchanges in opposite orders on the two workers.

    This would deadlock if an exchange occupied an engine thread until it ended.
    """
    arrays = [given((1000 + i,)) for i in range(IN_FLIGHT)]
    order = range(IN_FLIGHT) if bps.rank() == 0 else reversed(range(IN_FLIGHT))
    for i in order:
        bps.byteps_push_pull(arrays[i], name=f"flight.{i}", is_average=False)
    return [x.asnumpy() for x in arrays]


def job_dependencies() -> Any:
    """Exchange an array between two other operations on it, twice; then a view, and an array that
    goes out of scope.
    """
    x = given((4, 3))
    for _ in range(2):
        x *= 2
        bps.byteps_push_pull(x, name="between", is_average=False)
        x += 1
    y = given((4, 3))
    bps.byteps_push_pull(y[1:3], name="view", is_average=False)
    z = given((300_000,))
    bps.byteps_push_pull(z, name="gone", is_average=False)
    total = z.sum()
    del z
    return x.asnumpy(), y.asnumpy(), float(total.asscalar())


def job_layouts() -> Any:
    """Exchange a convolution's output, which has MKL-DNN's own memory layout."""
    x, w = given((2, 8, 16, 16)), given((16, 8, 3, 3))
    y = mx.nd.Convolution(x, w, no_bias=True, kernel=(3, 3), num_filter=16)
    alone = y.asnumpy()
    y = mx.nd.Convolution(x, w, no_bias=True, kernel=(3, 3), num_filter=16)
    bps.byteps_push_pull(y, name="layout", is_average=False)
    return alone, (y + 0).asnumpy()


def job_one_name() -> Any:
    """Exchange ten unrelated arrays under one name; the first depends on a long computation."""
    big = mx.nd.ones((1500, 1500))
    for _ in range(3):
        big = mx.nd.dot(big, big) / 1500
    arrays = [mx.nd.ones((3,)) * i for i in range(10)]
    arrays[0] += big[0, :3] - 1
    for x in arrays:
        bps.byteps_push_pull(x, name="one", is_average=False)
    return [x.asnumpy() for x in arrays]


def job_threads() -> Any:
    """Exchange one array under one name from four threads.

    Each sum must consist of matching operations of both workers, and no deadlock may occur.
    """
    x = mx.nd.ones((3,))

    def work() -> None:
        for _ in range(100):
            # both workers push equal values, so the average equals them
            bps.byteps_push_pull(x, name="threads")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return x.asnumpy().tolist()


def job_without_names() -> Any:
    x, y = given((3,)), given((4,))
    bps.byteps_push_pull(x)
    bps.byteps_push_pull(y, is_average=False)
    return x.asnumpy(), y.asnumpy()


def job_broadcast() -> Any:
    dtypes = (*SUMMED, "bool")
    arrays = {
        dtype: mx.nd.array(values((3, 2), bps.rank() + 10) % 2, dtype=dtype) for dtype in dtypes
    }
    bps.broadcast_parameters(arrays, root_rank=1)
    net = mx.gluon.nn.Dense(2, in_units=3, prefix="broadcast_")
    net.initialize(mx.init.Uniform(), ctx=[mx.cpu(0), mx.cpu(1)])
    net.weight.set_data(mx.nd.ones((2, 3)) * (bps.rank() + 1))
    bps.broadcast_parameters(net.collect_params())
    return {dtype: x.asnumpy() for dtype, x in arrays.items()}, [
        copy.asnumpy() for copy in net.weight.list_data()
    ]


def job_another_device() -> Any:
    """Treat host memory like a GPU's: copied to the host and back, in the engine's order."""
    before, ops.HOST = ops.HOST, ()
    try:
        x = given((4, 3)) * 2
        bps.byteps_push_pull(x, name="device", is_average=False)
        x += 1
    finally:
        ops.HOST = before
    return x.asnumpy()


def job_arguments_that_reach_the_core() -> Any:
    told = []
    begin = session().push_pull

    def push_pull(name: str, *arrays: Any, **options: Any) -> Any:
        told.append((name, options["priority"], options["average"], options["rate"]))
        return begin(name, *arrays, **options)

    session().push_pull = push_pull  # type: ignore[method-assign]
    try:
        bps.byteps_push_pull(given((3,)), name="told", priority=-7, version=3)
        ops.submit(given((3,)), "rate", rate=0.5)
        mx.nd.waitall()
    finally:
        del session().push_pull  # type: ignore[method-assign]
    return told


def job_declared() -> Any:
    """Declare with BytePS' string options and with bpsx's own options."""
    ours = bps.byteps_declare_tensor("declared", compressor="topk", k=2, ef="vanilla")
    again = bps.byteps_declare_tensor(
        "declared again",
        byteps_compressor_type="topk",
        byteps_compressor_k="2",
        byteps_ef_type="vanilla",
    )
    bps.byteps_declare_tensor(
        "dithered",
        byteps_compressor_type="dithering",
        byteps_compressor_k="4",
        byteps_dithering_partition="1",
        byteps_dithering_normalize="0",
        byteps_seed="7",
    )
    bps.byteps_declare_tensor(
        "signs",
        byteps_compressor_type="onebit",
        byteps_compressor_onebit_scaling="True",
        byteps_momentum_type="nesterov",
        byteps_momentum_mu="0.5",
    )
    bps.byteps_declare_tensor(
        "factored", byteps_compressor_type="powersgd", byteps_compressor_rank="3"
    )
    chosen = session().compressing
    x = mx.nd.array([9.0, 1.0, 2.0, 8.0] * 100)
    bps.byteps_push_pull(x, name="declared", is_average=False)
    return (
        ours,
        again,
        [
            str(chosen.of(name, 3, 1 << 20, (512, 512)))
            for name in ("declared", "declared again", "dithered", "signs", "factored")
        ],
        x.asnumpy(),
    )


def job_compression_types() -> Any:
    """Compression.none and Compression.fp16, called by the script itself."""
    found = []
    for compressor in (bps.Compression.none, bps.Compression.fp16):
        x = mx.nd.array([1.0, 2.0**-30, 3.0])
        small, ctx = compressor.compress(x)
        bps.byteps_push_pull(small, name=f"compressed.{compressor.__name__}", is_average=False)
        back = compressor.decompress(small, ctx)
        found.append((small.dtype.__name__, back.dtype.__name__, back.asnumpy().tolist()))
    whole = mx.nd.array([1], dtype="int32")
    return found, bps.Compression.fp16.compress(whole)[0] is whole


def job_refused() -> Any:
    sparse = mx.nd.array([[0, 1], [0, 0]]).tostype("row_sparse")
    x = mx.nd.ones((3,))
    deferred = mx.gluon.nn.Dense(2)
    deferred.initialize()
    rows = mx.gluon.nn.Embedding(3, 2, sparse_grad=True, prefix="rows_")
    rows.initialize()
    calls: list[Any] = [
        lambda: bps.byteps_push_pull(np.ones(3)),
        lambda: bps.byteps_push_pull(sparse, name="sparse"),
        lambda: bps.byteps_push_pull(mx.nd.array([1, 0], dtype="bool"), name="bool"),
        lambda: bps.byteps_push_pull(x, name=3),
        lambda: bps.byteps_push_pull(x, priority=2**31),
        lambda: bps.byteps_push_pull(x, is_average="no"),
        lambda: bps.broadcast_parameters([x]),
        lambda: bps.broadcast_parameters({"x": x}, 2),
        lambda: bps.broadcast_parameters({"x": 1}),
        lambda: bps.broadcast_parameters(deferred.collect_params()),
        lambda: bps.byteps_declare_tensor(""),
        lambda: bps.byteps_declare_tensor("x", byteps_compressor_type="zip"),
        lambda: bps.byteps_declare_tensor("x", colour="red"),
        lambda: bps.DistributedOptimizer("sgd"),
        lambda: bps.DistributedOptimizer(bps.DistributedOptimizer(mx.optimizer.SGD())),
        lambda: bps.DistributedTrainer(deferred.collect_params(), "sgd", root_rank=-1),
        lambda: bps.DistributedTrainer(rows.collect_params(), "sgd"),
        lambda: bps.DistributedTrainer(
            deferred.collect_params(), "sgd", compression_params={"compressor": "zip"}
        ),
        lambda: bps.DistributedTrainer(
            deferred.collect_params(),
            "sgd",
            compression_params={"compressor": "onebit", "momentum": "nesterov"},
        ),
        lambda: bps.DistributedTrainer([*deferred.collect_params().values()] * 2, "sgd"),
        lambda: bps.DistributedTrainer(deferred.collect_params(), None),
        lambda: bps.DistributedTrainer(
            deferred.collect_params(), "sgd", compression_params=bps.Compression.fp16
        ),
        lambda: bps.DistributedTrainer(
            deferred.collect_params(),
            "sgd",
            compression_params={"wieght": {"compressor": "onebit"}},
        ),
        lambda: bps.broadcast_parameters({"x": x, 1: x}),
        lambda: bps.DistributedTrainer(deferred.collect_params(), "sgd").load_states(__file__),
        lambda: bps.DistributedTrainer(deferred.collect_params(), "sgd").load_states("/nowhere"),
    ]
    told = []
    for call in calls:
        try:
            call()
            told.append("nothing")
        except Exception as e:
            told.append(f"{type(e).__name__}: {e}")
    return told


def job_mismatch() -> Any:
    """Catch the error where a result of the failed exchange is read; a later exchange works."""
    bad = mx.nd.ones((3 + bps.rank(),))
    bps.byteps_push_pull(bad, name="bad")
    late = bad * 2
    told = ""
    try:
        late.asnumpy()
    except mx.MXNetError as e:
        told = str(e)
    good = mx.nd.ones((3,))
    bps.byteps_push_pull(good, name="good", is_average=False)
    again = mx.nd.ones((2,))
    bps.byteps_push_pull(again, name="bad", is_average=False)
    return told, good.asnumpy(), again.asnumpy()


def job_forks() -> Any:
    """Fork during exchanges: MXNet's fork handler waits for its engine while it holds the GIL."""
    x = given((20_000,))
    for step in range(20):
        for i in range(10):
            bps.byteps_push_pull(x, name=f"forked.{i}", priority=step)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return x.asnumpy()
