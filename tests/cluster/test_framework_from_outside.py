"""A framework plugin outside the package, the one in CONTRIBUTING.md: jobs of two workers, compared
with one process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.jobs import run
from support.plugins import write_toy

#: Trains, and reports a variable after each step. Gradients differ between workers; their average
#: over the two workers of step i is i + 2.
TRAINS = """
import json, os
import numpy as np
import bpsx_toy as bps, toy

bps.init()
variables = [toy.Variable(name, np.full(3000, value + bps.rank())) for name, value in
             (("first", 1), ("second", 2))]
given = json.loads(os.environ["GIVEN"])
if "half" in given:
    given = {"compression": bps.Compression.fp16}
optimizer = bps.DistributedOptimizer(toy.SGD(variables, 0.5), **given)
bps.broadcast_variables(variables, 1)
for step in range(3):
    for v in variables:
        v.gradient = np.full(3000, step + 1 + 2 * bps.rank(), np.float32)
    optimizer.step()
    report([v.value[::2999].tolist() for v in variables])
report(len(optimizer.state()))
bps.shutdown()
"""


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """Variables for processes that can import both modules."""
    write_toy(tmp_path)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "GIVEN": "{}"}


def trained(begin: float, changes: list[float]) -> list[list[float]]:
    """Return two elements of a variable after each step."""
    return [[value] * 2 for value in (begin - np.cumsum(changes)).tolist()]


@pytest.mark.parametrize(
    "given",
    [
        "{}",
        '{"half": true}',
        '{"compression_params": {"compressor": "topk", "k": 3000}}',
        '{"compression_params": {"first": {"compressor": "onebit", "scaling": true}}}',
    ],
    ids=["plain", "float16", "all", "by name"],
)
def test_workers_step_on_averages_from_the_roots_weights(
    outside: dict[str, str], given: str
) -> None:
    env = {**outside, "GIVEN": given, "BYTEPS_MIN_COMPRESS_BYTES": "1000"}
    for found in run(TRAINS, 2, 1, env=env):
        *steps, state = found
        for place, begin in enumerate((2.0, 3.0)):
            assert [step[place] for step in steps] == trained(begin, [1.0, 1.5, 2.0])
        assert state > 0


def test_in_asynchronous_training_the_servers_hold_the_weights(outside: dict[str, str]) -> None:
    """A last step with zero changes reads what both workers have pushed."""
    source = TRAINS.replace("bps.shutdown()", "").replace("report(len(optimizer.state()))", "")
    source += """
bps.join()
for v in variables:
    v.gradient = np.zeros(3000, np.float32)
optimizer.step()
report([v.value[::2999].tolist() for v in variables])
bps.shutdown()
"""
    for *_, last in run(source, 2, 1, env={**outside, "BYTEPS_ENABLE_ASYNC": "1"}):
        whole = 0.5 * sum(step + 1 + 2 * rank for step in range(3) for rank in range(2))
        assert last == [[2.0 - whole] * 2, [3.0 - whole] * 2]


DIFFER = """
import numpy as np, bpsx_toy as bps, toy
bps.init()
variables = [toy.Variable(name, [FIRST]) for name in (NAMES)]
optimizer = bps.DistributedOptimizer(toy.SGD(variables, 0.5))
for v in variables:
    v.gradient = np.ones(1, np.float32)
try:
    optimizer.step()
    report("stepped")
except bps.MismatchError as error:
    report(str(error))
bps.shutdown()
"""


@pytest.mark.parametrize(
    ("names", "first", "said"),
    [
        ("['a', 'b'] if bps.rank() else ['b', 'a']", "1", "other names of variables"),
        ("['a', 'b']", "bps.rank()", "Call broadcast_variables(variables, 0)"),
    ],
    ids=["names", "weights"],
)
def test_the_first_step_compares(
    outside: dict[str, str], names: str, first: str, said: str
) -> None:
    source = DIFFER.replace("NAMES", names).replace("FIRST", first)
    for (found,) in run(source, 2, 1, env={**outside, "BPSX_CHECK_WEIGHTS": "error"}):
        assert said in found and "DistributedOptimizer: 2 variables" in found


def test_unsupported_tensors_are_refused_and_unnamed_calls_match(outside: dict[str, str]) -> None:
    source = """
    import numpy as np, bpsx_toy as bps
    bps.init()
    for tensor in ([1], np.ones(2, bool)):
        try:
            bps.push_pull(tensor)
        except TypeError as error:
            report([type(error).__name__, str(error)])
    report(bps.push_pull(np.full(2, bps.rank(), np.int32), average=False).tolist())
    bps.shutdown()
    """
    refusals: list[Any] = [
        ["UnsupportedTensor", "push_pull: expected an array, not list"],
        ["UnsupportedDType", "push_pull: dtype bool cannot be summed"],
    ]
    for *found, total in run(source, 2, 1, env=outside):
        assert total == [1, 1]
        assert found[0] == refusals[0] and found[1][1].startswith(refusals[1][1])
        assert found[1][1].endswith("; send tensor.astype('uint8')")
