"""The job secret: what all processes of a job know and nobody else, and the keys that are derived
from it.

Pure, except for :func:`make` and :func:`read`. Nothing here puts the secret into a text, and nobody
else may: not into errors, logs or commands. Without a secret the keys are derived from the empty
one. Anybody can do that, so they protect from mistakes only, never from people.
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

#: A listener may try secrets offline against what he has recorded, so a word that people remember
#: is not enough.
LEAST_BYTES = 16
MOST_BYTES = 4096
HOW_TO = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


def make() -> str:
    """A new secret with 256 random bits, as text that fits an environment variable."""
    return secrets.token_urlsafe(32)


def derive(secret: bytes, purpose: str, *parts: bytes | str | int) -> bytes:
    """A key or proof of 32 bytes (HMAC-SHA256) that only who knows ``secret`` can compute.

    Every part is framed by its kind and length, so that no two lists of parts give the same input.
    Integers are unsigned, up to 64 bits.
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
    """What a lane answers to a worker's random ``nonce``: 32 bytes.

    ``address`` is its own, so nobody can have another lane answer for it.
    """
    return derive(secret, "data connection: lane's proof", job, address, nonce)


def same(one: bytes, other: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)


def curve_key(secret: bytes, purpose: str) -> bytes:
    """A secret key for CURVE, as ZeroMQ spells keys (Z85, 40 characters)."""
    # Python's base85 has another alphabet than Z85, in the same order.
    there = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    here = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return base64.b85encode(derive(secret, purpose)).translate(bytes.maketrans(there, here))


def accept(text: str, where: str) -> bytes:
    """``text`` as a secret.

    Raises :class:`~bpsx.errors.ConfigError`, naming ``where`` it came from, if it is too short or
    too long.
    """
    try:
        value = text.strip().encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: is no text in UTF-8; {HOW_TO}") from None
    if not LEAST_BYTES <= len(value) <= MOST_BYTES:
        raise ConfigError(
            f"{where}: the job secret has {len(value)} bytes; {LEAST_BYTES} to {MOST_BYTES} are"
            f" allowed; {HOW_TO}"
        )
    return value


def read(path: str) -> bytes:
    """The secret in a file.

    Raises :class:`~bpsx.errors.ConfigError` if it cannot be read or if others than its owner may
    read or change it.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(MOST_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as e:
        raise ConfigError(f"BPSX_SECRET_FILE={path}: cannot read it: {e.strerror}") from e
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"BPSX_SECRET_FILE={path}: is no ordinary file")
    if found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"BPSX_SECRET_FILE={path}: must be readable by its owner only, this user or root (chmod"
            f" 600); it belongs to user {found.st_uid} and has mode"
            f" {stat.S_IMODE(found.st_mode):04o}"
        )
    try:
        return accept(data.decode(), f"BPSX_SECRET_FILE={path}")
    except UnicodeDecodeError:
        raise ConfigError(f"BPSX_SECRET_FILE={path}: is no text in UTF-8") from None
