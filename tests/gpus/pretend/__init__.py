"""A pretend CUDA driver and a pretend NCCL, so that the code for GPUs runs in tests on machines
that have none.

``build`` compiles them; processes that are started with ``environment`` then find them where they
look for the real ones. The process that runs the tests shall not load them: what asks for CUDA
there later would get the pretence.

- ``cuda.c``, ``streams.c``: libcuda.so.1. GPU memory is host memory; each stream is a thread.
- ``nccl.c``, ``reduce.h``: libnccl.so.2. Real collectives between processes, through shared memory;
  ranks that disagree abort, and say how.
- ``site``: as much of cupy as brings NCCL along.
- ``driver.py``: what a test does with them from inside such a process. ``memory.py``: arrays on the
  pretend GPU.

A process may have a real libnccl.so.2 besides, which PyTorch's ordinary wheel loads. Then cupy of
``site`` tells bpsx which one is meant, and refuses any but the pretend one.

They read the environment: PRETEND_NCCL, the path of the pretend NCCL; PRETEND_GPUS (1), how many
GPUs a process sees; PRETEND_FIRST_GPU (0), where the first is on the PCI bus, so that processes can
have different ones; PRETEND_DELAY_US (0), how long each operation on a stream takes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
_FLAGS = [
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fwrapv",
    "-O1",
    "-g",
    "-shared",
    "-fPIC",
    "-pthread",
    "-Wl,-Bsymbolic",
]  # a real NCCL in the process, PyTorch's, has functions of the same names
_LIBRARIES = {"libcuda.so.1": ["cuda.c", "streams.c"], "libnccl.so.2": ["nccl.c"]}


def build(folder: Path) -> Path:
    """Compiles both libraries into ``folder``, which is to be on the LD_LIBRARY_PATH of processes
    before they start; needs a C compiler, `cc`.

    Raises subprocess.CalledProcessError with the compiler's words on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # $ORIGIN: the pretend NCCL finds the pretend driver beside itself, wherever the process looks.
    compilers = [
        subprocess.Popen(
            [
                "cc",
                *_FLAGS,
                f"-Wl,-soname,{name}",
                "-Wl,-rpath,$ORIGIN",
                "-o",
                folder / name,
                *sources,
                "-lm",
            ],
            cwd=HERE,
        )
        for name, sources in _LIBRARIES.items()
    ]
    for compiler in compilers:
        if compiler.wait():
            raise subprocess.CalledProcessError(compiler.returncode, compiler.args)
    return folder


def environment(folder: Path, **more: object) -> dict[str, str]:
    """The environment of a process that shall have the libraries in ``folder`` and the pretend
    cupy; ``more`` are variables to set besides.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PRETEND_")}
    for name, first in (
        ("LD_LIBRARY_PATH", [folder]),
        ("PYTHONPATH", [HERE / "site", HERE.parents[1]]),
    ):
        env[name] = os.pathsep.join([*map(str, first), *filter(None, [env.get(name)])])
    env["PRETEND_NCCL"] = str(folder / "libnccl.so.2")
    return env | {name: str(value) for name, value in more.items()}
