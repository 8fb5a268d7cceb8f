"""The EMD studies run from end to end at tiny size, and fill their tables."""

import pytest


@pytest.mark.slow
def test_mixture(run):
    found, text = run("emd.mixture", "--seeds=2")
    assert {way: len(rows) for way, rows in found["rows"].items()} == {"EMD": 2, "Diff-Instruct": 2}
    assert all(0 <= row["modes"] <= 25 for rows in found["rows"].values() for row in rows)
    assert len(found["verdicts"]) == 2 and text.count("held:") + text.count("HELD:") == 2


@pytest.mark.slow
def test_divergences(run):
    found, text = run("emd.divergences")
    assert len(found["fixed_points"]) == 7 and "reverse optimum" in text
    assert found["reverse_optimum"] == pytest.approx([1.80, 1.875], abs=0.01)


@pytest.mark.slow
def test_digits(run):
    found, text = run("emd.digits", "--seeds=2")
    assert all(len(scores) == 2 for scores in found["rows"].values()) and len(found["rows"]) == 5
    assert len(found["verdicts"]) == 4 and "equal time" in text


@pytest.mark.slow
def test_ablations(run):
    found, text = run("emd.ablations", "--axis=cancel", "--axis=K")
    assert list(found["axes"]["cancel"]) == ["complete", "last", "none"] and list(found["axes"]["K"]) == list(
        "1248"
    ) + ["16"]
    assert "gradient norm" in text
