"""The checks of ``bpsx-run doctor``: each function adds its findings to a :class:`CheckReport`.

Nothing here imports a framework.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bpsx import __version__
from bpsx.config import OPTIONS, Config, Option, cache_dir, child_environment, faults, runtime_dir
from bpsx.errors import BpsxError, ConfigError
from bpsx.launch.job_view import ENDED, Observer
from bpsx.system.address import (
    inet6_addresses,
    interface_address,
    is_loopback,
    join_host_port,
    own_address_towards,
    resolve,
)
from bpsx.system.host import own_host
from bpsx.transports.reach import unreachable

#: Documentation addresses. No such host exists, but the route to it reveals the address that faces
#: the rest of the world.
_SOMEWHERE = ("192.0.2.1", "2001:db8::1")
_FRAMEWORKS = ("torch", "tensorflow", "mxnet", "cupy")
_ANSWER_SECONDS = 5.0
_FEW_FILES = 1024


@dataclass
class CheckReport:
    """Findings by section, problems with their remedies, and hints."""

    found: dict[str, dict[str, str | float | bool]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def add(self, section: str, name: str, value: object) -> None:
        """Add a finding. Numbers and booleans keep their type, for programs."""
        self.found.setdefault(section, {})[name] = (
            value if isinstance(value, bool | int | float) else str(value)
        )


def software(report: CheckReport) -> None:
    """Report the versions of bpsx, Python, libraries and frameworks."""
    import zmq

    report.add("software", "bpsx", f"{__version__} in {Path(__file__).parents[1]}")
    report.add("software", "Python", f"{platform.python_version()} at {sys.executable}")
    report.add(
        "software", "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    )
    curve = bool(zmq.has("curve"))
    report.add(
        "software",
        "libzmq",
        f"{zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}, CURVE {'yes' if curve else 'no'}",
    )
    if not curve:
        report.problems.append(
            "libzmq was built without CURVE, so connections cannot be secured: install pyzmq from"
            " its wheels (pip install --force-reinstall pyzmq)"
        )
    for name in ("numpy", "numba"):
        report.add("software", name, _version(name) or "missing")
    for name in _FRAMEWORKS:
        report.add("frameworks", name, _version(name) or "not installed")


def _version(module: str) -> str:
    """Version of the package that holds ``module``, found without importing it; else empty."""
    try:
        if importlib.util.find_spec(module) is None:
            return ""
    except (ImportError, ValueError):
        return ""
    for package in importlib.metadata.packages_distributions().get(module, (module,)):
        try:
            return f"{importlib.metadata.version(package)}" + (
                f" (package {package})" if package != module else ""
            )
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def devices(report: CheckReport) -> None:
    """Report GPUs and RDMA devices."""
    report.add("devices", "CUDA", _gpus() or "none found (no nvidia-smi, or it shows no GPU)")
    found = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        texts = [
            _read(port / name).split(":")[-1].strip() for name in ("state", "link_layer", "rate")
        ]
        found.append(f"{port.parent.parent.name}/{port.name}: {', '.join(t for t in texts if t)}")
    report.add("devices", "RDMA", "; ".join(found) or "none in /sys/class/infiniband")
    built = importlib.util.find_spec("bpsx.transports.rdma.endpoint") is not None
    report.add(
        "devices",
        "RDMA in bpsx",
        "built in" if built else "not built: the headers of libibverbs were missing",
    )


def _gpus() -> str:
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(
            query, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def network(report: CheckReport, config: Config | None) -> None:
    """Report interfaces, the scheduler, and the address that this machine would use."""
    for name, addresses in _interfaces().items():
        state, speed = (
            _read(Path("/sys/class/net") / name / "operstate"),
            _read(Path("/sys/class/net") / name / "speed"),
        )
        rate = f", {speed} Mbit/s" if speed.isdigit() else ""
        report.add(
            "network", name, f"{', '.join(addresses) or 'no address'} ({state or 'unknown'}{rate})"
        )
    control = _read(Path("/proc/sys/net/ipv4/tcp_congestion_control"))
    report.add("network", "TCP congestion control", control or "unknown")
    if control == "bbr":
        report.hints.append(
            "TCP's congestion control is bbr. It slows each connection down for 0.2 s every 10 s to"
            " measure the network, and a push_pull waits for the slowest connection. Between near"
            " machines plain sockets use cubic or reno in its place; ZeroMQ (BPSX_ENCRYPT=1) needs"
            " sysctl net.ipv4.tcp_congestion_control=cubic, on all machines"
        )
    if config is None:
        return
    if config.root_uri:
        _scheduler(report, config)
    else:
        report.add("network", "scheduler", "DMLC_PS_ROOT_URI is not set")
        _without_scheduler(report, config)


def _interfaces() -> dict[str, list[str]]:
    """Interface name -> its addresses."""
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        try:
            found[name] = [interface_address(name)]
        except OSError:
            found[name] = []
        found[name] += [
            a for interface, a in inet6_addresses() if interface == name and a not in found[name]
        ]
    return found


def _on(address: str) -> str:
    """``address``, followed by the interface that has it."""
    return address + "".join(
        f" on {name}" for name, addresses in _interfaces().items() if address in addresses
    )


def _without_scheduler(report: CheckReport, config: Config) -> None:
    if config.node_host or config.interface:
        _own(
            report,
            config,
            "DMLC_NODE_HOST" if config.node_host else f"DMLC_INTERFACE={config.interface}",
        )
        return
    for host in _SOMEWHERE:
        try:
            report.add(
                "network",
                "own address",
                f"{_on(own_address_towards(host, 9))}: on the route to other networks"
                " (DMLC_PS_ROOT_URI is not set)",
            )
            return
        except OSError:
            continue
    report.add(
        "network",
        "own address",
        "none but loopback: without a route to a network, jobs can run on this machine only",
    )


def _scheduler(report: CheckReport, config: Config) -> None:
    uri, port = config.root_uri, config.root_port
    try:
        address = resolve(uri, port or 0)
    except OSError as error:
        report.add("network", "scheduler", f"{uri}: does not resolve")
        report.problems.append(
            f"DMLC_PS_ROOT_URI={uri!r} does not resolve ({error}): correct the name, or add it to"
            " /etc/hosts or DNS"
        )
        return
    report.add(
        "network",
        "scheduler",
        join_host_port(uri, port or 0)
        + ("" if address == uri.strip("[]") else f", which is {address}"),
    )
    _own(
        report,
        config,
        (
            "DMLC_NODE_HOST"
            if config.node_host
            else (
                f"DMLC_INTERFACE={config.interface}"
                if config.interface
                else f"on the route to the scheduler at {address}"
            )
        ),
    )
    if not port:
        report.hints.append(
            "DMLC_PS_ROOT_PORT is not set, so doctor did not try to reach the scheduler"
        )
        return
    if config.role == "scheduler":
        return
    try:
        with socket.create_connection((address, port), timeout=_ANSWER_SECONDS):
            pass
        with Observer(config) as observer:  # also checks that the scheduler accepts the job secret
            view = observer.ask()
        report.add("network", "scheduler answers", f"yes, the job is {view['state']}")
        lanes(report, view["nodes"])
    except BpsxError as error:
        report.add("network", "scheduler answers", "no")
        report.problems.append(str(error))
    except OSError as error:
        report.add("network", "scheduler answers", f"no: {error}")
        report.problems.append(
            f"the scheduler at {join_host_port(address, port)} does not answer ({error}): start it"
            " first, or open its port in the firewall; a scheduler answers only while its job runs"
        )


def lanes(report: CheckReport, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Report which lanes of the servers in ``nodes`` this machine cannot reach.

    ``nodes``: as in a scheduler's VIEW.
    """
    names = {
        lane: f"server {n['rank']} at {lane}"
        for n in nodes
        if n["role"] == "server" and n["state"] not in ENDED
        for lane in n["lanes"]
    }
    if not names:
        return
    silent = unreachable(names, _ANSWER_SECONDS)
    report.add(
        "network", "lanes of servers", f"{len(names) - len(silent)} of {len(names)} can be reached"
    )
    for lane, why in silent.items():
        report.problems.append(
            f"this machine cannot reach {names[lane]} ({why}): open the ports of servers in the"
            " firewall (docs/run/ports.md; BPSX_PORTS chooses them)"
        )


def _own(report: CheckReport, config: Config, why: str) -> None:
    try:
        host = own_host(config)
    except BpsxError as error:
        report.problems.append(str(error))
        return
    try:
        number = resolve(host, 0)
        report.add("network", "own address", f"{_on(number)}: {why}")
        with socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET) as probe:
            probe.bind((number, 0))
    except OSError as error:
        report.add("network", "own address", f"{host}: {why}")
        report.problems.append(
            f"bpsx cannot listen on this machine's address {host} ({error}): set DMLC_NODE_HOST or"
            " DMLC_INTERFACE to an address or interface of this machine"
        )
    if config.root_uri and is_loopback(host) and not is_loopback(config.root_uri):
        report.problems.append(
            f"this machine's address {host} is loopback, but the scheduler at {config.root_uri} is"
            " not: other machines cannot reach it; set DMLC_NODE_HOST to an address that they can"
            " reach"
        )


def limits(report: CheckReport) -> None:
    """Report the system's limits for a process: open files, memory, cores."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    report.add("limits", "open files", _limit(soft))
    report.add("limits", "open files, at most", _limit(hard))
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        report.hints.append(f"only {soft} open files are allowed: large jobs need more (ulimit -n)")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    report.add("limits", "locked memory, KiB", _limit(soft, 10))  # RDMA needs it
    report.add("limits", "locked memory, KiB, at most", _limit(hard, 10))
    try:
        shm = os.statvfs("/dev/shm")  # bpsx needs no space there; NCCL and data loaders do
        size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
        report.add("limits", "/dev/shm, MiB", size >> 20)
        report.add("limits", "/dev/shm, MiB free", free >> 20)
    except OSError as error:
        report.add("limits", "/dev/shm", f"missing: {error}")
    report.add("limits", "cores that may be used", len(os.sched_getaffinity(0)))
    report.add("limits", "cores", os.cpu_count())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    report.add("limits", "memory, MiB", memory >> 20)
    report.add("limits", "memory, MiB, by cgroup", _cgroup_memory(memory))


def _limit(value: int, shift: int = 0) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value >> shift


def _cgroup_memory(machine: int) -> int | str:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(Path(path))
        if text.isdigit() and int(text) < machine:  # cgroup v1 writes a huge number for no limit
            return int(text) >> 20
    return "unlimited"


def options(report: CheckReport) -> Config | None:
    """Report the variables that are set; returns the configuration, or None if it is invalid."""
    environment = child_environment()
    for option in OPTIONS:
        if text := environment.get(option.env, "").strip():
            report.add(
                "options", option.env, "(set)" if "SECRET" in option.env else _value(option, text)
            )
    if "options" not in report.found:
        report.add("options", "none", "no variable of bpsx is set")
    wrong = faults()
    report.problems += [
        f"{fault}: {'set it' if fault.startswith('not set') else 'correct or unset it'}"
        for fault in wrong
    ]
    try:
        config = Config()
    except ConfigError:  # `faults` has reported it
        return None
    report.hints += config.unknown
    return config


def _value(option: Option, text: str) -> object:
    """The number or boolean that ``text`` means, else ``text``."""
    try:
        value = option.parse(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def folders(report: CheckReport) -> None:
    """Report the folders for compiled kernels and sockets."""
    for name, make in (("compiled kernels", cache_dir), ("sockets", runtime_dir)):
        try:
            report.add("folders", name, make())
        except ConfigError as error:
            report.add("folders", name, "unusable")
            report.problems.append(str(error))
