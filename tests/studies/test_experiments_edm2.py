"""The study of EDM2 runs from end to end at tiny size, and its two networks cost the same."""

import argparse

import pytest

from experiments.edm2 import compare
from jaxdiff import training


@pytest.mark.slow
def test_compare(run):
    found, text = run("edm2.compare")
    assert list(found["frechet"]) == ["DDPM++", "EDM2"] and found["marks"] == [2, 4]
    assert all(one < two for one, two in found["hours"].values()) and "CPU time" in text


def test_the_networks_cost_the_same():
    args = argparse.Namespace(tiny=False, steps=10, samples=64)
    runs = [training.build(c, training.load_data(c)) for c in (compare.config_of(n, args) for n in compare.NETWORKS)]
    plain, edm2 = (compare.cost(run) for run in runs)
    assert abs(edm2 / plain - 1) < 0.15
