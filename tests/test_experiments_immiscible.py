"""The studies of assigned noise run from end to end at tiny size, and fill their tables."""

import runpy

import pytest
from studies import EXPERIMENTS, forget, studies

FOLDER = EXPERIMENTS / "immiscible"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    yield studies(FOLDER, monkeypatch, capsys, tmp_path)
    forget()


@pytest.mark.slow
def test_ddim(run):
    found, text = run("compare", "--study=ddim")
    assert list(found["frechet"]) == ["none", "hungarian"] == list(found["inference"])
    assert found["distance_reduction"]["none"] == 0 < found["distance_reduction"]["hungarian"]
    assert "by inference steps" in text and found["steps_to_baseline"]["none"] == [4]


@pytest.mark.slow
def test_every_study_builds(monkeypatch):
    """Each variant's config is one that trains."""
    from jaxdiff import training
    from jaxdiff.configs import digits_immiscible

    monkeypatch.syspath_prepend(FOLDER)
    module = runpy.run_path(str(FOLDER / "compare.py"))
    for arg, variants in module["STUDIES"].values():
        for changes in variants.values():
            config = digits_immiscible.get_config(arg)
            with config.unlocked():
                config.update_from_flattened_dict(changes)
            assert training.build(config).config.noise.assignment in module["KINDS"]
    forget()


def test_steps_to_the_baseline_are_counted_seed_by_seed(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = runpy.run_path(str(FOLDER / "compare.py"))
    marks, plain = [100, 200, 400], [[5.0, 3.0, 2.0], [5.0, 3.0, 2.5]]
    near = [[3.0, 2.0, 1.0], [4.0, 3.0, 2.6]]
    goal = [curve[-1] for curve in plain]
    first = {
        "none, batch 8": module["reached"](marks, plain, goal),
        "knn, batch 8": module["reached"](marks, near, goal),
    }
    assert first == {"none, batch 8": [400, 400], "knn, batch 8": [200, None]}
    assert module["speed_up"](first, "knn, batch 8") == "not on every seed"
    first["knn, batch 8"] = [200, 100]
    assert module["speed_up"](first, "knn, batch 8") == "3.00x"
    forget()
