"""Variables that torchrun sets, and the options of bpsx that they stand for."""

from __future__ import annotations

from bpsx.config.option import Option

TORCHRUN = "torchrun"
#: Variables that ``torchrun`` sets for its processes. They are parsed as text, as other programs
#: use some of these names for other things.
TORCHRUN_OPTIONS: tuple[Option, ...] = (
    Option("rank", "RANK", str, "", "0..WORLD_SIZE-1", "rank() of this process.", TORCHRUN),
    Option("size", "WORLD_SIZE", str, "", "1..65535", "size() of the job.", TORCHRUN),
    Option(
        "local_rank", "LOCAL_RANK", str, "", "0..LOCAL_WORLD_SIZE-1", "BYTEPS_LOCAL_RANK.", TORCHRUN
    ),
    Option(
        "local_size",
        "LOCAL_WORLD_SIZE",
        str,
        "",
        "1..65535",
        "BYTEPS_LOCAL_SIZE. If it differs between machines, each process counts as a machine of"
        " its own. Unset: the processes of a machine find each other.",
        TORCHRUN,
    ),
    Option(
        "group_rank",
        "GROUP_RANK",
        str,
        "",
        "0..65534",
        "Not needed: bpsx computes the machine as RANK / LOCAL_WORLD_SIZE.",
        TORCHRUN,
    ),
    Option(
        "master_addr",
        "MASTER_ADDR",
        str,
        "",
        "address or host name",
        "Address of torchrun's store, on the machine of rank 0. Rank 0 starts the scheduler unless"
        " DMLC_PS_ROOT_URI is set.",
        TORCHRUN,
    ),
    Option(
        "master_port", "MASTER_PORT", str, "", "1..65535", "Port of torchrun's store.", TORCHRUN
    ),
    Option(
        "run_id",
        "TORCHELASTIC_RUN_ID",
        str,
        "",
        "text",
        "Identifies this run, so that its entries in the store are separate from those of other"
        " runs.",
        TORCHRUN,
    ),
)
