"""The studies of assigned noise run from end to end at tiny size, and fill their tables."""

import pytest

from experiments.immiscible import compare
from jaxdiff import training
from jaxdiff.configs import digits_immiscible


@pytest.mark.slow
def test_ddim(run):
    found, text = run("immiscible.compare", "--study=ddim")
    assert list(found["frechet"]) == ["none", "hungarian"] == list(found["inference"])
    assert found["distance_reduction"]["none"] == 0 < found["distance_reduction"]["hungarian"]
    (curve,), marks = found["frechet"]["none"], found["marks"]
    assert marks == [2, 4] and len(curve) == 2
    first = next(mark for mark, distance in zip(marks, curve, strict=True) if distance <= curve[-1])
    assert "by inference steps" in text and found["steps_to_baseline"]["none"] == [first]


@pytest.mark.slow
def test_every_study_builds():
    """Each variant's config is one that trains."""
    for arg, variants in compare.STUDIES.values():
        for changes in variants.values():
            config = digits_immiscible.get_config(arg)
            with config.unlocked():
                config.update_from_flattened_dict(changes)
            assert training.build(config, training.load_data(config)).config.noise.assignment in compare.KINDS


def test_steps_to_the_baseline_are_counted_seed_by_seed():
    marks, plain = [100, 200, 400], [[5.0, 3.0, 2.0], [5.0, 3.0, 2.5]]
    near = [[3.0, 2.0, 1.0], [4.0, 3.0, 2.6]]
    goal = [curve[-1] for curve in plain]
    first = {
        "none, batch 8": compare.reached(marks, plain, goal),
        "knn, batch 8": compare.reached(marks, near, goal),
    }
    assert first == {"none, batch 8": [400, 400], "knn, batch 8": [200, None]}
    assert compare.speed_up(first, "knn, batch 8") == "not on every seed"
    first["knn, batch 8"] = [200, 100]
    assert compare.speed_up(first, "knn, batch 8") == "3.00x"
