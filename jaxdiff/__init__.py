"""Fast diffusion models in JAX: denoisers, solvers, models and the methods that distil them.

`jaxdiff.load("runs/a")` reads a trained run back.
Submodules load on first use, so `import jaxdiff` costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "autoencoders",
    "conditions",
    "conventions",
    "data",
    "denoisers",
    "evaluation",
    "features",
    "methods",
    "models",
    "noise",
    "schedules",
    "solvers",
    "training",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name == "load":
        return importlib.import_module(f"{__name__}.training").load
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'jaxdiff' has no attribute {name!r}; it has load, {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), "load", *__all__])
