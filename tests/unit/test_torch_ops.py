"""push_pull of tensors: memory, layouts, names, refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch_fake import FakeSession

import bpsx
import bpsx.torch as bps
import bpsx.torch.horovod as hvd
from bpsx.dtypes import UnsupportedDType
from bpsx.errors import BpsxError, ConfigError, NotInitializedError
from bpsx.plugin import adapter
from bpsx.torch import ops
from bpsx.torch import tensors as of_tensors
from bpsx.torch.cross_barrier import CrossBarrier
from bpsx.torch.parallel import DistributedDataParallel
from support.torch_release import needs_jagged

VERBS = [bps.push_pull, bps.push_pull_async, bps.push_pull_inplace, bps.push_pull_async_inplace]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    monkeypatch.setattr(adapter, "session", lambda: session)
    return session


def overlapping() -> dict[str, torch.Tensor]:
    return {
        "expanded": torch.arange(3.0).expand(4, 3),
        "windows": torch.arange(6.0).unfold(0, 3, 1),
        "expanded inside": torch.arange(2.0).reshape(2, 1).expand(2, 5),
    }


def layouts() -> dict[str, torch.Tensor]:
    """Return tensors whose memory does not hold their elements in order, and other unusual ones."""
    base = torch.arange(48.0)
    return {
        "transposed": base.reshape(6, 8).t(),
        "every other": base[::2],
        "column": base.reshape(6, 8)[:, 3],
        "channels last": base.reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "offset": base[5:11],
        "negated lazily": torch.complex(base, base).conj().imag,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "empty transposed": torch.zeros(0, 4).t(),
        "one element, odd strides": base.as_strided((1, 3), (0, 7)),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_and_average_of_every_dtype(fake: FakeSession, dtype: torch.dtype) -> None:
    fake.others = lambda name, mine: mine * 0 + 3
    tensor = torch.tensor([0, 1, 2, 5]).to(dtype)
    expected = (
        torch.tensor([1.5, 2, 2.5, 4]) if dtype.is_floating_point else torch.tensor([1, 2, 2, 4])
    )
    assert torch.equal(bps.push_pull(tensor, average=False), torch.tensor([3, 4, 5, 8]).to(dtype))
    assert torch.equal(bps.push_pull(tensor), expected.to(dtype))
    assert torch.equal(tensor, torch.tensor([0, 1, 2, 5]).to(dtype))
    assert bps.push_pull_inplace(tensor) is tensor
    assert torch.equal(tensor, expected.to(dtype))


@pytest.mark.parametrize("case", layouts())
def test_layouts_out_of_place(fake: FakeSession, case: str) -> None:
    tensor = layouts()[case]
    before = tensor.clone()
    result = bps.push_pull(tensor, average=False)
    assert torch.equal(result, before * 2)
    assert torch.equal(tensor, before)
    assert result.stride() == torch.empty_like(tensor).stride()


@pytest.mark.parametrize("case", layouts())
def test_layouts_in_place(fake: FakeSession, case: str) -> None:
    tensor = layouts()[case]
    before = tensor.clone()
    address, strides = tensor.data_ptr(), tensor.stride()
    assert bps.push_pull_inplace(tensor, average=False) is tensor
    assert torch.equal(tensor, before * 2)
    assert (tensor.data_ptr(), tensor.stride()) == (address, strides)


def test_memory_between_the_elements_is_not_changed(fake: FakeSession) -> None:
    base = torch.arange(8.0)
    bps.push_pull_inplace(base[::2], average=False)
    assert base.tolist() == [0, 1, 4, 3, 8, 5, 12, 7]


@pytest.mark.parametrize("case", overlapping())
def test_overlapping_memory_is_read_but_never_written(fake: FakeSession, case: str) -> None:
    tensor = overlapping()[case]
    assert torch.equal(bps.push_pull(tensor, average=False), tensor * 2)
    with pytest.raises(TypeError, match="push_pull of 'w': elements share memory.*clone"):
        bps.push_pull_async_inplace(tensor, name="w")
    assert len(fake.pushes) == 1


REFUSED = {
    "expected a torch.Tensor, not list": lambda: [1.0, 2.0],
    "expected a torch.Tensor, not ndarray": lambda: np.zeros(3),
    "complex64 cannot be summed.*view_as_real": lambda: torch.zeros(2, dtype=torch.complex64),
    "bool cannot be summed.*uint8": lambda: torch.zeros(2, dtype=torch.bool),
    "int16 cannot be summed": lambda: torch.zeros(2, dtype=torch.int16),
    "sparse_csr tensors cannot be sent": lambda: torch.eye(3).to_sparse_csr(),
    "quantized tensors cannot be sent": lambda: torch.quantize_per_tensor(
        torch.ones(2), 0.1, 0, torch.qint8
    ),
    "nested tensors cannot be sent": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "tensors on meta cannot be sent": lambda: torch.zeros(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:Sparse CSR.*")
@pytest.mark.parametrize(
    "message",
    [pytest.param(text, marks=needs_jagged) if "nested" in text else text for text in REFUSED],
)
@pytest.mark.parametrize("verb", VERBS)
def test_refusals_name_the_tensor_the_problem_and_the_expected_type(
    fake: FakeSession, message: str, verb: object
) -> None:
    with pytest.raises(TypeError, match=f"push_pull of 'w'.*{message}") as caught:
        verb(REFUSED[message](), name="w")  # type: ignore[operator]
    assert isinstance(caught.value, BpsxError)
    assert isinstance(caught.value, (UnsupportedDType, bps.UnsupportedTensor))
    assert "expected" in message or "float32" in str(caught.value)
    assert not fake.pushes


@pytest.mark.parametrize("verb", [bps.push_pull_inplace, bps.push_pull_async_inplace])
def test_tensors_recorded_by_autograd_are_not_overwritten(
    fake: FakeSession, verb: Callable[[torch.Tensor], object]
) -> None:
    result = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(bps.UnsupportedTensor, match="use push_pull\\(\\)"):
        verb(result)
    with torch.no_grad():
        verb(result)
    verb(result.detach())


def test_refused_names_and_versions(fake: FakeSession) -> None:
    with pytest.raises(ConfigError, match="name must be a string, not int"):
        bps.push_pull(torch.zeros(1), True, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="version must be an integer, not str"):
        bps.push_pull_async(torch.zeros(1), version="1")  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "options, message",
    [
        *(
            (
                {"priority": p},
                rf"push_pull: priority={p!r}: expected an integer from -2147483648 to "
                "2147483647".replace("**", "."),
            )
            for p in ("high", 1.5, None, True, 2**31, -(2**31) - 1, 2**70)
        ),
        ({"name": ""}, "push_pull: name must be a string, not an empty one"),
        ({"name": b"w"}, "push_pull: name must be a string, not bytes"),
    ],
    ids=str,
)
def test_refused_options(
    fake: FakeSession, verb: Callable[..., object], options: dict[str, object], message: str
) -> None:
    for tensor in (
        (torch.zeros(2), torch.eye(2).to_sparse()) if verb is bps.push_pull else (torch.zeros(2),)
    ):
        with pytest.raises(ConfigError, match=message):
            verb(tensor, **options)
    assert not fake.pushes and not fake.broadcasts


@pytest.mark.parametrize("priority", [np.int64(3), torch.tensor(3), 2**31 - 1, -(2**31)], ids=str)
def test_integers_of_any_kind_are_priorities(fake: FakeSession, priority: object) -> None:
    bps.push_pull(torch.zeros(2), priority=priority)  # type: ignore[arg-type]
    assert fake.pushes[0].priority == priority


class _NoCompressor:
    """A class that is not derived from Compressor."""


@pytest.mark.parametrize(
    "compression",
    ["fp16", None, bps.Compression, bps.Compression.fp16(), _NoCompressor],
    ids=lambda c: type(c).__name__,
)
def test_a_class_that_is_no_compressor_is_refused(fake: FakeSession, compression: object) -> None:
    model = torch.nn.Linear(2, 2)
    calls: dict[str, Callable[[], object]] = {
        "push_pull": lambda: bps.push_pull(torch.zeros(2), compression=compression),  # type: ignore[arg-type]
        "DistributedOptimizer": lambda: bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), compression=compression
        ),  # type: ignore[arg-type]
        "CrossBarrier": lambda: CrossBarrier(
            model, torch.optim.SGD(model.parameters(), lr=0.1), compression=compression
        ),  # type: ignore[arg-type]
        "DistributedDataParallel": lambda: DistributedDataParallel(model, compression=compression),  # type: ignore[arg-type]
        "DDPHookState": lambda: bps.DDPHookState(compression=compression),  # type: ignore[arg-type]
        "allreduce": lambda: hvd.allreduce(torch.zeros(2), compression=compression),  # type: ignore[arg-type]
        "reducescatter": lambda: hvd.reducescatter(torch.zeros(2), compression=compression),  # type: ignore[arg-type]
    }
    calls["push_pull of a sparse tensor"] = lambda: bps.push_pull(
        torch.eye(2).to_sparse(), compression=compression
    )  # type: ignore[arg-type]
    for verb, of in (
        ("allreduce", hvd.grouped_allreduce),
        ("reducescatter", hvd.grouped_reducescatter),
    ):
        calls[f"{verb} of many"] = lambda of=of: of([torch.zeros(2)], compression=compression)  # type: ignore[misc]
    for op in (hvd.Sum, hvd.Max):
        calls[f"allreduce {op!r}"] = lambda op=op: hvd.allreduce(
            torch.zeros(2), compression=compression, op=op
        )  # type: ignore[misc]
    for verb, call in calls.items():
        with pytest.raises(
            ConfigError,
            match=(
                f"^{verb.split()[0]}: compression=.*: expected bpsx.torch.Compression.none, .fp16,"
                " or"
            ),
        ):
            call()
    assert not fake.pushes and not fake.broadcasts and not fake.declared


@pytest.mark.parametrize("verb", [bps.poll, bps.synchronize, bpsx.poll, bpsx.synchronize])
@pytest.mark.parametrize("given", [torch.zeros(2), None, 3], ids=str)
def test_an_object_that_is_no_handle_is_refused(
    verb: Callable[[object], object], given: object
) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            f"{verb.__name__}: expected a handle, as the _async verbs return it, not"
            f" {type(given).__name__}"
        ),
    ):
        verb(given)


def test_before_init() -> None:
    with pytest.raises(NotInitializedError, match="init"):
        bps.push_pull(torch.zeros(1))


def test_generated_names_depend_on_dtype_and_shape_only(fake: FakeSession) -> None:
    for tensor in (
        torch.zeros(2),
        torch.zeros(3, 1),
        torch.ones(2),
        torch.zeros(2, dtype=torch.int32),
    ):
        bps.push_pull_async(tensor)
    assert fake.names[0] == fake.names[2] == "push_pull.noname.float32.(2,)"
    assert len(set(fake.names)) == 3


def test_the_session_gets_the_arguments(fake: FakeSession) -> None:
    tensor = torch.zeros(2, 3)
    bps.push_pull_async_inplace(tensor, False, "w", 4, -7)
    (push,) = fake.pushes
    assert (push.name, push.average, push.priority, push.will_wait) == ("w", False, -7, False)
    assert push.source[:4] == push.target[:4] == (tensor.data_ptr(), 24, "float32", (2, 3))
    bps.push_pull(tensor, name="x")
    assert fake.pushes[1].will_wait and fake.pushes[1].source.address == tensor.data_ptr()


def test_a_second_synchronize_does_not_copy_again(fake: FakeSession) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    handle = bps.push_pull_async_inplace(tensor, average=False)
    assert not bps.poll(handle)
    assert bps.synchronize(handle) is tensor
    assert bps.poll(handle)
    tensor.zero_()
    assert torch.equal(bps.synchronize(handle), torch.zeros(3, 2)), (
        "a second synchronize must not copy again"
    )


def test_a_failure_is_raised_in_the_waiting_thread(fake: FakeSession) -> None:
    fake.failures["w"] = ConfigError("no")
    tensor = torch.arange(6.0).reshape(2, 3).t()
    with pytest.raises(ConfigError, match="no"):
        bps.push_pull_inplace(tensor, name="w")
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3).t())


def test_gradients_are_tracked_where_a_new_tensor_is_waited_for(fake: FakeSession) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    result = bps.push_pull(weight, average=False)
    assert result.requires_grad and result.tolist() == [2, 2, 2]
    assert not bps.synchronize(bps.push_pull_async(weight)).requires_grad
    with torch.no_grad():
        assert not bps.push_pull(weight).requires_grad
    fake.asynchronous = True
    assert not bps.push_pull(weight).requires_grad
    fake.asynchronous = False
    assert bps.push_pull_inplace(weight, average=False) is weight
    assert weight.requires_grad and weight.is_leaf and weight.tolist() == [2, 2, 2]


def test_autograd_notices_an_overwritten_tensor(fake: FakeSession) -> None:
    weight = torch.ones(3, requires_grad=True)
    saved = weight * 2
    loss = (saved * saved).sum()
    bps.push_pull_inplace(saved.detach(), average=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors(fake: FakeSession) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        assert bps.push_pull_inplace(tensor, average=False).tolist() == [2, 2, 2]
        assert bps.push_pull_inplace(tensor[::2], average=False).tolist() == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp16_compression(fake: FakeSession, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 1 / 3, 60000.0], dtype=dtype)
    before = tensor.clone()
    result = bps.push_pull(tensor, compression=bps.Compression.fp16)
    assert fake.pushes[0].source.dtype == "float16"
    assert torch.equal(result, before.half().to(dtype)) and result.dtype == dtype
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_fp16_compression_leaves_other_dtypes_alone(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    wire, ctx = bps.Compression.fp16.compress(tensor)
    assert wire is tensor and bps.Compression.fp16.decompress(wire, ctx) is tensor


def test_no_compression() -> None:
    tensor = torch.ones(3)
    wire, ctx = bps.Compression.none.compress(tensor)
    assert wire is tensor and bps.Compression.none.decompress(wire, ctx) is tensor


def test_declare_numbers_names_in_the_order_of_first_use(fake: FakeSession) -> None:
    assert [bps.declare("a"), bps.declare("b"), bps.declare("a")] == [0, 1, 0]


def test_byteps_name() -> None:
    assert bps.byteps_push_pull is ops.push_pull_async_inplace


@pytest.mark.parametrize(
    "torch_module, message",
    [
        (None, "bpsx.torch needs PyTorch 2.1 or newer: pip install torch"),
        (
            "Tensor = type('Tensor', (), {}); __version__ = '1.13'",
            "bpsx.torch needs PyTorch 2.1 or newer, this is 1.13",
        ),
    ],
)
def test_import_without_torch(tmp_path: object, torch_module: str | None, message: str) -> None:
    blocked = (
        f"sys.modules['torch'] = m = type(sys)('torch'); exec({torch_module!r}, m.__dict__)"
        if torch_module
        else (
            "sys.meta_path.insert(0, type('No', (), {'find_spec': staticmethod(lambda name, *a: (_"
            " for _ in ()).throw(ModuleNotFoundError(name=name)) if name == 'torch' else None)}))"
        )
    )
    code = f"import sys; {blocked}\ntry:\n import bpsx.torch\nexcept ImportError as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(message) and done.stdout.count("\n") == 1


def test_releases_of_pytorch_that_mark_one_tensor_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.autograd.graph.increment_version

    def one(tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise RuntimeError("increment_version expect a Tensor as input")
        real(tensor)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", one)
    monkeypatch.setattr(of_tensors, "_MARKS_MANY", of_tensors._marks_many())
    tensors = [torch.zeros(3), torch.zeros(2)]
    of_tensors.mark_all_written(tensors)
    assert [t._version for t in tensors] == [1, 1]
