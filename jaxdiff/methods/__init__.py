"""Training algorithms, each a `Method`: a tuple of pure functions."""

from collections.abc import Callable

from jaxdiff.methods.consistency import consistency
from jaxdiff.methods.denoise import denoise
from jaxdiff.methods.emd import emd
from jaxdiff.methods.method import Method
from jaxdiff.methods.sfd import sfd

METHODS: dict[str, Callable[..., Method]] = {"consistency": consistency, "denoise": denoise, "emd": emd, "sfd": sfd}

__all__ = ["METHODS", "Method", "consistency", "denoise", "emd", "sfd"]
