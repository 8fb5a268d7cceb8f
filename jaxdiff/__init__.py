"""Fast diffusion models in JAX: denoisers, solvers, models and the methods that distil them.

`jaxdiff.load("runs/a")` reads a trained run back; `jaxdiff.Teacher` and `jaxdiff.save_teacher` bring a teacher of
your own (docs/own_teacher.md).
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
_NAMES = {"load": "training", "save_teacher": "training", "Teacher": "teacher", "on_host": "teacher"}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'jaxdiff' has no attribute {name!r}; it has {', '.join([*_NAMES, *__all__])}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES, *__all__])
