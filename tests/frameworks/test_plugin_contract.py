"""Each plugin, and CONTRIBUTING.md's example, fulfils the contract of ``plugin/framework.py``."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from support.optional import OPTIONAL, why_missing
from support.places import ROOT
from support.plugins import PLUGINS, values_of, write_toy

#: Files that every plugin package has; files of the same name have the same purpose.
FILES = {
    "framework",
    "ops",
    "compression",
    "exchange",
    "optimizer",
    "async_training",
    "checkpoint",
    "names",
    "startup",
    "elastic",
}
#: Verbs that a plugin passes on unchanged.
VERBS = {"init", "join", "rank", "shutdown", "size"}


@pytest.mark.parametrize("plugin", [name for name in PLUGINS if name.startswith("bpsx.")])
def test_each_plugin_has_the_common_files(plugin: str) -> None:
    folder = ROOT / "src" / plugin.replace(".", "/")
    assert {path.stem for path in folder.glob("*.py")} >= FILES


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_keeps_the_contract(plugin: str, tmp_path: Path) -> None:
    """Run the check in a process of its own, because two frameworks must not share one."""
    package = plugin.removeprefix("bpsx.")
    if package in OPTIONAL and (reason := why_missing(package)):
        pytest.skip(reason)
    write_toy(tmp_path)
    paths = [str(tmp_path), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", f"import {Path(__file__).stem} as t; t.assert_contract({plugin!r})"],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def assert_contract(plugin: str) -> None:
    module = importlib.import_module(plugin)
    inside = plugin.startswith("bpsx.")
    framework = _only(
        importlib.import_module(f"{plugin}.framework") if inside else module, "Framework"
    )
    assert framework.module == plugin
    assert all(callable(getattr(module, verb)) for verb in VERBS)
    assert_tensors(framework, PLUGINS[plugin])
    assert_compressors(module, framework, PLUGINS[plugin])
    assert_asynchronous(importlib.import_module(f"{plugin}.async_training") if inside else module)


def _only(module: ModuleType, base: str) -> Any:
    """Return the one object in a module whose class derives from the contract's class ``base``."""
    contract = getattr(importlib.import_module("bpsx.plugin.framework"), base)
    (found,) = [value for value in vars(module).values() if isinstance(value, contract)]
    return found


def assert_tensors(framework: Any, make: Any) -> None:
    from bpsx.dtypes import UnsupportedDType
    from bpsx.plugin.startup import sample_of

    for dtype in ("float32", "float64", "int32"):
        array = np.arange(3000).reshape(30, 100).astype(dtype)
        tensor = make(array)
        assert framework.dtype_of(tensor) == dtype
        assert framework.shape_of(tensor) == (30, 100)
        assert framework.sample(tensor) == sample_of(array)
        assert framework.check_summable(tensor, "x") == dtype
        assert framework.is_floating(tensor) == (dtype != "int32")
        assert framework.unnamed("verb", tensor) == f"verb.noname.{dtype}.(30, 100)"
        assert framework.unnamed("verb", tensor, rows=True) == f"verb.noname.{dtype}.(100,)"
        half = framework.cast(tensor, "float16")
        assert framework.dtype_of(half) == "float16"
        assert (values_of(half) == array.astype("float16")).all()
        other = make(np.where(array == 0, 1, array).astype(dtype))
        same = framework.digest_of({"x": tensor})
        assert same == framework.digest_of({"x": make(array)}) != 0
        assert same != framework.digest_of({"x": other})
        assert same != framework.digest_of({"y": tensor})
    try:
        framework.check_summable(make(np.ones(2, bool)), "tensor 'x'")
    except UnsupportedDType as error:
        assert str(error).startswith("tensor 'x': dtype bool cannot be summed; allowed: float16")
        assert str(error).endswith(framework.instead.get("bool", ""))
    else:
        raise AssertionError("a bool cannot be summed")


def assert_compressors(module: ModuleType, framework: Any, make: Any) -> None:
    from bpsx.errors import ConfigError
    from bpsx.plugin import compression

    none, fp16 = module.Compression.none, module.Compression.fp16
    assert none is compression.NoneCompressor
    assert issubclass(fp16, compression.FP16Compressor) and fp16.framework is framework
    whole = make(np.full(3, 1 / 3, np.float32))
    small, ctx = fp16.compress(whole)
    assert framework.dtype_of(small) == "float16"
    wide = fp16.decompress(small, ctx)
    assert framework.dtype_of(wide) == "float32"
    assert (values_of(wide) == np.float16(1 / 3)).all()
    count = make(np.ones(3, np.int32))
    assert fp16.compress(count)[0] is count
    compression.check_compression(fp16, "verb", framework)
    with pytest.raises(ConfigError, match=f"verb: compression=3: expected {framework.module}"):
        compression.check_compression(3, "verb", framework)


def assert_asynchronous(module: ModuleType) -> None:
    from bpsx.plugin.async_training import Weights

    derived = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Weights) and value is not Weights
    ]
    assert derived and not any(inspect.isabstract(weights) for weights in derived)
