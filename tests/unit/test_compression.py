"""compression_params: accepted and refused values, and their text on the wire."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bpsx.compression.spec
from bpsx.compression.manager import Compressing
from bpsx.compression.spec import (
    NONE,
    CompressionSpec,
    MomentumSpec,
    check_fits,
    compression,
    effective,
    make,
    mix,
    parse,
    stream,
)
from bpsx.config import Config
from bpsx.dtypes import BY_NAME
from bpsx.errors import ConfigError
from bpsx.kernels import codecs
from bpsx.kernels.codecs import codec
from bpsx.local.neighbourhood import Neighbourhood
from bpsx.plugin.compression_params import choose
from support.codec_tools import Coder
from support.places import SOURCE

GOOD: list[dict[str, Any]] = [
    {"compressor": "onebit"},
    {
        "compressor": "onebit",
        "scaling": True,
        "ef": "vanilla",
        "momentum": "nesterov",
        "mu": 0.9,
        "seed": 3,
        "fp16": True,
    },
    {"compressor": "topk", "k": 0.01},
    {"compressor": "topk", "k": 1},
    {"compressor": "topk", "k": 10.0, "ef": "corrected"},
    {"compressor": "randomk", "k": 5, "ef": "sparse", "seed": 2**64 - 1},
    {"compressor": "dithering", "k": 4},
    {"compressor": "dithering", "k": 2, "partition": "natural", "normalize": "l2"},
    {"fp16": True},
    # As scripts pass their command-line arguments:
    {
        "compressor": "onebit",
        "k": None,
        "scaling": False,
        "ef": "",
        "momentum": None,
        "normalize": "",
        "partition": None,
        "fp16": False,
    },
    {"compressor": None, "ef": None, "k": False},
    {},
]
#: NumPy's numbers, and the equal Python numbers.
NUMPY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"compressor": "topk", "k": np.int64(5)}, {"compressor": "topk", "k": 5}),
    ({"compressor": "topk", "k": np.uint8(5)}, {"compressor": "topk", "k": 5}),
    ({"compressor": "randomk", "k": np.float64(0.25)}, {"compressor": "randomk", "k": 0.25}),
    ({"compressor": "randomk", "k": np.float32(3.0)}, {"compressor": "randomk", "k": 3}),
    (
        {"compressor": "dithering", "k": np.int32(4), "seed": np.uint64(2**64 - 1)},
        {"compressor": "dithering", "k": 4, "seed": 2**64 - 1},
    ),
    (
        {"compressor": "onebit", "momentum": "nesterov", "mu": np.float16(0.5)},
        {"compressor": "onebit", "momentum": "nesterov", "mu": 0.5},
    ),
]
BAD: list[tuple[Any, list[str]]] = [
    ({"compressor": "gzip"}, ["compressor='gzip'", "onebit", "topk", "randomk", "dithering"]),
    ({"compressor": 3}, ["compressor=3"]),
    ({"compressor": "half "}, ["compressor='half '"]),
    ([], ["expected a mapping", "list"]),
    ("onebit", ["str"]),
    ({"compressor": "onebit", "level": 3}, ["level=3", "expected", "compressor", "scaling"]),
    ({3: 4}, ["3", "expected"]),
    ({"compressor": "topk", "k": 0.1, "scaling": 1}, ["scaling=1"]),
    ({"compressor": "onebit", "k": "3"}, ["k='3'"]),
    ({"compressor": "onebit", "k": -1}, ["k=-1"]),
    ({"k": float("nan")}, ["k=nan"]),
    ({"compressor": "topk", "k": 0.1, "partition": "lineal"}, ["partition='lineal'", "'linear'"]),
    ({"compressor": "onebit", "K": 3}, ["K=3", "expected"]),
    ({"compressor": "", "kk": 1}, ["kk=1", "expected"]),
    ({"compressor": "topk"}, ["k"]),
    ({"compressor": "randomk"}, ["k"]),
    ({"compressor": "dithering"}, ["k"]),
    ({"compressor": "topk"}, ["k is missing: expected an integer"]),
    ({"compressor": "topk", "k": 0}, ["k=0"]),
    ({"compressor": "topk", "k": 0.0}, ["k=0.0"]),
    ({"compressor": "topk", "k": -1}, ["k=-1"]),
    ({"compressor": "topk", "k": 1.5}, ["k=1.5"]),
    ({"compressor": "topk", "k": float("nan")}, ["k=nan"]),
    ({"compressor": "topk", "k": True}, ["k=True"]),
    ({"compressor": "topk", "k": "10"}, ["k='10'"]),
    ({"compressor": "randomk", "k": "0.01"}, ["k='0.01'"]),
    ({"compressor": "topk", "k": np.True_}, ["k="]),
    ({"compressor": "topk", "k": [5]}, ["k=[5]"]),
    ({"compressor": "topk", "k": np.int64(0)}, ["k="]),
    ({"compressor": "topk", "k": np.float64("inf")}, ["k="]),
    ({"compressor": "topk", "k": np.float32("nan")}, ["k="]),
    ({"compressor": "randomk", "k": 10**400}, ["k=1000"]),
    ({"compressor": "dithering", "k": True}, ["k=True"]),
    ({"compressor": "dithering", "k": np.True_}, ["k="]),
    ({"compressor": "dithering", "k": 4.0}, ["k=4.0"]),
    ({"compressor": "dithering", "k": "4"}, ["k='4'"]),
    ({"compressor": "onebit", "seed": np.True_}, ["seed="]),
    ({"compressor": "onebit", "seed": True}, ["seed=True"]),
    ({"compressor": "onebit", "seed": "3"}, ["seed='3'"]),
    ({"compressor": "onebit", "seed": 3.0}, ["seed=3.0"]),
    ({"compressor": "onebit", "momentum": "nesterov", "mu": np.True_}, ["mu="]),
    ({"compressor": "onebit", "momentum": "nesterov", "mu": "0.9"}, ["mu='0.9'"]),
    ({"compressor": "dithering", "k": 0.5}, ["k=0.5"]),
    ({"compressor": "dithering", "k": 256}, ["k=256"]),
    (
        {"compressor": "dithering", "k": 2, "partition": "cubic"},
        ["partition='cubic'", "'linear'", "'natural'"],
    ),
    ({"compressor": "dithering", "k": 2, "normalize": "l1"}, ["normalize='l1'", "'max'", "'l2'"]),
    ({"compressor": "onebit", "ef": "sparse"}, ["ef='sparse'", "'vanilla'", "'corrected'"]),
    ({"compressor": "topk", "k": 1, "ef": "sparse"}, ["ef='sparse'"]),
    ({"compressor": "onebit", "ef": True}, ["ef=True"]),
    ({"compressor": "onebit", "momentum": "heavy"}, ["momentum='heavy'", "'nesterov'"]),
    ({"compressor": "onebit", "mu": 0.9}, ["mu=0.9", "momentum"]),
    ({"compressor": "onebit", "momentum": "nesterov", "mu": 1.0}, ["mu=1.0"]),
    ({"compressor": "onebit", "scaling": 1}, ["scaling=1"]),
    ({"compressor": "onebit", "seed": -1}, ["seed=-1"]),
    ({"compressor": "onebit", "seed": 2**64}, ["seed="]),
    ({"fp16": "yes"}, ["fp16='yes'"]),
    ({"ef": "vanilla"}, ["ef='vanilla'", "needs a compressor"]),
    ({"momentum": "nesterov"}, ["momentum"]),
]


@pytest.mark.parametrize("params", GOOD, ids=str)
def test_the_text_of_a_compression_parses_to_the_same(params: dict[str, Any]) -> None:
    chosen = compression(params)
    assert parse(chosen.text()) == chosen and len(chosen.text()) < 300
    assert chosen == compression(dict(reversed(params.items()))) and hash(chosen) == hash(
        compression(params)
    )


@pytest.mark.parametrize(("params", "named"), BAD, ids=str)
def test_invalid_params_are_named_with_the_expected_values(params: Any, named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        compression(params, "compression_params of 'w'")
    assert isinstance(refused.value, ValueError) and str(refused.value).startswith(
        "compression_params of 'w': "
    )
    for text in named:
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        (
            {"compressor": "onebit", "k": 1, "scaling": True},
            {"compressor": "onebit", "scaling": True},
        ),
        ({"compressor": "", "k": 1, "fp16": True}, {"fp16": True}),
        ({"compressor": "", "k": 1, "ef": "", "momentum": "", "scaling": False, "fp16": False}, {}),
        (
            {
                "compressor": "topk",
                "k": 0.1,
                "scaling": True,
                "partition": "linear",
                "normalize": "max",
            },
            {"compressor": "topk", "k": 0.1},
        ),
        ({"k": 3, "partition": "natural"}, {}),
    ],
    ids=str,
)
def test_options_of_another_compressor_are_ignored_as_in_byteps(
    params: dict[str, Any],
    plain: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bpsx.compression.spec, "_told", set())
    strange = {key for key, value in params.items() if value and key not in plain}
    for _ in range(2):
        assert compression(params) == compression(plain)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(strange), "once for each"
    for key in strange:
        assert any(
            f": {key}={params[key]!r} is ignored: it has no meaning with " in text for text in told
        )


@pytest.mark.parametrize(("params", "plain"), NUMPY, ids=str)
def test_numpys_numbers_are_numbers(params: dict[str, Any], plain: dict[str, Any]) -> None:
    """NumPy numbers are accepted, also in the text that is sent."""
    chosen = compression(params)
    assert chosen == compression(plain) and chosen.text() == compression(plain).text()
    assert (
        {type(value) for _, value in chosen.options} <= {int, float, str, bool}
        and type(chosen.seed) is int
        and type(chosen.mu) is float
    )


@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_a_partition_with_more_elements_than_indices_is_refused(name: str) -> None:
    """Happens only with BYTEPS_PARTITION_BYTES of 8 GiB or more.

    Servers refuse it, too, whatever a worker announces.
    """
    chosen = compression({"compressor": name, "k": 0.01})
    check_fits(chosen, "float32", 2**40, "'w'", 2**34 - 4096)
    check_fits(chosen, "float32", 2**34 - 4, "'w'", 2**40)
    with pytest.raises(
        ConfigError,
        match=(
            f"'w': compressor='{name}': a partition has 4294967296 elements; at most 4294967295 are"
            " possible; reduce BYTEPS_PARTITION_BYTES: compressed partitions have"
            " 17179869184 bytes"
        ),
    ):
        check_fits(chosen, "float32", 2**40, "'w'", 2**34)
    with pytest.raises(ConfigError, match="a partition has 4294967296 elements"):
        make(chosen, "float16", 2**33, 0, None)
    used = Compressing(
        config := Config({"BYTEPS_PARTITION_BYTES": str(2**33 - 1)}),
        Neighbourhood(config),
        None,
        lambda _: None,
    )
    with pytest.raises(
        ConfigError,
        match=(
            "'w': .*reduce BYTEPS_PARTITION_BYTES: compressed partitions have 17179869184 bytes"
        ),
    ):
        used.check("w", BY_NAME["float32"].code, 2**35, chosen)
    check_fits(compression({"compressor": "onebit"}), "float32", 2**40, "'w'", 2**40)


def test_empty_parameters_mean_no_compression() -> None:
    assert (
        compression(None) == compression({}) == compression({"compressor": "", "k": None}) == NONE
    )


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda b: b.decode(errors="replace")))
def test_any_line_is_a_compression_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(text), CompressionSpec)


def test_small_tensors_and_other_types_are_sent_as_float16_or_uncompressed() -> None:
    chosen, halves = (
        compression({"compressor": "onebit"}),
        compression({"compressor": "onebit", "fp16": True}),
    )
    assert (
        effective(chosen, "float32", 100, 100) is chosen
        and effective(chosen, "float32", 99, 100) is None
    )
    small = effective(halves, "float32", 99, 100)
    assert (
        small is not None
        and small.compressor == "half"
        and small is effective(halves, "float64", 0, 100)
    )
    assert (
        effective(halves, "float16", 99, 100) is None
        and effective(compression({"fp16": True}), "bfloat16", 10**6, 0) is None
    )
    check_fits(compression({"compressor": "topk", "k": 25}), "float32", 100, "'w'", 4096)
    with pytest.raises(ConfigError, match="'w': k=26 is more than the 25 elements"):
        check_fits(compression({"compressor": "randomk", "k": 26}), "float32", 100, "'w'", 4096)
    with pytest.raises(ConfigError, match="'w': .*int32.*float32"):
        check_fits(chosen, "int32", 100, "'w'", 4096)


def test_streams_of_names_and_partitions_differ() -> None:
    assert len({stream(name, part) for name in (b"a", b"b", b"") for part in range(50)}) == 150
    assert (
        mix(1, 2) != mix(2, 1) and mix(1, 2) == mix(1, 2) and 0 <= mix(2**64 - 1, 2**64 - 1) < 2**64
    )


def test_choices_of_parameters() -> None:
    one, names = {"compressor": "onebit"}, ["a", "b", "c"]
    assert choose(None, names, "X", {}) == choose({}, names, "X", {}) == {}
    assert choose(one, names, "X", {}) == dict.fromkeys(names, compression(one))
    assert choose({"b": one, "c": {}}, names, "X", {}) == {"b": compression(one)}
    assert choose(lambda n: one if n != "a" else None, names, "X", {}) == {
        "b": compression(one),
        "c": compression(one),
    }
    for wrong, text in (
        ({"d": one}, "names parameters that the optimizer does not have: d"),
        (3, "is a int"),
        ({"a": {"compressor": "onebits"}}, "of 'a'"),
    ):
        with pytest.raises(ConfigError, match=text):
            choose(wrong, names, "X", {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, shrinks",
    [
        ({"k": 2}, True),
        ({"k": 1}, False),
        ({"k": 2, "partition": "natural"}, True),
        ({"k": 1, "partition": "natural"}, False),
        ({"k": 16, "normalize": "l2"}, False),
    ],
    ids=str,
)
def test_residuals_of_contracting_options_stay_small_and_others_may_grow(
    options: dict[str, Any], shrinks: bool
) -> None:
    dithering = codec("dithering")
    assert dithering.shrinks(dithering.options(options)) == shrinks
    rng, coder, largest = (
        np.random.default_rng(0),
        Coder("dithering", options, 65536, residual=True),
        [],
    )
    for _ in range(40):
        coder.encode(rng.standard_normal(65536).astype(np.float32))
        largest.append(float(np.abs(coder.residual).max()))
    assert (largest[-1] > 2 * largest[4]) != shrinks, largest[4::5]


def test_the_other_compressors_contract() -> None:
    assert all(codec(name).shrinks({}) for name in ("onebit", "topk", "randomk"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_momentum_that_no_encoder_adds_forgets_an_overflow(dtype: str) -> None:
    momentum, g = MomentumSpec(dtype, 40), np.ones(40, dtype)
    assert (momentum.add(g.ctypes.data, 0.5).view(dtype) == 1.5).all() and (
        momentum.kept == 1
    ).all()
    for value in (np.inf, -np.inf, np.nan):
        bad = g.copy()
        bad[7] = value
        assert not np.isfinite(momentum.add(bad.ctypes.data, 0.5).view(dtype)[7])
        assert (momentum.kept == 0).all()
        assert (momentum.add(g.ctypes.data, 0.5).view(dtype) == 1.5).all()


def test_options_of_value_0_travel() -> None:
    assert '"seed"' not in compression({"compressor": "onebit"}).text()
    assert (
        '"level": 0' in CompressionSpec("mine", (("level", 0),)).text()
        and '"flag"' not in CompressionSpec("mine", (("flag", False),)).text()
    )


def test_the_core_has_the_codecs_constants() -> None:
    text = (SOURCE / "core" / "codec" / "packed.pxd").read_text()
    for name in ("N_OPTIONS", "ALIKE", "N_STATE", "MOST_PUSHES", "SLACK"):
        assert re.findall(rf"^    {name} = (\d+)", text, re.M) == [str(getattr(codecs, name))]
