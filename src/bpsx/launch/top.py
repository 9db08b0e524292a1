"""``bpsx-run top``: the processes of a running job, their rates, and the slowest worker.

Refreshed in a terminal, or printed as plain lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from bpsx.errors import RendezvousError
from bpsx.launch.job_view import Observer, add_job_arguments, find
from bpsx.launch.lanes import LaneProbes

_HEAD = (
    "role",
    "rank",
    "host",
    "pid",
    "state",
    "in MB/s",
    "out MB/s",
    "push_pulls/s",
    "rounds/s",
    "queue",
    "waiting",
)
_CHANGE_HEAD = ("term", "s ago", "gap s", "bytes again", "change")
#: Number of changes shown.
_SHOWN = 6
#: A worker that delays the others less than this is not reported. Seconds per second.
_NOTABLE = 0.01


class Rates:
    """Turns the counters of successive views into rates. Pure."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], Mapping[str, Any]] = {}
        self._slowest: dict[str, Any] | None = None

    def of(self, view: Mapping[str, Any]) -> dict[str, Any]:
        """Return the view with ``rates`` in each node that has reported twice, and ``slowest``.

        ``rates``: counter -> change per second.
        """
        nodes, late = [], dict[int, list[float]]()
        for node in view["nodes"]:
            who = (node["role"], node["rank"])
            before = self._before.get(who)
            rates: dict[str, float] = dict((before or {}).get("rates", {}))
            seconds = (node["at"] - before["at"]) / 1e9 if before and before["at"] else 0.0
            if before and seconds > 0:
                rates = {
                    k: (v - before["values"].get(k, 0)) / seconds for k, v in node["values"].items()
                }
                for rank, (new, old) in enumerate(zip(node["late"], before["late"], strict=False)):
                    found = late.setdefault(rank, [0.0, 0.0])
                    found[0] += (new[0] - old[0]) / seconds
                    found[1] += (new[1] - old[1]) / 1e9 / seconds
            made = {**node, "rates": rates if node["state"] == "running" else {}}
            nodes.append(made)
            if not before or not before["at"] or seconds > 0:
                self._before[who] = made
        if late:  # a server has reported since the last call
            self._slowest = slowest(late)
        return {**view, "nodes": nodes, "slowest": self._slowest}


def slowest(late: Mapping[int, Sequence[float]]) -> dict[str, Any] | None:
    """The worker for which rounds waited longest, or None.

    ``late``: rank -> (rounds in which it was last, seconds that these waited for it), per second.

    Returns ``rank``; ``share``: its fraction of all rounds; ``behind``: seconds after the last but
    one worker, averaged over these rounds.
    """
    if not late:
        return None
    rank = max(late, key=lambda r: late[r][1])
    rounds = sum(x[0] for x in late.values())
    if not late[rank][0] or late[rank][1] < _NOTABLE:
        return None
    return {"rank": rank, "share": late[rank][0] / rounds, "behind": late[rank][1] / late[rank][0]}


def lines(view: Mapping[str, Any], where: str) -> list[str]:
    """Format the table."""
    begun, now = view["workers"], view.get("workers_now", view["workers"])
    differs = view["state"] == "running" and now != begun
    counts = [
        _count(now if differs else begun, "worker") + f" ({begun} at the beginning)" * differs
    ]
    counts += [_count(view[f"{what}s"], what) for what in ("server", "tensor")]
    title = f"job at {where}: {view['state']}, {', '.join(counts)}, up {view['seconds']:.0f} s"
    table = aligned([_HEAD, *(_row(n) for n in view["nodes"])], left=(0, 2, 4))
    out = [title, "", *table, "", *_changes(view)]
    if view["missing"]:
        out.append("missing: " + ", ".join(view["missing"]))
    out += _counts(view)
    late = view.get("slowest")
    if late:
        out.append(
            f"slowest: worker {late['rank']}, last to push in {late['share']:.0%} of the rounds, on"
            f" average {late['behind'] * 1000:.1f} ms after the one before it"
        )
    elif view["state"] == "running":
        out.append("slowest: no worker delays the others")
    out += [f"cannot be reached from this machine: {lane}" for lane in view.get("unreachable", ())]
    for node in view["nodes"]:
        for tensor, round_, seconds in node["waits"]:
            out.append(
                f"stalled: worker {node['rank']} has waited {seconds:.0f} s for tensor {tensor!r},"
                f" round {round_}"
            )
    if view["failure"]:
        out.append(f"failed: {view['failure']}")
    return [_printable(line) for line in out]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Align the columns of ``rows``; ``left``: indices of those that are aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _changes(view: Mapping[str, Any]) -> list[str]:
    """Return a table of the latest changes, the last one first, and an empty line; or nothing."""
    latest = view.get("changes", ())[-_SHOWN:]
    if not latest:
        return []
    rows = [_change(change) for change in reversed(latest)]
    return [*aligned([_CHANGE_HEAD, *rows], left=(4,)), ""]


def _change(change: Mapping[str, Any]) -> tuple[str, ...]:
    ago, gap, why = change["ago"], change["seconds"], change["why"]
    if change["what"] == "moved":
        text = f"keys move to {change['who']}"
    else:
        text = f"{change['what']}: {change['who']}"
    return (
        str(change["term"] or "-"),
        "-" if ago is None else f"{ago:.0f}",
        "-" if gap is None else f"{gap:.3f}",
        "-" if gap is None else str(change["again"]),
        text + (f", {why}" if why else ""),
    )


def _counts(view: Mapping[str, Any]) -> list[str]:
    """Count the nodes that were lost, have left or have joined while the job runs, in one line."""
    counts = []
    for how in ("lost", "left", "joined"):
        some = [
            _count(number, role)
            for role in ("worker", "server")
            if (number := view.get(f"{role}s_{how}"))
        ]
        counts += [f"{', '.join(some)} {how}"] if some else []
    if again := view.get("again"):
        counts.append(f"{again} bytes pushed again")
    return [f"term {view.get('term', '-')}: {'; '.join(counts)}"] if counts else []


def _printable(text: str) -> str:
    """Replace what a terminal might take for a command, as names come from the network."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _row(node: Mapping[str, Any]) -> tuple[str, ...]:
    rates, values = node.get("rates", {}), node["values"]
    worker = node["role"] == "worker"

    def rate(name: str, scale: float = 1.0) -> str:
        return f"{rates[name] * scale:.1f}" if name in rates else "-"

    def value(name: str) -> str:
        return str(values.get(name, "-")) if node["state"] == "running" else "-"

    return (
        node["role"],
        str(node["rank"]),
        node["host"],
        str(node["pid"]),
        node["state"],
        rate("bytes_received", 1e-6),
        rate("bytes_sent", 1e-6),
        rate("push_pulls") if worker else "",
        "" if worker else rate("rounds"),
        value("queued" if worker else "pending"),
        value("outstanding" if worker else "open_rounds"),
    )


@contextlib.contextmanager
def _screen() -> Iterator[bool]:
    """Switch to the terminal's alternate screen with unbuffered keys; restore both afterwards.

    Yields whether there are keys.
    """
    keys = sys.stdin is not None and sys.stdin.isatty()
    before = termios.tcgetattr(sys.stdin) if keys else None
    try:
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        if keys:
            tty.setcbreak(sys.stdin.fileno())
        yield keys
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def _pause(seconds: float, keys: bool) -> bool:
    """Wait; returns False if q was pressed."""
    if not keys:
        time.sleep(seconds)
        return True
    end = time.monotonic() + seconds
    while select.select([sys.stdin], [], [], max(0.0, end - time.monotonic()))[0]:
        pressed = os.read(sys.stdin.fileno(), 64)
        if not pressed or b"q" in pressed.lower():
            return False
    return True


def _draw(text: Sequence[str]) -> None:
    size = os.get_terminal_size(sys.stdout.fileno())  # 0 and 0 if the terminal does not know
    shown = [line[: size.columns or None] for line in text[: max((size.lines or 25) - 1, 1)]]
    sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bpsx-run top",
        description=(
            "Show a running job: its processes, their rates, and the worker that delays the others."
            " q or Ctrl-C ends the view."
        ),
        epilog=(
            "queue: partitions (worker) or messages (server) that wait for their turn. waiting:"
            " push_pulls in progress (worker), rounds that lack a worker's push (server). The view"
            " changes nothing in the job."
        ),
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between two updates (default: 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the state and the rates once, and end"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and line per update"
    )
    return parser


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """Run ``bpsx-run top``.

    Returns the exit status: 0, or 1 when the job has failed or cannot be reached any more.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 0.1 <= options.interval <= 3600:
        parser.error(f"--interval {options.interval:g}: expected 0.1..3600")
    signal.signal(signal.SIGTERM, _end)
    last: list[str] = []
    try:
        with Observer(find(options.scheduler, options.job)) as observer:
            if options.once or options.json or not sys.stdout.isatty():
                return _plain(observer, options)
            with _screen() as keys:
                status, last = _live(observer, options.interval, keys)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Otherwise the interpreter would complain again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    print("\n".join(last))
    return status


def _live(observer: Observer, interval: float, keys: bool) -> tuple[int, list[str]]:
    """Refresh until q is pressed or the job ends; returns the exit status and the last output."""
    rates, lanes = Rates(), LaneProbes()
    shown: list[str] = []
    while True:
        try:
            view = rates.of(observer.ask())
        except RendezvousError as e:
            if not shown:
                raise
            status, text = _silence(observer, e)
            return status, [*shown, text]
        shown = lines({**view, "unreachable": lanes.of(view)}, observer.where)
        _draw(shown)
        if view["state"] in ("done", "failed"):
            return int(view["state"] == "failed"), shown
        if not _pause(interval, keys):
            return 0, shown


def _silence(observer: Observer, error: RendezvousError) -> tuple[int, str]:
    """Exit status and message for a scheduler that has stopped replying."""
    if observer.port_is_closed():
        return 0, "the job is over: its scheduler has ended"
    return 1, (
        f"{error}, but its port is open: the scheduler is stopped, overloaded, or replaced by"
        " another program"
    )


def _plain(observer: Observer, options: argparse.Namespace) -> int:
    """Print plain lines, for pipes and programs."""
    rates, lanes = Rates(), LaneProbes()
    looks = 0
    while True:
        try:
            view = rates.of(observer.ask())
        except RendezvousError as e:
            if not looks:
                raise
            status, text = _silence(observer, e)
            print(f"bpsx-run top: {text}", file=sys.stderr)
            return status
        looks += 1
        view["unreachable"] = lanes.of(view)
        over = view["state"] in ("done", "failed")
        complete = any(n["rates"] for n in view["nodes"]) or view["state"] != "running" or looks > 5
        complete = complete and not lanes.pending
        if not options.once or over or complete:
            view.pop("type", None)
            print(
                json.dumps(view) if options.json else "\n".join(lines(view, observer.where)),
                flush=True,
            )
        if over or (options.once and complete):
            return int(view["state"] == "failed")
        time.sleep(max(options.interval, 1.1) if options.once else options.interval)
