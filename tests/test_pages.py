"""Parts of HTML pages: colours that can be read on both backgrounds, lengths of bars, legends of plots."""

import re
import sys

import numpy as np
import pytest

from jaxdiff import pages, quickstart


def luminance(color):
    """WCAG's relative luminance of #rrggbb."""
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("background", [pages.LIGHT, pages.DARK])
def test_lines_and_text_stand_out_from_the_background(background):
    assert all(contrast(color, background) >= 3 for color in pages.COLORS)
    scheme = dict(re.findall(r"--(\w+): (#\w{6})", pages.STYLE.split("@media")[background == pages.DARK]))
    assert scheme["paper"] == background
    assert contrast(scheme["ink"], background) >= 7 and contrast(scheme["soft"], background) >= 4.5


def test_a_page_says_its_width_and_follows_the_reader_in_the_dark():
    page = pages.page("title", pages.plot([pages.Series("a", [(1.0, 1.0)])], "x", "y"))
    assert "width=device-width" in page and "prefers-color-scheme: dark" in page and "color-scheme: light dark" in page
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert set(re.findall(r'(?:stroke|fill)="([^"]+)"', svg)) <= {"currentColor", "none", *pages.COLORS}


def test_bars_have_lengths_in_proportion():
    text = pages.bars({"a": (30.0, "30 s"), "b": (120.0, "2 min"), "c": (0.0, "0 s")})
    assert re.findall(r"width: ([\d.]+)%", text) == ["25.0", "100.0", "0.0"]
    assert "width: 0.0%" in pages.bars({"a": (0.0, "nothing")})


def test_every_series_and_mark_has_a_row_of_the_legend_inside_the_picture():
    names = [f"method {i}" for i in range(7)]
    svg = pages.plot([pages.Series(name, [(1.0, 1.0), (2.0, 3.0)]) for name in names], "x", "y", {"best": 2.0})
    tall = float(re.search(r'viewBox="0 0 \d+ (\d+)"', svg)[1])
    places = {
        name: (float(x), float(y)) for x, y, name in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<', svg)
    }
    rows = [places[name] for name in [*names, "best"]]
    assert len(set(rows)) == 8 and all(y < tall for _, y in rows)
    assert svg.count("stroke-dasharray") == 2  # the line and its sign


def test_a_series_that_is_not_joined_is_dots():
    assert "polyline" not in pages.plot([pages.Series("a", [(1.0, 1.0), (2.0, 3.0)], line=False)], "x", "y")


@pytest.mark.parametrize("terminal", [False, True])
def test_rows_are_printed_above_a_bar_on_a_terminal_and_alone_elsewhere(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with quickstart.Progress(2) as progress:
        progress.advance("first")
        progress.advance("second")
    printed = capsys.readouterr()
    assert printed.out == "first\nsecond\n"
    assert ("2/2" in printed.err) == terminal
