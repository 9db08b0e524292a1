"""Horovod's API for the job and process sets, for PyTorch; see :mod:`bpsx.plugin.horovod`."""

from __future__ import annotations

from bpsx import torch as bps
from bpsx.api import verbs
from bpsx.plugin.horovod import Horovod
from bpsx.system.tracebacks import public
from bpsx.torch.framework import TORCH

HOROVOD = Horovod(
    TORCH,
    lambda: bps.init(),
    'for some of them use torch.distributed.new_group(ranks, backend="gloo")',
)
init, barrier = HOROVOD.init, HOROVOD.barrier
add_process_set, remove_process_set = HOROVOD.add_process_set, HOROVOD.remove_process_set
check_process_set = HOROVOD.check_process_set


@public
def join(device: int = -1) -> int:
    """Same as :func:`bpsx.torch.join`: return the rank that joined last. ``device`` is ignored."""
    return verbs.join()
