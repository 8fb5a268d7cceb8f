"""The SFD studies run from end to end with an untrained teacher, and fill their tables."""

import sys

import pytest

from experiments.sfd import ablations


@pytest.fixture
def sfd(run):
    """`run` of an SFD study, its settings checked."""

    def study(name, *flags):
        found, text = run(f"sfd.{name}", *flags)
        assert found["settings"]["iterations"] == 2 and found["settings"]["config"]["method"]["name"] == "sfd"
        return found, text

    return study


def test_needs_a_teacher(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["ablations", f"--teacher={tmp_path / 'none'}"])
    with pytest.raises(SystemExit):
        ablations.main()
    assert f"jaxdiff train --config=configs/digits.py --workdir={tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.slow
def test_single_timestamp(sfd):
    found, text = sfd("single_timestamp", "--seeds=2", "--timestamps=4", "--substeps=2")
    assert len(found["timestamps"]) == 4
    assert [len(row) for row in found["gap_after"]] == [3, 3, 3] and min(found["gap_before"]) > 0
    assert "tuned at t = 80" in text and "2 seed(s)" in text


@pytest.mark.slow
def test_ablation_of_one_axis(sfd):
    found, text = sfd("ablations", "--axis=afs", "--seeds=2")
    assert {value: len(scores) for value, scores in found["frechet"]["afs"].items()} == {"True": 2, "False": 2}
    assert "the paper's" in text and "2 seed(s)" in text


@pytest.mark.slow
def test_every_ablation(sfd):
    found, _ = sfd("ablations")
    sizes = {axis: len(values) for axis, values in found["frechet"].items()}
    assert sizes == {"solver": 6, "t_min": 4, "afs": 2, "loss": 3, "K": 6, "rho": 4}
    chosen = ("dpmpp3m", "0.006", "True", "l1", "4", "7.0")
    paper = [found["frechet"][axis][value] for axis, value in zip(sizes, chosen, strict=True)]
    assert all(scores == paper[0] for scores in paper)


@pytest.mark.slow
def test_nfe(sfd):
    found, text = sfd("nfe", "--seeds=2")
    assert len(found["training_free"]) == 7
    tables = [found["sfd_v"], *found["training_free"].values()]
    assert all(sorted(table) == list("12345") and {len(v) for v in table.values()} == {2} for table in tables)
    assert set(found["heun_35"][0]) == {"frechet", "precision", "recall", "density", "coverage"}
    assert len(found["verdicts"]) == 3 and text.count("held:") + text.count("HELD:") == 3


@pytest.mark.slow
def test_condition(sfd):
    found, _ = sfd("condition")
    assert len(found["conditions"]) == 4 and all(sorted(v) == list("2345") for v in found["conditions"].values())
    assert {name: len(v) for name, v in found["lists"].items()} == {"2": 1, "2,3": 2, "2,3,4": 3, "2,3,4,5": 4}


@pytest.mark.slow
def test_second_stage(sfd):
    found, text = sfd("second_stage")
    assert [row["way"] for row in found["rows"]] == ["direct", "direct", "two-stage"]
    assert [row["in all"] for row in found["rows"]] == [2, 4, 4] and "here with l1: two-stage" in text


@pytest.mark.slow
def test_consistency(sfd):
    found, text = sfd("consistency")
    assert [list(row[1]) for row in found["sfd"][0]] == [["2"], ["1"]]
    assert [sorted(row[1]) for row in found["consistency"][0]] == [["1", "2"]] * 2 and "second stage" in text
