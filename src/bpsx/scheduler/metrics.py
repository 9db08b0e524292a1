"""A job's metrics in Prometheus' text format 0.0.4, and the scheduler's HTTP server for them.

:func:`exposition` is pure: it turns what :meth:`Observers.view` returns into text.
docs/run/metrics.md explains each metric.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from typing import Any, NamedTuple

from bpsx.errors import TransportError
from bpsx.scheduler.observers import Observers
from bpsx.system.address import is_ipv6, join_host_port
from bpsx.transports.ports import bind_one

log = logging.getLogger("bpsx.metrics")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


class Metric(NamedTuple):
    """One metric.

    ``source``: the name under which nodes report it; empty if it is computed here. ``scale``:
    factor from the reported unit to the base unit.
    """

    name: str
    kind: str
    help: str
    source: str = ""
    scale: float = 1.0


_NS = 1e-9
METRICS: tuple[Metric, ...] = (
    Metric("bpsx_up", "gauge", "1 while the process is in the job, 0 after it has left or died."),
    Metric("bpsx_report_age_seconds", "gauge", "How old this process's other figures are."),
    Metric("bpsx_job_running", "gauge", "1 while the job is complete and running."),
    Metric("bpsx_tensors", "gauge", "Tensors declared in the job."),
    Metric(
        "bpsx_push_pulls_total", "counter", "Push_pulls that a worker has completed.", "push_pulls"
    ),
    Metric(
        "bpsx_tensor_bytes_total",
        "counter",
        "Bytes of tensors that came home to a worker.",
        "tensor_bytes",
    ),
    Metric(
        "bpsx_sent_bytes_total",
        "counter",
        "Bytes handed to the transport, headers included.",
        "bytes_sent",
    ),
    Metric(
        "bpsx_received_bytes_total",
        "counter",
        "Bytes taken from the transport, headers included.",
        "bytes_received",
    ),
    Metric(
        "bpsx_sent_messages_total", "counter", "Messages handed to the transport.", "messages_sent"
    ),
    Metric(
        "bpsx_received_messages_total",
        "counter",
        "Messages taken from the transport.",
        "messages_received",
    ),
    Metric(
        "bpsx_malformed_messages_total",
        "counter",
        "Messages that made no sense and were dropped.",
        "malformed",
    ),
    Metric(
        "bpsx_repeated_pushes_total",
        "counter",
        "Pushes that a server had counted already and ignored.",
        "repeated",
    ),
    Metric(
        "bpsx_busy_seconds_total",
        "counter",
        "Time in which a worker had push_pulls under way.",
        "busy_ns",
        _NS,
    ),
    Metric(
        "bpsx_outstanding_push_pulls", "gauge", "Push_pulls under way on a worker.", "outstanding"
    ),
    Metric(
        "bpsx_queued_partitions",
        "gauge",
        "Partitions that wait in a worker for their turn to be sent.",
        "queued",
    ),
    Metric(
        "bpsx_in_flight_bytes",
        "gauge",
        "Bytes that a worker has handed to the transport and that are not written out yet.",
        "in_flight",
    ),
    Metric(
        "bpsx_rounds_total",
        "counter",
        "Rounds (one partition summed over all workers) that a server has closed.",
        "rounds",
    ),
    Metric("bpsx_round_bytes_total", "counter", "Bytes of the results of closed rounds.", "bytes"),
    Metric(
        "bpsx_open_rounds",
        "gauge",
        "Rounds of which a server has the pushes of some workers only.",
        "open_rounds",
    ),
    Metric(
        "bpsx_pending_messages",
        "gauge",
        "Messages that wait in a server for their turn (BYTEPS_SERVER_ENABLE_SCHEDULE).",
        "pending",
    ),
    Metric(
        "bpsx_round_wait_seconds_total",
        "counter",
        "Time from the first to the last push of a server's rounds, summed.",
        "waited_ns",
        _NS,
    ),
    Metric(
        "bpsx_worker_last_rounds_total",
        "counter",
        "Rounds in which this worker was the last to push, by server.",
    ),
    Metric(
        "bpsx_worker_late_seconds_total",
        "counter",
        "Time that rounds waited for this worker alone, by server.",
    ),
    Metric(
        "bpsx_stalled_push_pulls",
        "gauge",
        "Push_pulls for which a worker has waited longer than BPSX_STALL_WARN_SECONDS.",
    ),
    Metric("bpsx_oldest_stall_seconds", "gauge", "Age of the oldest of these; 0 without any."),
)


def escaped(value: str) -> str:
    """Escape a label's value for use between quotes."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def exposition(view: Mapping[str, Any]) -> str:
    """Format the job's metrics as text."""
    lines: list[str] = []
    for metric in METRICS:
        samples = [(labels, value * metric.scale) for labels, value in _samples(metric, view)]
        if samples:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in samples:
            inside = ",".join(f'{name}="{escaped(text)}"' for name, text in labels)
            lines.append(f"{metric.name}{{{inside}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _samples(metric: Metric, view: Mapping[str, Any]) -> Iterator[tuple[Labels, float]]:
    scheduler: Labels = (("role", "scheduler"), ("rank", "0"), ("host", view["host"]))
    if metric.name in ("bpsx_job_running", "bpsx_tensors", "bpsx_up"):
        values = {
            "bpsx_job_running": view["state"] == "running",
            "bpsx_tensors": view["tensors"],
            "bpsx_up": 1,
        }
        yield scheduler, float(values[metric.name])
    for node in view["nodes"]:
        labels: Labels = (
            ("role", node["role"]),
            ("rank", str(node["rank"])),
            ("host", node["host"]),
        )
        if metric.source:
            if metric.source in node["values"]:
                yield labels, float(node["values"][metric.source])
        else:
            yield from _computed(metric.name, node, labels)


def _computed(name: str, node: Mapping[str, Any], labels: Labels) -> Iterator[tuple[Labels, float]]:
    if name == "bpsx_up":
        yield labels, float(node["state"] == "running")
    elif name == "bpsx_report_age_seconds" and node["age"] is not None:
        yield labels, node["age"]
    elif name == "bpsx_stalled_push_pulls" and node["role"] == "worker":
        yield labels, float(len(node["waits"]))
    elif name == "bpsx_oldest_stall_seconds" and node["role"] == "worker":
        yield labels, max((w[2] for w in node["waits"]), default=0.0)
    elif name.startswith("bpsx_worker_"):
        for rank, (rounds, ns) in enumerate(node["late"]):
            yield (
                (*labels, ("worker", str(rank))),
                float(rounds) if name == "bpsx_worker_last_rounds_total" else ns * _NS,
            )


#: Most simultaneous connections to the metrics port.
_MOST_CLIENTS = 32


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A second scheduler must not share the port silently.
    allow_reuse_port = False

    def __init__(self, host: str, port: int, observers: Observers) -> None:
        self.address_family = AF_INET6 if is_ipv6(host) else AF_INET
        self.observers = observers
        self._open: dict[Any, None] = {}  # open requests, oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Close the oldest connection above the limit: each holds a thread and a descriptor."""
        with self._lock:
            self._open[request] = None
            late = next(iter(self._open)) if len(self._open) > _MOST_CLIENTS else None
            if late is not None:
                del self._open[late]
        if late is not None:
            with contextlib.suppress(OSError):  # its thread then ends and closes it
                late.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget the request and close it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request at debug level: a client that went away is no error here."""
        log.debug("a request from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds; an idle connection must not hold a thread for ever

    def do_GET(self) -> None:
        if self.path.split("?")[0] not in ("/metrics", "/"):
            self.send_error(404, "the metrics are at /metrics")
            return
        body = exposition(self.server.observers.view(time.monotonic())).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s " + format, self.client_address[0], *args)


class Exporter:
    """Serves the metrics over HTTP from a daemon thread until :meth:`close`."""

    def __init__(
        self, host: str, port: int, observers: Observers, ports: Sequence[int] = ()
    ) -> None:
        """Listen on ``host``:``port``.

        Port 0 means the first free one of ``ports``, else any free one.

        Raises :class:`~bpsx.errors.TransportError` if it cannot listen there.
        """
        try:
            self._server = bind_one(
                () if port else ports, lambda free: _Server(host, port or free, observers)
            )
        except TransportError:
            raise
        except OSError as e:
            raise TransportError(
                f"BPSX_METRICS_PORT={join_host_port(host, port)}: cannot listen there: {e}"
            ) from e
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="bpsx-metrics", daemon=True
        )
        self._thread.start()
        log.info("metrics at http://%s/metrics", join_host_port(host, self.port))

    @classmethod
    def serving(
        cls, where: tuple[str, int] | None, observers: Observers, ports: Sequence[int] = ()
    ) -> Exporter | None:
        """An exporter at ``where`` (host, port), or None."""
        return cls(*where, observers, ports) if where is not None else None

    def close(self) -> None:
        """Stop listening, and wait for the thread to end."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
