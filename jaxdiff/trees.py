"""Names and shapes of the arrays in a pytree, and where two pytrees differ in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import numpy as np

Tree: TypeAlias = Any  # an arbitrary pytree
Params: TypeAlias = Any  # a pytree of parameters, or of their shapes
Path: TypeAlias = Iterable[object]  # of a leaf, as jax.tree_util gives it
AnyArray: TypeAlias = np.ndarray | jax.Array  # on the host or on a device


def path_name(path: Path) -> str:
    """A pytree path as a/b/c."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def by_name(tree: Tree) -> dict[str, Any]:
    """The arrays of a pytree under their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves if hasattr(leaf, "shape")}


def size_of(tree: Tree) -> int:
    """The number of elements of all arrays, or shapes, of a pytree."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def mismatches(found: Params, wanted: Params, partial: bool = False) -> str:
    """How the arrays found differ from those wanted, the first five named; "" when they do not.

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
    return f"{len(wrong)} mismatches ({'; '.join(wrong[:5])}{more})" if wrong else ""
