"""Options for failures: the deaths that a job survives, and the times that it waits."""

from __future__ import annotations

from bpsx.config.option import FAILURE, Option
from bpsx.config.parsers import FLAG, choice, flag, integer, number

_ELASTIC = ("auto", "servers", "shrink", "replace", "off")

FAILURE_OPTIONS: tuple[Option, ...] = (
    Option(
        "rendezvous_timeout",
        "BPSX_RENDEZVOUS_TIMEOUT",
        number(0.1),
        300.0,
        "seconds",
        "Time for all processes to join the job. After it every process gives up with an error"
        " that names the missing ones.",
        FAILURE,
    ),
    Option(
        "gather_grace",
        "BPSX_GATHER_GRACE",
        number(0),
        3.0,
        "seconds",
        "While the job starts: time for a process to come back after its connection broke (a"
        " process that died, or the scheduler) or after its options were refused. Then every"
        " process gives up with an error that names it.",
        FAILURE,
    ),
    Option(
        "heartbeat_interval",
        "PS_HEARTBEAT_INTERVAL",
        number(0),
        5.0,
        "seconds; 0: off",
        "Interval of heartbeats on connections.",
        FAILURE,
    ),
    Option(
        "heartbeat_timeout",
        "PS_HEARTBEAT_TIMEOUT",
        number(0),
        30.0,
        "seconds",
        "A peer counts as dead after this long without a sign of life. A killed process is noticed"
        " at once.",
        FAILURE,
    ),
    Option(
        "elastic",
        "BPSX_ELASTIC",
        choice(*_ELASTIC),
        "auto",
        " | ".join(_ELASTIC),
        "Deaths that the job survives (docs/run/when-machines-die.md). off: none. servers: those of"
        " servers and of the scheduler. shrink: as servers, and those of workers: the others go on."
        " replace: as shrink, but the others wait for a new worker, at most BPSX_ELASTIC_WAIT."
        " auto: as servers on several machines, else off. Must be the same on all workers and"
        " servers.",
        FAILURE,
    ),
    Option(
        "max_workers",
        "BPSX_MAX_WORKERS",
        integer(0, 65535),
        0,
        "0..65535",
        "Largest number of worker machines in a job with BPSX_ELASTIC=shrink or replace. It begins"
        " with DMLC_NUM_WORKER of them. Others may join while it runs, with a larger"
        " DMLC_WORKER_ID. 0: as DMLC_NUM_WORKER, so that others can only take the places of lost"
        " workers. Must be the same on all workers.",
        FAILURE,
    ),
    Option(
        "elastic_wait",
        "BPSX_ELASTIC_WAIT",
        number(0),
        0.0,
        "seconds",
        "Time for which a job waits for a new server after its last one has died. Then the job"
        " fails. 0: it fails at once, and a job with a single server keeps no results for another."
        " With BPSX_ELASTIC=replace, also the time for a new worker. Must be 0 on all processes, or"
        " on none. bpsx-run --max-restarts sets it to 60.",
        FAILURE,
    ),
    Option(
        "scheduler_wait",
        "BPSX_SCHEDULER_WAIT",
        number(0),
        60.0,
        "seconds",
        "After the scheduler of an elastic job has died: time for which steps go on without one,"
        " until another one is started at its address. Then every process ends with an error. The"
        " new scheduler waits as long for workers that have not come back. 0: the scheduler's death"
        " ends the job at once.",
        FAILURE,
    ),
    Option(
        "elastic_log",
        "BPSX_ELASTIC_LOG",
        number(0.01),
        2.0,
        "a multiple of the tensor's bytes, at least 0.01",
        "Read by servers. A worker keeps its latest pushes of each tensor that is compressed with"
        " error feedback, at most this multiple of the tensor's bytes in float32 (float64 for"
        " float64). From them another server rebuilds the residual of a lost one. Instead of more"
        " pushes, a worker gets a copy of the residual, on the server's machine if there is one."
        " Larger numbers mean fewer such copies, and more time to replace a lost server. No effect"
        " with BPSX_ELASTIC=off.",
        FAILURE,
    ),
    Option(
        "elastic_balance",
        "BPSX_ELASTIC_BALANCE",
        flag,
        True,
        FLAG,
        "Read by the scheduler. 1: a server that joins the running job gets keys of the others,"
        " until each has its share. 0: it gets new tensors, and keys of servers lost later.",
        FAILURE,
    ),
    Option(
        "stall_warn",
        "BPSX_STALL_WARN_SECONDS",
        number(0.1),
        30.0,
        "seconds",
        "A worker logs a warning when its oldest push_pull is older than this, once per stall, and"
        " again after ten times as long. The warning names the tensor, its round, the number of"
        " other tensors that wait and the workers that have not pushed.",
        FAILURE,
    ),
    Option(
        "deadlock_after",
        "BPSX_DEADLOCK_SECONDS",
        number(0.5),
        60.0,
        "seconds",
        "Deadlock: the scripts of all workers have waited this long for tensors that another"
        " worker has not pushed. All push_pulls under way then fail. Scripts that have called"
        " push_pull equally often may catch the error and go on; otherwise the job has to end. A"
        " push_pull counts only while a script waits for it. While another thread that has used"
        " bpsx does not wait, the time is ten times as long.",
        FAILURE,
    ),
    Option(
        "check_weights",
        "BPSX_CHECK_WEIGHTS",
        choice("warn", "error", "off"),
        "warn",
        "warn | error | off",
        "Reaction of an optimizer's first step if workers have different weights, as after a"
        " forgotten broadcast_parameters or broadcast_variables. A sample of each parameter's"
        " elements is compared bit for bit. TensorFlow warns in the second step. Does not apply to"
        " MXNet's DistributedTrainer, which broadcasts, nor to TensorFlow 1's sessions.",
        FAILURE,
    ),
    Option(
        "shutdown_timeout",
        "BPSX_SHUTDOWN_TIMEOUT",
        number(0.1),
        5.0,
        "seconds",
        "Time that shutdown waits for push_pulls under way and for the scheduler's goodbye.",
        FAILURE,
    ),
    Option(
        "term_grace",
        "BPSX_TERM_GRACE",
        number(0),
        30.0,
        "seconds",
        "After SIGTERM: time for which servers and scheduler still serve workers that save, and"
        " for which bpsx-run waits for its workers before it ends them. Servers, and workers in"
        " elastic.run, leave earlier if others can go on. A second SIGTERM ends them at once.",
        FAILURE,
    ),
)
