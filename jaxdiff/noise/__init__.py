"""Noise: how training draws and weighs its levels, and which noise goes with which image."""

from jaxdiff.noise.assignment import linear_assignment
from jaxdiff.noise.immiscible import Coupling, assign, coupling, distance_reduction
from jaxdiff.noise.levels import LEVELS, WEIGHTS, Levels, Weight, at_least, make_levels, make_weight, shifted

__all__ = [
    "LEVELS",
    "WEIGHTS",
    "Coupling",
    "Levels",
    "Weight",
    "assign",
    "at_least",
    "coupling",
    "distance_reduction",
    "linear_assignment",
    "make_levels",
    "make_weight",
    "shifted",
]
