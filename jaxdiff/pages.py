"""Self-contained HTML pages: tables, images and plots, with nothing to download. All text is escaped."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

COLORS = ("#1b6ca8", "#c8553d", "#2f8f5b", "#8a4fbf", "#b8860b", "#0f8b8d", "#d1495b", "#5b6c80", "#7f9c1c", "#444444")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; it scrolls sideways where the screen is narrow."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def image(pixels: np.ndarray, caption: str, large: bool = False) -> str:
    """An image embedded as PNG, with its caption; `large` in its own size."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    data = base64.b64encode(buffer.getvalue()).decode()
    size = ' class="large"' if large else ""
    return (
        f'<figure><img alt=""{size} src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


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
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
.wide { overflow-x: auto }
table { border-collapse: collapse; white-space: nowrap }
td, th { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
figure { display: inline-block; margin: 1rem 1rem 0 0; max-width: 100% }
figcaption { font-size: .85rem; color: #555; overflow-wrap: anywhere }
img { image-rendering: pixelated; width: 20rem; max-width: 100% }
img.large { width: auto; max-width: 100% }
svg { max-width: 100%; height: auto }
"""


# ------------------------------------------------------------------------------------------ plots


class Series(NamedTuple):
    """Points (x, y), joined by a line if `line`."""

    name: str
    points: Sequence[tuple[float, float]]
    line: bool = True


def plot(series: Sequence[Series], x_label: str, y_label: str, marks: Mapping[str, float] | None = None) -> str:
    """An SVG plot with logarithmic axes; `marks` are horizontal lines by name. Points must be positive."""
    shown = [s for s in series if s.points]
    values = [point for s in shown for point in s.points] or [(1.0, 1.0)]
    heights = [y for _, y in values] + list((marks or {}).values())
    x_axis, y_axis = _axis([x for x, _ in values]), _axis(heights)
    width, height, left, bottom, top, legend = 640, 400, 64, 48, 12, 190

    def across(x: float) -> float:
        return left + (width - left - legend) * _place(x, x_axis)

    def up(y: float) -> float:
        return height - bottom - (height - bottom - top) * _place(y, y_axis)

    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" font-family="sans-serif" font-size="12">']
    parts += [_text(across(x), height - bottom + 18, _number(x), "middle") for x in _ticks(x_axis)]
    for y in _ticks(y_axis):
        parts.append(_line(left, up(y), width - legend, up(y), "#ddd"))
        parts.append(_text(left - 6, up(y) + 4, _number(y), "end"))
    parts.append(_text((left + width - legend) / 2, height - 8, x_label, "middle"))
    middle = (height - bottom + top) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle:.0f})">{_text(14, middle, y_label, "middle")}</g>')
    for name, y in (marks or {}).items():
        parts.append(_line(left, up(y), width - legend, up(y), "#222", dashed=True))
        parts.append(_text(width - legend + 8, up(y) + 4, name))
    for i, s in enumerate(shown):
        color = COLORS[i % len(COLORS)]
        places = [(across(x), up(y)) for x, y in sorted(s.points)]
        if s.line and len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places]
        row = height - bottom - 16 * (len(shown) - i)
        parts.append(f'<circle cx="{width - legend + 14}" cy="{row - 4}" r="4" fill="{color}"/>')
        parts.append(_text(width - legend + 24, row, s.name))
    return "\n".join([*parts, "</svg>"])


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


def _line(x1: float, y1: float, x2: float, y2: float, color: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dash}/>'


def scatter(points: np.ndarray, caption: str, side: int = 200) -> str:
    """Points [n 2] as an SVG figure over [-1.5, 1.5]^2 or, if they reach further, their own range."""
    reach = max(1.5, float(np.quantile(np.abs(points), 0.99)))
    places = side / 2 * (1 + np.clip(points / reach, -1, 1) * (1, -1))
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.2"/>' for x, y in places)
    return (
        f'<figure><svg viewBox="0 0 {side} {side}" width="{side}" fill="{COLORS[0]}">{dots}</svg>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )
