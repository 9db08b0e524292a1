"""Shares of the servers on workers' machines and on other machines, in a real job.

Machines are addresses of loopback.
"""

from __future__ import annotations

import re

import pytest

from support.jobs import Job

_SUMS = """
    import bpsx, numpy as np

    bpsx.init()
    wanted = sum(range(1, bpsx.size() + 1))
    for name, n in (
        ("a", 3_000_000),
        ("b", 700_001),
        ("c", 5),
        ("d", 1_000_000),
        ("e", 0),
        ("f", 90_000),
    ):
        x = np.arange(n, dtype=np.float32) % 1000 * (bpsx.rank() + 1)
        assert (
            bpsx.push_pull(x, name, average=False) == np.arange(n, dtype=np.float32) % 1000 * wanted
        ).all()
    report("done")
"""


class Machines(Job):
    """A job whose processes claim to run on these machines; servers have these ``weights``."""

    def __init__(
        self, workers: str, servers: str, weights: tuple[int, ...] = (), **env: str
    ) -> None:
        self._machine = {f"worker {i}": m for i, m in enumerate(workers)} | {
            f"server {i}": m for i, m in enumerate(servers)
        }
        self._weight = {f"server {i}": w for i, w in enumerate(weights)}
        super().__init__(
            _SUMS,
            len(workers),
            len(servers),
            env={"PS_KEY_LOG": "1", "BYTEPS_LOG_LEVEL": "info", **env},
        )

    def command(self, name: str, words: list[str]) -> list[str]:
        if name not in self._machine:
            return words
        variables = [f"DMLC_NODE_HOST=127.0.0.{ord(self._machine[name]) - ord('a') + 2}"]
        if name in self._weight:
            variables.append(f"BPSX_SERVER_WEIGHT={self._weight[name]}")
        return ["env", *variables, *words]

    def shares(self) -> list[float]:
        """Return each server's share of the bytes, in the order in which servers were started."""
        had = [
            sum(int(n) for n in re.findall(r"key \d+ is .* (\d+) bytes", server.text()))
            for server in self.servers
        ]
        return [n / sum(had) for n in had]


@pytest.mark.parametrize("given", [{}, {"BYTEPS_ENABLE_MIXED_MODE": "1"}], ids=["auto", "given"])
@pytest.mark.parametrize(
    ("workers", "servers", "shares"),
    [
        ("ab", "abc", [1 / 4, 1 / 4, 1 / 2]),
        ("abc", "abc", [1 / 3] * 3),
        ("abc", "abcde", [1 / 11, 1 / 11, 1 / 11, 4 / 11, 4 / 11]),
        ("ab", "abcde", [0, 0, 1 / 3, 1 / 3, 1 / 3]),
    ],
    ids=["n=2, k=1", "n=3, k=0", "n=3, k=2", "n=2, k=3"],
)
def test_bytes_are_divided_as_in_the_paper(workers, servers, shares, given):
    with Machines(workers, servers, **given) as job:
        assert [reports[-1] for reports in job.results()] == ["done"] * len(workers)
        assert job.shares() == pytest.approx(shares, rel=0.03, abs=0.002)


def test_without_mixed_mode_machines_do_not_count_but_weights_do():
    with Machines("ab", "abc", (1, 2, 5), BYTEPS_ENABLE_MIXED_MODE="0") as job:
        job.results()
        assert job.shares() == pytest.approx([1 / 8, 2 / 8, 5 / 8], rel=0.03)


@pytest.mark.parametrize(("workers", "servers"), [("ab", "cde"), ("abc", "ab")])
def test_servers_of_one_kind_have_equal_shares(workers: str, servers: str) -> None:
    """All have a machine of their own, or none has."""
    with Machines(workers, servers) as job:
        job.results()
        assert job.shares() == pytest.approx([1 / len(servers)] * len(servers), rel=0.03)
