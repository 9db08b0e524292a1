"""Generates the page ``docs/reference/options.md`` from the table of options."""

from __future__ import annotations

import textwrap
from typing import Any

from bpsx.config.ignored import NOT_USED
from bpsx.config.launchers import LAUNCHERS
from bpsx.config.option import Option
from bpsx.config.options import OPTIONS
from bpsx.config.torchrun_options import TORCHRUN, TORCHRUN_OPTIONS


def reference() -> str:
    """Return the page ``docs/reference/options.md``."""
    lines = [
        "# Options",
        "",
        (
            "Generated from the tables in `src/bpsx/config` by `make docs`. All options are"
            " environment variables. *Required* are those that each process of a job with servers"
            " needs; launchers set them."
        ),
        "",
    ]
    options = (*OPTIONS, *TORCHRUN_OPTIONS)
    for group in dict.fromkeys(o.group for o in options):
        lines += [f"## {group}", ""]
        if group == TORCHRUN:
            lines += [
                (
                    "bpsx reads them unless `DMLC_WORKER_ID` or `BYTEPS_LOCAL_RANK` is set"
                    " ([pytorch.md](../train/pytorch.md))."
                ),
                "",
            ]
        lines += ["| variable | allowed | default | meaning |", "|---|---|---|---|"]
        for o in (o for o in options if o.group == group):
            allowed = o.allowed.replace("|", "\\|")
            lines.append(f"| `{o.env}` | {allowed} | {_default(o)} | {o.help} |")
        lines.append("")
    lines += [
        "## Other launchers",
        "",
        (
            "Variables from which bpsx takes rank and size if torchrun's are not set"
            " ([launching.md](../run/launching.md#under-another-launcher))."
        ),
        "",
        "| launcher | rank | size | local rank | local size |",
        "|---|---|---|---|---|",
    ]
    for at in LAUNCHERS[1:]:
        names = (at.rank, at.size, at.local_rank, at.local_size)
        lines.append(
            f"| {at.name} | " + " | ".join(f"`{name}`" if name else "" for name in names) + " |"
        )
    lines += [
        "",
        "## BytePS options without effect in this version",
        "",
        "bpsx warns if one of these is set.",
        "",
    ]
    lines += [", ".join(f"`{n}`" for n in sorted(NOT_USED)), ""]
    return "\n".join(wrapped for line in lines for wrapped in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    """The line in pieces of at most 100 columns; a table's row stays whole."""
    if line.startswith("|"):
        return [line]
    return textwrap.wrap(line, 100, break_long_words=False, break_on_hyphens=False) or [""]


def _default(option: Option) -> str:
    """The default as the table shows it."""
    if callable(option.default):
        return "by cores"
    return "*required*" if option.required else _plain(option.default)


def _plain(default: Any) -> str:
    return (
        "unset"
        if default in (None, "")
        else str(int(default))
        if isinstance(default, bool)
        else str(default)
    )
