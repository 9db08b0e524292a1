"""bpsx.push_pull and bpsx.broadcast of arrays with an interface that names their GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import gpu_run


@pytest.mark.parametrize(
    "shape", [(1, 1, 0), (1, 2, 0), (2, 1, 1)], ids=["one", "one machine", "two machines"]
)
def test_arrays_with_an_interface(shape: tuple[int, int, int], pretend: Path) -> None:
    gpu_run(
        """
        bpsx.init()
        r, n = bpsx.rank(), bpsx.size()
        given = np.arange(1000, dtype=np.float32).reshape(10, 100)
        x, y = (
            PretendArray(given * (r + 1), main),
            PretendArray(np.zeros((10, 100), np.float32), main),
        )
        assert bpsx.push_pull(x, "x", average=False, output=y) is y
        assert (y.get() == given * sum(range(1, n + 1))).all() and (
            x.get() == given * (r + 1)
        ).all()
        handle = bpsx.push_pull_async(x, "in place", output=x)
        assert bpsx.synchronize(handle) is x
        assert np.allclose(x.get(), given * (n + 1) / 2) and bpsx.poll(handle)
        for kind in ("complex128", "int16", "bool"):  # broadcast only, not summed
            z = PretendArray(np.full(7, r % 2, kind), main)
            assert (
                bpsx.broadcast(z, n - 1, kind, output=z) is z
                and (z.get() == np.full(7, (n - 1) % 2, kind)).all()
            )
        a, b = PretendArray(np.full(5, float(r)), main), PretendArray(np.zeros(5), main)
        bpsx.broadcast(a, 0, "elsewhere", output=b)
        assert (b.get() == 0).all() and (a.get() == r).all()
        empty = PretendArray(np.zeros((0, 3), np.float32), main)
        assert bpsx.push_pull(empty, "empty", output=empty) is empty
        bpsx.shutdown()
    """,
        pretend,
        *shape,
    )


def test_arrays_that_only_have_dlpack(pretend: Path) -> None:
    """The results become CuPy's arrays; a stand-in has the parts of CuPy that bpsx uses."""
    gpu_run(
        """
        import cupy


        class Only:
            def __init__(self, values):
                self.inner = PretendArray(values, main)

            def __dlpack_device__(self):
                return 2, 0

            def __dlpack__(self, **options):
                raise AssertionError("CuPy's affair")


        def asarray(array):
            raise AssertionError("CuPy knows nothing of it")


        cupy.ndarray, cupy.from_dlpack, cupy.asarray = (
            PretendArray,
            lambda array: array.inner,
            asarray,
        )
        cupy.empty_like = lambda array, order: PretendArray(
            np.empty(array.shape, array.dtype), main
        )
        bpsx.init()
        r, n = bpsx.rank(), bpsx.size()
        x, y = Only(np.full(10, r + 1.0)), Only(np.zeros(10))
        new = bpsx.push_pull(x, "x", average=False)
        assert (
            isinstance(new, PretendArray)
            and (new.get() == 3).all()
            and (x.inner.get() == r + 1).all()
        )
        assert bpsx.push_pull(x, "x", average=False, output=y) is y and (y.inner.get() == 3).all()
        assert (bpsx.broadcast(x, 1, "b").get() == 2).all()
        bpsx.shutdown()
    """,
        pretend,
        1,
        2,
        0,
    )


def test_arrays_that_cannot_be(pretend: Path) -> None:
    gpu_run(
        """
        bpsx.init()
        x = PretendArray(np.ones((4, 6), np.float32), main)


        class Interface:
            def __init__(self, **changes):
                self.__cuda_array_interface__ = {**x.__cuda_array_interface__, **changes}


        def text(function):
            try:
                function()
            except Exception as e:
                return f"{type(e).__name__}: {e}"
            return "nothing"


        assert "C-contiguous" in text(
            lambda: bpsx.push_pull(x, "x", output=Interface(strides=(4, 16)))
        )
        assert "writeable" in text(
            lambda: bpsx.push_pull(x, "x", output=Interface(data=(x.address, True)))
        )
        assert "is not memory of a GPU" in text(
            lambda: bpsx.push_pull(
                Interface(data=(np.ones(24, np.float32).ctypes.data, False)), "x", output=x
            )
        )
        told = text(
            lambda: bpsx.push_pull(x, "x", output=PretendArray(np.ones(24, np.float32), main))
        )
        assert "(4, 6)" in told and "(24,)" in told, told
        assert "output float64" in text(
            lambda: bpsx.push_pull(x, "x", output=PretendArray(np.ones((4, 6)), main))
        )
        told = text(
            lambda: bpsx.push_pull(PretendArray(np.ones(3, np.complex64), main), "c", output=x)
        )
        assert told.startswith("UnsupportedDType") and "complex64" in told, told


        def refused(given, output=x, verb=bpsx.push_pull):
            return text(lambda: verb(given, name="y", output=output))


        for verb in (bpsx.push_pull, bpsx.broadcast):
            assert "byte order" in refused(Interface(typestr=">f4"), verb=verb)
            assert "byte order" in refused(Interface(typestr=">f4", strides=(4, 16)), verb=verb)
            assert "byte order" in refused(x, Interface(typestr=">f4"), verb)
            assert "mask" in refused(Interface(mask=x), verb=verb)
            assert "C-contiguous" in refused(x, Interface(strides=(0, 4)), verb)
            assert "on a GPU" in refused(x, np.ones((4, 6), np.float32), verb)
            assert "overlaps" in refused(x, Interface(data=(x.address + 4, False)), verb)
            assert "NumPy array" in refused(np.ones((4, 6), np.float32), x, verb)
        assert "aligned" in refused(Interface(data=(x.address + 2, False)))
        assert (x.get() == 1).all()
        bpsx.shutdown()
    """,
        pretend,
    )
