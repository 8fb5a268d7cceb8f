"""Self-contained HTML pages: tables, images and plots, with nothing to download. All text is escaped."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# each has a contrast of at least 3 to both backgrounds
COLORS = ("#2f7fc1", "#d0603f", "#2f9460", "#9a63cf", "#b07d12", "#128f92", "#d8536f", "#6b7d92", "#728f12", "#808080")
LIGHT, DARK = "#ffffff", "#16181c"  # backgrounds


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; it scrolls sideways where the screen is narrow."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def image(pixels: np.ndarray, caption: str, large: bool = False) -> str:
    """An image embedded as PNG, with its caption; `large` in its own size."""
    size = ' class="large"' if large else ""
    return f'<figure><img alt=""{size} src="{_png(pixels)}"><figcaption>{html.escape(caption)}</figcaption></figure>'


def strips(rows: Mapping[str, np.ndarray]) -> str:
    """Wide images below each other, each with its name, so that their columns can be compared."""
    parts = [
        f'<div class="strip"><span>{html.escape(name)}</span><img alt="" src="{_png(pixels)}"></div>'
        for name, pixels in rows.items()
    ]
    return "\n".join(parts)


def _png(pixels: np.ndarray) -> str:
    """The address of an image that is part of the page."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def folded(title: str, *parts: str) -> str:
    """Parts that are shown on request."""
    inner = "\n".join(parts)
    return f"<details><summary>{html.escape(title)}</summary>{inner}</details>"


def bars(values: Mapping[str, tuple[float, str]]) -> str:
    """Horizontal bars: the length and the text of each, by name."""
    most = max((length for length, _ in values.values()), default=0.0) or 1.0
    rows = [
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td>"
        f'<td class="bar"><div style="width: {100 * length / most:.1f}%"></div></td></tr>'
        for name, (length, text) in values.items()
    ]
    return f'<table class="bars">{"".join(rows)}</table>'


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def page(title: str, *parts: str) -> str:
    """A page of these parts."""
    return PAGE.format(title=html.escape(title), style=STYLE, body="\n".join(parts))


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
<h1>{title}</h1>
{body}
</html>
"""
STYLE = """
:root { color-scheme: light dark; --ink: #222222; --paper: #ffffff; --rule: #dddddd; --soft: #5a5a5a }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --paper: #16181c; --rule: #3a3f47; --soft: #a6acb4 }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
body { color: var(--ink); background: var(--paper) }
.wide { overflow-x: auto }
table { border-collapse: collapse; white-space: nowrap }
td, th { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid var(--rule) }
td:first-child, th:first-child { text-align: left; padding-left: 0 }
table.bars { width: 100%; max-width: 44rem; table-layout: fixed; white-space: normal }
table.bars td:nth-child(2) { width: 6rem }
td.bar { width: 45% }
td.bar div { height: .7rem; min-width: 2px; background: #2f7fc1 }
figure { display: inline-block; margin: 1rem 1rem 0 0; max-width: 100% }
figcaption { font-size: .85rem; color: var(--soft); overflow-wrap: anywhere }
img { image-rendering: pixelated; width: 20rem; max-width: 100% }
img.large { width: auto; max-width: 100% }
.strip { display: flex; align-items: center; gap: 1rem; margin-bottom: .4rem }
.strip span { flex: 0 0 11rem; font-size: .85rem }
.strip img { width: 40rem; min-width: 0 }
svg { max-width: 100%; height: auto }
details { margin-top: 1.5rem }
summary { cursor: pointer }
@media (max-width: 40rem) {
  body { margin: 1rem auto }
  td, th { padding: .3rem .5rem }
  th { white-space: normal }
  td.bar { width: 30% }
  .strip { display: block }
  .strip span { display: block }
  .strip img { width: 100% }
}
"""


# ------------------------------------------------------------------------------------------ plots


class Series(NamedTuple):
    """Points (x, y), joined by a line if `line`."""

    name: str
    points: Sequence[tuple[float, float]]
    line: bool = True


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 420, 300, 52, 44, 10, 10  # of a plot, in units that a phone shows as pixels
ROW, COLUMN = 18, 204  # of its legend


def plot(series: Sequence[Series], x_label: str, y_label: str, marks: Mapping[str, float] | None = None) -> str:
    """An SVG plot with logarithmic axes and its legend below; `marks` are horizontal lines by name.

    Points must be positive. Text and axes take the colour of the text around the plot.
    """
    shown, marks = [s for s in series if s.points], marks or {}
    values = [point for s in shown for point in s.points] or [(1.0, 1.0)]
    x_axis, y_axis = _axis([x for x, _ in values]), _axis([y for _, y in values] + list(marks.values()))

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * _place(x, x_axis)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * _place(y, y_axis)

    parts = [_text(across(x), HEIGHT - BOTTOM + 18, _number(x), "middle") for x in _ticks(x_axis)]
    for y in _ticks(y_axis):
        parts.append(_line(LEFT, up(y), WIDTH - RIGHT, up(y), 'stroke-opacity="0.18"'))
        parts.append(_text(LEFT - 6, up(y) + 4, _number(y), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle:.0f})">{_text(14, middle, y_label, "middle")}</g>')
    parts += [_line(LEFT, up(y), WIDTH - RIGHT, up(y), DASHED) for y in marks.values()]
    for i, s in enumerate(shown):
        parts += _drawn(s, [(across(x), up(y)) for x, y in sorted(s.points)], COLORS[i % len(COLORS)])
    legend = [(name, COLORS[i % len(COLORS)]) for i, (name, *_) in enumerate(shown)] + [(name, "") for name in marks]
    tall = HEIGHT + 8 + ROW * -(-len(legend) // 2)
    head = f'<svg viewBox="0 0 {WIDTH} {tall}" width="{1.4 * WIDTH:.0f}" role="img" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12" fill="currentColor">', *parts, *_legend(legend), "</svg>"])


def _drawn(series: Series, places: Sequence[tuple[float, float]], color: str) -> list[str]:
    """The points of a series, and the line through them."""
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places]
    if not series.line or len(places) < 2:
        return dots
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>', *dots]


def _legend(names: Sequence[tuple[str, str]]) -> list[str]:
    """Two columns below the plot: a dot, or for marks, which have no colour, a dashed line, and the name."""
    parts = []
    for i, (name, color) in enumerate(names):
        x, y = 8 + i % 2 * COLUMN, HEIGHT + 14 + i // 2 * ROW
        dot = f'<circle cx="{x + 6}" cy="{y - 4}" r="4" fill="{color}"/>'
        parts += [dot if color else _line(x, y - 4, x + 14, y - 4, DASHED), _text(x + 20, y, name)]
    return parts


def _axis(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis, with room at both."""
    low, high = min(values), max(values)
    return low / 1.15, high * 1.15


def _place(value: float, ends: tuple[float, float]) -> float:
    return math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def _ticks(ends: tuple[float, float]) -> list[float]:
    """1, 2 and 5 of each decade within the axis; at most eight."""
    decades = range(math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1])) + 1)
    found = [m * 10.0**d for d in decades for m in (1, 2, 5) if ends[0] <= m * 10.0**d <= ends[1]]
    return found if len(found) <= 8 else [tick for tick in found if f"{tick:e}"[0] == "1"]


def _number(value: float) -> str:
    return f"{value:.0f}" if 1 <= value < 1e5 else f"{value:g}"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


DASHED = 'stroke-dasharray="5 4"'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" {style}/>'


def scatter(points: np.ndarray, caption: str, side: int = 200) -> str:
    """Points [n 2] as an SVG figure over [-1.5, 1.5]^2 or, if they reach further, their own range."""
    reach = max(1.5, float(np.quantile(np.abs(points), 0.99)))
    places = side / 2 * (1 + np.clip(points / reach, -1, 1) * (1, -1))
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.2"/>' for x, y in places)
    return (
        f'<figure><svg viewBox="0 0 {side} {side}" width="{side}" fill="{COLORS[0]}">{dots}</svg>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )
