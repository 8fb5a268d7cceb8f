"""Fast diffusion models in JAX: denoisers, solvers, models and the methods that distil them.

Submodules load on first use, so `import jaxdiff` costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"
__all__ = [
    "data",
    "denoisers",
    "evaluation",
    "features",
    "latents",
    "methods",
    "models",
    "noise",
    "solvers",
    "training",
    "weights",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'jaxdiff' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
