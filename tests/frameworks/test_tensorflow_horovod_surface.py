"""Horovod's names for TensorFlow and Keras all exist with Horovod's arguments; rejected arguments.

Functions named ``job_*`` run in two workers. Arguments are rejected before anything is sent, so the
other worker does not wait.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx.keras.horovod as hvd_k
    import bpsx.keras.horovod.callbacks as callbacks
    import bpsx.tensorflow.horovod as hvd
    from bpsx import ConfigError

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).parents[2] / "docs" / "start" / "migrating.md"


def words(text: str) -> list[str]:
    return text.split()


BOTH = words("""
    init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank
    local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
    nccl_built ddl_built ccl_built cuda_built rocm_built ProcessSet global_process_set
    add_process_set remove_process_set Average Sum Adasum Compression DistributedOptimizer
    broadcast_global_variables allreduce allgather broadcast reducescatter
    """)
#: Names importable from horovod.tensorflow 0.28.1, except modules and its internal helpers.
TENSORFLOW = [
    *BOTH,
    *words("""
    allgather_object broadcast_object broadcast_object_fn broadcast_variables grouped_allgather
    broadcast_ alltoall is_homogeneous rank_op local_rank_op size_op local_size_op
    process_set_included_op Min Max Product handle_average_backwards_compatibility join
    SyncBatchNormalization grouped_allreduce grouped_reducescatter BroadcastGlobalVariablesHook
    DistributedGradientTape PartialDistributedGradientTape
    """),
]
#: Names importable from horovod.keras and horovod.tensorflow.keras.
KERAS = [*BOTH, "PartialDistributedOptimizer", "load_model", "callbacks"]
CALLBACKS = [
    "BroadcastGlobalVariablesCallback",
    "MetricAverageCallback",
    "BestModelCheckpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
]
#: Names of horovod.tensorflow that the documentation lists as unsupported.
NOT_HERE = [
    "check_num_rank_power_of_2",
    "vars_to_refs",
    "refs_to_vars",
    "LocalGradientAggregationHelper",
    "gpu_available",
    "check_extension",
    "split_list",
]

TRAINING = (
    "compression sparse_as_dense=False op=0 gradient_predivide_factor=1.0 num_groups=0 "
    "groups=None process_set"
)
REDUCED = "compression op=None prescale_factor=1.0 postscale_factor=1.0"
DEVICES = "device_dense='' device_sparse=''"
SCATTERED = "device_dense='' compression op=0"
FACTORS = "prescale_factor=1.0 postscale_factor=1.0"
SIGNATURES = {
    "allreduce": (
        f"tensor average=None {DEVICES} {REDUCED} name=None process_set ignore_name_scope=False"
    ),
    "grouped_allreduce": (
        f"tensors average=None {DEVICES} {REDUCED} process_set ignore_name_scope=False name=None"
    ),
    "reducescatter": f"tensor {SCATTERED} name=None process_set ignore_name_scope=False {FACTORS}",
    "grouped_reducescatter": f"tensors {SCATTERED} process_set {FACTORS}",
    "allgather": "tensor name=None ignore_name_scope=False process_set",
    "grouped_allgather": "tensors name=None ignore_name_scope=False process_set",
    "broadcast": "tensor root_rank name=None ignore_name_scope=False process_set",
    "broadcast_": "variables root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None ignore_name_scope=False process_set",
    "broadcast_variables": "variables root_rank process_set inplace=False",
    "broadcast_object": "obj root_rank=0 session=None name=None process_set",
    "broadcast_object_fn": "root_rank=0 session=None name=None process_set",
    "allgather_object": "obj session=None name=None process_set",
    "size_op": "process_set_id=0 name=None",
    "process_set_included_op": "process_set_id=0 name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "local_size_op": "name=None",
    "join": "",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank device=''",
    "DistributedGradientTape": f"gradtape {DEVICES} {TRAINING} scale_local_gradients=True",
    "PartialDistributedGradientTape": (
        f"gradtape {DEVICES} {TRAINING} local_layers=None scale_local_gradients=True"
    ),
    "DistributedOptimizer": (
        f"optimizer name=None use_locking=False {DEVICES} compression "
        "sparse_as_dense=False backward_passes_per_step=1 op=0 "
        "gradient_predivide_factor=1.0 average_aggregated_gradients=False "
        "num_groups=0 groups=None process_set scale_local_gradients=True"
    ),
    "keras.DistributedOptimizer": (
        f"optimizer name=None {DEVICES} compression sparse_as_dense=False "
        "gradient_predivide_factor=1.0 op=0 backward_passes_per_step=1 "
        "average_aggregated_gradients=False num_groups=0 groups=None "
        "process_set scale_local_gradients=True"
    ),
    "keras.PartialDistributedOptimizer": (
        f"optimizer name=None {DEVICES} compression "
        "sparse_as_dense=False gradient_predivide_factor=1.0 op=0 "
        "groups=None process_set local_layers=None "
        "scale_local_gradients=True"
    ),
    "keras.allreduce": f"value name=None average=None {FACTORS} op=None compression",
    "keras.allgather": "value name=None",
    "keras.broadcast": "value root_rank name=None",
    "keras.reducescatter": "value name=None op=0",
    "keras.load_model": (
        "filepath custom_optimizers=None custom_objects=None compression legacy_opts=False"
        " op=0 average_aggregated_gradients=False"  # which Horovod's has not
    ),
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank device='' local_variables=None",
    "callbacks.MetricAverageCallback": "device=''",
    "callbacks.LearningRateScheduleCallback": (
        "initial_lr multiplier start_epoch=0 end_epoch=None "
        "staircase=True momentum_correction=True "
        "steps_per_epoch=None"
    ),
    "callbacks.LearningRateWarmupCallback": (
        "initial_lr warmup_epochs=5 momentum_correction=True steps_per_epoch=None verbose=0"
    ),
    "callbacks.BestModelCheckpoint": (
        "monitor='val_loss' verbose=0 save_weights_only=False mode='auto' save_freq='epoch'"
    ),
}


def signature_of(function: Any) -> str:
    """Return arguments and defaults in Horovod's notation."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        name, default = parameter.name.rstrip("_"), parameter.default
        if default in (inspect.Parameter.empty, hvd.Compression.none, hvd.global_process_set):
            found.append(name)
        else:
            found.append(
                f"{name}={int(default) if name == 'op' and default is not None else default!r}"
            )
    return " ".join(found)


def job_surface() -> Any:
    places = {"keras": hvd_k, "callbacks": callbacks, "hvd": hvd}
    signatures = {}
    for name in SIGNATURES:
        place, _, own = name.rpartition(".")
        signatures[name] = signature_of(getattr(places[place or "hvd"], own))
    questions = [name for name in TENSORFLOW if name.endswith(("_built", "_enabled", "_supported"))]
    assert len(questions) == 10 and not any(getattr(hvd, name)() for name in questions)
    assert hvd.is_initialized() and hvd.is_homogeneous() and hvd.cross_size() == hvd.size()
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))
    assert hvd.handle_average_backwards_compatibility(None, False) is hvd.Sum
    hvd.init()
    hvd.init([], process_sets="dynamic")
    everyone = hvd.add_process_set([1, 0])
    total = hvd.allreduce(tf.ones(1), op=hvd.Sum, process_set=everyone)
    assert total.numpy() == [2.0] and not hvd.remove_process_set(everyone)
    assert everyone.process_set_id == 0 and hvd.global_process_set.process_set_id == 0
    missing = {
        "tensorflow": [name for name in TENSORFLOW if not hasattr(hvd, name)],
        "keras": [name for name in KERAS if not hasattr(hvd_k, name)],
        "callbacks": [name for name in CALLBACKS if not hasattr(callbacks, name)],
        "listed": [name for name in hvd.__all__ if not hasattr(hvd, name)],
    }
    return missing, signatures, sorted({*hvd.__all__, *hvd_k.__all__, *callbacks.__all__})


Refusal = tuple[Callable[[], object], str]
ADASUM = "op=hvd.Adasum is not supported, because summation servers only add; use op=hvd.Average"


def refused_sets() -> list[Refusal]:
    x, some = tf.ones(4), hvd.ProcessSet([0])
    tape, sgd = tf.GradientTape(), keras.optimizers.SGD()
    subset = r"process_set=ProcessSet\(\[0\]\).*not all 2 workers, but a sum.*needs all of them$"
    verbs = [
        hvd.allreduce,
        hvd.allgather,
        hvd.reducescatter,
        hvd.alltoall,
        hvd.broadcast_object,
        hvd.allgather_object,
        hvd.broadcast_object_fn,
    ]
    groups = [hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter]
    roots = [
        hvd.broadcast,
        lambda *a, **k: hvd.broadcast_([tf.Variable(x)], 0, **k),
        lambda *a, **k: hvd.broadcast_variables([tf.Variable(x)], 0, **k),
    ]
    calls: list[Callable[[], object]] = [
        *[lambda v=v: v(x, process_set=some) for v in verbs],
        *[lambda v=v: v([x], process_set=some) for v in groups],
        *[lambda v=v: v(x, 0, process_set=some) for v in roots],
        lambda: hvd.DistributedGradientTape(tape, process_set=some),
        lambda: hvd.barrier(some),
        lambda: hvd.PartialDistributedGradientTape(tape, process_set=some),
        lambda: hvd.DistributedOptimizer(sgd, process_set=some),
        lambda: hvd.add_process_set([0]),
        lambda: hvd_k.PartialDistributedOptimizer(sgd, process_set=some),
    ]
    return [
        *[(call, subset) for call in calls],
        (lambda: hvd.init(process_sets=[some]), "init: process_sets=ProcessSet"),
        (lambda: hvd.init([0]), "init: comm"),
        (lambda: hvd.ProcessSet("all"), "a list of ranks"),
        (lambda: hvd.allreduce(x, process_set=[0]), "must be a ProcessSet, not list"),
        (
            lambda: hvd.size_op(process_set_id=1),
            "process_set_id=1: expected 0, the set of all workers",
        ),
        (lambda: hvd.process_set_included_op(7), "process_set_id=7"),
    ]


def refused_calls() -> list[Refusal]:
    x, scalar = tf.ones(4), tf.ones(())
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([2, 2]))
    return [
        *[(lambda v=v: v(x, op=hvd.Adasum), ADASUM) for v in (hvd.allreduce, hvd.reducescatter)],
        (lambda: hvd.grouped_allreduce([x], op=hvd.Adasum), ADASUM),
        (lambda: hvd.reducescatter(x, op=hvd.Max), "op=hvd.Max; expected hvd.Average or hvd.Sum"),
        (
            lambda: hvd.allreduce(slices, op=hvd.Max),
            "op=hvd.Max is not possible for tf.IndexedSlices",
        ),
        (lambda: hvd.allreduce(x, op=7), "op=7; expected one of hvd.Average, hvd.Sum, hvd.Min"),
        (lambda: hvd.allreduce(x, True, op=hvd.Sum), "op and average are both given"),
        (lambda: hvd.allreduce(x, "loss"), "average must be True or False, not 'loss'"),
        (lambda: hvd.allreduce(x, prescale_factor="2"), "prescale_factor must be a number"),
        (lambda: hvd.allreduce(x, name=3), "name must be a string"),
        (lambda: hvd.allreduce(x > 0, op=hvd.Min), "bool cannot be summed"),
        (lambda: hvd.allreduce(tf.constant("a")), "string cannot be summed"),
        (lambda: hvd.allgather(tf.constant(["a"])), "dtype string cannot be sent"),
        (lambda: hvd.allreduce(x, compression=3), "compression"),
        (lambda: hvd.broadcast(x, 9), "root_rank=9"),
        (lambda: hvd.broadcast_([tf.Variable(x)], 9), "root_rank=9"),
        (lambda: hvd.broadcast_([x], 0), "element 0 is not a variable"),
        (lambda: hvd.broadcast_(tf.Variable(x), 0), "element 0 is not a variable"),
        (lambda: hvd.broadcast_variables([x], 0), "expected a variable"),
        (lambda: hvd.grouped_allreduce(x), "expected a list of tensors, not"),
        *[
            (lambda v=v: v(scalar), "at least one dimension")
            for v in (hvd.allgather, hvd.reducescatter, hvd.alltoall)
        ],
        (lambda: hvd.alltoall(tf.ones(3)), "3 rows cannot be divided evenly among 2 workers"),
        *[
            (
                lambda s=s: hvd.alltoall(x, s),
                r"^alltoall: splits=.*2 integers from 0, one for each worker",
            )
            for s in (3, [1], [5, 0], [1.0, 1.0], [-1, 2], tf.constant([1]), tf.constant([4, 4]))
        ],
        (lambda: hvd.alltoall(x, tf.ones(2)), r"splits is a tensor of shape \(2,\) and float32"),
    ]


def refused_options() -> list[Refusal]:
    x = tf.ones(4)
    sgd, v1 = keras.optimizers.SGD, tf.compat.v1.train.GradientDescentOptimizer(1.0)
    made = [
        lambda **k: hvd.DistributedGradientTape(tf.GradientTape(), **k),
        lambda **k: hvd.DistributedOptimizer(sgd(), **k),
        lambda **k: hvd.DistributedOptimizer(v1, **k),
    ]
    return [
        *[(lambda m=m: m(op=hvd.Adasum), ADASUM) for m in made],
        *[(lambda m=m: m(op=hvd.Min), "op=hvd.Min; expected hvd.Average or hvd.Sum") for m in made],
        *[(lambda m=m: m(gradient_predivide_factor=0), "a number above 0") for m in made],
        *[(lambda m=m: m(gradient_predivide_factor=2.0, op=hvd.Sum), "leave it out") for m in made],
        *[(lambda m=m: m(groups=-1), "groups=-1: expected an integer from 0") for m in made],
        *[(lambda m=m: m(groups=[[x]]), "must be lists of variables") for m in made],
        *[(lambda m=m: m(num_groups="a"), "num_groups='a'") for m in made],
        *[
            (lambda m=m: m(scale_local_gradients="a"), "scale_local_gradients must be")
            for m in made
        ],
    ]


def refused_training() -> list[Refusal]:
    x, sgd = tf.ones(4), keras.optimizers.SGD
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    return [
        (lambda: hvd.start_timeline(5), "^start_timeline: file_path=5"),
        (lambda: tf.function(hvd.join, autograph=False)(), "join: must be called in eager code"),
        (lambda: hvd.broadcast_global_variables(0), "give your variables to broadcast_variables"),
        (lambda: hvd.DistributedGradientTape(3), "expected a tf.GradientTape, not int"),
        (lambda: hvd.DistributedOptimizer(3), "expected an optimizer of Keras 3, not int"),
        (
            lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0),
            "backward_passes_per_step",
        ),
        (
            lambda: hvd.DistributedGradientTape(tf.GradientTape()).register_local_source(x),
            "it is not a variable",
        ),
        (
            lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3]),
            "a layer of Keras 3",
        ),
        (
            lambda: hvd_k.PartialDistributedOptimizer(sgd(), local_layers="dense"),
            "a layer of Keras 3",
        ),
        (
            lambda: hvd_k.PartialDistributedOptimizer(sgd(global_clipnorm=2.0), local_layers=layer),
            "global_clipnorm=2 clips by a norm",
        ),
        (lambda: hvd_k.load_model("m.keras", legacy_opts=True), "legacy_opts=True"),
        (lambda: hvd.SyncBatchNormalization(fused=True), "fused=True"),
        (lambda: callbacks.LearningRateWarmupCallback(None), "initial_lr=None"),
        (lambda: callbacks.LearningRateScheduleCallback(0.1, "a"), "multiplier='a'"),
        (lambda: callbacks.BroadcastGlobalVariablesCallback(0, "", [3]), "3 is not a variable"),
    ]


def job_refusals() -> Any:
    """Return the calls without the expected rejection; nothing may have been sent."""
    from bpsx.api.verbs import session

    before, wrong = session().counters()["push_pulls"], []
    for i, (call, match) in enumerate(
        [*refused_sets(), *refused_calls(), *refused_options(), *refused_training()]
    ):
        try:
            wrong.append((i, match, "not refused", repr(call())))
        except (ConfigError, TypeError) as e:
            if not re.search(match, str(e), re.DOTALL):
                wrong.append((i, match, type(e).__name__, str(e)))
        except Exception as e:
            wrong.append((i, match, type(e).__name__, str(e)))
    assert session().counters()["push_pulls"] == before
    with pytest.raises(AttributeError, match="no attribute 'elastik'"):
        _ = hvd.elastik
    with pytest.warns(DeprecationWarning, match="op=hvd.Average") as seen:
        hvd.allreduce(tf.ones(1), average=True)
    assert seen[0].filename == __file__
    return wrong


def job_later() -> Any:
    """Splits known only when a function runs are rejected then, before rows are sent."""
    function = tf.function(
        hvd.alltoall,
        input_signature=[tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int64)],
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="splits must be 2 integers from 0"
    ) as caught:
        function(tf.ones(4), tf.constant([4, 4], tf.int64))
    return caught.value.message


def job_error_classes() -> Any:
    """Every bpsx error inside a TensorFlow error's text is raised as both classes; other errors
    stay.
    """
    from bpsx import errors
    from bpsx.tensorflow.horovod.errors import verb

    def raised(kind: type[Exception], text: str) -> Exception:
        def fail() -> None:
            raise kind(None, None, text)

        with pytest.raises(kind) as caught:
            verb(fail)()
        return caught.value

    found = []
    for name in {status[0].__name__ for status in errors.STATUS.values()}:
        text = (
            f"{{{{node x}}}} {name}: worker 1 (10.0.0.2, pid 77) is gone [Op:BpsxPushPull] name: "
        )
        error = raised(tf.errors.AbortedError, text)
        assert isinstance(error, getattr(errors, name)) and isinstance(error, RuntimeError)
        assert error.message == text and error.error_code == tf.errors.ABORTED
        found.append(str(error))
    lost = raised(tf.errors.UnknownError, "PeerLostError: worker 1 (10.0.0.2, pid 77) is gone")
    other = raised(tf.errors.InvalidArgumentError, "ValueError: of somebody else")
    return found, (lost.rank, lost.address), type(other) is tf.errors.InvalidArgumentError


def job_timeline() -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(tf.ones(2), name="seen")
        hvd.stop_timeline()
        return path.exists() and "allreduce.seen" in path.read_text()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    # base folder of one of the pytest processes that share the job
    base = tmp_path_factory.getbasetemp()
    traces = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "horovod-traces")
    jobs = ["job_surface", "job_refusals", "job_later", "job_error_classes", "job_timeline"]
    done = run_job(__file__, jobs, tmp_path_factory, BYTEPS_TRACE_DIR=traces)
    assert done.status == 0, done.output[-5000:]
    return done


def test_all_of_horovods_names_are_there(job: Finished) -> None:
    for missing, _, _ in each(job, "job_surface"):
        assert missing == {"tensorflow": [], "keras": [], "callbacks": [], "listed": []}


def test_arguments_are_in_horovods_order(job: Finished) -> None:
    assert each(job, "job_surface")[0][1] == SIGNATURES


def test_the_page_names_all(job: Finished) -> None:
    text = PAGE.read_text()
    section = text[text.index("### TensorFlow and Keras", text.index("## From Horovod")) :]
    said = set(re.findall(r"\w+", section))
    assert [name for name in each(job, "job_surface")[0][2] if name not in said] == []
    assert [name for name in NOT_HERE if name not in said] == []


def test_refusals(job: Finished) -> None:
    assert each(job, "job_refusals") == [[], []]


def test_splits_known_only_at_execution_are_checked(job: Finished) -> None:
    assert all("whose sum is at most the number of rows" in text for text in each(job, "job_later"))


def test_errors_are_of_both_kinds(job: Finished) -> None:
    for found, lost, stays in each(job, "job_error_classes"):
        assert len(found) > 8 and set(found) == {"worker 1 (10.0.0.2, pid 77) is gone"}
        assert lost == (1, "10.0.0.2") and stays


def test_timelines(job: Finished) -> None:
    assert each(job, "job_timeline") == [True, False]
