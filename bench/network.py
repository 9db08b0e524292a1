"""A small network of namespaces on a bridge, one for each process, whose links can be made slow.

Needs root and iproute2.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report import BenchError

_numbers = itertools.count()
_RULE = (
    "add table inet cut; add chain inet cut {0} {{ type filter hook {0} priority 0; }}; add rule"
    " inet cut {0} {1}"
)


def run(*words: str) -> None:
    """Run a command. Raises :class:`BenchError` with its error output if it fails."""
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)
    except subprocess.CalledProcessError as error:
        raise BenchError(f"{' '.join(words)}: {error.stderr.strip()}") from None


@functools.cache
def why_not() -> str:
    """Return why this host cannot have such a network, or an empty string if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        with Links(["try", "other"], "1gbit"):
            return ""
    except BenchError as error:
        return f"this kernel does not allow network namespaces with tc: {error}"


@functools.cache
def why_no_cuts() -> str:
    """Return why links of such a network cannot be cut, or an empty string if they can."""
    reason = why_not()
    if reason or shutil.which("nft") is None:
        return reason or "not installed: nft"
    try:
        with Links(["try"]) as links:
            links.cut("try")
            return ""
    except BenchError as error:
        return f"this kernel does not allow it: {error}"


def congestion() -> str:
    """Return the host's TCP congestion control."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="utf-8").strip()


def congestions() -> list[str]:
    """Return the congestion controls that namespaces may use."""
    return (
        Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
        .read_text(encoding="utf-8")
        .split()
    )


class Links:
    """Context manager of network namespaces by name; the first holds the bridge.

    It removes all of them at its end. With a ``rate`` each of the other namespaces sends at most
    that much; with ``both`` it also receives no more than that. ``beside``: further processes, each
    with the name of the namespace whose place it shares. ``congestion``: TCP's congestion control,
    by default the host's. ``round_trip``: seconds that a packet between two namespaces other than
    the first, and its answer, take at least; between the first and another one half of that.
    """

    def __init__(
        self,
        names: Sequence[str],
        rate: str | None = None,
        *,
        both: bool = False,
        burst: str = "256k",
        beside: Mapping[str, str] | None = None,
        congestion: str | None = None,
        round_trip: float = 0.0,
    ) -> None:
        self._mark = f"bpsx-{os.getpid()}-{next(_numbers)}"
        self._congestion, self._round_trip = congestion, round_trip
        self._relays: list[subprocess.Popen[bytes]] = []
        self._names, self._rate, self._both, self._burst = list(names), rate, both, burst
        self._place = {
            **{name: i for i, name in enumerate(self._names)},
            **{name: self._names.index(at) for name, at in (beside or {}).items()},
        }
        self.address = {name: f"10.214.9.{i + 1}" for name, i in self._place.items()}

    def namespace(self, name: str) -> str:
        return f"{self._mark}-{self._place[name]}"

    def prefix(self, name: str) -> list[str]:
        """Return the words before a command that is to run in the place ``name``."""
        return ["ip", "netns", "exec", self.namespace(name)]

    def __enter__(self) -> Links:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            if relay.poll() is not None:
                print("a process that delays packets has died", file=sys.stderr)
            relay.kill()
            relay.communicate()
        for name in self._names:
            subprocess.run(
                ["ip", "netns", "del", self.namespace(name)],
                capture_output=True,
                timeout=30,
                check=False,
            )

    def _make(self) -> None:
        hub = self._names[0]
        for name in self._names:
            run("ip", "netns", "add", self.namespace(name))
            self._ip(name, "link", "set", "lo", "up")
            if self._congestion:
                run(
                    *self.prefix(name),
                    "sysctl",
                    "-q",
                    "-w",
                    f"net.ipv4.tcp_congestion_control={self._congestion}",
                )
        self._ip(hub, "link", "add", "net0", "type", "bridge")
        for i, name in enumerate(self._names[1:]):
            there = ["net0", "netns", self.namespace(name)]
            if self._round_trip:  # relays stand between two pairs
                self._pair(f"far{i}", *there)
                # Without ARP, or the first namespace would answer there by itself.
                self._ip(hub, "link", "set", f"far{i}", "up", "arp", "off")
                there = [f"in{i}"]
            self._pair(f"port{i}", *there)
            self._ip(hub, "link", "set", f"port{i}", "master", "net0", "up")
            if self._round_trip:
                self._ip(hub, "link", "set", f"in{i}", "up", "arp", "off")
        for name in self._names:
            self._ip(name, "addr", "add", f"{self.address[name]}/24", "dev", "net0")
            self._ip(name, "link", "set", "net0", "up")
        for i, name in enumerate(self._names[1:] if self._rate else ()):
            # The burst is a few segments as large as TCP hands them down. With a smaller one the
            # rate is not reached.
            self.slow(name, str(self._rate), self._burst)
            if self._both:  # bound also what the bridge sends to the namespace
                self.slow(hub, str(self._rate), self._burst, f"port{i}")

        if self._round_trip:
            self._start_relays()

    def _pair(self, here: str, *there: str) -> None:
        """Make a pair of interfaces: ``here`` in the first namespace, and another one."""
        self._ip(self._names[0], "link", "add", here, "type", "veth", "peer", "name", *there)

    def _start_relays(self) -> None:
        """Delay what each namespace sends to the bridge."""
        for i in range(len(self._names) - 1):
            self._start_relay(self._round_trip / 2, f"far{i}", f"in{i}")
            self._start_relay(0.0, f"in{i}", f"far{i}")
        for relay in self._relays:
            assert relay.stdout is not None
            if relay.stdout.readline() != b"ready\n":
                raise BenchError("a process that delays packets has not started; see above")

    def _start_relay(self, seconds: float, source: str, target: str) -> None:
        words = [sys.executable, "-m", "bench.relay", str(seconds), source, target]
        self._relays.append(
            subprocess.Popen(
                [*self.prefix(self._names[0]), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).resolve().parents[1],
            )
        )

    def _ip(self, name: str, *words: str) -> None:
        run("ip", "-n", self.namespace(name), *words)

    def slow(self, name: str, rate: str, burst: str = "32k", device: str = "net0") -> None:
        """Bound what ``name`` sends to ``rate`` in ``tc``'s notation, as in ``50mbit``."""
        run(
            "tc",
            "-n",
            self.namespace(name),
            "qdisc",
            "add",
            "dev",
            device,
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            burst,
            "latency",
            "50ms",
        )

    # ---- cuts, which need nftables

    def cut(self, name: str) -> None:
        """Drop every packet from and to ``name``, silently.

        Packets between other processes still pass the bridge, if ``name`` has it.
        """
        for hook, side in (("input", "iifname"), ("output", "oifname")):
            self.filter(name, hook, f"{side} net0 drop")

    def filter(self, name: str, hook: str, rule: str) -> None:
        """Apply ``rule``, in nftables' language, to ``name``'s packets.

        ``hook``: "input" for packets that reach it, "output" for packets that leave it.
        """
        run(*self.prefix(name), "nft", _RULE.format(hook, rule))

    def mend(self, name: str) -> None:
        """End a cut, and all filters."""
        run(*self.prefix(name), "nft", "delete table inet cut")
