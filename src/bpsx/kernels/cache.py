"""C functions compiled by Numba, with a cache for later processes (``BPSX_CACHE_DIR``).

The cache keeps object code, which :mod:`bpsx.kernels.object_code` links in a millisecond. A process
whose functions are all there does not import Numba, which takes most of a second.

Each entry is a separate file, named by everything that its code depends on, and ends with a
checksum. A damaged entry is deleted and compiled anew. The cache is optional: any failure to store
a function is logged as one warning.

Of a machine's processes that lack the same function, one compiles it and the others wait for its
entry: the processes of a job's first start otherwise all compile the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import inspect
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpsx.config import kernel_cache, numba_settings

if TYPE_CHECKING:
    from bpsx.kernels.object_code import Function

log = logging.getLogger("bpsx.kernels")
_DIGEST = 32
#: Seconds that a process waits for another one that compiles the same function. It then does so
#: itself: the other one may be stopped.
_PATIENCE = 60.0
#: Seconds between two looks whether that process has ended.
_LOOKS = 0.02
_told: set[str] = set()
#: Compiles a function; returns it, with an ``.address``, and what returns its object code. It is
#: :func:`bpsx.kernels.cpu.jit.compile_with_numba` for one function; a call imports Numba.
Source = Callable[[], tuple[Any, Callable[[], bytes]]]


def compiled(name: str, depends_on: Iterable[object], source: Source) -> Any:
    """Return a C function, at ``.address``, from the cache or compiled by Numba. Not thread-safe.

    ``name`` and ``depends_on``, of which the text counts, tell it from the others of our sources.

    Raises :class:`~bpsx.errors.ConfigError` if ``BPSX_CACHE_DIR`` is not a folder.
    """
    folder, why = kernel_cache()
    path = None
    if folder is None:
        _warn("kept", f"compiled kernels are not cached, so each process compiles them: {why}")
    else:
        try:
            path = folder / _file_name(name, depends_on)
        except OSError as e:
            _warn_unread(e)
    if path is None:
        return _compile(source, None)
    found = _load(path)
    if found is None:
        with _first(path) as first:
            if first:
                return _load(path) or _compile(source, path)
        found = _load(path) or _compile(source, path)
    return found


@contextlib.contextmanager
def _first(path: Path) -> Iterator[bool]:
    """Yield True while other processes of this machine that lack the same entry wait.

    Yield False after such a wait, or if locks do not work, as in a folder that is read-only. An
    entry that could not be stored is then compiled by all that have waited, at once.

    The system ends such a lock with its process. It is one byte of a file that all entries of the
    folder share, chosen by names of entry and machine: several machines may share the folder, and
    may see each other's new files late.
    """
    of = f"{path.name} {platform.node()}".encode()
    byte = int.from_bytes(hashlib.blake2b(of, digest_size=7).digest(), "little")
    with contextlib.ExitStack() as opened:
        first = False
        with contextlib.suppress(OSError):
            file = opened.enter_context(path.with_name(".lock").open("ab"))
            end = time.monotonic() + _PATIENCE
            first = _locked(file.fileno(), byte)
            while not first and not _locked(file.fileno(), byte) and time.monotonic() < end:
                time.sleep(_LOOKS)
        yield first


def _locked(descriptor: int, byte: int) -> bool:
    """Lock a byte of a file, unless another process has. Raises OSError if locks do not work."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except BlockingIOError:
        return False
    return True


def _linked(code: bytes) -> Function:
    # Loading LLVM takes a tenth of a second, so only processes that use kernels do it.
    from bpsx.kernels.object_code import Function

    return Function(code)


def _compile(source: Source, path: Path | None) -> Any:
    """Compile a function, and store it as ``path`` if there is one."""
    made, object_code = source()
    if path is None:
        return made
    try:
        code = object_code()
        function = _linked(code)
        _store(path, code)
    except Exception as e:
        _warn("kept", f"compiled kernels cannot be cached, so each process compiles them: {e}")
        return made
    return function


def _warn(kind: str, text: str) -> None:
    """Warn once per process and ``kind``; log later messages at debug level."""
    log.log(logging.DEBUG if kind in _told else logging.WARNING, "%s", text)
    _told.add(kind)


def _warn_unread(error: OSError) -> None:
    _warn("read", f"cached kernels cannot be read, so this process compiles them: {error}")


@functools.cache
def _sources() -> bytes:
    """Digest of all kernels' sources: each may be compiled into the others."""
    here = Path(__file__)
    digest = hashlib.blake2b()
    others = (here.with_name(f"{name}.py") for name in ("codec", "codecs", "object_code"))
    for source in (here, *others, *sorted(here.parent.glob("cpu/*.py"))):
        digest.update(source.read_bytes())
    return digest.digest()


@functools.cache
def _numba_version() -> str:
    try:
        return importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        import numba

        return str(numba.__version__)


@functools.cache
def _target() -> tuple[object, ...]:
    """Return what the machine code depends on besides sources: versions, processor, settings."""
    from bpsx.kernels.object_code import processor, version

    settings = numba_settings()
    triple, name, features = processor()
    return (
        platform.python_version(),
        _numba_version(),
        version(),
        triple,
        settings.get("NUMBA_CPU_NAME") or name,
        settings.get("NUMBA_CPU_FEATURES", features),
        sorted(settings.items()),
    )


def _file_name(name: str, depends_on: Iterable[object]) -> str:
    """Return an entry's name: a digest of all that its code depends on."""
    digest = hashlib.blake2b(_sources(), digest_size=16)
    for part in (name, *_target(), *depends_on):
        digest.update(repr(part).encode() + b"\0")
    return f"{name}-{digest.hexdigest()}.nbc"


def identity(body: Callable[..., Any]) -> Iterable[object]:
    """Yield what tells a function apart whose module may be a user's, outside of our sources.

    Raises :class:`OSError` for a function whose source cannot be read.
    """
    yield hashlib.blake2b(Path(inspect.getsourcefile(body) or "").read_bytes()).hexdigest()
    yield body.__qualname__
    yield body.__code__.co_firstlineno
    constants = [cell.cell_contents for cell in body.__closure__ or ()]
    if all(isinstance(value, int | float | str | None) for value in constants):
        yield constants
    else:
        from numba.core.serialize import dumps

        yield dumps(constants)


def _load(path: Path) -> Function | None:
    """Return the cached function, or None if it has to be compiled."""
    try:
        content = path.read_bytes()
        code, checksum = content[:-_DIGEST], content[-_DIGEST:]
        if not code or hashlib.blake2b(code, digest_size=_DIGEST).digest() != checksum:
            raise ValueError("its checksum is wrong")
        return _linked(code)
    except FileNotFoundError:
        return None
    except OSError as e:
        _warn_unread(e)
    except Exception as e:
        _warn(
            "damaged",
            f"the cached kernel {path} is damaged ({e}): bpsx deletes it and compiles it again",
        )
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _store(path: Path, code: bytes) -> None:
    """Write an entry, which appears under its name only when it is complete."""
    descriptor, making = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code + hashlib.blake2b(code, digest_size=_DIGEST).digest())
        os.replace(making, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(making)
        raise
