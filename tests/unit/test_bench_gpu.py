"""Plan and report of ``bench gpu``, without measurements; and the shapes of its networks."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.shapes")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.gpu")


# Published numbers of parameters and multiplications of a forward pass, where there are any;
# numbers of tensors as in torchvision and transformers.
@pytest.mark.parametrize(
    ("name", "elements", "tensors", "products"),
    [
        ("resnet50", 25_557_032, 161, 4.09e9),
        ("vgg16", 138_357_544, 32, 15.47e9),
        ("bert-large", 335_141_888, 391, None),
        ("gpt2", 124_439_808, 148, None),
    ],
)
def test_networks_are_as_large_as_published(
    shapes: ModuleType, name: str, elements: int, tensors: int, products: float | None
) -> None:
    network = shapes.NETWORKS[name]()
    assert (network.elements, network.tensors) == (elements, tensors)
    assert products is None or network.products == pytest.approx(products, rel=2e-3)
    assert len({layer.name for layer in network.layers}) == len(network.layers)
    assert network.elements == sum(
        math.prod(s) for layer in network.layers for s in layer.shapes.values()
    )


def test_layers_are_where_they_belong(shapes: ModuleType) -> None:
    resnet, vgg, bert = (shapes.NETWORKS[n]() for n in ("resnet50", "vgg16", "bert-large"))
    assert resnet.layers[0].shapes["weight"] == (64, 3, 7, 7) and resnet.layers[-1].shapes[
        "weight"
    ] == (1000, 2048)
    sides = {layer.name: math.isqrt(layer.rows) for layer in resnet.layers}
    assert [
        sides[f"layer{i}.0.{part}"]
        for i in (1, 2)
        for part in ("conv1", "conv2", "conv3", "downsample")
    ] == [56] * 4 + [56, 28, 28, 28]
    largest = max(vgg.layers, key=lambda layer: layer.elements)
    assert largest.name == "fc6" and largest.shapes == {"weight": (4096, 25088), "bias": (4096,)}
    assert bert.layers[0].shapes == {"weight": (30522, 1024)} and not bert.layers[0].products
    # For each token, a product with every weight of the 24 layers.
    assert bert.products == 384 * 24 * (4 * 1024**2 + 2 * 1024 * 4096) + 1024**2


def test_each_generator_of_ugatit_has_one_huge_tensor(shapes: ModuleType) -> None:
    network = shapes.NETWORKS["ugatit"]()
    sizes = sorted(layer.elements for layer in network.layers)
    assert sizes[-2:] == [256 * 64 * 64 * 256] * 2 and sizes[-3] < 40e6
    assert len({layer.name for layer in network.layers}) == len(network.layers)


@pytest.mark.parametrize(
    ("workers", "extra", "most"),
    [(2, 0, 1), (2, 4, 1), (4, 0, 1), (4, 4, 1.5), (4, 2, 1.25), (32, 32, 1.9375)],
)
def test_the_bound(bench: ModuleType, workers: int, extra: int, most: float) -> None:
    assert bench.bound(workers, extra) == most


def test_servers_are_beside_workers_or_on_machines_of_their_own(bench: ModuleType) -> None:
    names, beside = bench.places_of(2, 0)
    assert names == ["scheduler", "worker 0", "worker 1"] and beside == {
        "server 0": "worker 0",
        "server 1": "worker 1",
    }
    names, beside = bench.places_of(2, 4)
    assert names[3:] == [f"server {i}" for i in range(4)] and not beside


def test_a_process_beside_another_has_its_address(bench: ModuleType) -> None:
    names, beside = bench.places_of(2, 0)
    links = bench.network.Links(names, beside=beside)
    assert links.address["server 1"] == links.address["worker 1"] != links.address["worker 0"]
    assert links.prefix("server 1") == links.prefix("worker 1")


def test_imitated_machines_have_a_gpu_each(bench: ModuleType) -> None:
    assert bench.own(2, 2, None) == {
        i: {"CUDA_VISIBLE_DEVICES": str(i), "NCCL_HOSTID": f"machine{i}"} for i in range(2)
    }
    assert [v["CUDA_VISIBLE_DEVICES"] for v in bench.own(2, 2, "5,3,1").values()] == ["5", "3"]
    shared = bench.own(4, 2, None)
    assert [v["CUDA_VISIBLE_DEVICES"] for v in shared.values()] == ["0", "1", "0", "1"]
    assert len({v["NCCL_HOSTID"] for v in shared.values()}) == 4


def test_rates_are_bytes_of_a_worker_over_seconds(bench: ModuleType) -> None:
    plan = bench.Plan(count=10, part=100_000_000, large=2_000_000_000)
    seconds = {
        "bpsx many": [0.1, 0.5, 0.25],
        "ddp many": [0.2],
        "bpsx large": [1.0],
        "ddp large": [0.95],
        "bpsx latency": [2.5e-5],
        "ddp latency": [2e-5],
    }
    cases = {c.case: c for c in bench.nccl_cases(plan, seconds)}
    assert list(cases) == ["nccl-many", "nccl-large", "nccl-latency"]
    many, large, latency = cases.values()
    assert (many.value, many.peer, many.ratio, many.met) == (
        4.0,
        5.0,
        0.8,
        False,
    ) and "10 x 100,000,000 B" in many.note
    assert (large.value, large.met) == (2.0, True)
    assert (latency.unit, latency.value, latency.peer, latency.met) == (
        "us",
        pytest.approx(25),
        pytest.approx(20),
        True,
    )
    found = bench.pcie_cases(
        plan, {"gpu many": [0.2], "cpu many": [0.1], "gpu large": [1.0], "cpu large": [1.0]}
    )
    assert [(c.case, c.ratio, c.met) for c in found] == [
        ("pcie-many", 0.5, False),
        ("pcie-large", 1.0, True),
    ]


def test_steps_are_compared_with_ddp(bench: ModuleType) -> None:
    ours, alone = bench.train_cases(
        "resnet50", {"bpsx": [0.01, 0.02, 0.03], "ddp": [0.02], "alone": [0.01]}
    )
    assert (ours.case, ours.value, ours.ratio, ours.met, alone.case, alone.ratio) == (
        "train-resnet50",
        20,
        1.0,
        True,
        "alone-resnet50",
        0.5,
    )
    assert "25.6 M parameters in 161 tensors" in ours.note


@pytest.mark.parametrize(
    ("workers", "extra", "seconds", "met"),
    [
        (2, 0, 1.0, True),
        (2, 0, 1.05, False),
        (2, 4, 1.1, True),
        (2, 4, 1.12, False),
        (4, 4, 0.74, True),
        (4, 4, 0.75, False),
    ],
)
def test_on_links_the_target_is_the_bound(
    bench: ModuleType, workers: int, extra: int, seconds: float, met: bool
) -> None:
    plain, packed = bench.link_cases(
        "vgg16",
        "10gbit",
        workers,
        extra,
        {"bpsx": [seconds], "ddp": [1.0], "onebit": [0.1]},
        "cubic",
    )
    assert (plain.case, plain.peer, plain.met) == (f"links-10gbit-k{extra}-vgg16", 1000, met)
    assert (
        packed.case.endswith("-onebit")
        and packed.ratio == pytest.approx(0.1)
        and packed.target == ("<= 0.2" if extra else None)
    )


def test_a_note_says_how_much_of_its_link_the_peer_uses(bench: ModuleType) -> None:
    plain, _ = bench.link_cases(
        "vgg16",
        "10gbit",
        2,
        4,
        {"bpsx": [0.5], "ddp": [4 * 138_357_544 / 1.25e9], "onebit": [0.1]},
        "bbr",
    )
    assert (
        "uses 100% of its link (bbr)" in plain.note
        and "0.89 times as fast, bound 1.00: 0.89 of it" in plain.note
    )


def _options(**given: Any) -> argparse.Namespace:
    usual = {
        "only": "nccl",
        "device": "cpu",
        "gpus": 2,
        "machines": None,
        "networks": None,
        "rates": "10gbit",
        "extra": "0,4",
        "quick": True,
        "congestion": None,
        "ways": "onebit",
        "transport": "shm",
    }
    return argparse.Namespace(**{**usual, **given})


def test_links_are_measured_over_the_transport_that_jobs_have_by_default(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser, started = argparse.ArgumentParser(), []
    bench.add_arguments(parser)
    chosen = parser.parse_args([]).transport
    assert importlib.import_module("bench.jobs").TRANSPORTS[chosen] == {
        "DMLC_ENABLE_RDMA": "tcp",
        "BYTEPS_ENABLE_IPC": "1",
    }
    monkeypatch.setattr(bench.network, "Links", lambda *_, **__: contextlib.nullcontext())

    def start(*_: Any, transport: str, **__: Any) -> contextlib.AbstractContextManager[None]:
        started.append(transport)
        return contextlib.nullcontext()

    monkeypatch.setattr(bench, "gpu_job", start)
    for transport in (chosen, "zmq"):
        with bench._linked(bench.Setup("cpu", 2, 2, transport=transport), "10gbit", 2):
            pass
    assert started == [chosen, "zmq"]


def test_a_run_without_links_cannot_be_drawn(bench: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = importlib.import_module("bench.report")
    cases = [report.Case("nccl-large", 1.0, "GB/s"), report.Case("links-10gbit-k4-vgg16", 1, "ms")]
    with pytest.raises(report.BenchError, match="no case links-<rate>gbit-k0-<network>"):
        bench.picture(_options())({}, cases, str(tmp_path / "none.svg"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only": "nccl,wifi"}, "unknown: wifi; expected nccl, pcie, train, links"),
        ({"networks": "alexnet"}, "unknown: alexnet; expected resnet50"),
        ({"rates": "fast"}, "'fast' is not a rate"),
        ({"rates": "10gbit,5"}, "'5' is not a rate"),
        ({"extra": "4,x"}, "--extra '4,x'"),
        ({"extra": "-1"}, "--extra"),
        ({"ways": "zip"}, "--ways: unknown: zip; expected onebit, topk"),
        ({"ways": "powersgd", "only": "links"}, "--ways powersgd: .* needs NCCL"),
        ({"congestion": "calm"}, "--congestion: unknown: calm; expected reno"),
        ({"gpus": 1}, "--gpus 1: at least 2"),
        ({"gpus": 0, "only": "links"}, "--gpus 0: at least 1"),
        ({"gpus": 1, "only": "links"}, "--machines 1: at least two"),
        ({"machines": 1}, "--machines 1: at least two"),
    ],
)
def test_wrong_options_are_named_before_anything_is_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(bench, "PARTS", dict.fromkeys(bench.PARTS))
    with pytest.raises(bench.BenchError, match=said):
        bench.run(_options(**given))


def test_missing_requirements_are_reported_before_measuring(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType("torch")
    fake.cuda = argparse.Namespace(device_count=lambda: 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(bench, "PARTS", dict.fromkeys(bench.PARTS))
    with pytest.raises(bench.BenchError, match="sees 1 GPUs, but 2 are needed.*--device cpu"):
        bench.run(_options(device="cuda"))
    monkeypatch.setattr(bench.network, "why_not", lambda: "not installed: tc")
    with pytest.raises(bench.BenchError, match="links needs.*not installed: tc"):
        bench.run(_options(only="nccl,links"))


def test_parts_run_in_order_whatever_the_options_say(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.network, "why_not", lambda: "")
    monkeypatch.setattr(
        bench, "PARTS", {name: lambda setup, name=name: [(name, setup)] for name in bench.PARTS}
    )
    found = bench.run(_options(only="links,nccl", rates="10gbit,200mbit", networks="tiny"))
    assert [name for name, _ in found] == ["nccl", "links"]
    setup = found[0][1]
    assert (setup.rates, setup.extra, setup.networks) == (
        ["10gbit", "200mbit"],
        [0, 4],
        ["tiny"],
    ) and bench.bits("200mbit") == 2e8
    assert (setup.gpus, setup.machines) == (2, 2)
    alone = bench.run(_options(only="links", gpus=1, machines=4))[0][1]
    assert (alone.gpus, alone.machines) == (1, 4)
    assert setup.plan.large < bench.plan_of("cuda", True).large == 512 << 20
