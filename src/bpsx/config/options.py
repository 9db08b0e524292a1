"""Table of all options: name, environment variable, type, default, help."""

from __future__ import annotations

from bpsx.config.failure_options import FAILURE_OPTIONS
from bpsx.config.job_options import JOB_OPTIONS
from bpsx.config.operation_options import OPERATION_OPTIONS
from bpsx.config.option import Option
from bpsx.config.tuning_options import TUNING_OPTIONS

OPTIONS: tuple[Option, ...] = (*JOB_OPTIONS, *TUNING_OPTIONS, *FAILURE_OPTIONS, *OPERATION_OPTIONS)
