"""C functions compiled by Numba, with a cache for later processes (``BPSX_CACHE_DIR``).

Numba's own cache trusts its files. A damaged file raises, or crashes when its machine code runs.
Two processes that write at once may store the code of one signature under the name of another. Here
each entry is a separate file, named by everything that its code depends on, and ends with a
checksum. An incomplete entry is deleted and compiled anew. The cache is optional: any failure to
store a function is logged as one warning.
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
    """Compile ``body`` to a C function of this signature, at ``.address``. Not thread-safe."""
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
            "compiled kernels are not cached, because bpsx's cache does not fit Numba"
            f" {numba.__version__}: {e}",
        )
        return numba.cfunc(signature, error_model="numpy")(body)
    made.compile()
    return made


def _warn(kind: str, text: str) -> None:
    """Warn once per process and ``kind``; log later messages at debug level."""
    log.log(logging.DEBUG if kind in _told else logging.WARNING, "%s", text)
    _told.add(kind)


@functools.cache
def _sources() -> bytes:
    """Digest of all kernels' sources: each may be compiled into the others."""
    digest = hashlib.blake2b()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()


def _whole(path: Path) -> bool:
    """Whether an entry's checksum is right. Raises :class:`OSError` if it cannot be read."""
    content = path.read_bytes()
    return (
        len(content) > _DIGEST
        and hashlib.blake2b(content[:-_DIGEST], digest_size=_DIGEST).digest() == content[-_DIGEST:]
    )


class _File(IndexDataCacheFile):  # type: ignore[misc]
    """Numba's reader and writer of entries, with a checksum appended to each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), "kernels", None)

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[IO[bytes]]:
        with super()._open_for_write(filepath) as file:
            yield _Hashed(file)  # type: ignore[misc]


class _Hashed:
    """File object that appends the checksum of the content, which comes in a single write."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, content: bytes) -> None:
        """Write ``content`` and its checksum."""
        self._file.write(content)
        self._file.write(hashlib.blake2b(content, digest_size=_DIGEST).digest())


class _Cache:
    """Cache that :class:`numba.core.ccallback.CFunc` asks before it compiles a function.

    It also stores the compiled function. Raises :class:`~bpsx.errors.ConfigError` if
    ``BPSX_CACHE_DIR`` is not a folder, and nothing else.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body

    def _name(self, signature: Any, codegen: Any) -> str:
        """Return the entry's name: a digest of all that its code depends on.

        Raises :class:`OSError` for a function whose source cannot be read.
        """
        body = self._body
        # A compressor's module may be a user's, outside of our sources.
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
        """Return the cached function, or None if it has to be compiled."""
        context.refresh()
        folder, why = kernel_cache()
        if folder is None:
            _warn("kept", f"compiled kernels are not cached, so each process compiles them: {why}")
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
            _warn("read", f"cached kernels cannot be read, so this process compiles them: {e}")
        except Exception as e:
            _warn(
                "damaged",
                f"the cached kernel {path} is damaged ({e}): bpsx deletes it and compiles it again",
            )
            with contextlib.suppress(OSError):
                path.unlink()
        return None

    def save_overload(self, signature: Any, made: Any) -> None:
        """Store a function for other processes, if possible."""
        try:
            if made.lifted or made.library.has_dynamic_globals:
                return  # its code contains addresses of this process
            folder, _ = kernel_cache()
            if folder is not None:  # else load_overload has logged why
                _File(folder)._save_data(self._name(signature, made.codegen), made._reduce())
        except Exception as e:
            _warn("kept", f"compiled kernels cannot be cached, so each process compiles them: {e}")
