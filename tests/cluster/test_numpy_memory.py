"""NumPy arrays of any byte order, layout and alignment give right sums, or an error that says why
not.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.jobs import run

DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64"]
LAYOUTS = [
    "plain",
    "fortran",
    "strided",
    "reversed",
    "unaligned",
    "read-only",
    "one element",
    "memmap",
    "matrix",
    "masked, nothing hidden",
    "byte view",
]
OUTPUTS = [
    "none",
    "itself",
    "new",
    "unaligned",
    "memmap",
    "matrix",
    "overlapping",
    "masked, nothing hidden",
]
ORDERS = ["<", ">"]

#: Creates arrays of a given shape with the requested memory layout.
WORK = """
import bpsx, json, ml_dtypes, numpy as np, os, tempfile


def dtype_of(name, order):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name).newbyteorder(order)


def laid_out(values, layout):
    shape, dtype, size = values.shape, values.dtype, values.size
    if layout == "fortran":
        return np.array(values, order="F")
    if layout in ("strided", "reversed"):
        step = 2 if layout == "strided" else -1
        room = np.zeros((shape[0] * abs(step), shape[1]), dtype)
        room[::step] = values
        return room[::step]
    if layout in ("unaligned", "byte view"):
        room = np.zeros(values.nbytes + 1, np.uint8)[layout == "unaligned" :][: values.nbytes]
        found = room.view(dtype).reshape(shape)
        found[...] = values
        return found
    if layout == "memmap":
        found = np.memmap(tempfile.TemporaryFile(), dtype, "w+", shape=shape)
        found[...] = values
        return found
    if layout == "matrix":
        return np.asmatrix(values)
    if layout == "masked, nothing hidden":
        return np.ma.array(values, mask=np.zeros(shape, bool))
    if layout == "one element":
        return np.broadcast_to(values[:1, :1], shape)
    found = np.array(values)
    found.flags.writeable = layout != "read-only"
    return found


def values_of(case, rank):
    if case["layouts"][rank] == "one element":
        return np.full(case["shape"], rank + 3)
    return np.arange(np.prod(case["shape"])).reshape(case["shape"]) % 50 + rank


def output_of(case, given, rank):
    kind, order = case["outputs"][rank], case["output orders"][rank]
    if (
        kind == "none"
        or kind == "itself"
        and not (given.flags.c_contiguous and given.flags.writeable)
    ):
        return None
    if kind == "itself":
        return given
    dtype = given.dtype.newbyteorder(order)
    if (
        kind == "overlapping"
        and type(given) is np.ndarray
        and given.flags.c_contiguous
        and given.flags.writeable
    ):
        room = np.zeros(2 * given.size + 1, np.uint8).repeat(given.itemsize).view(given.dtype)
        source = room[given.size // 2 + 1 :][: given.size].reshape(given.shape)
        source[...] = given
        case["given"] = source
        return room[: given.size].reshape(given.shape).view(dtype)
    return laid_out(np.zeros(given.shape, dtype), kind)


bpsx.init()
rank = bpsx.rank()
for i, case in enumerate(json.loads(os.environ["CASES"])):
    if bpsx.local_size() > 1 and "int" in case["dtype"] and case["verb"] == "average":
        # a machine's sum would wrap before it is divided, and is refused
        case["verb"] = "sum"
    given = laid_out(
        values_of(case, rank).astype(dtype_of(case["dtype"], case["orders"][rank])),
        case["layouts"][rank],
    )
    case["given"] = given
    output = output_of(case, given, rank)
    given = case["given"]
    before = given.tobytes()
    if case["verb"] == "broadcast":
        want, result = values_of(case, 1), bpsx.broadcast(given, 1, f"b{i}", output)
    else:
        want = values_of(case, 0) + values_of(case, 1)
        handle = bpsx.push_pull_async(given, f"p{i}", case["verb"] == "average", output=output)
        result = bpsx.synchronize(handle)
        if case["verb"] == "average":
            want = want // 2 if "int" in case["dtype"] else want / 2
        assert bpsx.synchronize(handle) is result and bpsx.poll(handle)
    assert result.shape == given.shape and (output is None or result is output), case
    assert result.dtype == (given if output is None else output).dtype, (case, result.dtype)
    assert (np.asarray(result).astype(np.float64) == want).all(), (i, case, result, want)
    assert np.may_share_memory(given, result) or given.tobytes() == before, case
report("right")
"""


def two(values: list[str]) -> st.SearchStrategy[tuple[str, str]]:
    """Draw one of ``values`` for each worker."""
    return st.tuples(st.sampled_from(values), st.sampled_from(values))


CASES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES),
        "orders": two(ORDERS),
        "layouts": two(LAYOUTS),
        "outputs": two(OUTPUTS),
        "output orders": two(ORDERS),
        "verb": st.sampled_from(["sum", "average", "broadcast"]),
        "shape": st.sampled_from([(1, 1), (3, 5), (40, 100), (300, 70)]),
    }
)


# A failure prints its case. Shrinking the list would cost a job per attempt.
@settings(
    max_examples=5, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    st.lists(CASES, min_size=100, max_size=200),
    st.sampled_from([4096, 4_096_000]),
    st.sampled_from([1, 2]),
)
def test_sums_equal_numpys_for_any_memory_layout(
    cases: list[dict[str, Any]], partition_bytes: int, processes: int
) -> None:
    assert (
        run(
            WORK,
            env={
                "CASES": json.dumps(cases),
                "BYTEPS_PARTITION_BYTES": str(partition_bytes),
                "BYTEPS_FORCE_DISTRIBUTED": "1",
            },
            processes=processes,
        )
        == [["right"]] * 2
    )


def test_byte_orders_may_differ_between_workers_and_within_structures() -> None:
    """Big-endian arrays with and without a name, another byte order on the other worker, and byte
    orders within structures.
    """
    found = run("""
        import bpsx, numpy as np

        bpsx.init()
        r = bpsx.rank()
        x = (np.arange(6) + r).astype(">f4")
        report(bpsx.push_pull(x, "x", average=False).tolist())
        report(bpsx.push_pull(x if r else x.astype("<f4"), average=False).tolist())
        report(bpsx.broadcast(x if r else x.astype("<f4"), 1).tolist())
        pair = np.array([(r, 2.5 + r)], [("n", "<>"[r] + "i2"), ("x", "<>"[r] + "f8")])
        got = bpsx.broadcast(pair, 1, "pair")
        report([got.tolist(), got.dtype == pair.dtype])
        report(
            bpsx.broadcast(
                np.array(["ab", "c"]).astype("<>"[r] + "U4") if r else np.zeros(2, "<U4"), 1, "text"
            ).tolist()
        )
        when = np.array(["2020-02-02"], "<>"[r] + "M8[D]") - r
        report(str(bpsx.broadcast(when, 1, "when")[0]))
        report(
            bpsx.broadcast(
                np.rec.array([(r + 1, 0.5)], dtype=[("n", ">i4"), ("x", "f4")]), 1, "record"
            ).tolist()
        )
        report(np.asarray(bpsx.push_pull(np.zeros((0, 3), ">f8"), "empty")).shape)
    """)
    wanted = [
        [1, 3, 5, 7, 9, 11],
        [1, 3, 5, 7, 9, 11],
        [1, 2, 3, 4, 5, 6],
        [[[1, 3.5]], True],
        ["ab", "c"],
        "2020-02-01",
        [[2, 0.5]],
        [0, 3],
    ]
    assert found == [wanted, wanted]


def test_broadcast_of_another_type_is_a_mismatch() -> None:
    """Elements have the same size, so their bytes would be misread as other numbers."""
    for found in run("""
        import bpsx, numpy as np
        bpsx.init()
        try:
            report(bpsx.broadcast(np.ones(4, ["f4", "i4"][bpsx.rank()]), 0, "x").tolist())
        except bpsx.MismatchError as e:
            report(str(e))
    """):
        assert "float32" in found[0] and "int32" in found[0] and "'x'" in found[0], found


def test_seeds_of_asynchronous_training() -> None:
    assert (
        run(
            """
        import bpsx, numpy as np

        bpsx.init()
        order = "<>"[bpsx.rank()]
        seeded = bpsx.seed(
            np.arange(5).astype(order + "f4") + np.array(bpsx.rank(), order + "f4"),
            "w",
            root_rank=1,
        )
        report(seeded.tolist())
        bpsx.barrier()
        bpsx.push_pull(np.ones(5, order + "f4"), "w", average=False)
        bpsx.barrier()
        report(bpsx.push_pull(np.zeros(5, order + "f4"), "w", average=False).tolist())
    """,
            env={"BYTEPS_ENABLE_ASYNC": "1"},
        )
        == [[[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]] * 2
    )


def test_impossible_arrays_raise_an_error_that_names_them() -> None:
    ((told,),) = run(
        """
        import bpsx, numpy as np

        bpsx.init()


        def text(verb, *arguments, **more):
            try:
                verb(*arguments, **more)
            except bpsx.ConfigError as e:
                return f"{type(e).__name__}: {e}"
            return "nothing"


        ones, grid = np.ones(4, np.float32), np.ones((2, 2), np.float32)
        masked, locked = np.ma.array(ones, mask=[0, 1, 0, 1]), ones.copy()
        locked.flags.writeable = False
        spread = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (4,), (0,))
        pair = np.zeros(2, [("a", "f4"), ("b", "O")])
        moved = {"sum": bpsx.push_pull, "copy": lambda a, **o: bpsx.broadcast(a, 0, **o)}
        found = {}
        for what, verb in moved.items():
            found[what] = [
                text(verb, a, name="x", output=o)
                for a, o in (
                    (masked, None),
                    (ones, masked),
                    (ones, locked),
                    (ones, spread),
                    (grid, grid.T),
                    (ones, [0.0] * 4),
                    (ones, ones.astype(">f8")),
                    (pair, None),
                    (np.array([object()]), None),
                )
            ]
        summed = [
            text(bpsx.push_pull, np.zeros(2, d), "x")
            for d in ("V4", [("a", "f4")], "M8[s]", "c8", "U3", "?")
        ]
        texts = [
            text(moved["copy"], a)
            for a in (
                np.zeros(3, "V0"),
                *(
                    [np.array(["a"], np.dtypes.StringDType())]
                    if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType")
                    else [np.zeros(3, "V0")]
                ),
            )
        ]
        report([found, summed, texts, bpsx.push_pull(masked.filled(0), "after").tolist()])
    """,
        workers=1,
        servers=0,
        alone=True,
    )
    found, summed, texts, after = told
    for one in found.values():
        for line, expected in zip(
            one,
            (
                "2 elements of a numpy.ma.MaskedArray are masked",
                "output: 2 elements",
                "output is read-only",
                "C-contiguous; this one has shape (4,) and strides (0,)",
                "output must be C-contiguous",
                "output must be a NumPy array, like the input, not list",
                "dtype and shape must be equal",
            ),
            strict=False,
        ):
            assert line.startswith("ConfigError: x: ") and expected in line, (line, expected)
        assert all(line.startswith("UnsupportedDType: x: dtype ") for line in one[7:]), one
    assert all(
        line.startswith("UnsupportedDType: x: dtype ") and "cannot be summed" in line
        for line in summed
    ), summed
    assert all(
        line.startswith("UnsupportedDType: array: dtype ") and "cannot be sent" in line
        for line in texts
    ), texts
    assert after == [1, 0, 1, 0]


def test_tensorflow_drops_no_mask() -> None:
    assert run(
        """
        import bpsx, bpsx.tensorflow as bps, numpy as np
        bps.init()
        report(bps.push_pull(np.arange(3).astype(">f4"), op=bps.Sum).numpy().tolist())
        try:
            bps.push_pull(np.ma.array([1.0, 2.0], mask=[0, 1]))
        except bpsx.ConfigError as e:
            report("masked" in str(e))
    """,
        workers=1,
        servers=0,
        alone=True,
    ) == [[[0, 1, 2], True]]
