"""Options of bpsx: their table, the reader of the environment, and values derived from them."""

from bpsx.config.config import (
    Config,
    child_environment,
    environment,
    faults,
    frame_bound,
    full_tracebacks,
    is_set,
    launched,
)
from bpsx.config.folders import cache_dir, kernel_cache, numba_settings, runtime_dir
from bpsx.config.job_options import MOST_WORKERS
from bpsx.config.launchers import ALONE, STORE_PORTS, LaunchedPlace, own_store, run_id
from bpsx.config.launchers import fields as place_fields
from bpsx.config.operation_options import NO_ENCRYPTION
from bpsx.config.option import Option
from bpsx.config.options import OPTIONS
from bpsx.config.parsers import AUTO
from bpsx.config.reference import reference
from bpsx.config.torchrun_options import TORCHRUN_OPTIONS
from bpsx.config.tuning_options import PARTITION_BYTES

__all__ = [
    "ALONE",
    "AUTO",
    "MOST_WORKERS",
    "NO_ENCRYPTION",
    "OPTIONS",
    "PARTITION_BYTES",
    "STORE_PORTS",
    "TORCHRUN_OPTIONS",
    "Config",
    "Option",
    "LaunchedPlace",
    "cache_dir",
    "child_environment",
    "environment",
    "faults",
    "frame_bound",
    "full_tracebacks",
    "is_set",
    "kernel_cache",
    "numba_settings",
    "launched",
    "own_store",
    "place_fields",
    "reference",
    "run_id",
    "runtime_dir",
]
