"""Stacks of blocks, unrolled or scanned, optionally rematerialised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from jaxdiff import placement
from jaxdiff.errors import pick
from jaxdiff.trees import Params, Tree

# what a rematerialised block saves for the backward pass besides its inputs
REMAT: dict[str, Callable[..., bool] | None] = {
    "full": None,  # nothing: least memory, one extra forward pass
    "dots": jax.checkpoint_policies.dots_saveable,  # outputs of matrix products and convolutions
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # of Dense layers, not of attention
}


def rematerialised(block: type[nn.Module], remat: bool | str, scanned: bool = False) -> type[nn.Module]:
    """The block with activations recomputed in the backward pass, except those that REMAT[remat] saves."""
    if not remat:
        return block
    policy = pick(REMAT, "full" if remat is True else remat, "remat policy")
    return nn.remat(block, prevent_cse=not scanned, policy=policy)


def block_stack(
    block: type[nn.Module],
    depth: int,
    *,
    scan: bool,
    remat: bool | str,
    name: str = "blocks",
    keep: bool = False,
    **fields: Any,
) -> Callable[..., Tree]:
    """`depth` blocks `carry = block(carry, c)`, named {name}_0, ...; if scanned, one {name} with a layer axis.

    Called as stack(carry, c, *each): block i gets item i of each further argument. With `keep` it also returns the
    carries of all blocks: a list or, if scanned, an array with a layer axis.
    """
    block = rematerialised(block, remat, scanned=scan)

    def unrolled(carry: Tree, c: Tree, *each: Tree) -> Tree:
        carries = []
        for i in range(depth):
            carry = block(**fields, name=f"{name}_{i}")(placement.along_tokens(carry), c, *(items[i] for items in each))
            carries.append(carry)
        return (carry, carries) if keep else carry

    def scanned(carry: Tree, c: Tree, *each: Tree) -> Tree:
        body = nn.scan(
            _ScanBody,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, *(0 for _ in each)),
            length=depth,
        )
        out = body(block=block, fields=tuple(fields.items()), keep=keep, name=name)(carry, c, *each)
        return out if keep else out[0]

    return scanned if scan else unrolled


class _ScanBody(nn.Module):
    """Adapts a block to the (carry, output) signature of nn.scan."""

    block: type[nn.Module]
    fields: tuple
    keep: bool = False

    @nn.compact
    def __call__(self, carry: Tree, c: Tree, *each: Tree) -> tuple[Tree, Tree]:
        carry = self.block(**dict(self.fields), name="block")(placement.along_tokens(carry), c, *each)
        return carry, carry if self.keep else None


def stack_blocks(params: Mapping[str, Params], depth: int, name: str = "blocks") -> dict[str, Params]:
    """Parameters of an unrolled `block_stack` in the layout of a scanned one."""
    layers = [params[f"{name}_{i}"] for i in range(depth)]
    rest = {key: value for key, value in params.items() if not key.startswith(f"{name}_")}
    return {**rest, name: {"block": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}}


def unstack_blocks(params: Mapping[str, Params], name: str = "blocks") -> dict[str, Params]:
    """The inverse of `stack_blocks`."""
    stacked = params[name]["block"]
    depth = len(jax.tree.leaves(stacked)[0])
    layers = {f"{name}_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(depth)}
    rest = {key: value for key, value in params.items() if key != name}
    return {**rest, **layers}


def unrolled_params(params: Params) -> Params:
    """The parameters with every scanned stack unstacked; others unchanged."""
    for name in [name for name, value in params.items() if isinstance(value, Mapping) and [*value] == ["block"]]:
        params = unstack_blocks(params, name)
    return params
