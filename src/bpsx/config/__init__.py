"""Options of bpsx: the table, its reader, and what follows from both."""

from bpsx.config.config import (
    Config,
    child_environment,
    environment,
    faults,
    frame_bound,
    is_set,
    torchrun_variables,
)
from bpsx.config.folders import cache_dir, kernel_cache, runtime_dir
from bpsx.config.options import (
    MOST_WORKERS,
    NO_ENCRYPTION,
    OPTIONS,
    TORCHRUN_OPTIONS,
    TRANSPORT_NAMES,
    Option,
)
from bpsx.config.reference import reference

__all__ = [
    "MOST_WORKERS", "NO_ENCRYPTION", "OPTIONS", "TORCHRUN_OPTIONS", "TRANSPORT_NAMES", "Config",
    "Option", "cache_dir", "child_environment", "environment", "faults", "frame_bound", "is_set", "kernel_cache",
    "reference", "runtime_dir", "torchrun_variables",
]
