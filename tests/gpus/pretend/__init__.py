"""A pretend CUDA driver and a pretend NCCL, so that tests run the GPU code on machines without
GPUs.

``build`` compiles both. Processes started with ``environment`` then load them instead of the real
libraries. The pytest process must not load them, because other users of CUDA there would get the
pretend ones.

- ``cuda.c``, ``streams.c``: libcuda.so.1. GPU memory is host memory; each stream is a thread.
- ``nccl.c``, ``reduce.h``: libnccl.so.2. Real collectives between processes through shared memory;
  ranks that disagree abort with a description of the difference.
- ``site``: the part of cupy that provides NCCL.
- ``driver.py``: control of both from inside such a process. ``memory.py``: arrays on the pretend
  GPU.

A process may also have a real libnccl.so.2, which PyTorch's ordinary wheel loads. Then cupy of
``site`` tells bpsx which one to use, and refuses any but the pretend one.

Environment variables: PRETEND_NCCL, the path of the pretend NCCL; PRETEND_GPUS (1), the number of
GPUs that a process sees; PRETEND_FIRST_GPU (0), the place of the first one on the PCI bus, so that
processes can have different ones; PRETEND_DELAY_US (0), the duration of each operation on a stream.
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
]  # a real NCCL in the process, such as PyTorch's, has functions of the same names
_LIBRARIES = {"libcuda.so.1": ["cuda.c", "streams.c"], "libnccl.so.2": ["nccl.c"]}


def build(folder: Path) -> Path:
    """Compile both libraries into ``folder``.

    ``folder`` must be on the LD_LIBRARY_PATH of processes before they start. Needs a C compiler,
    ``cc``. Raises subprocess.CalledProcessError with the compiler's output in stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # $ORIGIN: the pretend NCCL finds the pretend driver in its own folder, whatever the search
    # path.
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
    """Return the environment of a process that uses the libraries in ``folder`` and the pretend
    cupy.

    ``more``: additional variables.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PRETEND_")}
    for name, first in (
        ("LD_LIBRARY_PATH", [folder]),
        ("PYTHONPATH", [HERE / "site", HERE.parents[1]]),
    ):
        paths = [*map(str, first), *filter(None, env.get(name, "").split(os.pathsep))]
        env[name] = os.pathsep.join(dict.fromkeys(paths))
    env["PRETEND_NCCL"] = str(folder / "libnccl.so.2")
    return env | {name: str(value) for name, value in more.items()}
