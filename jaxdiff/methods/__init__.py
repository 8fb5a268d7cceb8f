"""Training algorithms, each a `Method`: a tuple of pure functions."""

from jaxdiff.methods.denoise import denoise
from jaxdiff.methods.method import Method

METHODS = {"denoise": denoise}

__all__ = ["METHODS", "Method", "denoise"]
