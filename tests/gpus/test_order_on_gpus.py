"""Order: the user's streams wait for results, and exchanges wait for work queued on the user's
streams; no thread waits for either.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import gpu_run

SHAPES = pytest.mark.parametrize(
    "shape", [(1, 1, 0), (2, 1, 1), (1, 2, 0), (1, 2, 1)], ids=lambda s: "{}x{}/{}".format(*s)
)

# Like a real script: queue work, start exchanges, queue more work, and read the results at the end.
ORDER = """
import threading, time

bpsx.init()
r, n = bpsx.rank(), bpsx.size()
made, after, other = (PretendArray(np.zeros(50_000, np.float32), main) for _ in range(3))
fresh = PretendArray(np.full(50_000, r + 1, np.float32), main)
total = n * (n + 1) / 2
push_pull("warm", made).wait(60)

# The input is made on the held stream: it must not be read before.
with held(main):
    cuda.copy(made.address, fresh.address, made.nbytes, main)
    h = push_pull("x", made)
    time.sleep(0.05)
    assert not made._array.any()
    assert not h.done()
h.wait(60)
cuda.copy(after.address, made.address, made.nbytes, main)
cuda.sync(main)
assert (after.get() == total).all(), after.get()[:3]

# Another stream waits for the result.
second = cuda.stream()
made.set(np.full(50_000, r + 1, np.float32))
view_on_second = push_pull("x", made, stream=second)
view_on_second.wait(60)
cuda.copy(other.address, made.address, made.nbytes, second)
cuda.sync(second)
assert (other._array == total).all()

# Rounds requested before the stream is held end, although later work on it does not.
made.set(np.full(50_000, 1, np.float32))
rounds = [push_pull("x", made) for _ in range(3)]
later = PretendArray(np.full(1000, 2, np.float32), main)
with held(main):
    cuda.copy(after.address, later.address, later.nbytes, main)
    last = push_pull("later", later)
    for h in rounds:
        h.wait(60)
last.wait(60)
assert (made.get() == n**3).all() and (later.get() == 2 * n).all(), (
    made.get()[:3],
    later.get()[:3],
)
report("done")
bpsx.shutdown()
"""


@SHAPES
def test_no_thread_waits_and_streams_do(shape: tuple[int, int, int], pretend: Path) -> None:
    assert gpu_run(ORDER, pretend, *shape) == [["done"]] * (shape[0] * shape[1])


def test_streams_do_not_wait_for_each_other(pretend: Path) -> None:
    """With any number of streams: pending work on one of them does not delay the others."""
    gpu_run(
        """
        bpsx.init()
        streams = [cuda.stream() for _ in range(14)]
        tensors = [PretendArray(np.full(1000, i, np.float32), s) for i, s in enumerate(streams)]
        for i, (t, s) in enumerate(zip(tensors, streams)):
            push_pull(f"t{i}", t, stream=s).wait(60)
            t.get()
        for k in range(0, len(streams), 3):
            with held(streams[k]):
                stuck = push_pull(f"t{k}", tensors[k], stream=streams[k])
                rest = [
                    push_pull(f"t{i}", tensors[i], stream=s)
                    for i, s in enumerate(streams)
                    if i != k
                ]
                for h in rest:
                    h.wait(60)
                assert not stuck.done()
            stuck.wait(60)
        for i, t in enumerate(tensors):
            assert (t.get() == i * 2.0 ** (1 + len(range(0, len(streams), 3)))).all()
        bpsx.shutdown()
    """,
        pretend,
        2,
        1,
        1,
    )


def test_memory_is_kept_until_the_gpu_has_done_with_it_and_no_longer(pretend: Path) -> None:
    gpu_run(
        """
        import gc, weakref
        bpsx.init()
        n = bpsx.size()
        for name in "ab":
            push_pull(name, PretendArray(np.ones(300_000, np.float32), main)).wait(60)
        cuda.delay(3000)
        x, y = (PretendArray(np.full(300_000, 1 + bpsx.rank(), np.float32), main) for _ in range(2))
        out = PretendArray(np.zeros(300_000, np.float32), main)
        gone = weakref.ref(x)
        h = push_pull("a", x, out)
        g = push_pull("b", y)
        h.wait(60)
        g.wait(60)
        del x, h, g
        gc.collect()
        assert (out.get() == n * (n + 1) / 2).all() and (y.get() == n * (n + 1) / 2).all()
        cuda.delay(0)
        until(lambda: gone() is None)
        bpsx.shutdown()
    """,
        pretend,
        1,
        2,
        1,
    )


def test_tensors_and_names_may_move_between_host_and_gpu(pretend: Path) -> None:
    """A name moves from the host's memory to the GPU, and is in the host's memory on one machine
    and on the GPU on the other.
    """
    gpu_run(
        """
        bpsx.init()
        r, n = bpsx.rank(), bpsx.size()
        machine = r // bpsx.local_size()
        kept = []
        for step in range(12):
            for size in (5, 100_000):
                on_gpu = step % 2 if step < 4 else (machine + step) % 2 if step < 8 else machine
                given = np.full(size, (r + 1) * (step + 1), np.float32)
                x = PretendArray(given, main) if on_gpu else given.copy()
                y = (
                    PretendArray(np.zeros(size, np.float32), main)
                    if on_gpu
                    else np.zeros(size, np.float32)
                )
                kept.append(x)
                push_pull(f"x{size}", x, y).wait(60)
                got = y.get() if on_gpu else y
                assert (got == (step + 1) * n * (n + 1) / 2).all(), (step, size, got[:3])
                b = PretendArray(given, main) if on_gpu else given.copy()
                broadcast(f"b{size}", b, step % n).wait(60)
                got = b.get() if on_gpu else b
                assert (got == (step % n + 1) * (step + 1)).all(), (step, size, got[:3])
        assert cuda.pageable() == cuda.straddling() == 0
        bpsx.shutdown()
    """,
        pretend,
        2,
        2,
        1,
    )


@pytest.mark.parametrize(
    ("shape", "odd"), [((1, 2, 0), 0), ((1, 2, 0), 1), ((2, 2, 1), 0), ((1, 2, 1), 1)], ids=str
)
def test_host_and_gpu_tensors_mixed_within_a_machine_are_an_error_on_all(
    shape: tuple[int, int, int], odd: int, pretend: Path
) -> None:
    found = gpu_run(
        f"""
        bpsx.init()
        for known in range(3):
            if known == 1:
                push_pull("y", PretendArray(np.ones(300_000, np.float32), main)).wait(60)
            x = np.ones(300_000, np.float32)
            report(ask(push_pull("x", x if bpsx.rank() == {odd} else PretendArray(x, main))))
            report(ask(broadcast("b", x if bpsx.rank() == {odd} else PretendArray(x, main), 0)))
        for x in (np.ones(300_000, np.float32), PretendArray(np.ones(300_000, np.float32), main)):
            push_pull("x", x).wait(60)
            assert ((x if isinstance(x, np.ndarray) else x.get()) == bpsx.size()).all()
        bpsx.shutdown()
    """,
        pretend,
        *shape,
    )
    assert len(found) == shape[0] * shape[1]
    for said in found:
        assert len(said) == 6 and all(
            text.startswith("MismatchError: ") and "workers 1 and 0" in text for text in said
        ), said
        assert all(repr("xb"[i % 2]) in text for i, text in enumerate(said)), said


def test_a_round_follows_the_one_before_without_a_wait(pretend: Path) -> None:
    """The next round in place sums the result of the round before, not the buffer's content during
    its copy to the GPU.
    """
    gpu_run(
        """
        bpsx.init()
        n = bpsx.size()
        others = [PretendArray(np.ones(1000, np.float32), main) for i in range(20)]
        x = PretendArray(np.ones(60_000, np.float32), main)
        cuda.delay(1000)
        handles = [push_pull(f"y{i}", y, priority=1) for i, y in enumerate(others)] + [
            push_pull("x", x) for _ in range(3)
        ]
        [h.wait(60) for h in handles]
        cuda.delay(0)
        assert (x.get() == n**3).all(), x.get()[:3]
        bpsx.shutdown()
    """,
        pretend,
        2,
        1,
        1,
    )


def test_a_pinned_place_is_not_written_to_while_it_is_copied_up(pretend: Path) -> None:
    """A receiver of a broadcast copies nothing to the host. The received data must not overwrite
    another tensor's sum that the GPU has not copied yet.
    """
    gpu_run(
        """
        bpsx.init()
        r, n = bpsx.rank(), bpsx.size()
        for step in range(4):
            sums = [PretendArray(np.full(1000, i + r, np.float32), main) for i in range(20)]
            given = [PretendArray(np.full(1000, -1.0 - i, np.float32), main) for i in range(20)]
            cuda.delay(1000 if step and r == 1 else 0)
            handles = [push_pull(f"x{i}", x) for i, x in enumerate(sums)]
            handles += [broadcast(f"b{i}", b, 0) for i, b in enumerate(given)]
            [h.wait(60) for h in handles]
            cuda.sync(main)
            cuda.delay(0)
            for i in range(20):
                assert (sums[i].get() == 2 * i + 1).all(), (step, i, sums[i].get()[:3])
                assert (given[i].get() == -1.0 - i).all(), (step, i, given[i].get()[:3])
        bpsx.shutdown()
    """,
        pretend,
        2,
        1,
        1,
    )
