"""Draws a merged timeline as SVG: ``python docs/images/draw.py merged.json STEP > trace.svg``. Nothing is moved or left out within the step."""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, ROW, HEAD = 1100, 210, 17, 20
COLOURS = {"": "#9aa7b8", "PUSH": "#e0a458", "PULL": "#5b8fb9", "RECEIVE": "#d9c5a0", "SUM": "#6a994e", "SEND": "#bc4749", "ROUND": "#c9cfd6"}


def rows_of(events: list[dict[str, Any]], step: int) -> tuple[dict[int, str], list[tuple[int, int, str]], list[dict[str, Any]]]:
    """Process titles, rows (pid, tid, name) in their order, and the step's slices."""
    slices = [e for e in events if e["ph"] == "X" and e["args"]["step"] == step and not e["args"]["name"].startswith("Comm.bpsx.")]
    used = {(e["pid"], e["tid"]) for e in slices}
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    rows = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name" and (e["pid"], e["tid"]) in used]
    return titles, sorted(rows, key=lambda r: (r[0], order[r[0], r[1]])), slices


def box(e: dict[str, Any], y: int, begin: int, scale: float) -> str:
    kind = e["name"].removeprefix(e["args"]["name"])[1:]
    x, width = LEFT + (e["ts"] - begin) * scale, max(e["dur"] * scale, 0.6)
    nested = 3 if kind == "SEND" else 0
    shape = f'<rect x="{x:.1f}" y="{y + 1 + nested}" width="{width:.1f}" height="{ROW - 3 - nested}" fill="{COLOURS[kind]}"/>'
    label = kind or "total"
    if width > 7 * len(label) + 4:
        shape += f'<text x="{x + 3:.1f}" y="{y + 12}">{label}</text>'
    return f"<g><title>{escape(e['name'])}: {e['dur']} us</title>{shape}</g>"


def draw(events: list[dict[str, Any]], step: int) -> str:
    """The SVG's text."""
    titles, rows, slices = rows_of(events, step)
    begin, end = min(e["ts"] for e in slices), max(e["ts"] + e["dur"] for e in slices)
    scale = (WIDTH - LEFT - 10) / (end - begin)
    out, y, pid = [], HEAD, 0
    tick = next(t for t in (100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 10**9) if (end - begin) / t < 12)
    height = HEAD + ROW * (len(rows) + len({r[0] for r in rows})) + 6
    for at in range(0, end - begin, tick):
        x = LEFT + at * scale
        out.append(f'<path d="M{x:.1f} {HEAD - 4}V{height}" stroke="#e3e6ea"/><text x="{x + 2:.1f}" y="12" fill="#667">{at / 1000:g} ms</text>')
    for row in rows:
        if row[0] != pid:
            pid = row[0]
            out.append(f'<rect y="{y}" width="{WIDTH}" height="{ROW - 2}" fill="#eef1f5"/><text x="4" y="{y + 12}" font-weight="bold">'
                       f"{escape(titles[pid])}</text>")
            y += ROW
        out.append(f'<text x="12" y="{y + 12}">{escape(row[2])}</text>')
        out += [box(e, y, begin, scale) for e in sorted(slices, key=lambda e: (e["ts"], -e["dur"])) if (e["pid"], e["tid"]) == row[:2]]
        y += ROW
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="10.5">\n'
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    print(draw(json.loads(Path(sys.argv[1]).read_text())["traceEvents"], int(sys.argv[2])), end="")
