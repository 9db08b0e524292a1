"""An optimizer's gradients on GPUs, which begin in buckets: bpsx.torch, with CPU tensors that stand
for a GPU's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import SHAPES, gpu_run, run

TORCH = """
import contextlib
import torch
import bpsx.torch as bps
from bpsx.plugin.adapter import TensorView
from bpsx.torch import _bucket, _gradients, bucket, exchange, submit, tensors
from bpsx.errors import ConfigError

known = {}


def take_for_a_gpus(address, nbytes, storage):
    # the memory may have belonged to a shorter gradient before
    if nbytes > known.get(address, 0):
        cuda.device_memory(address, nbytes)
        known[address] = nbytes


def as_on_gpu(tensor, nbytes, dtype, shape):
    take_for_a_gpus(tensor.data_ptr(), nbytes, tensor.untyped_storage())
    return TensorView(tensor.data_ptr(), nbytes, dtype, shape, tensor, 0, lambda: stream[0])


_bucket.streams_of, _gradients.ALL_ON_GPU = lambda device: lambda: stream[0], take_for_a_gpus


def alone(*arguments, **options):
    tensors.view_at = as_on_gpu
    try:
        return submit.submit(*arguments, **options)
    finally:
        tensors.view_at = view_at


# PyTorch's next work, such as freeing memory, would be on that stream
def synchronous(plain):
    def call(self, managed):
        pushed = managed.pushed
        pushed.wait()
        cuda.sync(stream[0])
        plain(self, managed)

    return call


view_at, bucket.submit = tensors.view_at, alone
for name in ("_receive", "_discard"):
    setattr(exchange.Exchange, name, synchronous(getattr(exchange.Exchange, name)))
settle, settled = exchange._settling.settle, []


def settle_and_wait(managed):
    settled.append(len(managed))
    rest = settle(managed)
    cuda.sync(stream[0])
    return rest


exchange._settling.settle = settle_and_wait
stream, asked = [main], []
begin = bucket.adapter.Session.push_pull_all


def counted(self, items, *more, **options):
    asked.append([item.name for item in items])
    return begin(self, items, *more, **options)


bucket.adapter.Session.push_pull_all = counted


class Net(torch.nn.Module):
    def __init__(self, n=7, size=5000):
        super().__init__()
        self.layers = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(size + i)) for i in range(n)]
        )

    def forward(self, value, skip=()):
        return sum((p * value * (i + 1)).sum() for i, p in enumerate(self.layers) if i not in skip)


def Parameter(name):  # the attributes that a bucket uses
    return _gradients.Managed(
        name, torch.nn.Parameter(torch.zeros(1)), bucket.GradientInfo(name, name, 0), 1
    )


def optimizer(net, **options):
    return bps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), **options
    )


def finish(opt):
    opt.synchronize()
    with opt.skip_synchronize():
        opt.step()


def assert_weights(net, step, times=1):  # the weights after so many steps of all workers
    for i, p in enumerate(net.layers):
        assert (p == -times * (step + 1) * (i + 1) * (n + 1) / 2).all(), (step, i, p)


bps.init()
r, n = bps.rank(), bps.size()
"""


#: Imitates a PyTorch without DLPack's exchange table.
WITHOUT_TABLE = TORCH.replace(
    "import torch\n", "import torch\ntorch.Tensor.__dlpack_c_exchange_api__ = None\n", 1
)


@pytest.mark.parametrize(
    ("shape", "most", "batches", "names"),
    [
        ("alone", 50 << 20, 1, TORCH),
        ("machine", 65536, 2, TORCH),
        ("alone", 50 << 20, 1, WITHOUT_TABLE),
    ],
    ids=["alone", "machine", "older PyTorch"],
)
def test_gradients_go_together(
    shape: str, most: int, batches: int, names: str, pretend: Path
) -> None:
    """A step's gradients form one bucket without servers, and buckets by partitions with servers.

    The sums are right in both cases.
    """
    run(
        names,
        f"""
        assert verbs.session().devices.batch_bytes == {most}
        net = Net()
        opt = optimizer(net)
        for step in range(4):
            asked.clear()
            net(r + 1.0).backward()
            assert len(asked) == {batches} and sum(map(len, asked)) == 7, asked
            finish(opt)
            assert len(settled) == step + 1 and settled[-1] == 7, settled
            assert_weights(net, step)
            opt.zero_grad(set_to_none=False)
        bps.shutdown()
    """,
        pretend,
        *SHAPES[shape],
        env={"BYTEPS_PARTITION_BYTES": 65536},
    )


def test_an_error_of_one_gradient_is_raised_and_the_others_are_right(pretend: Path) -> None:
    run(
        TORCH,
        """
        net = Net()
        opt = optimizer(net)
        for step in range(4):
            net(r + 1.0).backward()
            second, third = net.layers[2].grad, net.layers[3].grad
            if step == 1:
                second.add_(1)
                with contextlib.suppress(exchange.GradientOrderError):
                    opt.synchronize()
                    raise AssertionError("nobody has noticed")
            elif step == 2:
                third.data = torch.zeros_like(third)
                net.layers[4].grad = None
                opt.synchronize()
            else:
                opt.synchronize()
            assert settled[-1] == 7
            for i, p in enumerate(net.layers):
                assert (p.grad == (i + 1) * (n + 1) / 2).all() or i == 2 and step == 1, (
                    step,
                    i,
                    p.grad,
                )
            assert net.layers[3].grad is third
            opt.zero_grad(set_to_none=False)
        bps.shutdown()
    """,
        pretend,
        *SHAPES["machine"],
    )


def test_an_error_of_one_gradient_is_raised_after_all_have_arrived(pretend: Path) -> None:
    """The parameter has new memory by then, and the gradient does not fit into it."""
    run(
        TORCH,
        """
        net = Net()
        opt = optimizer(net)
        for step in range(3):
            net(r + 1.0).backward()
            if step == 1:
                changed = net.layers[2]
                changed.grad, kept, changed.data = None, changed.data, torch.zeros(3)
                with contextlib.suppress(RuntimeError):
                    opt.synchronize()
                    raise AssertionError("nobody has told")
                changed.data = kept
            else:
                opt.synchronize()
            for i, p in enumerate(net.layers):
                assert (
                    p.grad is None
                    if (i, step) == (2, 1)
                    else (p.grad == (i + 1) * (n + 1) / 2).all()
                ), (step, i, p.grad)
            opt.zero_grad(set_to_none=False)
        bps.shutdown()
    """,
        pretend,
        *SHAPES["alone"],
    )


def test_an_interrupted_wait_continues_later(pretend: Path) -> None:
    run(
        TORCH,
        """
        import signal
        class Alarm(Exception):
            pass
        def ring(*_):
            raise Alarm
        signal.signal(signal.SIGALRM, ring)
        net = Net()
        opt = optimizer(net)
        for step in range(3):
            if r and step:
                push_pull(f"go {step}", np.ones(1)).wait(60)
            net(r + 1.0).backward()
            if not r and step:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with contextlib.suppress(Alarm):
                    opt.synchronize()
                    raise AssertionError("the alarm was lost")
                push_pull(f"go {step}", np.ones(1)).wait(60)
            finish(opt)
            assert_weights(net, step)
            opt.zero_grad(set_to_none=False)
        bps.shutdown()
    """,
        pretend,
        *SHAPES["alone"],
    )


def test_gradients_that_share_memory_when_their_batch_starts_are_exchanged_singly(
    pretend: Path,
) -> None:
    """A hook of the user has kept a view: it shows this worker's own gradient until the sum."""
    run(
        TORCH,
        """
        net = Net()
        opt = optimizer(net)
        for step in range(4):
            asked.clear()
            kept = []
            hook = net.layers[3].register_post_accumulate_grad_hook(
                lambda p: kept.append(p.grad.view(-1))
            )
            net(r + 1.0).backward()
            hook.remove()
            # before, it was examined at once
            assert sum(map(len, asked)) == (6 if step > 1 else 7), asked
            finish(opt)
            assert_weights(net, step)
            opt.zero_grad()
        bps.shutdown()
    """,
        pretend,
        *SHAPES["alone"],
    )


@pytest.mark.parametrize("default", [False, True], ids=["a stream", "the default stream"])
def test_a_gradient_that_goes_alone_does_so_on_the_stream_that_made_it(
    default: bool, pretend: Path
) -> None:
    """Although its bucket begins only because the next gradient is made on another stream.

    The test imitates PyTorch's own streams: number 0 would make PyTorch create a new one.
    """
    run(
        TORCH,
        f"""
        made_on, other = 0 if {default} else main, cuda.stream()
        @contextlib.contextmanager
        def work_on(number):
            before, stream[0] = stream[0], number
            yield
            stream[0] = before
        def existing(number, device):
            assert number, "a new stream"
            return number
        torch.cuda.stream, torch.cuda.ExternalStream = work_on, existing
        torch.cuda.default_stream = lambda device: 0
        net = Net()
        opt = optimizer(net)
        for step in range(4):
            stream[0], kept, alone_on = made_on, [], []
            def keep(p):
                kept.append(p.grad.view(-1))
            def turn(_):
                stream[0] = other
            def noted(*arguments, **options):
                alone_on.append(stream[0])
                return alone(*arguments, **options)
            bucket.submit = noted
            hooks = [net.layers[3].register_post_accumulate_grad_hook(h) for h in (keep, turn)]
            net(r + 1.0).backward()
            for hook in hooks:
                hook.remove()
            stream[0] = made_on
            finish(opt)
            assert alone_on == ([made_on] if step > 1 else []), alone_on
            assert_weights(net, step)
            opt.zero_grad()
        bps.shutdown()
    """,
        pretend,
        *SHAPES["alone"],
    )


def test_two_optimizers_of_one_parameter_both_sum_its_gradient(pretend: Path) -> None:
    run(
        TORCH,
        """
        net = Net()


        def named(prefix):
            return [(f"{prefix}.{i}", p) for i, p in enumerate(net.layers)]


        opts = [
            bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), named(prefix))
            for prefix in "ab"
        ]
        for step in range(5):
            net(r + 1.0).backward()
            for opt in opts:
                opt.step()
            assert_weights(net, step, times=2)
            for opt in opts:
                opt.zero_grad()
        bps.shutdown()
    """,
        pretend,
        *SHAPES["alone"],
    )


def test_an_arrived_gradient_stays_valid_after_its_group_is_released(pretend: Path) -> None:
    """A group's sums share an event, which is reused after the last of them is released."""
    run(
        TORCH,
        """
        together = bucket.bucket_of(False)
        parameters, stay = [Parameter(str(i)) for i in range(8)], []
        def send():
            for p in parameters:
                together.add(p, torch.full((5000,), r + 1.0))
            together.submit()
        def receive():
            for p in parameters:
                p.pushed.wait()
            cuda.sync(main)     # only then may the memory go
            stay.append(parameters[0].pushed)
            for p in parameters:
                p.receive()
        for turn in range(20):
            send()
            receive()
            verbs.session()._core.reap()
            with held(main):
                send()
                assert all(pushed.done() for pushed in stay)
            receive()
        bps.shutdown()
    """,
        pretend,
        *SHAPES["alone"],
    )


def test_a_gradient_of_two_parameters_is_summed_for_each(pretend: Path) -> None:
    """Both gradients are one tensor; each sum is of its original value, not of the other sum."""
    run(
        TORCH,
        """
        together, one, both = (
            bucket.bucket_of(False),
            torch.full((5000,), r + 1.0),
            [Parameter("a"), Parameter("b")],
        )
        with held(main):
            for p in both:
                together.add(p, one)
            together.submit()
        sums = [p.pushed.wait() for p in both]
        cuda.sync(main)
        assert all((total == n * (n + 1) / 2).all() for total in sums), sums
        bps.shutdown()
    """,
        pretend,
        *SHAPES["alone"],
    )


def test_memory_lives_until_the_sum_has_arrived_even_without_references(pretend: Path) -> None:
    run(
        TORCH,
        """
        import gc
        together, expired = bucket.bucket_of(False), torch.UntypedStorage._expired
        first = Parameter("a")
        together.add(first, torch.full((5000,), r + 1.0))  # exchanged with others from then on
        first.pushed.wait()
        with held(main):
            p, gradient = Parameter("a"), torch.full((5000,), r + 1.0)
            together.add(p, gradient)
            together.submit()
            memory = gradient.untyped_storage()._weak_ref()
            del p, gradient
            gc.collect()
            verbs.session()._core.reap()
            assert not expired(memory)
        cuda.sync(main)
        until(lambda: (verbs.session()._core.reap(), expired(memory))[1])
        bps.shutdown()
    """,
        pretend,
        *SHAPES["alone"],
    )


ODD = """
net = Net()
opt = optimizer(net)
for step in range(3):
    asked.clear()
    stream[0] = main

    def turn(_):
        stream[0] = cuda.stream()

    hook = net.layers[3].register_post_accumulate_grad_hook(turn)
    net(r + 1.0, skip=(5, 6) if r else (6,)).backward()
    hook.remove()
    finish(opt)
    assert len(asked) >= 2
    for i, p in enumerate(net.layers):
        want = 0 if i == 6 else 6 * 1.0 / 2 if i == 5 else (i + 1) * 1.5
        assert (p == -(step + 1) * want).all(), (step, i, p)
    assert net.layers[6].grad is None
    opt.zero_grad(set_to_none=False)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ValueError("on purpose")


stream[0] = main
before = [p.detach().clone() for p in net.layers]
try:
    (net(1.0) + Fails.apply(net.layers[0]).sum()).backward()
except ValueError:
    # on all workers: exchanges under way end, and their results are discarded
    opt.zero_grad(set_to_none=False)
net(r + 1.0).backward()
finish(opt)
for i, p in enumerate(net.layers):
    assert (p == before[i] - (i + 1) * 1.5).all(), (i, p)
"""

CAPTURED = """
# A gradient that cannot begin fails backward() and the step.
before = [p.detach().clone() for p in net.layers]
for step in range(2):
    cuda.capture(main)
    for act in (lambda: net(1.0).backward(), opt.synchronize):
        try:
            act()
        except ConfigError as e:
            assert "is being captured into a CUDA graph" in str(e), e
        else:
            raise AssertionError(f"no error from {act} in step {step}: {asked}")
    cuda.capture(main, False)
    opt.zero_grad(set_to_none=False)
    net(r + 1.0).backward()
    finish(opt)
    assert (net.layers[0] == before[0] - (step + 1) * 1.5).all()
    opt.zero_grad(set_to_none=False)
"""

FROZEN = """
# A worker with all gradients does not wait for the others' report that one is frozen there, and
# gets it in the next step.
told = []
for step in range(4):
    net.layers[2].requires_grad_(not (r == 1 and step == 1))
    net(r + 1.0).backward()
    try:
        finish(opt)
    except bpsx.MismatchError as e:
        assert "'layers.2' is trained on 1 workers and frozen (requires_grad=False) on 1" in str(
            e
        ), e
        told.append(step)
    opt.zero_grad(set_to_none=False)
report(told)
bps.shutdown()
"""


def test_gradients_that_cannot_be_batched_are_exchanged_singly(pretend: Path) -> None:
    """Of two streams, unused on one worker or on all, after a pass that has failed, while a stream
    is captured, frozen on one worker.
    """
    out = gpu_run(TORCH + ODD + CAPTURED + FROZEN, pretend, 1, 2, 0)
    assert out == [[[2]], [[1]]], out
