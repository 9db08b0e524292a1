"""Folders of this user: compiled kernels, and sockets of running jobs."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bpsx.config.config import environment
from bpsx.config.parsers import folder as expanded
from bpsx.errors import ConfigError


def _named(variable: str, source: Mapping[str, str]) -> str:
    """The folder that an option names; empty if it names none.

    Raises :class:`~bpsx.errors.ConfigError`.
    """
    text = source.get(variable, "")
    try:
        return expanded(text)
    except ValueError as e:
        raise ConfigError(f"{variable}={text!r}: {e}") from None


def _temporary(options: str) -> str:
    """The system's temporary folder. ``options``: variables to set instead, for the error."""
    try:
        return tempfile.gettempdir()
    except OSError as e:
        raise ConfigError(
            f"{options}: there is no folder that this user may write to ({e.strerror}); set"
            f" {options} or TMPDIR to a writeable folder"
        ) from e


def _cache_places(source: Mapping[str, str]) -> Iterator[Path]:
    """Candidate folders for compiled kernels, best first."""
    if named := _named("BPSX_CACHE_DIR", source):
        yield Path(named)
        return
    above = source.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    # Without HOME and an entry in passwd, a user has no home folder, and ~ stays unexpanded.
    if os.path.isabs(above):
        yield Path(above) / "bpsx"
    # Looked up only if needed: gettempdir() creates a file for a moment, which stays if the process
    # is killed then.
    yield Path(_temporary("BPSX_CACHE_DIR")) / f"bpsx-{os.getuid()}"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return a private, writable folder for compiled kernels; creates it if needed.

    Raises :class:`~bpsx.errors.ConfigError` if there is none.
    """
    tried = []
    for folder in _cache_places(environment(environ)):
        tried.append(str(folder))
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        found = folder.stat()
        # A user who may write there controls the code that runs here.
        if os.access(folder, os.W_OK) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    raise ConfigError(
        "BPSX_CACHE_DIR: compiled kernels need a folder to which only this user may write; tried "
        + ", ".join(tried)
    )


def _above(source: Mapping[str, str]) -> str:
    """The folder that contains this user's runtime folder."""
    if named := _named("BYTEPS_SOCKET_PATH", source):
        return named
    session = source.get("XDG_RUNTIME_DIR", "")
    # su, cron and containers pass the variable on without the folder. Login creates that folder, so
    # bpsx must not.
    return (
        session
        if os.path.isabs(session) and os.access(session, os.W_OK | os.X_OK)
        else _temporary("BYTEPS_SOCKET_PATH")
    )


def kernel_cache() -> tuple[Path | None, str]:
    """Return the folder of :func:`cache_dir`, or None and the reason why there is none.

    Compiled kernels need not be kept, so having no folder is not an error.

    Raises :class:`~bpsx.errors.ConfigError` if ``BPSX_CACHE_DIR`` does not name a folder.
    """
    try:
        return cache_dir(), ""
    except ConfigError as e:
        named = _named("BPSX_CACHE_DIR", environment())
        if named and not Path(named).is_dir():
            raise
        return None, str(e)


def numba_settings() -> dict[str, str]:
    """Return all that a user may have set for Numba: variables, and the content of its file."""
    settings = {n: v for n, v in environment().items() if n.startswith("NUMBA_")}
    with contextlib.suppress(OSError):
        for path in Path().glob(".numba_config.*"):
            settings[path.name] = path.read_text(errors="replace")
    return settings


def runtime_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for sockets of running jobs; creates it if needed.

    It is called ``bpsx-<user id>``, belongs to this user and has mode 0700.

    Raises :class:`~bpsx.errors.ConfigError` if another user owns it or may enter it, as its content
    could not be trusted.
    """
    source = environment(environ)
    folder = Path(_above(source)) / f"bpsx-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as e:
        raise ConfigError(
            f"BYTEPS_SOCKET_PATH: cannot create {folder}: {e.strerror}; set it to a folder that"
            " this user may write to"
        ) from e
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"BYTEPS_SOCKET_PATH: {folder} must be a folder that belongs to user {os.getuid()} and"
            f" has mode 0700; it belongs to user {found.st_uid} and has mode"
            f" {stat.S_IMODE(found.st_mode):04o}"
        )
    return folder
