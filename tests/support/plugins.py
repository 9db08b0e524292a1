"""Plugins of frameworks, and how to make their tensors; the plugin that CONTRIBUTING.md shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from support.places import ROOT


def _torch(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array.copy())


def _tensorflow(array: np.ndarray) -> Any:
    import tensorflow as tf

    return tf.Variable(array)


def _mxnet(array: np.ndarray) -> Any:
    import mxnet as mx

    return mx.nd.array(array, dtype=array.dtype)


def _toy(array: np.ndarray) -> Any:
    return array.copy()


#: By plugin's module: what makes a tensor of an array.
PLUGINS: dict[str, Callable[[np.ndarray], Any]] = {
    "bpsx.torch": _torch,
    "bpsx.tensorflow": _tensorflow,
    "bpsx.mxnet": _mxnet,
    "bpsx_toy": _toy,
}


def values_of(tensor: Any) -> np.ndarray:
    """Return a tensor's elements."""
    return np.asarray(tensor.asnumpy() if hasattr(tensor, "asnumpy") else tensor)


def write_toy(folder: Path) -> None:
    """Write the framework ``toy`` and its plugin ``bpsx_toy``, from the page, into ``folder``."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Add a framework\n") :]
    blocks = re.findall(r"^```python\n(.*?)^```$", section[: section.index("\n## ")], re.M | re.S)
    for name, block in zip(("toy", "bpsx_toy"), blocks, strict=True):
        (folder / f"{name}.py").write_text(block)
