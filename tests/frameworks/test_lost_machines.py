"""Jobs of the frameworks whose machines have several processes, and that lose one: in each step its
machine counts in all gradients or in none.
"""

from __future__ import annotations

import random
import signal
import textwrap
from collections.abc import Callable

import pytest

from frameworks import test_mxnet_worker_deaths as mxnet
from frameworks import test_tensorflow_worker_deaths as tensorflow
from frameworks import test_torch_worker_deaths as torch
from frameworks.mxnet_scripts import HEAD
from support.jobs import Job
from support.worker_deaths import DYING, survivors_agree, waits_for_death

pytestmark = pytest.mark.timeout(180)
STEPS = 8


def _torch() -> str:
    return torch.TRAINING.format(sizes=torch.SIZES, steps=STEPS, fatal=-1, compression=None)


def _tensorflow() -> str:
    run = tensorflow.RUNS["graph"]
    training = tensorflow.TRAINING.format(sizes=tensorflow.SIZES, steps=STEPS, fatal=-1, run=run)
    return tensorflow.HEAD + textwrap.dedent(training)


def _mxnet() -> str:
    training = mxnet.TRAINING.format(steps=STEPS, fatal=-1, update=mxnet.UPDATES["step"])
    return DYING + HEAD + mxnet.PARAMETERS.format(sizes=mxnet.SIZES) + training


SOURCES: dict[str, Callable[[], str]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "mxnet": _mxnet,
}
#: Mean of 10 ** worker over all six, and without the machine of workers 2 and 3.
WHOLE, WITHOUT = round(111_111 / 6, 2), round(110_011 / 4, 2)


@pytest.mark.parametrize("killed", [2, 3], ids=["other", "root"])
@pytest.mark.parametrize("framework", SOURCES)
def test_a_machine_counts_in_all_gradients_of_a_step_or_in_none(framework, killed):
    source = waits_for_death(SOURCES[framework](), 2, 3)
    with Job(source, workers=6, processes=2, servers=2, env=tensorflow.ENV) as job:
        job.workers[random.randrange(6)].wait_for_line('["step", 2]')
        job.workers[killed].signal(signal.SIGKILL)
        moves = survivors_agree(job, (2, 3), 6)
        assert moves == sorted(moves) and set(moves) == {WHOLE, WITHOUT}, moves
