"""``bpsx-run advise``: what it reads in timelines, what it chooses, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bpsx.errors import ConfigError
from bpsx.launch import advise, advise_profile
from bpsx.launch.advise import Layout, Row, choose, layout, measured_costs
from bpsx.launch.advise_methods import METHODS, PLAIN, Measured, exchange, shown, used_now
from bpsx.planning.step_model import Cluster, Costs, Gradient

STEP, BACKWARD = 100_000, 40_000  # microseconds


def total(name: str, begin: int, end: int, nbytes: int = 4000) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"Comm.{name}",
        "tid": "total",
        "ts": begin,
        "dur": end - begin,
        "args": {"name": f"Comm.{name}", "bytes": nbytes},
    }


def push(name: str, at: int, nbytes: int) -> dict[str, Any]:
    args = {"name": f"Comm.{name}", "bytes": nbytes}
    return {"name": f"Comm.{name}.PUSH", "tid": "7", "ts": at, "dur": 1, "args": args}


def steps(count: int, exchange_: int = 30_000) -> list[dict[str, Any]]:
    """Two gradients a step: ready after 30 and 40 ms; the second one's sum ends the step."""
    found = []
    for i in range(count):
        begin = i * (BACKWARD + exchange_)
        found.append(total("b", begin + 30_000, begin + 35_000, 8000))
        found.append(total("a", begin + BACKWARD, begin + BACKWARD + exchange_))
        found += [push("b", begin + 30_001, 2000), push("a", begin + 40_001, 1000)]
    return found


def test_a_profile_has_the_medians_of_whole_steps():
    tensors = {"a": {"shape": [10, 100], "compression": ""}, "b": {"shape": [2000]}}
    found = advise_profile.profile(steps(6), tensors)
    assert [(g.name, g.nbytes, g.shape) for g in found.gradients] == [
        ("b", 8000, (2000,)),
        ("a", 4000, (10, 100)),
    ]
    assert [g.ready for g in found.gradients] == pytest.approx([0.03, 0.04])
    assert found.seconds == pytest.approx(0.07) and found.ready == pytest.approx(0.04)
    assert (found.nbytes, found.sent, found.steps) == (12_000, 3000, 4)
    assert not found.on_gpu and found.compression == ""


def test_a_profile_tells_gpus_and_compression():
    more = [{"name": "Comm.a.COPYD2H", "tid": "7", "ts": 5, "dur": 1, "args": {"bytes": 4}}]
    tensors = {"a": {"shape": [1000], "compression": '{"compressor": "onebit"}'}}
    found = advise_profile.profile(steps(5) + more, tensors)
    assert found.on_gpu and used_now(found.compression) == "onebit"


def test_what_is_pushed_only_now_and_then_is_no_gradient():
    odd = [total("metric", 285_000, 286_000)]
    assert {g.name for g in advise_profile.profile(steps(8) + odd, {}).gradients} == {"a", "b"}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_steps_are_refused(count):
    with pytest.raises(ConfigError, match="fewer than 2 whole steps were recorded: give"):
        advise_profile.profile(steps(count), {})


def test_steps_that_overlap_are_refused():
    overlapping = [total("a", i * 1000, i * 1000 + 1500) for i in range(9)]
    with pytest.raises(ConfigError, match="CrossBarrier, or several optimizers"):
        advise_profile.profile(overlapping, {})


def nodes(workers: list[str], servers: list[str]) -> list[dict[str, str]]:
    return [
        {"role": role, "host": host, "state": "running"}
        for role, hosts in (("worker", workers), ("server", servers))
        for host in hosts
    ]


@pytest.mark.parametrize(
    ("workers", "servers", "expected"),
    [
        (["a", "a", "b"], ["a", "b", "c"], Layout(2, 1, True)),
        (["a", "b"], ["c", "c"], Layout(2, 1, False)),
        (["a", "a"], ["a"], None),
    ],
)
def test_machines_are_counted_by_their_hosts(workers, servers, expected):
    gone = [{"role": "server", "host": "z", "state": "lost"}]
    assert layout(nodes(workers, servers) + gone) == expected


def test_servers_on_some_worker_machines_only_are_refused():
    with pytest.raises(
        ConfigError, match=r"others not \(b, c\): predictions need a server on each"
    ):
        layout(nodes(["a", "b", "c"], ["a"]))


def rows(**seconds: float) -> list[Row]:
    return [Row(name, 1.0, {0: seconds.get(name, 9.0)}) for name in METHODS]


@pytest.mark.parametrize(
    ("seconds", "pick", "says"),
    [
        ({PLAIN: 1.0, "onebit": 0.97}, PLAIN, "do not compress: no method .* more than 3% of a"),
        ({PLAIN: 1.0, "onebit": 1.2}, PLAIN, "do not compress: no method .* more than 0%"),
        ({PLAIN: 1.0, "bfloat16": 0.52, "onebit": 0.5}, "bfloat16", "0.52 .* onebit, the fastest"),
        ({PLAIN: 1.0, "bfloat16": 0.6, "onebit": 0.5}, "onebit", "onebit takes 0.50 of"),
    ],
)
def test_the_method_that_changes_gradients_least_is_chosen_if_others_gain_little(
    seconds, pick, says
):
    import re

    found, why = choose(rows(**seconds), 0)
    assert found == pick and re.search(says, why)


def answer(workers: int, servers: float) -> dict[str, Any]:
    one = {"seconds": 2e-9, "worker": 1e-9, "servers": servers, "wire": 0.5}
    return {"workers": workers, "methods": dict.fromkeys(METHODS, one)}


def test_a_worker_more_shows_what_each_push_costs_a_server():
    found = measured_costs([answer(3, 8e-9), answer(2, 6e-9)], 2)
    assert found[PLAIN].wire == 0.5
    assert found[PLAIN].costs == pytest.approx(Costs(1e-9, 2e-9, 2e-9, 0.0))
    assert measured_costs([answer(2, 6e-9), answer(3, 5e-9)], 2)[PLAIN].costs.push == 0.0
    # With many cores the processes do not wait for each other, so the time is the worker's own.
    assert measured_costs([answer(2, 6e-9), answer(3, 8e-9)], 32)[PLAIN].costs.alone == 2e-9


MEASURED = {name: Measured(Costs(1.0, 1.0, 1.0), 0.1) for name in METHODS}


def test_small_tensors_and_vectors_travel_as_they_would():
    small, matrix = Gradient("s", 4096, 0.0, (1024,)), Gradient("m", 1 << 22, 0.0, (1024, 1024))
    vector = Gradient("v", 1 << 22, 0.0, (1 << 20,))
    assert exchange("onebit", small, MEASURED, 65536).wire == (4096.0,)
    assert exchange("bfloat16", small, MEASURED, 65536).wire == (409.6,)
    assert exchange("onebit", matrix, MEASURED, 65536).wire == pytest.approx((419_430.4,))
    assert exchange("powersgd", matrix, MEASURED, 65536).wire == (16_384.0, 16_384.0)
    assert exchange("powersgd", vector, MEASURED, 65536).wire == (float(1 << 22),)
    assert exchange(PLAIN, matrix, MEASURED, 0).wire == (float(1 << 22),)


def test_methods_are_named_as_scripts_choose_them():
    assert shown(PLAIN) == "no compression" and "'compressor': 'onebit'" in shown("onebit")
    assert "bfloat16" in shown("bfloat16")
    assert used_now("") == PLAIN and used_now('{"compressor": "half"}') == "bfloat16"
    assert used_now('{"compressor": "topk", "k": 0.5}') == "topk"


def test_the_output_names_what_was_found_and_what_to_use():
    found = advise_profile.profile(steps(6), {})
    where = Cluster(4, 0, advise._GBIT, 1e-4, 8.0)
    model = advise.Model(found.gradients, MEASURED, 65536, advise.Partitions(2 << 20, True))
    table, pick, why = advise.advise(model, where, [0, 2])
    made = advise.Advice(found, where, "as given", "", table, pick, why)
    text = advise.text(made)
    for words in (
        "steps: 2 gradients of 0.0 MB, the last one ready after 40.0 ms (medians of 4 steps)",
        "machines: 4 with a worker and a server each, 0 spare; 8 cores each",
        "links: 1 Gbit/s, as given",
        "ms, 2 spare",
        "advice: ",
    ):
        assert words in text
    assert [line.split()[0] for line in text.splitlines()[5:12]] == list(METHODS)
    read = json.loads(advise.as_json(made))
    assert read["pick"] == pick and set(read["methods"]) == set(METHODS)
    assert set(read["methods"][PLAIN]["seconds"]) == {"0", "2"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--link 10 python x", "--link needs --workers"),
        ("--workers 4 python x", "COMMAND needs either --link and --workers, or --hostfile"),
        ("--workers 4 --link 1 --hostfile f python x", "either --link and --workers, or"),
        ("--link 0 --workers 2 python x", "'0': expected a number of Gbit/s above 0"),
        ("--link ten --workers 2 python x", "'ten': expected a number of Gbit/s above 0"),
        ("--workers 1 --link 1 python x", "'1': expected 2..512"),
        ("--cores 0", "'0': expected a number above 0"),
        ("--spare 1,x", "'1,x': expected whole numbers, with commas between"),
        ("--hostfile f", "--hostfile needs COMMAND"),
        ("--bogus", "unknown option --bogus"),
        ("--hostfile f --bogus python x", "unknown option --bogus"),
        ("--workers 2 --link 1 --job 5 python x", "--scheduler and --job choose a running job"),
    ],
)
def test_bad_arguments_are_named(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        advise.main(words.split())
    assert ended.value.code == 2 and says in capsys.readouterr().err
