"""The study of EDM2 runs from end to end at tiny size, and its two networks cost the same."""

import argparse

import numpy as np
import pytest

from experiments.edm2 import compare
from jaxdiff import training


@pytest.mark.slow
def test_compare(run, tmp_path):
    found, text = run("edm2.compare")
    assert list(found["frechet"]) == ["DDPM++", "EDM2"] and found["marks"] == [2, 4]
    assert all(one < two for one, two in found["hours"].values()) and "CPU time" in text
    state = f"--state={tmp_path / 'state'}"
    run("edm2.compare", state, "--seconds=1e-9")  # nothing was done yet
    again, text = run("edm2.compare", state)
    assert again["frechet"] == found["frechet"] and text.count(", step ") == 4
    again, text = run("edm2.compare", state)  # all of it was
    assert again["frechet"] == found["frechet"] and ", step " not in text


@pytest.mark.parametrize("images", [False, True])
def test_the_networks_cost_the_same(tmp_path, images):
    file = tmp_path / "images.npz"
    np.savez(file, images=np.zeros((2, 32, 32, 1), np.uint8), labels=np.arange(2), class_names=["a", "b"])
    given = {"images": str(file) if images else "", "weights": "", "rate": 0.01, "constant": 0.1, "width": 0.1}
    args = argparse.Namespace(tiny=False, steps=10, samples=64, **given)
    data = training.load_data(compare.config_of("EDM2", args))
    runs = [training.build(compare.config_of(name, args), data) for name in compare.NETWORKS]
    plain, edm2 = (compare.cost(run) for run in runs)
    assert abs(edm2 / plain - 1) < 0.15
