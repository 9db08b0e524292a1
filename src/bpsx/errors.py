"""Exceptions of bpsx. Every one derives from :class:`BpsxError`.

There are two kinds. Errors *of the environment* (a peer died, a deadline passed) end the job: start
it again. Errors *of the user* (a wrong option, tensors that differ between workers) have a message
that says what to change. Status codes of the core become exceptions here and nowhere else.
"""

from __future__ import annotations

import ast
import re
from enum import IntEnum

#: A process of the job, as reports name it: "worker 1 (10.0.0.2, pid 77)", "server 0 at
#: 10.0.0.3:5000", "the scheduler at …".
_PEER = re.compile(
    r"\b(worker|server|scheduler)(?: (\d+))?(?: \((?P<host>[^,()]+)(?:, pid \d+)?\)| at"
    r" (?P<at>[^\s,;()]*[^\s,;():.]))?"
)
#: A name, as :func:`repr` writes it.
_NAME = r"""('(?:[^'\\]|\\.)+'|"(?:[^"\\]|\\.)+")"""
_TENSOR = re.compile(rf"(?:\btensor |\bpush_pull of |\bbroadcast of |^){_NAME}")


class BpsxError(RuntimeError):
    """Base class of all errors raised by bpsx.

    It is a :class:`RuntimeError`, as the errors of PyTorch and Horovod are, which scripts catch.

    The attributes are parsed from the text, which may come from another process. So copies and
    pickles have them too. An attribute is None, or empty, if the text does not contain it.
    """

    def _peer(self) -> re.Match[str] | None:
        return _PEER.search(str(self))

    @property
    def role(self) -> str | None:
        """Role of the process that the error is about: ``worker``, ``server`` or ``scheduler``."""
        found = self._peer()
        return found[1] if found else None

    @property
    def rank(self) -> int | None:
        """Rank of that process; None for the scheduler."""
        found = self._peer()
        return int(found[2]) if found and found[2] else None

    @property
    def address(self) -> str | None:
        """Host of that process, or its host and port."""
        found = self._peer()
        return found["host"] or found["at"] if found else None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the error is about."""
        return _names_in(_TENSOR, str(self))

    @property
    def tensor(self) -> str | None:
        """The first of :attr:`tensors`."""
        return next(iter(self.tensors), None)

    @property
    def reason(self) -> str:
        """The whole text."""
        return str(self)


def _names_in(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    """Return the matches of ``pattern``'s first group in ``text``, each once."""
    return tuple(dict.fromkeys(ast.literal_eval(found) for found in pattern.findall(text)))


class ConfigError(BpsxError, ValueError):
    """An option has a value that is not allowed, or a required one is missing.

    The message names the variable and the allowed values.
    """


class NotInitializedError(BpsxError, RuntimeError):
    """A verb was called before ``init()`` or after ``shutdown()``."""


class RendezvousError(BpsxError, TimeoutError):
    """The job did not come together before the deadline. The message names missing processes."""


class JobOverError(RendezvousError):
    """The job of the scheduler at this address is complete, running or over.

    A new job needs a new scheduler.
    """


class TransportError(BpsxError, ConnectionError):
    """The transport could not listen, connect or send."""


class PeerLostError(BpsxError, ConnectionError):
    """A worker, a server or the scheduler died or cannot be reached.

    The message names role, rank and address.
    """


class PeerLeftError(PeerLostError):
    """A worker left the job in good order while this one still needs its gradients."""


class MismatchError(BpsxError, ValueError):
    """Workers disagree about a tensor's shape, dtype or operation. The message names both sides."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensor that workers disagree about; its name is the first in the text."""
        return _names_in(_FIRST, str(self))[:1]


_ROOT_LOST = "was lost before it had broadcast it"
#: A name anywhere in a text.
_FIRST = re.compile(_NAME)
#: Tensors in the scheduler's report of a stall: "worker 0 waits for 'x' (float32 of shape (4,)),
#: which worker 1 has not pushed, 'y' …".
_AWAITED = re.compile(rf"(?:\bwaits for |, ){_NAME}(?= \(|, | and |;|$)")
_LACKING = re.compile(r"\bwhich worker (\d+) has not pushed")


class StallError(BpsxError, TimeoutError):
    """Every worker waits for a tensor that another worker has not pushed.

    ``role`` and ``rank``: of a worker that has not pushed :attr:`tensor`. ``tensors``: the tensors
    that workers wait for.
    """

    @property
    def role(self) -> str | None:
        """``worker``, or None."""
        return "worker" if _LACKING.search(str(self)) else None

    @property
    def rank(self) -> int | None:
        """Rank of the worker that has not pushed :attr:`tensor`."""
        found = _LACKING.search(str(self))
        return int(found[1]) if found else None

    @property
    def address(self) -> None:
        """None: the text has no address."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that workers wait for, a few for each worker."""
        return _names_in(_AWAITED, str(self))


class ProtocolError(BpsxError, RuntimeError):
    """A peer refused a message as malformed: a defect in bpsx, or a foreign program on the port."""


class ShutdownError(BpsxError, RuntimeError):
    """bpsx was shut down while the operation was in flight."""


class JoinedError(BpsxError, RuntimeError):
    """A worker has called ``join()``, and not all workers have joined yet.

    Either an operation needs that worker, or that worker itself calls a verb.
    """


class OutOfMemoryError(BpsxError, MemoryError):
    """The core could not allocate memory."""


class KernelError(BpsxError, RuntimeError):
    """The code that sums an element type could not be compiled or loaded.

    The log of the process that sums gives the reason.
    """


class DeviceError(BpsxError, RuntimeError):
    """A GPU or NCCL failed. The message names the call and contains the library's text."""


class InternalError(BpsxError, RuntimeError):
    """A defect in bpsx: an event that the state of things does not allow."""


class Status(IntEnum):
    """Cause of an operation's failure: the negative codes of ``core/status.pxd`` and messages."""

    #: A worker, a server or the scheduler is gone.
    PEER_LOST = -1
    #: The workers disagree about shape, dtype, operation or divisor.
    MISMATCH = -2
    #: A worker left the job in good order while others still need it.
    LEFT = -3
    #: Every worker waits for something that another worker has not pushed.
    STALL = -4
    #: The peer refused a message as malformed.
    PROTOCOL = -5
    #: This process shut bpsx down with the operation under way.
    SHUTDOWN = -6
    MEMORY = -7
    #: The root of a broadcast has called join() and so pushes nothing.
    JOINED = -9
    #: The code that sums this element type could not be compiled or loaded.
    KERNELS = -10
    #: A worker's compressed bytes do not decode.
    CODEC = -11
    #: The server does not know how this tensor is compressed.
    COMPRESSOR = -12
    #: A GPU or NCCL failed.
    DEVICE = -13


#: The exception for each status, and its text if no more is known.
STATUS: dict[int, tuple[type[BpsxError], str]] = {
    Status.PEER_LOST: (PeerLostError, "a peer was lost"),
    Status.MISMATCH: (
        MismatchError,
        "the workers disagree about this tensor's shape, dtype or operation",
    ),
    Status.LEFT: (PeerLeftError, "a worker has left the job"),
    Status.STALL: (StallError, "all workers wait for each other"),
    Status.PROTOCOL: (ProtocolError, "the server refused the message as malformed"),
    Status.SHUTDOWN: (ShutdownError, "bpsx was shut down while this operation was under way"),
    Status.MEMORY: (OutOfMemoryError, "the core could not allocate memory"),
    Status.JOINED: (JoinedError, "a worker that this operation needs has called join()"),
    Status.KERNELS: (
        KernelError,
        "the code that sums this element type could not be loaded; see the log of this machine's"
        " process with the largest local rank",
    ),
    Status.CODEC: (ProtocolError, "compressed data cannot be decoded"),
    Status.COMPRESSOR: (ConfigError, "a server does not know how this tensor is compressed"),
    Status.DEVICE: (DeviceError, "the GPU failed"),
}


def from_status(status: int, detail: str = "") -> BpsxError:
    """Return the exception for a negative ``status``; ``detail`` replaces the default text."""
    kind, text = STATUS[status]
    return kind(detail or text)


def says_root_lost(text: str) -> bool:
    """Whether the text of an error says that the root of a broadcast was lost.

    In a job that goes on without that worker, the survivors may broadcast from another root.
    """
    return _ROOT_LOST in text


def in_short(error: BaseException) -> str:
    """Return ``TypeName: text``, for reports in other processes.

    TensorFlow's errors may contain the text of a bpsx error. Then only that line is returned.
    """
    text = str(error)
    # TensorFlow appends "[Op:…]", which is left out.
    own = (
        None
        if isinstance(error, BpsxError)
        else re.search(
            rf"\b(?:{'|'.join(_names(BpsxError))}): .*?(?=\s*\[Op:|$)", text, re.MULTILINE
        )
    )
    return ": ".join(filter(None, [type(error).__name__, own[0] if own else text]))


def _names(kind: type[BpsxError]) -> list[str]:
    return [kind.__name__, *(name for derived in kind.__subclasses__() for name in _names(derived))]


def explain(
    status: int,
    name: str,
    rank_a: int,
    rank_b: int,
    codec: str = "",
    broadcast: bool = False,
    divisor: int = 1,
) -> str:
    """Return the message for a failed round of tensor ``name``.

    ``rank_a``, ``rank_b``: ranks in the server's reply. ``codec``: the tensor's compression.
    ``broadcast``: whether this worker's round was a broadcast. ``divisor``: root of the broadcast,
    or divisor of the sum.
    """
    kind, text = STATUS[status]
    if kind is MismatchError:
        here = (
            f"a broadcast from worker {divisor}"
            if broadcast
            else f"push_pull with op={'Sum' if divisor == 1 else 'Average'}"
        )
        return (
            f"tensor {name!r}: workers {rank_a} and {rank_b} called different operations in the"
            f" same round (this worker: {here}). All workers must call the same one: a broadcast"
            " from the same root, or push_pull with the same op and learning rate"
        )
    if status == Status.CODEC:
        return f"tensor {name!r}: the compressed data from worker {rank_a} cannot be decoded"
    if kind is ConfigError:
        return (
            f"tensor {name!r}: a server does not know its compression {codec}. BPSX_COMPRESSORS"
            " must name the module of a compressor from outside bpsx on servers as on workers, in"
            " the same version. See the server's log"
        )
    if kind is PeerLeftError:
        return (
            f"tensor {name!r}: worker {rank_a} has left the job without pushing it, so the sum can"
            " never be complete (a worker whose data ends earlier must call join():"
            " docs/train/uneven-and-elastic.md)"
        )
    if kind is PeerLostError and broadcast:
        return f"tensor {name!r}: its root, worker {rank_a}, {_ROOT_LOST}"
    if kind is JoinedError and not broadcast:
        return (
            f"tensor {name!r}: workers on worker {rank_a}'s machine have called join(), and at no"
            " position in its PCIe switches (BYTEPS_PCIE_SWITCH_SIZE) every switch still has a"
            " GPU, where sums begin. Leave the GPUs in one group, or end all workers together"
        )
    if kind is JoinedError:
        return (
            f"tensor {name!r}: its root, worker {rank_a}, has called join() and cannot broadcast"
            " until all workers have joined"
        )
    return f"tensor {name!r}: {text}" if name else text
