"""A single worker, whose GPU tensors go nowhere: its results wait for what they are made of."""

from __future__ import annotations

from pathlib import Path

from gpus.machines import gpu_run

BATCH = """
from bpsx.plugin.adapter import Item

bpsx.init()
made, fresh, after = (PretendArray(np.full(1000, i, np.float32), main) for i in range(3))
backward = cuda.stream()
with held(backward):
    cuda.copy(made.address, fresh.address, made.nbytes, backward)
    item = Item("x", view(made))
    verbs.session().push_pull_all([item], 0, lambda: main, backward, average=True)
    item.begun.wait(60)
    cuda.copy(after.address, made.address, made.nbytes, main)
    assert not cuda.idle(main)
assert (after.get() == 1).all(), after.get()[:3]
bpsx.shutdown()
"""


def test_a_batch_waits_for_the_stream_that_makes_it(pretend: Path) -> None:
    gpu_run(BATCH, pretend, 1, 1, 0)


MOMENTUM = """
import ctypes

from bpsx.kernels.cuda import device

launch, holding = device.Kernel.launch, []


def late(self, blocks, stream, *arguments):
    # The simulator runs a kernel at once; the result of this one comes when its stream goes on.
    cuda.sync(stream)
    launch(self, blocks, stream, *arguments)
    if len(arguments) == 6 and not device.building():
        out, nbytes = arguments[2], 4 * arguments[4]
        made = PretendArray(np.frombuffer(ctypes.string_at(out, nbytes), np.float32))
        ctypes.memset(out, 0, nbytes)
        cuda.hold(stream)
        cuda.copy(out, made.address, nbytes, stream)
        holding.append((stream, made))


device.Kernel.launch = late
bpsx.init()
bpsx.declare("x", compression={"compressor": "onebit", "momentum": "nesterov", "mu": 0.5})
momentum = np.zeros(100, np.float32)
for step in range(3):
    g = np.random.default_rng(step).integers(-9, 9, 100).astype(np.float32)
    x = PretendArray(g, main)
    handle = push_pull("x", x)
    stream, _ = holding[step]
    assert not cuda.idle(main)
    cuda.release(stream)
    handle.wait(60)
    momentum = 0.5 * momentum + g
    assert (x.get() == g + 0.5 * momentum).all(), step
bpsx.shutdown()
"""


def test_the_result_waits_for_momentum(pretend: Path) -> None:
    gpu_run(MOMENTUM, pretend, 1, 1, 0, env={"NUMBA_ENABLE_CUDASIM": "1"})
