"""Every example of examples/mxnet, at small sizes, with the command that its page gives; and a
BytePS script with only its import changed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.running import launch, train

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parents[2] / "examples" / "mxnet"
MIGRATING = Path(__file__).parent / "migrating"


def test_each_example_has_a_test() -> None:
    assert sorted(p.name for p in EXAMPLES.glob("*.py")) == ["digits.py"]


@pytest.mark.parametrize("compression", ["none", "onebit", "topk", "randomk", "dithering", "fp16"])
def test_digits(compression: str) -> None:
    script = [str(EXAMPLES / "digits.py"), "--epochs", "2", "--compress", compression]
    if compression == "none":
        status, output = launch([sys.executable, *script], 2, 1)
    else:
        status, output = train(script, 2, 1)
    assert status == 0, output[-3000:]
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]
    assert (
        f"2 workers, batches of 32 each, compression: {compression}" in output
        and "weights are the same on all workers" in output
    )
    assert len(losses) == 2 and losses[1] < losses[0], output


def test_a_script_for_byteps_trains_with_the_import_changed_and_put_first() -> None:
    before, after = ((MIGRATING / f"mxnet_{which}.py").read_text() for which in ("before", "after"))
    assert (
        after
        == before.replace(
            "import mxnet as mx\nimport byteps.mxnet as bps\n",
            "import bpsx.mxnet as bps\nimport mxnet as mx\n",
        )
        != before
    )
    status, output = train(
        [str(MIGRATING / "mxnet_after.py")], 2, 1, BYTEPS_MIN_COMPRESS_BYTES="1000"
    )
    assert status == 0, output[-3000:]
    losses = [float(text) for text in re.findall(r"epoch \d: loss (\S+),", output)]
    weights = dict(re.findall(r"worker (\d): weights add up to (\S+)", output))
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0], output
    assert sorted(weights) == ["0", "1"] and weights["0"] == weights["1"], output


def test_digits_refuses_unsupported_options() -> None:
    status, output = train([str(EXAMPLES / "digits.py")], 2, 1, BYTEPS_ENABLE_ASYNC="1")
    assert status == 1 and "BYTEPS_ENABLE_ASYNC=1 is not supported: byteps_push_pull" in output, (
        output[-3000:]
    )
