"""No ten lines of the source stand twice without a reason; decision 34 gives the reasons."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from support.places import SOURCE

LEAST = 10
#: Reason -> pattern of the files in which lines may stand twice, by path below src/bpsx.
ALLOWED = {
    "signatures of a codec's methods": r"kernels/(codec|cuda/\w+)\.py",
    "functions that Numba compiles from their source": r"kernels/cpu/\w+\.py",
    "codes of stages for C and for the pure planner": r"(planning/stages\.py|core/partition\.pxd)",
    "the end of a listener's thread": r"transports/(sockets/listener|zeromq/auth)\.py",
    "public names": r"(\w+/)*__init__\.py",
    "a public signature, and the call that passes it on": r"tensorflow/horovod/training\.py",
}
_TRIPLE = re.compile(r'("""|\'\'\').*?\1', re.DOTALL)
_SKIPPED = re.compile(r"#|(from|import|cimport)\b|[)}\]],?$")


def lines_of(path: Path) -> list[tuple[int, str]]:
    """Return the numbered lines of code, without docstrings, comments, imports and brackets."""
    text = _TRIPLE.sub(lambda found: "\n" * found[0].count("\n"), path.read_text())
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines()]
    return [(n, line) for n, line in enumerate(lines, 1) if line and not _SKIPPED.match(line)]


def alike(files: dict[str, list[tuple[int, str]]]) -> list[tuple[str, int, str, int]]:
    """Return the pairs of places that begin with :data:`LEAST` equal lines."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in files.items():
        for i in range(len(lines) - LEAST + 1):
            places[tuple(line for _, line in lines[i : i + LEAST])].append((name, i))
    return [
        (a, files[a][i][0], b, files[b][j][0])
        for found in places.values()
        for n, (a, i) in enumerate(found)
        for b, j in found[n + 1 :]
        if a != b or abs(i - j) >= LEAST
    ]


def reason(a: str, b: str) -> str | None:
    """Return why two files may have alike lines."""
    return next(
        (
            why
            for why, files in ALLOWED.items()
            if all(re.fullmatch(files, name) for name in (a, b))
        ),
        None,
    )


def test_no_ten_lines_stand_twice_without_a_reason() -> None:
    paths = [p for suffix in ("py", "pyx", "pxd") for p in SOURCE.rglob(f"*.{suffix}")]
    pairs = alike({str(p.relative_to(SOURCE)): lines_of(p) for p in paths})
    assert [pair for pair in pairs if reason(pair[0], pair[2]) is None] == []
    assert {reason(pair[0], pair[2]) for pair in pairs} == set(ALLOWED), "a reason is not needed"


def test_a_copy_is_found() -> None:
    lines = [(n, f"line {n}") for n in range(30)]
    moved = [(n + 7, line) for n, line in lines[12:24]]
    assert ("a", 12, "b", 19) in alike({"a": lines, "b": moved})
    assert not alike({"a": lines, "b": moved[: LEAST - 1]})
