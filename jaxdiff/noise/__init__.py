"""Noise: sampling and weighting of noise levels, and assignment of noise to images."""

from jaxdiff.noise.assignment import linear_assignment
from jaxdiff.noise.immiscible import Coupling, assign, check_coupling, coupling, distance_reduction
from jaxdiff.noise.levels import (
    LEVELS,
    LOSS_WEIGHTS,
    LossWeight,
    SigmaSampler,
    at_least,
    loss_weight,
    make_levels,
    make_weight,
    shifted,
)

__all__ = [
    "LEVELS",
    "LOSS_WEIGHTS",
    "Coupling",
    "LossWeight",
    "SigmaSampler",
    "assign",
    "at_least",
    "check_coupling",
    "coupling",
    "distance_reduction",
    "linear_assignment",
    "loss_weight",
    "make_levels",
    "make_weight",
    "shifted",
]
