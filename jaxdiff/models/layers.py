"""Pieces shared by the networks: taps, embeddings, resampling, modulation, attention, patches, checks.

Noise labels, sinusoids, modulation and norms' statistics stay in float32; only the wide products run in `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from jaxdiff.errors import pick

Dtype = Any
Cond = Mapping[str, Any] | None

BATCH_AXES = ("data", "fsdp")  # of a mesh: those that split the batch

xavier = nn.initializers.xavier_uniform()
zeros = nn.initializers.zeros


# ------------------------------------------------------------------------------------------ checking inputs


def check_inputs(model: str, x: Array, channels: int, multiple: int, cond: Cond, keys: tuple[str, ...]) -> None:
    """Shapes and condition keys a network can take, checked while tracing."""
    if x.ndim != 4 or x.shape[-1] != channels:
        raise ValueError(
            f"{model} with channels={channels} takes x of shape [b, h, w, {channels}] (NHWC), got {x.shape}"
        )
    if x.shape[1] % multiple or x.shape[2] % multiple:
        raise ValueError(
            f"{model} needs height and width divisible by {multiple}, got {x.shape[1]}x{x.shape[2]}; pad or resize it"
        )
    check_keys(model, cond, keys)
    check_text_mask(cond)


def check_text_mask(cond: Cond) -> None:
    """The mask says of each token of the text whether it is one."""
    if cond is None or "text" not in cond or "text_mask" not in cond:
        return
    text, mask = jnp.shape(cond["text"]), jnp.shape(cond["text_mask"])
    if len(text) == 3 and mask != text[:2]:
        raise ValueError(
            f"cond['text_mask'] must be [b, l] = {text[:2]}, one value a text token, got {mask}; pad or cut one of them"
        )


def check_keys(model: str, cond: Cond, keys: tuple[str, ...]) -> None:
    """Every condition given is one the network uses."""
    for key in cond or {}:
        if key not in keys:
            allowed = f"it takes {', '.join(keys)}" if keys else "it is unconditional"
            raise ValueError(f"{model} has no use for cond[{key!r}]; {allowed}")


def noise_labels(noise_label: Any, x: Array) -> Float[Array, " b"]:
    """The noise label as float32, one per example."""
    return jnp.broadcast_to(jnp.asarray(noise_label, jnp.float32).reshape(-1), x.shape[:1])


# ------------------------------------------------------------------------------------------ taps

TAP = "tap:"  # keeps the names of taps apart from those of submodules


def tap(module: nn.Module, name: str, value: Any) -> Any:
    """Returns `value`, offered to `jaxdiff.features` as <path of the module>/<name>; nothing when nobody asks.

    A function is called only when somebody asks, for what the network itself does not compute.
    """
    if module.is_mutable_collection("intermediates"):
        sown = value() if callable(value) else value
        module.sow("intermediates", TAP + name, sown, init_fn=lambda: None, reduce_fn=lambda _, new: new)
    return value


def tap_heads(
    module: nn.Module, mask: Array | None = None, prefix: str = "", bias: Array | None = None, **heads: Array
) -> None:
    """Taps of q, k, v [b, n, heads, d] as [b, n, heads d], and of q with k as `map`, attention [b, heads, n, m]."""
    for name, value in heads.items():
        tap(module, prefix + name, lambda value=value: value.reshape(*value.shape[:2], -1))
    if "q" in heads and "k" in heads:
        tap(module, f"{prefix}map", lambda: attention_map(heads["q"], heads["k"], mask, bias))


def attention_map(
    q: Float[Array, "b n h d"], k: Float[Array, "b m h d"], mask: Array | None = None, bias: Array | None = None
) -> Float[Array, "b h n m"]:
    """softmax(q k' / sqrt(d) + bias) in float32, which the fused attention never holds.

    `mask` and `bias` broadcast to [b, h, n, m].
    """
    logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=jnp.float32) / np.float32(np.sqrt(q.shape[-1]))
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    return jax.nn.softmax(logits if mask is None else jnp.where(mask, logits, -jnp.inf))


# ------------------------------------------------------------------------------------------ embeddings


def sinusoid(value: Float[Array, " b"], width: int, endpoint: bool = False) -> Float[Array, "b {width}"]:
    """[cos(v f), sin(v f)] with f_k = 10000^(-k / (width/2 - endpoint)), in float32."""
    half = width // 2
    frequencies = 10000.0 ** (-np.arange(half) / (half - endpoint))
    angles = value[:, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


POSITIONS = {"interpolate": 0, "extrapolate": 0, "bicubic": 0}


def sincos_positions(
    height: int, width: int, features: int, base: int = 0, kind: str = "interpolate"
) -> Float[np.ndarray, "{height} {width} {features}"]:
    """Fixed 2-D positions [height, width, features]: [e(column), e(row)].

    e(p) = [sin(p w), cos(p w)], w_k = 10000^(-4k/features). p counts tokens from 0; with `base`, the side of the grid
    of training, a grid of another size gets p = i base / count (interpolate), goes on counting (extrapolate), or has
    the table of training resized to it (bicubic).
    """
    pick(POSITIONS, kind, "way to resample positions")
    if base and kind == "bicubic":
        table = sincos_positions(base, base, features)
        return np.einsum("ia,jb,abd->ijd", _cubic(height, base), _cubic(width, base), table).astype(np.float32)
    base = 0 if kind == "extrapolate" else base
    omega = 10000.0 ** (-np.arange(features // 4) / (features // 4))

    def encode(count: int) -> np.ndarray:
        angles = (np.arange(count) * (base / count if base else 1.0))[:, None] * omega
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)

    columns = np.broadcast_to(encode(width)[None, :], (height, width, features // 2))
    rows = np.broadcast_to(encode(height)[:, None], (height, width, features // 2))
    return np.concatenate([columns, rows], axis=-1).astype(np.float32)


def _cubic(count: int, base: int) -> Float[np.ndarray, "{count} {base}"]:
    """The matrix that resizes `base` values to `count` by Keys' cubic kernel, pixels being areas."""
    centres = (np.arange(count) + 0.5) * base / count - 0.5
    d = np.abs(centres[:, None] - np.arange(base)) / max(1.0, base / count)
    near, far = (1.5 * d - 2.5) * d**2 + 1, ((2.5 - 0.5 * d) * d - 4) * d + 2
    weights = np.where(d < 1, near, np.where(d < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


class EmbedMLP(nn.Module):
    """Dense, SiLU, Dense: how timesteps, pooled text and other vectors enter the modulation, in float32."""

    features: int
    kernel_init: Callable = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, "b e"]:
        x = nn.Dense(self.features, kernel_init=self.kernel_init, name="in")(x)
        return nn.Dense(self.features, kernel_init=self.kernel_init, name="out")(nn.silu(x))


STEP_INITS = ("", "zero", "reference")


class StepEmbed(nn.Module):
    """cond["step"], the number of timestamps a few-step student walks (or any scalar), as a vector, in float32.

    start "zero" ends in a zero Dense, so the network starts as if it had no such condition; "reference" does not.
    """

    features: int
    start: str = "zero"

    @nn.compact
    def __call__(self, x: Array, cond: Cond) -> Float[Array, "b e"]:
        e = sinusoid(step_value(x, cond, self.start), 256)
        e = nn.silu(nn.Dense(self.features, kernel_init=xavier, name="in")(e))
        return nn.Dense(self.features, kernel_init=zeros if self.start == "zero" else xavier, name="out")(e)


def step_value(x: Array, cond: Cond, init: str) -> Float[Array, " b"]:
    """cond["step"] as float32, one per example, for a network whose step_embed is `init`."""
    if init not in STEP_INITS:
        raise ValueError(f"step_embed is one of {', '.join(map(repr, STEP_INITS))}, got {init!r}")
    if "step" not in (cond or {}):
        raise ValueError(f"a network with step_embed={init!r} needs cond['step'], the number of timestamps of the walk")
    return noise_labels(cond["step"], x)  # type: ignore[index]


# ------------------------------------------------------------------------------------------ transformers


def patchify(x: Float[Array, "b h w c"], patch: int) -> Float[Array, "b n d"]:
    """Tokens in row-major order, each a patch flattened as (row, column, channel)."""
    return rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=patch, q=patch)


def unpatchify(tokens: Float[Array, "b n d"], patch: int, height: int, width: int) -> Float[Array, "b h w c"]:
    """The inverse of `patchify` for an image of height x width pixels."""
    return rearrange(
        tokens, "b (h w) (p q c) -> b (h p) (w q) c", p=patch, q=patch, h=height // patch, w=width // patch
    )


def normalize(x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """LayerNorm without scale or bias, eps 1e-6, in float32."""
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)


def modulate(
    x: Float[Array, "b n d"], shift: Float[Array, "b d"], scale: Float[Array, "b d"], dtype: Dtype
) -> Float[Array, "b n d"]:
    """normalize(x) (1 + scale) + shift, computed in float32, returned in dtype."""
    return (normalize(x) * (1 + scale[:, None]) + shift[:, None]).astype(dtype)


class Modulation(nn.Module):
    """SiLU then a Dense, zero-initialised (adaLN-zero), split into `parts` vectors, in float32."""

    parts: int
    features: int
    kernel_init: Callable = zeros

    @nn.compact
    def __call__(self, c: Float[Array, "b d"]) -> list[Float[Array, "b e"]]:
        out = nn.Dense(self.parts * self.features, kernel_init=self.kernel_init, name="dense")(nn.silu(c))
        return jnp.split(out, self.parts, axis=-1)


class MLP(nn.Module):
    """Dense to ratio * d, tanh-GELU, Dense back."""

    ratio: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        d = x.shape[-1]
        x = nn.Dense(int(self.ratio * d), kernel_init=xavier, dtype=self.dtype, name="in")(x)
        x = tap(self, "inner", nn.gelu(x))
        return tap(self, "out", nn.Dense(d, kernel_init=xavier, dtype=self.dtype, name="out")(x))


def attend(
    q: Float[Array, "b n h d"],
    k: Float[Array, "b m h d"],
    v: Float[Array, "b m h d"],
    bias: Any = None,
    mask: Any = None,
) -> Float[Array, "b n h d"]:
    """softmax(q k' / sqrt(d) + bias) v, by the fused kernel of the platform where it has one for these arguments."""
    plain = bias is None and mask is None
    kernel = fused(_platform(), q.dtype, q.shape[-1], plain)
    return jax.nn.dot_product_attention(q, k, v, bias, mask, implementation=kernel)


def fused(platform: str, dtype: Dtype, width: int, plain: bool) -> Literal["cudnn", "xla"]:
    """Which attention a platform shall use: cuDNN's in half precision, heads of up to 128 in eights, nothing masked."""
    able = dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= 128 and plain
    return "cudnn" if platform == "cuda" and able else "xla"


def _platform() -> str:
    """The platform that programs are made for, "cuda" apart from other GPUs."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" and "cuda" in jax.devices()[0].client.platform_version else backend


def qkv_heads(
    x: Array, heads: int, dtype: Dtype, kernel_init: Callable = xavier, name: str = "qkv", **kwargs: Any
) -> list[Array]:
    """Queries, keys, values [b, n, heads, d/heads] from one kernel [d, 3, heads, d/heads], which shards over heads."""
    features = (3, heads, x.shape[-1] // heads)
    qkv = nn.DenseGeneral(features, kernel_init=kernel_init, dtype=dtype, name=name, **kwargs)(x)
    return [qkv[:, :, i] for i in range(3)]


def merge_heads(
    x: Array, features: int, dtype: Dtype, kernel_init: Callable = xavier, name: str = "out", **kwargs: Any
) -> Array:
    """The output projection of attention, kernel [heads, d/heads, features]."""
    return nn.DenseGeneral(features, axis=(-2, -1), kernel_init=kernel_init, dtype=dtype, name=name, **kwargs)(x)


class SelfAttention(nn.Module):
    """Multi-head attention of a token sequence with itself; a bias is added to the logits, a mask hides keys."""

    heads: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        bias: Float[Array, "#b {self.heads} n n"] | None = None,
        mask: Bool[Array, "b n"] | None = None,
    ) -> Float[Array, "b n d"]:
        q, k, v = qkv_heads(x, self.heads, self.dtype)
        mask = None if mask is None else mask[:, None, None]
        tap_heads(self, mask, bias=bias, q=q, k=k, v=v)
        gathered = attend(q, k, v, bias, mask)
        return tap(self, "out", merge_heads(gathered, x.shape[-1], self.dtype))


class CrossAttention(nn.Module):
    """Attention of image tokens to text tokens, in which the mask may hide some."""

    heads: int
    use_bias: bool = True  # of queries, keys and values
    kernel_init: Callable = xavier
    out_init: Callable = zeros
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n c"], text: Float[Array, "b l d"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b n c"]:
        c = x.shape[-1]
        dense = partial(nn.DenseGeneral, use_bias=self.use_bias, kernel_init=self.kernel_init, dtype=self.dtype)
        q = dense((self.heads, c // self.heads), name="q")(x)
        kv = dense((2, self.heads, c // self.heads), name="kv")(text)
        mask = None if mask is None else mask[:, None, None]
        tap_heads(self, mask, q=q, k=kv[:, :, 0], v=kv[:, :, 1])
        gathered = attend(q, kv[:, :, 0], kv[:, :, 1], mask=mask)
        return tap(self, "out", merge_heads(gathered, c, self.dtype, self.out_init))


class FinalLayer(nn.Module):
    """Modulated norm, then a zero-initialised Dense to patches, in float32."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], c: Float[Array, "b e"]) -> Float[Array, "b n f"]:
        shift, scale = Modulation(2, x.shape[-1], name="modulation")(c)
        return nn.Dense(self.features, kernel_init=zeros, name="out")(modulate(x, shift, scale, jnp.float32))


def along_batch(tree: Any) -> Any:
    """Activations [b ...] split as the batch is, in a program of several devices whose mesh is set.

    Left to itself the compiler may split the width of the tokens like the parameters, and exchange them at every step.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in BATCH_AXES if name in mesh.axis_names)
    if not axes or mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, jax.sharding.PartitionSpec(axes))


# what a rematerialised block keeps for the backward pass beside its inputs
REMAT: dict[str, Any] = {
    "full": None,  # nothing: least memory, one more forward pass
    "dots": jax.checkpoint_policies.dots_saveable,  # results of products and convolutions: recomputes elementwise work
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # of Dense layers, not of attention
}


def rematerialised(block: type[nn.Module], remat: bool | str, scanned: bool = False) -> type[nn.Module]:
    """The block with activations computed again in the backward pass, apart from those that REMAT[remat] keeps."""
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
) -> Callable[..., Any]:
    """`depth` blocks `carry = block(carry, c)` in a row, named {name}_0..; scanned: one {name} with a layer axis.

    Called as stack(carry, c, *each): of each further argument, block i gets item i. With `keep` it returns the last
    carry and those of all blocks, a list or, scanned, an array with a layer axis.
    """
    block = rematerialised(block, remat, scanned=scan)

    def unrolled(carry: Any, c: Any, *each: Any) -> Any:
        carries = []
        for i in range(depth):
            carry = block(**fields, name=f"{name}_{i}")(along_batch(carry), c, *(items[i] for items in each))
            carries.append(carry)
        return (carry, carries) if keep else carry

    def scanned(carry: Any, c: Any, *each: Any) -> Any:
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
    """Gives a block the (carry, output) pair that nn.scan wants."""

    block: Any
    fields: tuple
    keep: bool = False

    @nn.compact
    def __call__(self, carry: Any, c: Any, *each: Any) -> tuple[Any, Any]:
        carry = self.block(**dict(self.fields), name="block")(along_batch(carry), c, *each)
        return carry, carry if self.keep else None


def stack_blocks(params: Mapping[str, Any], depth: int, name: str = "blocks") -> dict[str, Any]:
    """Parameters of an unrolled `block_stack` in the layout of a scanned one."""
    layers = [params[f"{name}_{i}"] for i in range(depth)]
    rest = {key: value for key, value in params.items() if not key.startswith(f"{name}_")}
    return {**rest, name: {"block": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}}


def unstack_blocks(params: Mapping[str, Any], name: str = "blocks") -> dict[str, Any]:
    """The inverse of `stack_blocks`."""
    stacked = params[name]["block"]
    depth = len(jax.tree.leaves(stacked)[0])
    layers = {f"{name}_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(depth)}
    return {**{key: value for key, value in params.items() if key != name}, **layers}


# ------------------------------------------------------------------------------------------ convolutions


def loop_conv(x: Array, kernel: Array, strides: Any, padding: Any, **kwargs: Any) -> Array:
    """`lax.conv_general_dilated` whose gradients on CPU are an ordinary convolution and matrix products.

    XLA on CPU runs its own convolution gradients an order of magnitude slower inside loops and branches; these run
    there as fast as outside. Other platforms keep theirs. Reverse mode only: `jax.jvp` refuses it. Convolutions that
    are strided, dilated or grouped, or padded by name, are passed on unchanged.
    """
    dilated = any(step != 1 for name in ("lhs_dilation", "rhs_dilation") for step in kwargs.get(name) or (1,))
    grouped = kwargs.get("feature_group_count", 1) != 1 or kwargs.get("batch_group_count", 1) != 1
    if dilated or grouped or isinstance(padding, str) or any(stride != 1 for stride in strides):
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **kwargs)
    return _loop_conv(x, kernel, tuple((int(low), int(high)) for low, high in padding), kwargs.get("precision"))


def _conv(x: Array, kernel: Array, padding: Any, precision: Any) -> Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=layout, precision=precision)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _loop_conv(x: Array, kernel: Array, padding: Any, precision: Any) -> Array:
    return _conv(x, kernel, padding, precision)


def _loop_conv_forward(x: Array, kernel: Array, padding: Any, precision: Any) -> tuple[Array, tuple[Array, Array]]:
    return _conv(x, kernel, padding, precision), (x, kernel)


def _loop_conv_backward(padding: Any, precision: Any, inputs: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    def products(x: Array, kernel: Array, g: Array) -> tuple[Array, Array]:
        room = [(size - 1 - low, size - 1 - high) for size, (low, high) in zip(kernel.shape, padding, strict=False)]
        flipped = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
        padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
        (rows, columns), (_, h, w, _) = kernel.shape[:2], g.shape
        windows = [[padded[:, i : i + h, j : j + w] for j in range(columns)] for i in range(rows)]
        weight = [[jnp.einsum("bhwc,bhwf->cf", window, g, precision=precision) for window in row] for row in windows]
        return _conv(g, flipped, room, precision), jnp.stack([jnp.stack(row) for row in weight])

    def native(x: Array, kernel: Array, g: Array) -> tuple[Array, Array]:
        return jax.vjp(lambda x, kernel: _conv(x, kernel, padding, precision), x, kernel)[1](g)

    return jax.lax.platform_dependent(*inputs, g, cpu=products, default=native)


_loop_conv.defvjp(_loop_conv_forward, _loop_conv_backward)


def downsample(
    x: Float[Array, "b h w c"], taps: tuple[int, ...] = (1, 1), padding: int | None = None
) -> Float[Array, "b k l c"]:
    """Halve the resolution with a separable filter; taps (1, 1) average 2x2 pixels."""
    if taps == (1, 1):  # not by strided slices: libtpu 0.0.51 aborts on some of them inside loops
        quads = rearrange(x, "b (h p) (w q) c -> p q b h w c", p=2, q=2)
        return (quads[0, 0] + quads[0, 1] + quads[1, 0] + quads[1, 1]) / 4
    pad = (len(taps) - 1) // 2 if padding is None else padding
    return _depthwise(x, taps, 1.0, strides=(2, 2), padding=((pad, pad),) * 2)


def upsample(x: Float[Array, "b h w c"], taps: tuple[int, ...] = (1, 1)) -> Float[Array, "b k l c"]:
    """Double the resolution with a separable filter; taps (1, 1) repeat pixels."""
    if taps == (1, 1):
        return x.repeat(2, axis=1).repeat(2, axis=2)
    pad = len(taps) - 1 - (len(taps) - 1) // 2
    return _depthwise(x, taps, 4.0, lhs_dilation=(2, 2), padding=((pad, pad),) * 2)


def _depthwise(x: Array, taps: tuple[int, ...], gain: float, strides: tuple[int, int] = (1, 1), **kwargs: Any) -> Array:
    outer = np.outer(taps, taps)
    kernel = jnp.asarray(gain * outer / outer.sum(), x.dtype)[:, :, None, None].repeat(x.shape[-1], axis=-1)
    return jax.lax.conv_general_dilated(
        x, kernel, strides, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1], **kwargs
    )
