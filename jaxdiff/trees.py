"""Names and shapes of the arrays in a pytree, and where two pytrees differ in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def path_name(path: Any) -> str:
    """A pytree path as a/b/c."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def by_name(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree under their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves if hasattr(leaf, "shape")}


def misfits(found: Mapping[str, Any], wanted: Mapping[str, Any], partial: bool = False) -> str:
    """How the arrays found differ from those wanted, the first five told; "" when they do not.

    With `partial`, arrays may be missing.
    """
    wrong = [
        f"{name} is {tuple(found[name].shape)}, expected {tuple(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in found and tuple(found[name].shape) != tuple(leaf.shape)
    ]
    wrong += [f"{name} is missing" for name in wanted if name not in found and not partial]
    wrong += [f"{name} is unknown" for name in found if name not in wanted]
    more = "; ..." if len(wrong) > 5 else ""
    return f"{len(wrong)} misfits ({'; '.join(wrong[:5])}{more})" if wrong else ""
