"""A virtual machine with a software RDMA device, for one command. Its kernel supports InfiniBand
where the host's kernel may not.

The machine sees the host's files at the same paths, read-only under a temporary overlay. So the
interpreter and the source tree of the tests also run in it. It has only its own network. It is good
for tests of correctness, but not of speed.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from machine.preparing import NoPackages, prepare, why_not

__all__ = [
    "ADDRESS",
    "CACHE",
    "DEVICE",
    "Finished",
    "MachineError",
    "NoPackages",
    "compiling",
    "run",
    "why_not",
]

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".venv" / "rdma"
DEVICE, ADDRESS = "rxe0", "192.0.2.1"
# With frames of 4500 bytes RDMA's packets have the maximum of 4096 bytes: fewer packets to
# emulate.
_NETWORK = f"""
ip link add dummy0 mtu 4500 type dummy
ip address add {ADDRESS}/24 dev dummy0
ip link set dummy0 up
"""
_LINK = f"rdma link add {DEVICE} type rxe netdev dummy0\n"
#: Options for the kernel: they turn off work that an emulated processor does not need, and checks
#: of clocks.
_QUIET = (
    "quiet loglevel=3 console=ttyS0 rdinit=/init panic=-1 reboot=t nokaslr mitigations=off"
    " init_on_alloc=0 tsc=reliable no_timer_check audit=0"
)


class MachineError(AssertionError):
    """The machine did not run the command to its end. The text has the console's output."""


@dataclass(frozen=True)
class Finished:
    """Result of a command: its exit status, stdout and stderr, and the kernel's log."""

    status: int
    output: str
    console: str


def run(
    command: str,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    timeout: float = 120.0,
    memory_mb: int = 2048,
    cpus: int = 1,
    device: bool = True,
    cache: Path = CACHE,
) -> Finished:
    """Run ``command`` (for sh) as root in a new machine, in ``folder``, with ``environment``.

    ``device``: whether there is an RDMA device, ``rxe0``; the modules exist in any case.
    ``timeout``: seconds for the whole machine; :class:`MachineError` is raised after that. The
    machine ends with this thread. ``cache`` keeps the kernels that Numba compiles in it. With two
    ``cpus`` the same work takes 1.5 times the host's processor time, because they synchronize.
    """
    kernel, initramfs = prepare(cache)
    kernels = _kernels(cache)
    with tempfile.TemporaryDirectory(prefix="bpsx-machine-") as share:
        place = Path(share)
        (place / "start").write_text(
            _start(command, place, folder, {**compiling(cache), **(environment or {})}, device)
        )
        shared = {"share": place, "kernels": kernels}
        console = _emulate(_qemu(kernel, initramfs, shared, memory_mb, cpus), place, timeout)
        try:
            return Finished(int((place / "status").read_text()), _text(place / "output"), console)
        except (OSError, ValueError):
            raise MachineError(
                f"the machine ended without an exit status\n{_account(place)}"
            ) from None


def compiling(cache: Path = CACHE) -> dict[str, str]:
    """Return the environment with which Numba on the host compiles kernels for the machine.

    An emulated processor takes half a minute for a kernel that takes a second here.
    """
    return {
        "BPSX_CACHE_DIR": str(_kernels(cache)),
        "NUMBA_CPU_NAME": "ivybridge",
        "NUMBA_CPU_FEATURES": "",
    }


def _kernels(cache: Path) -> Path:
    folder = cache / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _start(
    command: str, share: Path, folder: Path, environment: Mapping[str, str], device: bool
) -> str:
    """Return the script that the machine's first process executes once it sees the host's files."""
    around = {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
    } | dict(environment)
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in around.items())
    return f"""
export PATH=/usr/bin:/bin:/usr/sbin:/sbin
ip link set lo up
{_NETWORK}{_LINK if device else ""}
ulimit -l unlimited
cd {shlex.quote(str(folder))} && \\
  env -i {variables} /bin/sh -c {shlex.quote(command)} < /dev/null > {share}/output 2>&1
echo $? > {share}/status
echo b > /proc/sysrq-trigger
"""


def _qemu(
    kernel: Path, initramfs: Path, shared: Mapping[str, Path], memory_mb: int, cpus: int
) -> list[str]:
    """Return QEMU's command. ``shared``: folders that the machine may write to.

    `setpriv` makes the kernel kill the machine when the thread that started it ends.
    """
    words = " ".join([_QUIET, *(f"{name.upper()}={path}" for name, path in shared.items())])
    return [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "qemu-system-x86_64",
        "-machine",
        "pc,usb=off,vmport=off",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max",
        "-smp",
        str(cpus),
        "-m",
        str(memory_mb),
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-serial",
        "stdio",
        "-kernel",
        str(kernel),
        "-initrd",
        str(initramfs),
        "-append",
        words,
        "-virtfs",
        "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        *(
            word
            for name, path in shared.items()
            for word in ("-virtfs", f"local,path={path},mount_tag={name},security_model=none")
        ),
    ]


def _emulate(command: list[str], share: Path, timeout: float) -> str:
    """Run the machine; return the console's output. The machine has ended in any case."""
    with (share / "console").open("wb") as console:
        machine = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT
        )
        try:
            machine.wait(timeout)
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"the machine has not ended after {timeout} s\n{_account(share)}"
            ) from None
        finally:
            machine.kill()
            machine.wait()
    return _text(share / "console")


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


def _account(share: Path) -> str:
    """Return the end of the output, for the message of a failed test."""
    return (
        f"--- output\n{_text(share / 'output')[-8000:]}\n---"
        f" console\n{_text(share / 'console')[-4000:]}"
    )
