"""A job's metrics for Prometheus, and the scheduler's HTTP server for them.

Needs the package prometheus-client, so only a scheduler with ``BPSX_METRICS_PORT`` imports this
module. docs/run/metrics.md explains each metric.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from bpsx.errors import TransportError
from bpsx.scheduler.observers import Observers
from bpsx.system.address import is_ipv6, join_host_port
from bpsx.system.threads import NamedThread
from bpsx.transports.ports import bind_one

log = logging.getLogger("bpsx.metrics")
Family = CounterMetricFamily | GaugeMetricFamily
#: A node of :meth:`Observers.view`.
Node = Mapping[str, Any]
#: Values of a metric's labels after those of the node, and its value.
Sample = tuple[tuple[str, ...], float]


class Metric(NamedTuple):
    """One metric: a counter if its name ends in ``_total``, else a gauge.

    ``source``: the name under which nodes report it, which ends in ``_ns`` for nanoseconds; or a
    function that returns the samples of a node. ``labels``: labels other than the node's.
    """

    name: str
    help: str
    source: str | Callable[[Node], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    def family(self, nodes: Iterable[Node] = ()) -> Family:
        """Return the metric with its samples of ``nodes``."""
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = kind(self.name, self.help, labels=("role", "rank", "host", *self.labels))
        for node in nodes:
            for labels, value in self._samples(node):
                family.add_metric((node["role"], str(node["rank"]), node["host"], *labels), value)
        return family

    def _samples(self, node: Node) -> Iterable[Sample]:
        if callable(self.source):
            return self.source(node)
        if self.source not in node["values"]:
            return ()
        scale = 1e-9 if self.source.endswith("_ns") else 1
        return (((), node["values"][self.source] * scale),)


def _up(node: Node) -> Iterable[Sample]:
    yield (), node["state"] == "running"


def _age(node: Node) -> Iterable[Sample]:
    if node["age"] is not None:
        yield (), node["age"]


def _last_rounds(node: Node) -> Iterable[Sample]:
    return (((str(rank),), rounds) for rank, (rounds, _) in enumerate(node["late"]))


def _late_seconds(node: Node) -> Iterable[Sample]:
    return (((str(rank),), ns * 1e-9) for rank, (_, ns) in enumerate(node["late"]))


def _stalled(node: Node) -> Iterable[Sample]:
    if node["role"] == "worker":
        yield (), len(node["waits"])


def _oldest_stall(node: Node) -> Iterable[Sample]:
    if node["role"] == "worker":
        yield (), max((age for _, _, age in node["waits"]), default=0.0)


METRICS: tuple[Metric, ...] = (
    Metric("bpsx_up", "1 while the process is in the job, 0 after it has left or died.", _up),
    Metric("bpsx_report_age_seconds", "Age of this process's last report.", _age),
    Metric("bpsx_job_running", "1 while the job is complete and running.", "job_running"),
    Metric("bpsx_tensors", "Tensors declared in the job.", "job_tensors"),
    Metric("bpsx_workers", "Workers in the job now.", "job_workers_now"),
    Metric("bpsx_workers_at_start", "Workers with which the job has begun.", "job_workers"),
    Metric("bpsx_term", "Number of changes of the job's servers and workers.", "job_term"),
    *(
        Metric(f"bpsx_{role}s_{how}_total", help_.format(f"{role.title()}s"), f"job_{role}s_{how}")
        for role in ("worker", "server")
        for how, help_ in (
            ("lost", "{} that the job has lost and survived."),
            ("left", "{} that have left the running job in good order."),
            ("joined", "{} that have joined the running job."),
        )
    ),
    Metric(
        "bpsx_last_recovery_seconds",
        "Time that the job took to go on after its latest change.",
        "job_gap_ns",
    ),
    Metric(
        "bpsx_pushed_again_bytes_total",
        "Bytes that workers have pushed again after changes.",
        "job_again",
    ),
    Metric("bpsx_push_pulls_total", "Push_pulls that a worker has completed.", "push_pulls"),
    Metric(
        "bpsx_tensor_bytes_total",
        "Bytes of tensors whose push_pull a worker has completed.",
        "tensor_bytes",
    ),
    Metric(
        "bpsx_sent_bytes_total", "Bytes handed to the transport, headers included.", "bytes_sent"
    ),
    Metric(
        "bpsx_received_bytes_total",
        "Bytes taken from the transport, headers included.",
        "bytes_received",
    ),
    Metric("bpsx_sent_messages_total", "Messages handed to the transport.", "messages_sent"),
    Metric(
        "bpsx_received_messages_total", "Messages taken from the transport.", "messages_received"
    ),
    Metric("bpsx_malformed_messages_total", "Malformed messages, which were dropped.", "malformed"),
    Metric(
        "bpsx_repeated_pushes_total",
        "Pushes that a server had counted already and ignored.",
        "repeated",
    ),
    Metric(
        "bpsx_busy_seconds_total", "Time during which a worker had push_pulls under way.", "busy_ns"
    ),
    Metric("bpsx_outstanding_push_pulls", "Push_pulls under way on a worker.", "outstanding"),
    Metric(
        "bpsx_queued_partitions", "Partitions queued in a worker, waiting to be sent.", "queued"
    ),
    Metric(
        "bpsx_in_flight_bytes",
        "Bytes that a worker has handed to the transport and that it has not written out yet.",
        "in_flight",
    ),
    Metric(
        "bpsx_kept_bytes",
        "Bytes of results that a worker keeps until all workers have them.",
        "kept",
    ),
    Metric(
        "bpsx_rounds_total",
        "Rounds (one partition summed over all workers) that a server has closed.",
        "rounds",
    ),
    Metric("bpsx_round_bytes_total", "Bytes of the results of closed rounds.", "bytes"),
    Metric(
        "bpsx_open_rounds",
        "Rounds for which a server has pushes from some but not all workers.",
        "open_rounds",
    ),
    Metric(
        "bpsx_pending_messages",
        "Messages queued in a server (BYTEPS_SERVER_ENABLE_SCHEDULE).",
        "pending",
    ),
    Metric(
        "bpsx_round_wait_seconds_total",
        "Time from the first to the last push of a server's rounds, summed.",
        "waited_ns",
    ),
    Metric(
        "bpsx_worker_last_rounds_total",
        "Rounds in which this worker was the last to push, by server.",
        _last_rounds,
        ("worker",),
    ),
    Metric(
        "bpsx_worker_late_seconds_total",
        "Time during which rounds waited for this worker alone, by server.",
        _late_seconds,
        ("worker",),
    ),
    Metric(
        "bpsx_stalled_push_pulls",
        "Push_pulls for which a worker has waited longer than BPSX_STALL_WARN_SECONDS.",
        _stalled,
    ),
    Metric(
        "bpsx_oldest_stall_seconds",
        "Age of the oldest stalled push_pull; 0 if none.",
        _oldest_stall,
    ),
)


#: Numbers in :meth:`Observers.view` that are metrics of the scheduler.
_CHANGES = (
    *("workers", "workers_now", "workers_lost", "workers_left", "workers_joined"),
    *("servers_lost", "servers_left", "servers_joined", "term", "again"),
)


class JobCollector(Collector):
    """The metrics of a job, read anew for each scrape. Thread-safe."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers

    def collect(self) -> Iterable[Family]:
        """Yield the metrics that have samples."""
        view = self._observers.view(time.monotonic())
        scheduler = {
            "role": "scheduler",
            "rank": 0,
            "host": view["host"],
            "state": "running",
            "age": None,
            "late": (),
            "values": {
                "job_running": view["state"] == "running",
                "job_tensors": view["tensors"],
                "job_gap_ns": view["gap"] * 1e9,
                **{f"job_{what}": view[what] for what in _CHANGES},
            },
        }
        families = (metric.family([scheduler, *view["nodes"]]) for metric in METRICS)
        return (family for family in families if family.samples)

    def describe(self) -> Iterable[Family]:
        """Yield all metrics without samples, for scrapes of a few by ``?name[]=``."""
        return (metric.family() for metric in METRICS)


#: Most simultaneous connections to the metrics port.
_MOST_CLIENTS = 32


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A second scheduler must not share the port silently.
    allow_reuse_port = False

    def __init__(self, host: str, port: int, handler: type) -> None:
        self.address_family = AF_INET6 if is_ipv6(host) else AF_INET
        self._open: dict[Any, None] = {}  # open requests, oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

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


class _Handler(MetricsHandler):
    timeout = 10  # seconds; an idle connection must not hold a thread for ever

    def do_GET(self) -> None:
        if self.path.split("?")[0] in ("/metrics", "/"):
            super().do_GET()
        else:
            self.send_error(404, "the metrics are at /metrics")

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
        registry = CollectorRegistry()
        registry.register(JobCollector(observers))
        handler = _Handler.factory(registry)
        try:
            self._server = bind_one(
                () if port else ports, lambda free: _Server(host, port or free, handler)
            )
        except TransportError:
            raise
        except OSError as e:
            raise TransportError(
                f"BPSX_METRICS_PORT={join_host_port(host, port)}: cannot listen there: {e}"
            ) from e
        self.port = int(self._server.server_address[1])
        self._thread = NamedThread(
            target=self._server.serve_forever, name="bpsx-metrics", daemon=True
        )
        self._thread.start()
        log.info("metrics at http://%s/metrics", join_host_port(host, self.port))

    def close(self) -> None:
        """Stop listening, and wait for the thread to end."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
