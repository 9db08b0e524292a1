"""C functions by Numba, kept for the next process in the user's folder (``BPSX_CACHE_DIR``), where
they can be kept.

Numba's own cache believes its files: a damaged one raises, or crashes when its machine code runs,
and two processes that write at once may leave the code of one signature under the name of another.
Here each entry is a file of its own, named by all that its code depends on, and ends with a
checksum. An entry that is not whole is dropped and compiled anew. The cache is optional: what keeps
a function from being kept is one warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import llvmlite
import numba
from numba.core import sigutils
from numba.core.caching import IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from bpsx.config import kernel_cache

log = logging.getLogger("bpsx.kernels")
_DIGEST = 32
_told: set[str] = set()


def compiled(signature: Any, body: Callable[..., Any]) -> Any:
    """``body`` as a C function of this signature; ``.address`` is where. One thread at a time."""
    try:
        made = CFunc(
            body,
            sigutils.normalize_signature(signature),
            locals={},
            options={"error_model": "numpy"},
        )
        made._cache = _Cache(body)  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, ImportError, TypeError) as e:
        _warn(
            "new",
            f"compiled kernels are not kept: Numba {numba.__version__} is unlike those that this"
            f" was written for: {e}",
        )
        return numba.cfunc(signature, error_model="numpy")(body)
    made.compile()
    return made


def _warn(kind: str, text: str) -> None:
    """One warning of a kind per process."""
    log.log(logging.DEBUG if kind in _told else logging.WARNING, "%s", text)
    _told.add(kind)


@functools.cache
def _sources() -> bytes:
    """A digest of all our kernels: functions are compiled into each other."""
    digest = hashlib.blake2b()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()


def _whole(path: Path) -> bool:
    """Whether an entry is there as it was written. Raises :class:`OSError` if it cannot be read."""
    content = path.read_bytes()
    return (
        len(content) > _DIGEST
        and hashlib.blake2b(content[:-_DIGEST], digest_size=_DIGEST).digest() == content[-_DIGEST:]
    )


class _File(IndexDataCacheFile):  # type: ignore[misc]
    """Numba's reading and writing of entries, each followed by the checksum of what was written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), "kernels", None)

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[IO[bytes]]:
        with super()._open_for_write(filepath) as file:
            yield _Hashed(file)  # type: ignore[misc]


class _Hashed:
    """A file that is written at once, and its checksum behind that."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, content: bytes) -> None:
        """Write ``content`` and its checksum."""
        self._file.write(content)
        self._file.write(hashlib.blake2b(content, digest_size=_DIGEST).digest())


class _Cache:
    """What :class:`numba.core.ccallback.CFunc` asks for a function before it compiles it, and gives
    what it has compiled.

    Raises :class:`~bpsx.errors.ConfigError` where ``BPSX_CACHE_DIR`` names what is no folder, and
    nothing else.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body

    def _name(self, signature: Any, codegen: Any) -> str:
        """Of the entry: a digest of all that its code depends on.

        Raises :class:`OSError` for a function whose source cannot be read.
        """
        body = self._body
        # a compressor's module may be a user's
        outside = Path(inspect.getsourcefile(body) or "").read_bytes()
        constants = [cell.cell_contents for cell in body.__closure__ or ()]
        on = (
            signature,
            codegen.magic_tuple(),
            platform.python_version(),
            numba.__version__,
            llvmlite.__version__,
        )
        digest = hashlib.blake2b(_sources(), digest_size=16)
        for part in (
            outside,
            body.__qualname__,
            body.__code__.co_firstlineno,
            dumps(constants),
            on,
        ):
            digest.update(part if isinstance(part, bytes) else repr(part).encode())
            digest.update(b"\0")
        return f"{body.__name__}-{digest.hexdigest()}.nbc"

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The function, or None: it has to be compiled."""
        context.refresh()
        folder, why = kernel_cache()
        if folder is None:
            _warn("kept", f"compiled kernels are not kept, so each process compiles them: {why}")
            return None
        path = folder
        try:
            path = folder / self._name(signature, context.codegen())
            if not _whole(path):
                raise ValueError("its checksum is wrong")
            return CompileResult._rebuild(context, *_File(folder)._load_data(path.name))
        except FileNotFoundError:
            return None
        except OSError as e:
            _warn("read", f"compiled kernels cannot be read, so this process compiles them: {e}")
        except Exception as e:
            _warn(
                "damaged",
                f"{path}, a compiled kernel, is damaged ({e}): it is deleted and compiled anew",
            )
            with contextlib.suppress(OSError):
                path.unlink()
        return None

    def save_overload(self, signature: Any, made: Any) -> None:
        """Keep a function for other processes, if it can be kept."""
        try:
            if made.lifted or made.library.has_dynamic_globals:
                return  # addresses of this process's are in its code
            folder, _ = kernel_cache()
            if folder is not None:  # else load_overload has said why
                _File(folder)._save_data(self._name(signature, made.codegen), made._reduce())
        except Exception as e:
            _warn("kept", f"compiled kernels cannot be kept, so each process compiles them: {e}")
