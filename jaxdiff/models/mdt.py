"""MDTv2 (Gao et al. 2023): DiT with relative position biases and long skips, trained with masked tokens.

c and blocks as in DiT; every block adds a learned bias to the attention logits, indexed by the offset of two tokens
encoder in:  x_0 = patches W + P;  x <- block(x), every output becomes a skip
encoder out: x <- block([x, skip] W), last skip first;  then x + Q
decoder:     x <- block([x, x_0] W);  the final layer of DiT.  The position tables P and Q are learned
masking:     the encoder sees only the visible tokens; a learned token then fills the masked positions and, after Q is
             added, one more block (the side interpolater) predicts them; nothing is masked outside training
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxdiff.conditions import Cond, Signal
from jaxdiff.conventions import DDPM
from jaxdiff.models import checks, conditioning, dit, embeddings, initializers, stacks, taps, transformer

T = TypeVar("T", float, Array)
SIZES = {name: {**size, "decoder": 6 if name == "S" else 4} for name, size in dit.SIZES.items()}


def relative_index(rows: int, columns: int) -> np.ndarray:
    """The index [n, n] of the offset of tokens a, b in a grid: (ya-yb+rows-1) (2 columns-1) + xa-xb+columns-1."""
    y, x = np.divmod(np.arange(rows * columns), columns)
    return (y[:, None] - y + rows - 1) * (2 * columns - 1) + x[:, None] - x + columns - 1


def random_ranks(key: Array, batch: int, tokens: int) -> Int[Array, "b n"]:
    """A random permutation of the tokens of each example."""
    return jnp.argsort(jnp.argsort(jax.random.uniform(key, (batch, tokens)), axis=1), axis=1)


class Shared(NamedTuple):
    """Inputs that all blocks of a stack have in common."""

    c: dit.ModulationInput
    offset_index: Array  # [n n] or per example [b n n]
    mask: Array | None = None  # of keys [b n]
    skip: Array | None = None  # [b n d]


class Block(nn.Module):
    """DiT's block with a relative position bias, its input first joined with a skip if there is one."""

    heads: int
    offsets: int  # the table has 3 more unused rows, as in the public checkpoints
    mlp_ratio: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], shared: Shared, skip: Float[Array, "b n d"] | None = None
    ) -> Float[Array, "b n d"]:
        if shared.skip is not None:
            skip = shared.skip
        if skip is not None:
            joined = jnp.concatenate([x, skip], axis=-1)
            dense = nn.Dense(x.shape[-1], kernel_init=initializers.xavier, dtype=self.dtype, name="skip")
            x = taps.tap(self, "skip", dense(joined))
        init = nn.initializers.truncated_normal(0.02)
        table = self.param("position_bias", init, (self.offsets + 3, self.heads))
        bias = jnp.moveaxis(table[shared.offset_index], -1, -3)
        bias = bias if bias.ndim == 4 else bias[None]
        return dit.Block(self.heads, self.mlp_ratio, self.dtype, name="dit")(x, shared.c, bias, shared.mask)


class MDT(nn.Module):
    """MDTv2, by default XL/2 on 4-channel latents with 1000 classes; `MDT(**mdt.SIZES["S"])` for others.

    `noise_label`, cond, learn_variance, control, step_embed and `label_conditioning` (adaln, cross) are as in `DiT`.
    Position and bias tables belong to one token grid: `grid` is its side, or 0 to take it from the first input. The
    last `decoder` of the `depth` blocks form the decoder.

    With deterministic=False and an rng `mask`, a fraction of the tokens is masked, one for the whole batch, uniform in
    mask_ratio = (low, high); () builds a network without masking. mask_buckets = 0 keeps all tokens in place and
    masks them as keys; k > 0 removes them, the fraction rounded to one of k values, each with its own branch of the
    program: the same result for less work.
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
    label_conditioning: str = "adaln"
    class_tokens: int = 1
    control: conditioning.Control | None = None
    step_embed: str = ""
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT
    scan: bool = False
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = DDPM()

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        return conditioning.signals(self)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w k"]:
        checks.check_inputs("MDT", x, self.channels, self.patch, cond, self.signals())
        grid = x.shape[1] // self.patch, x.shape[2] // self.patch
        self._check(grid)
        c = dit.embed(self, x, noise_label, cond)
        tokens = transformer.patchify(taps.tap(self, "in", x), self.patch)
        tokens = nn.Dense(self.width, kernel_init=initializers.xavier, dtype=self.dtype, name="patches")(tokens)
        tokens = start = taps.tap(self, "embedded", tokens + self._positions("positions", grid))
        after = self._positions("decoder_positions", grid)
        modulation: dit.ModulationInput = c
        if self.num_classes and self.label_conditioning == "cross":
            modulation = c, conditioning.class_tokens(self, x, cond, self.width)
        shared = Shared(modulation, jnp.asarray(relative_index(*grid), jnp.int32))
        first = self.is_initializing()
        if first and self.mask_ratio:
            self._side(grid, self._fill(tokens), shared)  # creates their parameters
        if self.mask_ratio and self.has_rng("mask") and not (deterministic or first):
            tokens = self._encode_some(grid, tokens, shared, after)
        else:
            tokens = self._encode(grid, tokens, shared) + after
        tokens = self._stack("decode", self.decoder, grid)(tokens, shared._replace(skip=start))
        out = transformer.FinalLayer(self.patch**2 * self.channels * (1 + self.learn_variance), name="final")(tokens, c)
        return taps.tap(self, "out", transformer.unpatchify(out, self.patch, *x.shape[1:3]))

    def _encode(self, grid: tuple[int, int], tokens: Array, shared: Shared) -> Array:
        half = (self.depth - self.decoder) // 2
        tokens, kept = self._stack("encode_in", half, grid, keep=True)(tokens, shared)
        return self._stack("encode_out", half, grid)(tokens, shared, kept[::-1])

    def _stack(self, name: str, depth: int, grid: tuple[int, int], keep: bool = False) -> Callable[..., Any]:
        scan = self.scan and depth > 0
        fields = self._fields(grid)
        return stacks.block_stack(Block, depth, scan=scan, remat=self.remat, name=name, keep=keep, **fields)

    def _fields(self, grid: tuple[int, int]) -> dict[str, Any]:
        offsets = math.prod(2 * side - 1 for side in grid)
        return {"heads": self.heads, "offsets": offsets, "mlp_ratio": self.mlp_ratio, "dtype": self.dtype}

    def _positions(self, name: str, grid: tuple[int, int]) -> Float[Array, "n d"]:
        table = self.param(name, lambda key: jnp.asarray(embeddings.sincos_positions(*grid, self.width)))
        return table.reshape(-1, self.width).astype(self.dtype)

    # ------------------------------------------------------------------------------------------ masking

    def _encode_some(self, grid: tuple[int, int], tokens: Array, shared: Shared, after: Array) -> Array:
        """The decoder's input when a random subset of the tokens is masked."""
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
            tokens = self._encode(grid, tokens, shared._replace(mask=seen))
            tokens = jnp.where(seen[..., None], tokens, self._fill(tokens))
        tokens = tokens + after
        return jnp.where(seen[..., None], tokens, self._side(grid, tokens, shared))

    def _kept(self, n: int, share: T) -> T:
        """The number of visible tokens of n: floor(n (1 - ratio)), ratio = low + (high - low) share."""
        low, high = self.mask_ratio
        return n * (1 - low - (high - low) * share) // 1

    def _encode_first(self, tokens: Array, shared: Shared, ranks: Array, *, count: int, grid: tuple[int, int]) -> Array:
        """Encode only the tokens of the first `count` ranks and put them back; fill the others with the mask token."""
        places = jnp.argsort(ranks, axis=1)[:, :count]
        some = jnp.take_along_axis(tokens, places[..., None], axis=1)
        index = shared.offset_index[places[:, :, None], places[:, None, :]]
        some = self._encode(grid, some, shared._replace(offset_index=index))
        rest = self._fill(tokens[:, count:])
        return jnp.take_along_axis(jnp.concatenate([some, rest], axis=1), ranks[..., None], axis=1)

    def _fill(self, tokens: Array) -> Array:
        """The learned mask token at every position."""
        token = self.param("mask_token", nn.initializers.normal(0.02), (self.width,))
        return jnp.broadcast_to(token.astype(self.dtype), tokens.shape)

    def _side(self, grid: tuple[int, int], tokens: Array, shared: Shared) -> Array:
        block = stacks.rematerialised(Block, self.remat)
        return block(**self._fields(grid), name="side")(tokens, shared)

    # ------------------------------------------------------------------------------------------ messages

    def _check(self, grid: tuple[int, int]) -> None:
        encoder = self.depth - self.decoder
        if encoder < 2 or encoder % 2 or self.decoder < 0:
            raise ValueError(
                f"MDT needs an even number of encoder blocks (depth - decoder), at least 2, got depth={self.depth}, "
                f"decoder={self.decoder}"
            )
        if self.label_conditioning == "token":
            raise ValueError("MDT's tokens lie on a grid: label_conditioning must be 'adaln' or 'cross', got 'token'")
        ratio = tuple(self.mask_ratio)
        if ratio and not (len(ratio) == 2 and 0 < ratio[0] <= ratio[1] < 1):
            raise ValueError(
                f"mask_ratio must be (low, high) with 0 < low <= high < 1, or () for no masking, got {ratio}"
            )
        known = (self.grid, self.grid) if self.grid else grid
        if self.has_variable("params", "positions"):
            known = self.get_variable("params", "positions").shape[:2]
        if grid != known:
            sides = [f"{rows * self.patch}x{columns * self.patch}" for rows, columns in (grid, known)]
            raise ValueError(
                f"this MDT has position tables for {known[0]}x{known[1]} tokens, inputs of {sides[1]}, got {sides[0]}; "
                "use that size, or train another MDT starting from this one (train.init_from)"
            )
