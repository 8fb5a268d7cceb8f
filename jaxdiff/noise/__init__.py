"""Noise: how training draws and weighs its levels."""

from jaxdiff.noise.levels import LEVELS, WEIGHTS, Levels, Weight, at_least, make_levels, make_weight, shifted

__all__ = ["LEVELS", "WEIGHTS", "Levels", "Weight", "at_least", "make_levels", "make_weight", "shifted"]
