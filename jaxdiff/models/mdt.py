"""MDTv2 (Gao et al. 2023): DiT with relative position biases and long skips, trained with part of its tokens hidden.

c and blocks as in DiT; in every block a trained table adds to the attention logits, by the offset between two tokens
encoder in:  x_0 = patches W + P;  x <- block(x), each output kept
encoder out: x <- block([x, kept] W), the last kept first;  then x + Q
decoder:     x <- block([x, x_0] W);  the final layer of DiT.  P and Q, tables of positions, are trained
hidden tokens: the encoder sees the others alone, then a trained token takes their place and after adding Q one more
               block, the side interpolater, replaces what stands there; nothing is hidden outside training
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxdiff.models import conditioning, dit, layers
from jaxdiff.models.layers import Cond, Dtype

SIZES = {name: {**size, "decoder": 6 if name == "S" else 4} for name, size in dit.SIZES.items()}


def relative_index(rows: int, columns: int) -> np.ndarray:
    """The number of the offset of tokens a, b of a grid, [n, n]: (ya-yb+rows-1) (2 columns-1) + xa-xb+columns-1."""
    y, x = np.divmod(np.arange(rows * columns), columns)
    return (y[:, None] - y + rows - 1) * (2 * columns - 1) + x[:, None] - x + columns - 1


def random_ranks(key: Array, batch: int, tokens: int) -> Int[Array, "b n"]:
    """Each example's tokens numbered in a random order."""
    return jnp.argsort(jnp.argsort(jax.random.uniform(key, (batch, tokens)), axis=1), axis=1)


class Block(nn.Module):
    """DiT's block with a bias by relative position, after joining its input with a skip where there is one.

    shared: `c` as `dit.Block` takes it; `index` of the offsets, [n n] or of each example [b n n]; `mask` [b n] of keys,
    or None; and `skip` [b n d] where all blocks of a stack have the same.
    """

    heads: int
    offsets: int  # 3 rows more than these are stored, as public checkpoints have them; they are not used
    mlp_ratio: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], shared: dict[str, Any], skip: Float[Array, "b n d"] | None = None
    ) -> Float[Array, "b n d"]:
        skip = shared.get("skip", skip)
        if skip is not None:
            joined = jnp.concatenate([x, skip], axis=-1)
            dense = nn.Dense(x.shape[-1], kernel_init=layers.xavier, dtype=self.dtype, name="skip")
            x = layers.tap(self, "skip", dense(joined))
        init = nn.initializers.truncated_normal(0.02)
        table = self.param("position_bias", init, (self.offsets + 3, self.heads))
        bias = jnp.moveaxis(table[shared["index"]], -1, -3)
        bias = bias if bias.ndim == 4 else bias[None]
        return dit.Block(self.heads, self.mlp_ratio, self.dtype, name="dit")(x, shared["c"], bias, shared["mask"])


class MDT(nn.Module):
    """MDTv2, by default XL/2 on 4-channel latents with 1000 classes; `MDT(**mdt.SIZES["S"])` for others.

    `noise_label`, cond, learn_variance, control, step_embed and `semantic` (adaln, cross) are as in `DiT`. Tables of
    positions and biases belong to a grid of tokens: `grid` is its side, or 0 for that of the first input. Of `depth`
    blocks the last `decoder` decode.

    With deterministic=False and an rng `mask` a share of the tokens is hidden, one share for the whole batch, uniform
    in mask_ratio = (low, high); () makes a network without hiding. mask_buckets = 0 keeps all tokens in place and masks
    the hidden ones as keys; k > 0 leaves them out, the share rounded to one of k values, each with its own branch of
    the program: the same result for less work.
    """

    channels: int = 4
    patch: int = 2
    depth: int = 28
    width: int = 1152
    heads: int = 16
    decoder: int = 4
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    learn_variance: bool = True
    grid: int = 0
    mask_ratio: tuple[float, ...] = (0.3, 0.5)
    mask_buckets: int = 0
    semantic: str = "adaln"
    class_tokens: int = 1
    control: conditioning.Control | None = None
    step_embed: str = ""
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of layers.REMAT
    scan: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: Any, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w k"]:
        keys = ("label",) * bool(self.num_classes) + ("control",) * bool(self.control)
        keys += ("step",) * bool(self.step_embed)
        layers.check_inputs("MDT", x, self.channels, self.patch, cond, keys)
        grid = x.shape[1] // self.patch, x.shape[2] // self.patch
        self._check(grid)
        c = dit.embed(self, x, noise_label, cond)
        tokens = layers.patchify(layers.tap(self, "in", x), self.patch)
        tokens = nn.Dense(self.width, kernel_init=layers.xavier, dtype=self.dtype, name="patches")(tokens)
        tokens = start = layers.tap(self, "embedded", tokens + self._positions("positions", grid))
        after = self._positions("decoder_positions", grid)
        told: Any = c
        if self.num_classes and self.semantic == "cross":
            told = c, conditioning.class_tokens(self, x, cond, self.width)
        shared = {"c": told, "index": jnp.asarray(relative_index(*grid), jnp.int32), "mask": None}
        first = self.is_initializing()
        if first and self.mask_ratio:
            self._side(grid, self._fill(tokens), shared)  # makes their parameters
        if self.mask_ratio and self.has_rng("mask") and not (deterministic or first):
            tokens = self._encode_some(grid, tokens, shared, after)
        else:
            tokens = self._encode(grid, tokens, shared) + after
        tokens = self._stack("decode", self.decoder, grid)(tokens, {**shared, "skip": start})
        out = layers.FinalLayer(self.patch**2 * self.channels * (1 + self.learn_variance), name="final")(tokens, c)
        return layers.tap(self, "out", layers.unpatchify(out, self.patch, *x.shape[1:3]))

    def _encode(self, grid: tuple[int, int], tokens: Array, shared: dict[str, Any]) -> Array:
        half = (self.depth - self.decoder) // 2
        tokens, kept = self._stack("encode_in", half, grid, keep=True)(tokens, shared)
        return self._stack("encode_out", half, grid)(tokens, shared, kept[::-1])

    def _stack(self, name: str, depth: int, grid: tuple[int, int], keep: bool = False) -> Callable[..., Any]:
        scan = self.scan and depth > 0
        fields = self._fields(grid)
        return layers.block_stack(Block, depth, scan=scan, remat=self.remat, name=name, keep=keep, **fields)

    def _fields(self, grid: tuple[int, int]) -> dict[str, Any]:
        offsets = math.prod(2 * side - 1 for side in grid)
        return {"heads": self.heads, "offsets": offsets, "mlp_ratio": self.mlp_ratio, "dtype": self.dtype}

    def _positions(self, name: str, grid: tuple[int, int]) -> Float[Array, "n d"]:
        table = self.param(name, lambda key: jnp.asarray(layers.sincos_positions(*grid, self.width)))
        return table.reshape(-1, self.width).astype(self.dtype)

    # ------------------------------------------------------------------------------------------ hidden tokens

    def _encode_some(self, grid: tuple[int, int], tokens: Array, shared: dict[str, Any], after: Array) -> Array:
        """What the decoder gets when a random part of the tokens is hidden from the encoder."""
        b, n, _ = tokens.shape
        draw, order = jax.random.split(self.make_rng("mask"))
        share, ranks = jax.random.uniform(draw), random_ranks(order, b, n)
        if self.mask_buckets:
            which = (share * self.mask_buckets).astype(jnp.int32)
            counts = [int(self._kept(n, (i + 0.5) / self.mask_buckets)) for i in range(self.mask_buckets)]
            seen = ranks < jnp.asarray(counts, jnp.int32)[which]
            branches = [partial(MDT._encode_first, count=count, grid=grid) for count in counts]
            tokens = nn.switch(which, branches, self, tokens, shared, ranks)
        else:
            seen = ranks < self._kept(n, share).astype(jnp.int32)
            tokens = self._encode(grid, tokens, {**shared, "mask": seen})
            tokens = jnp.where(seen[..., None], tokens, self._fill(tokens))
        tokens = tokens + after
        return jnp.where(seen[..., None], tokens, self._side(grid, tokens, shared))

    def _kept(self, n: int, share: Any) -> Any:
        """How many of n tokens are seen: floor(n (1 - ratio)), the ratio `share` of the way from low to high."""
        low, high = self.mask_ratio
        return n * (1 - low - (high - low) * share) // 1

    def _encode_first(
        self, tokens: Array, shared: dict[str, Any], ranks: Array, *, count: int, grid: tuple[int, int]
    ) -> Array:
        """The tokens of the first `count` ranks encoded by themselves and put back, the others filled."""
        places = jnp.argsort(ranks, axis=1)[:, :count]
        some = jnp.take_along_axis(tokens, places[..., None], axis=1)
        index = shared["index"][places[:, :, None], places[:, None, :]]
        some = self._encode(grid, some, {**shared, "index": index})
        rest = self._fill(tokens[:, count:])
        return jnp.take_along_axis(jnp.concatenate([some, rest], axis=1), ranks[..., None], axis=1)

    def _fill(self, tokens: Array) -> Array:
        """The trained token that stands for hidden ones, in place of all the given."""
        token = self.param("mask_token", nn.initializers.normal(0.02), (self.width,))
        return jnp.broadcast_to(token.astype(self.dtype), tokens.shape)

    def _side(self, grid: tuple[int, int], tokens: Array, shared: dict[str, Any]) -> Array:
        block = layers.rematerialised(Block, self.remat)
        return block(**self._fields(grid), name="side")(tokens, shared)

    # ------------------------------------------------------------------------------------------ messages

    def _check(self, grid: tuple[int, int]) -> None:
        encoder = self.depth - self.decoder
        if encoder < 2 or encoder % 2 or self.decoder < 0:
            raise ValueError(
                f"MDT needs an even number of encoder blocks, depth - decoder, and at least 2, got depth={self.depth}, "
                f"decoder={self.decoder}"
            )
        if self.semantic == "token":
            raise ValueError(
                "MDT's tokens have places in a grid, which a class has not: semantic is 'adaln' or 'cross', got 'token'"
            )
        ratio = tuple(self.mask_ratio)
        if ratio and not (len(ratio) == 2 and 0 < ratio[0] <= ratio[1] < 1):
            raise ValueError(f"mask_ratio is (low, high) with 0 < low <= high < 1, or () for no hiding, got {ratio}")
        known = (self.grid, self.grid) if self.grid else grid
        if self.has_variable("params", "positions"):
            known = self.get_variable("params", "positions").shape[:2]
        if grid != known:
            sides = [f"{rows * self.patch}x{columns * self.patch}" for rows, columns in (grid, known)]
            raise ValueError(
                f"this MDT has tables for {known[0]}x{known[1]} tokens, images of {sides[1]}, got {sides[0]}; its "
                "positions belong to one size: give that, or build and train one for the other"
            )
