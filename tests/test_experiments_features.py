"""The studies of features run from end to end at tiny size, and fill their tables."""

import pytest
from studies import EXPERIMENTS, forget, studies


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    yield studies(EXPERIMENTS / "features", monkeypatch, capsys, tmp_path)
    forget()


@pytest.mark.slow
def test_profile(run):
    found, text = run("profile")
    assert list(found["accuracy"]) == list(found["noise"]) == ["0.05", "0.1"]
    assert found["noise"]["0.05"]["in"]["nsr"] < found["noise"]["0.1"]["in"]["nsr"]
    assert "blocks_1/out" in text and "self_q" in text and "blocks 8x8" in text


@pytest.mark.slow
def test_compare(run):
    found, text = run("compare")
    assert found["lists"]["inter-module"]["candidates"] == 2 and set(found["top_ten_kept"]) <= set(found["lists"])
    assert len(found["lists"]["all"]["judged"]) == 2 and found["lists"]["all"]["single"] in found["alone"]
    pck = found["correspondence"]["pck"]
    assert set(pck["warp"]) == {"pixels", *found["alone"]} and all(
        len(halves) == 2 for halves in pck["semantic"].values()
    )
    assert "PCK@0.1, 6 pairs" in text and "of the best ten" in text
