"""Noise: how training draws and weighs its levels."""

from jaxdiff.noise.levels import LEVELS, WEIGHTS, Levels, Weight, make_levels, make_weight, shifted

__all__ = ["LEVELS", "WEIGHTS", "Levels", "Weight", "make_levels", "make_weight", "shifted"]
