"""The job secret, shared by all processes of a job, and the keys derived from it.

Pure, except for :func:`make` and :func:`read`. No code may put the secret into an error, a log or a
command line. A job without a secret derives its keys from the empty secret. Anyone can derive those
keys too, so they protect against mistakes only, not against attackers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import stat
import struct

from bpsx.errors import ConfigError

#: Least bytes of a secret. An eavesdropper can test guesses offline against recorded traffic, so a
#: memorable word is not enough.
LEAST_BYTES = 16
MOST_BYTES = 4096
HOW_TO = "create one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


def make() -> str:
    """Return a new secret with 256 random bits, as text that fits an environment variable."""
    return secrets.token_urlsafe(32)


def derive(secret: bytes, purpose: str, *parts: bytes | str | int) -> bytes:
    """Return a key or proof of 32 bytes (HMAC-SHA256) that requires ``secret`` to compute.

    Each part is framed by its kind and length, so different lists of parts never give the same
    input. Integers are unsigned, up to 64 bits.
    """
    code = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (purpose, *parts):
        kind, data = (
            (b"i", struct.pack("<Q", part))
            if isinstance(part, int)
            else (b"s", part.encode())
            if isinstance(part, str)
            else (b"b", part)
        )
        code.update(kind + struct.pack("<Q", len(data)) + data)
    return code.digest()


def lane_proof(secret: bytes, job: int, address: str, nonce: bytes) -> bytes:
    """Return the lane's proof for a worker's random ``nonce``: 32 bytes.

    The proof covers the lane's own ``address``, so an impostor cannot pass off another lane's proof
    as its own.
    """
    return derive(secret, "data connection: lane's proof", job, address, nonce)


def same(one: bytes, other: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)


def curve_key(secret: bytes, purpose: str) -> bytes:
    """Return a secret key for CURVE in ZeroMQ's notation (Z85, 40 characters)."""
    # Python's base85 and Z85 differ in their alphabets only, not in the order of digits.
    there = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    here = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return base64.b85encode(derive(secret, purpose)).translate(bytes.maketrans(there, here))


def accept(text: str, where: str) -> bytes:
    """Return ``text`` as a secret, without surrounding whitespace.

    Raises :class:`~bpsx.errors.ConfigError`, which names the source ``where``, if it is too short,
    too long or not UTF-8.
    """
    try:
        value = text.strip().encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: not valid UTF-8; {HOW_TO}") from None
    if not LEAST_BYTES <= len(value) <= MOST_BYTES:
        raise ConfigError(
            f"{where}: the job secret has {len(value)} bytes; {LEAST_BYTES} to {MOST_BYTES} are"
            f" allowed; {HOW_TO}"
        )
    return value


def read(path: str) -> bytes:
    """Return the secret in the file at ``path``.

    Raises :class:`~bpsx.errors.ConfigError` if the file is unreadable or not a regular file. The
    same holds if it belongs to neither this user nor root, or grants access to any other user.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(MOST_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as e:
        raise ConfigError(f"BPSX_SECRET_FILE={path}: cannot read it: {e.strerror}") from e
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"BPSX_SECRET_FILE={path}: not a regular file")
    if found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"BPSX_SECRET_FILE={path}: must belong to this user or root and be readable by its"
            f" owner only (chmod 600); it belongs to user {found.st_uid} and has mode"
            f" {stat.S_IMODE(found.st_mode):04o}"
        )
    try:
        return accept(data.decode(), f"BPSX_SECRET_FILE={path}")
    except UnicodeDecodeError:
        raise ConfigError(f"BPSX_SECRET_FILE={path}: not valid UTF-8") from None
