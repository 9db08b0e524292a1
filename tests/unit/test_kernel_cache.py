"""The cache of compiled kernels: whatever happens to its folder, sums are right.

One warning says what happened.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from bpsx.kernels.object_code import Function

CODE = """
import ctypes, logging, sys, numpy as np

logging.basicConfig(format="%(levelname)s %(message)s")
from bpsx.kernels import load
from bpsx.kernels import cache

compiling = []
made = cache._compile
cache._compile = lambda *given: compiling.append(1) or made(*given)
P, N = ctypes.c_void_p, ctypes.c_int64
for code, dtype in ((5, "int32"), (1, "float32"))[:SUMS]:
    from bpsx.dtypes import BY_NAME

    a, b = np.arange(9).astype(dtype), np.ones(9, dtype)
    ctypes.CFUNCTYPE(None, P, P, N, N)(load(BY_NAME[dtype].code).pair)(
        a.ctypes.data, b.ctypes.data, 9, 1
    )
    assert (a == np.arange(1, 10)).all(), a
assert compiling or "numba" not in sys.modules
print(len(compiling))
"""


def sums(
    folder: Path, count: int = 1, before: str = "", **environment: str
) -> tuple[int, list[str]]:
    """Return how many functions a process compiled to add int32 (and float32), and its warnings.

    ``before``: what it runs first.
    """
    done = subprocess.run(
        [sys.executable, "-c", before + CODE.replace("SUMS", str(count))],
        env={**os.environ, "BPSX_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout), [
        line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))
    ]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernels of int32."""
    folder = tmp_path_factory.mktemp("kernels")
    assert sums(folder) == (3, [])
    assert sums(folder) == (0, [])
    return folder


@pytest.fixture()
def folder(filled: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(filled, tmp_path / "kernels")
    (tmp_path / "kernels").chmod(0o700)
    return tmp_path / "kernels"


#: Position of the byte in which a bit is flipped, by case.
FLIPPED = {
    "a bit at the beginning": lambda size: 5,
    "a bit of the code": lambda size: size // 2,
    "a bit of the checksum": lambda size: size - 1,
}


@pytest.mark.parametrize("damage", ["empty", "truncated", "no checksum", "another's", *FLIPPED])
def test_damaged_files_are_deleted_and_rebuilt(damage: str, folder: Path) -> None:
    files = sorted(folder.glob("*.nbc"))
    contents = [file.read_bytes() for file in files]
    for i, (file, content) in enumerate(zip(files, contents, strict=True)):
        changed = bytearray(content)
        if damage in FLIPPED:
            changed[FLIPPED[damage](len(content))] ^= 4
        size = {"empty": 0, "truncated": len(content) // 3, "no checksum": len(content) - 32}.get(
            damage, len(content)
        )
        file.write_bytes(contents[i - 1] + b"!" if damage == "another's" else changed[:size])
    compiled, warnings = sums(folder)
    assert compiled == 3
    assert len(warnings) == 1 and "is damaged" in warnings[0] and str(folder) in warnings[0]
    assert sums(folder) == (0, [])


def test_an_entry_is_never_confused_with_another(folder: Path) -> None:
    """Two processes that write at the same time leave only complete files, under correct names."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CODE.replace("SUMS", "2")],
            env={**os.environ, "BPSX_CACHE_DIR": str(folder)},
        )
        for _ in range(2)
    ]
    assert [process.wait() for process in running] == [0, 0]
    assert sums(folder, 2) == (0, [])
    assert {path.suffix or path.name for path in folder.iterdir()} == {".nbc", ".lock"}


#: Says so when it begins to compile, and waits for a line.
FIRST = """
count = cache._compile

def once_told(*given):
    if not compiling:
        print("compiles", flush=True)
        input()
    return count(*given)

cache._compile = once_told
"""
#: Begins when told, and says so when it waits for another process.
SECOND = """
input()
lock, waits = cache._locked, []

def told(*given):
    got = lock(*given)
    if not got and not waits:
        waits.append(print("waits", flush=True))
    return got

cache._locked = told
"""


@pytest.fixture()
def two(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that need the same functions: one compiles, the other waits."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CODE.replace("P, N =", more + "P, N =").replace("SUMS", "1")],
            env={**os.environ, "BPSX_CACHE_DIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for more in (FIRST, getattr(request, "param", "") + SECOND)
    ]
    one, other = running
    assert one.stdout and other.stdin and other.stdout
    assert one.stdout.readline() == "compiles\n"
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline() == "waits\n"
    yield running
    for process in running:
        process.kill()
        process.communicate()


def test_processes_that_start_together_compile_a_function_once(
    two: list[subprocess.Popen[str]],
) -> None:
    one, other = two
    compiled = int(one.communicate("\n")[0]), int(other.communicate()[0])
    assert sum(compiled) == 3 and compiled[0] >= 1
    assert one.returncode == other.returncode == 0


def test_a_process_compiles_what_one_that_dies_has_not(two: list[subprocess.Popen[str]]) -> None:
    one, other = two
    one.kill()
    assert int(other.communicate()[0]) == 3


@pytest.mark.parametrize("two", ["cache._PATIENCE = 0.1\n"], indirect=True, ids=["impatient"])
def test_a_process_does_not_wait_forever_for_another(two: list[subprocess.Popen[str]]) -> None:
    assert int(two[1].communicate()[0]) == 3
    assert two[0].poll() is None


@pytest.fixture()
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page, which is full."""
    folder = tmp_path / "small"
    folder.mkdir(mode=0o700)
    if (
        os.getuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "none", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small tmpfs needs root")
    (folder / "full").write_bytes(bytes(4096))
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_file_system(small: Path) -> None:
    compiled, warnings = sums(small)
    assert compiled == 3
    assert (
        len(warnings) == 1
        and ("cannot be cached") in warnings[0]
        and "No space left" in warnings[0]
    )
    assert {path.name for path in small.iterdir()} <= {"full", ".lock"}


def test_a_read_only_file_system(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    compiled, warnings = sums(small)
    assert compiled == 3
    assert len(warnings) == 1 and "are not cached" in warnings[0] and str(small) in warnings[0]


def test_a_folder_in_place_of_a_file(folder: Path) -> None:
    for file in folder.glob("*.nbc"):
        file.unlink()
        file.mkdir()
    compiled, warnings = sums(folder)
    assert compiled == 3 and 1 <= len(warnings) <= 2 and "cannot be" in warnings[0]


def test_a_folder_that_vanishes(folder: Path) -> None:
    gone = CODE.replace(
        "print(len",
        f"import shutil; shutil.rmtree({str(folder)!r}); load(BY_NAME['float32'].code); print(len",
    )
    done = subprocess.run(
        [sys.executable, "-c", gone.replace("SUMS", "1")],
        env={**os.environ, "BPSX_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3", "")
    assert len(list(folder.glob("*.nbc"))) == 3


def test_no_descriptor_left_to_read_with(folder: Path) -> None:
    code = CODE.replace(
        "P, N =", "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); P, N ="
    ).replace(
        "import ctypes",
        """
import numba, bpsx.kernels.cpu.jit, bpsx.kernels.cpu.sum, ctypes, numba.core.ccallback
@numba.cfunc("int32(int32)")
def warm(x): return x
import ctypes""",
    )
    done = subprocess.run(
        [sys.executable, "-c", code.replace("SUMS", "1")],
        env={**os.environ, "BPSX_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 3 and "Too many open files" in done.stderr


@pytest.mark.parametrize(
    "setting",
    [{"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, {"NUMBA_OPT": "1"}],
    ids=str,
)
def test_code_for_other_settings_of_numba_is_another_entry(
    setting: dict[str, str], folder: Path
) -> None:
    assert sums(folder, **setting) == (3, [])
    assert sums(folder, **setting) == (0, []) == sums(folder)


def test_a_codec_is_compiled_once(tmp_path: Path) -> None:
    """Its code names functions of Numba's, which its loading therefore brings along."""
    code = CODE[: CODE.index("P, N =")] + (
        "from bpsx.kernels.codecs import load_codec\n"
        "assert load_codec('onebit', 'float32', True, False).encode\n"
        "print(len(compiling))"
    )
    for compiled in (2, 0):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "BPSX_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(compiled), "")


def test_a_numba_that_does_not_give_its_code_away_sums_all_the_same(tmp_path: Path) -> None:
    """Each process compiles, and says so once."""
    other = "import numba.core.ccallback as c; del c.CFunc.inspect_llvm\n"
    compiled, warnings = sums(tmp_path, before=other)
    assert compiled == 3 and len(warnings) == 1 and "cannot be cached" in warnings[0]
    assert sums(tmp_path, before=other)[0] == 3


def test_a_worker_without_kernels_does_not_load_llvm() -> None:
    """Its library takes 40 MB of memory and a tenth of a second."""
    source = "import sys, bpsx.api.verbs; print('llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_code_that_needs_a_function_that_is_not_there_is_refused() -> None:
    """LLVM would end the process."""
    text = """
        declare i32 @nowhere()
        define i32 @bpsx_kernel() {{
          %r = call i32 @{name}()
          ret i32 %r
        }}
        declare i32 @getpid()
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        codemodel="jitdefault", jit=True
    )

    def code(name: str) -> bytes:
        return bytes(machine.emit_object(llvm.parse_assembly(text.format(name=name))))

    there = Function(code("getpid"))
    assert ctypes.CFUNCTYPE(ctypes.c_int)(there.address)() == os.getpid()
    with pytest.raises(ValueError, match="it needs nowhere"):
        Function(code("nowhere"))
