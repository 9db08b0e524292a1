"""``python -m bench gpu`` runs on the CPU with gloo and reports its cases; its model trains
correctly.

These tests judge no figures.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from support import benches

ROOT = Path(__file__).resolve().parents[2]


def cases_of(*words: str) -> dict[str, dict]:
    return benches.cases("gpu", "--device", "cpu", "--quick", "--networks", "tiny", *words)


def test_one_machine_and_two_imitated_ones() -> None:
    cases = cases_of("--only", "nccl,pcie,train")
    assert list(cases) == [
        "nccl-many",
        "nccl-large",
        "nccl-latency",
        "pcie-many",
        "pcie-large",
        "train-tiny",
        "alone-tiny",
    ]
    assert all(c["value"] > 0 and c["peer"] > 0 and c["samples"] for c in cases.values())
    assert [c["target"] for c in cases.values()] == [
        ">= 0.9",
        ">= 0.9",
        "<= 1.5",
        ">= 0.85",
        ">= 0.85",
        "<= 1.0",
        None,
    ]


def test_links_have_the_given_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    if reason := importlib.import_module("bench.network").why_not():
        pytest.skip(reason)
    cases = cases_of("--only", "links", "--rates", "50mbit", "--extra", "0,2")
    assert list(cases) == [
        f"links-50mbit-k{k}-tiny{way}" for k in (0, 2) for way in ("", "-onebit")
    ]
    least = 1e3 * 4 * 399_578 * 8 / 50e6
    for k in (0, 2):
        plain, packed = cases[f"links-50mbit-k{k}-tiny"], cases[f"links-50mbit-k{k}-tiny-onebit"]
        # A burst of 0.26 of 1.6 MB is exempt from shaping.
        assert (
            plain["value"] > 0.8 * least and plain["peer"] > 0.8 * least and packed["value"] < least
        )


def test_gradients_come_last_layer_first_and_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    made, shapes = (importlib.import_module(f"bench.{name}") for name in ("gpu_model", "shapes"))
    network = shapes.tiny()
    model = made.Model(network, made.Work(network, "cpu"), 3.0, "cpu")
    assert sum(p.numel() for p in model.parameters()) == network.elements
    came: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: came.append(name.partition("_")[0])
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.zeros((), requires_grad=True)).backward()
        optimizer.step()
    assert list(dict.fromkeys(came)) == ["out", "middle", "in", "conv"]
    assert model.holds(-3.0) and not model.holds(-2.9) and model.holds(-2.9, 0.05)
