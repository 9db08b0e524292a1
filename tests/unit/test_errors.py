"""Status codes of the core, and the exceptions that they become."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from bpsx import errors
from bpsx.compression.spec import CompressionSpec
from support.places import SOURCE
from unit.scheduler_tools import declare, running, waiting

# Name of a code in core/status.pxd -> exception that a user sees.
MEANT = {
    "E_PEER_LOST": errors.PeerLostError,
    "E_MISMATCH": errors.MismatchError,
    "E_LEFT": errors.PeerLeftError,
    "E_STALL": errors.StallError,
    "E_PROTOCOL": errors.ProtocolError,
    "E_SHUTDOWN": errors.ShutdownError,
    "E_MEMORY": errors.OutOfMemoryError,
    "E_JOINED": errors.JoinedError,
    "E_KERNELS": errors.KernelError,
    "E_CODEC": errors.ProtocolError,
    "E_COMPRESSOR": errors.ConfigError,
    "E_DEVICE": errors.DeviceError,
}


def test_every_code_becomes_the_exception_of_its_name():
    codes = {
        name: int(value)
        for name, value in re.findall(
            r"^ {4}(\w+) = (-?\d+)", (SOURCE / "core" / "status.pxd").read_text(), re.M
        )
    }
    assert codes.pop("PENDING") == 0 and codes.pop("DONE") == 1
    assert {errors.STATUS[code][0] for code in codes.values()} == set(MEANT.values())
    assert {name: errors.STATUS[code][0] for name, code in codes.items()} == MEANT
    assert set(errors.STATUS) == set(codes.values())


@pytest.mark.parametrize("status", errors.STATUS)
def test_a_status_has_a_default_text_that_a_better_one_replaces(status):
    kind, text = errors.STATUS[status]
    assert type(errors.from_status(status)) is kind and str(errors.from_status(status)) == text
    assert (
        str(errors.from_status(status, "worker 3 (h, pid 4) is gone"))
        == "worker 3 (h, pid 4) is gone"
    )
    assert len({t for _, t in errors.STATUS.values()}) == len(errors.STATUS)


@pytest.mark.parametrize("status", errors.STATUS)
def test_an_explanation_names_the_tensor(status):
    assert "'layer.0.weight'" in errors.explain(status, "layer.0.weight", 2, 5)


def test_an_explanation_names_the_ranks_where_it_knows_them():
    assert "its root, worker 2" in errors.explain(
        -9, "w", 2, 2, "", True, 2
    ) and "BYTEPS_PCIE_SWITCH_SIZE" in errors.explain(-9, "w", 2, 2)
    assert "workers 2 and 5" in errors.explain(
        -2, "w", 2, 5
    ) and "worker 2 has left the job" in errors.explain(-3, "w", 2, 0)


def test_a_mismatch_error_includes_this_workers_operation():
    assert "this worker: a broadcast from worker 5)" in errors.explain(-2, "w", 2, 5, "", True, 5)
    assert "this worker: push_pull with op=Sum)" in errors.explain(-2, "w", 2, 5)
    assert "this worker: push_pull with op=Average)" in errors.explain(-2, "w", 2, 5, divisor=6)


OF_TENSORFLOW = """Graph execution error:

Detected at node BpsxPushPull defined at (most recent call last):
  File "train.py", line 11, in <module>

%s
\t [[{{node BpsxPushPull}}]] [Op:__inference_step_11]"""


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("own"), "ValueError: own"),
        (errors.MismatchError("tensor 'w': two\nlines"), "MismatchError: tensor 'w': two\nlines"),
        (
            RuntimeError(OF_TENSORFLOW % "MismatchError: tensor 'w': a, b"),
            "RuntimeError: MismatchError: tensor 'w': a, b",
        ),
        (
            RuntimeError(
                "{{function_node x}} PeerLostError: worker 1 is gone [Op:BpsxBroadcast] name: "
            ),
            "RuntimeError: PeerLostError: worker 1 is gone",
        ),
        (
            RuntimeError("nothing of ours:\nSomeError: b"),
            "RuntimeError: nothing of ours:\nSomeError: b",
        ),
    ],
)
def test_a_report_contains_the_line_with_the_error(error, short):
    assert errors.in_short(error) == short


def test_one_base_and_the_builtin_kin_that_scripts_may_already_catch():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert all(issubclass(k, errors.BpsxError) for k in kinds) and all(k.__doc__ for k in kinds)
    assert issubclass(errors.PeerLeftError, errors.PeerLostError) and issubclass(
        errors.PeerLostError, ConnectionError
    )
    assert issubclass(errors.StallError, TimeoutError) and issubclass(
        errors.RendezvousError, TimeoutError
    )
    assert issubclass(errors.ConfigError, ValueError) and issubclass(
        errors.MismatchError, ValueError
    )


def test_an_unknown_status_is_no_error_of_the_users():
    with pytest.raises(KeyError):
        errors.from_status(-99)


def test_every_error_is_a_runtime_error_as_scripts_for_horovod_and_pytorch_catch_it():
    from bpsx import errors

    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.BpsxError)
    ]
    assert len(kinds) > 10
    assert all(issubclass(kind, RuntimeError) for kind in kinds)


def all_kinds() -> list[type[errors.BpsxError]]:
    """Return every exception class of bpsx, including PyTorch's."""
    import bpsx.torch  # noqa: F401  (defines more)

    found, left = [], [errors.BpsxError]
    while left:
        kind = left.pop()
        found.append(kind)
        left += kind.__subclasses__()
    return found


def test_all_errors_have_the_attributes_and_copies_keep_them():
    text = 'tensor "layer 1\'s": worker 2 (10.0.0.1, pid 3) is gone'
    kinds = all_kinds()
    assert len(kinds) > 20
    for kind in kinds:
        error = kind(text)
        error.add_note("noted")
        for same in (
            error,
            copy.copy(error),
            copy.deepcopy(error),
            pickle.loads(pickle.dumps(error)),
        ):
            assert (
                type(same) is kind
                and same.reason == str(same) == text
                and same.__notes__ == ["noted"]
            )
            if kind is not errors.StallError:
                assert (same.role, same.rank, same.address) == ("worker", 2, "10.0.0.1")
                assert (same.tensor, same.tensors) == ("layer 1's", ("layer 1's",))


def test_an_error_without_a_process_has_empty_attributes():
    error = errors.ConfigError("BYTEPS_LOCAL_RANK='x': expected 0 or more")
    assert (error.role, error.rank, error.address, error.tensor, error.tensors) == (
        None,
        None,
        None,
        None,
        (),
    )


def test_a_stall_error_names_the_tensors_and_the_workers_that_lack_them():
    m = running(3)
    wire = CompressionSpec("onebit", ef="vanilla").text()
    for rank, names in enumerate((["it's", "b"], ["c"], ["c"])):
        for name in names:
            m.declare(
                b"w%d" % rank, {**declare(name, [3, 4]), "codec": wire if name == "b" else ""}
            )
        out = m.waiting(b"w%d" % rank, waiting(*([name, 0, 0, 31.0] for name in names)), 100.0)
    text = next(message["text"] for _, message in out if message["type"] == "RESET")
    for error in (errors.StallError(text), pickle.loads(pickle.dumps(errors.StallError(text)))):
        assert error.tensors == ("it's", "b", "c") and error.tensor == "it's", text
        assert (error.role, error.rank, error.reason) == ("worker", 1, text)
    assert (
        errors.StallError("x").role,
        errors.StallError("x").rank,
        errors.StallError("x").tensors,
    ) == (None, None, ())
