"""A strict parser of the part of Prometheus' text format that bpsx uses."""

from __future__ import annotations

import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (-?[0-9.eE+-]+|NaN|[+-]Inf)")


def parse(text: str) -> dict[str, tuple[str, dict[tuple, float]]]:
    """Parse text format 0.0.4 strictly: metric -> (type, labels -> value)."""
    assert text.endswith("\n")
    found: dict[str, tuple[str, dict[tuple, float]]] = {}
    helped, current = set(), None
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, help_ = re.fullmatch(rf"# HELP ({_NAME}) (\S.*)", line).groups()
            assert name not in helped and "\\" not in help_
            helped.add(name)
            current = name
        elif line.startswith("# TYPE "):
            name, kind = re.fullmatch(rf"# TYPE ({_NAME}) (counter|gauge)", line).groups()
            assert name == current and name not in found, (
                "TYPE comes once, after its HELP and before its samples"
            )
            found[name] = (kind, {})
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == current, "samples of one metric stand together"
            labels = tuple(re.findall(_LABEL, match[2] or ""))
            assert labels not in found[match[1]][1], f"twice: {line}"
            found[match[1]][1][labels] = float(
                match[7] if match[7] is not None else match[0].rsplit(" ", 1)[1]
            )
    return found
