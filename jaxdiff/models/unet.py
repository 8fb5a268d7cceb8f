"""The pixel UNet of EDM in three published forms: DDPM++, NCSN++ (Song et al. 2021), ADM (Dhariwal & Nichol 2021).

    block     h = conv0(resample(silu(norm0(x))));  h = conv1(dropout(silu(norm1(h) with e)));  x = (h + skip(x)) g
              e is added before norm1 (DDPM++, NCSN++) or scales and shifts after it (ADM); g = sqrt(1/2) or 1
    attention x = (x + out(attend(qkv(norm2(x))))) g
    encoder   conv, then per level [down] blocks; every output becomes a skip; NCSN++ also adds the downsampled image
    decoder   in0 (attention), in1, then per level [up] blocks that each take one skip: x = [x, skip]

`STYLES` holds all differences between the three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import CONTROL, Cond, Signal
from jaxdiff.conventions import EDM
from jaxdiff.errors import pick
from jaxdiff.models import attention, checks, conditioning, convolution, embeddings, initializers, stacks, taps
from jaxdiff.models.keep import keep


class Style(NamedTuple):
    """How the published UNets differ."""

    scale_shift: bool = False  # the embedding modulates norm1 instead of being added
    gain: float = math.sqrt(0.5)  # factor on each residual sum
    epsilon: float = 1e-6  # of the group norms
    head_width: int = 0  # channels per attention head; 0: one head
    attention_in_decoder: str = "last"  # which decoder blocks of an attention level attend: "last" or "all"
    taps: tuple[int, ...] = (1, 1)  # resampling filter
    embedding: str = "sincos"  # "sincos" (endpoint, sine first), "cossin", or "fourier" of doubled width
    residual_input: bool = False  # the downsampled image is added at each level
    label_after_mlp: bool = False  # the class is added after the embedding MLP, without bias
    project_resampled_skip: bool = True  # a 1x1 convolution on every resampled skip
    zero_gain: float = 1e-5  # initial gain of layers that start near zero
    fan_in_init: bool = False  # uniform in +-1/sqrt(fan_in), biases too; else Xavier with zero biases


STYLES = {
    "ddpmpp": Style(),
    "ncsnpp": Style(taps=(1, 3, 3, 1), embedding="fourier", residual_input=True),
    "adm": Style(
        scale_shift=True, gain=1.0, epsilon=1e-5, head_width=64, attention_in_decoder="all", embedding="cossin",
        label_after_mlp=True, project_resampled_skip=False, zero_gain=0.0, fan_in_init=True,
    ),
}  # fmt: skip


def _inits(style: Style, fan_in: int, gain: float = 1.0) -> dict[str, Any]:
    """Kernel and bias initializers of a layer; gain scales the kernel's standard deviation (0: zeros)."""
    if gain == 0:
        return {"kernel_init": initializers.zeros, "bias_init": initializers.zeros}
    if not style.fan_in_init:
        return {
            "kernel_init": nn.initializers.variance_scaling(gain**2, "fan_avg", "uniform"),
            "bias_init": initializers.zeros,
        }
    bound = 1 / math.sqrt(fan_in)
    return {
        "kernel_init": nn.initializers.variance_scaling(gain**2 / 3, "fan_in", "uniform"),
        "bias_init": lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound),
    }


def _group_norm(x: Array, style: Style, dtype: Dtype, name: str) -> Array:
    groups = checks.group_count(x.shape[-1])
    return nn.GroupNorm(groups, epsilon=style.epsilon, dtype=dtype, use_fast_variance=False, name=name)(keep(x))


def _conv_form(loop: bool) -> dict[str, Any]:
    return {"conv_general_dilated": convolution.loop_conv if loop else convolution.conv}


class Block(nn.Module):
    """A residual block with optional resampling and attention."""

    features: int
    style: Style
    resample: str = ""  # "", "down" or "up"
    attention: bool = False
    dropout: float = 0.0
    deterministic: bool = True
    loop: bool = False
    step_init: str = "zero"
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], e: Float[Array, "b d"], step: Float[Array, "b d"] | None = None
    ) -> Float[Array, "b k l f"]:
        style = self.style
        h = taps.tap(self, "norm0", _group_norm(x, style, self.dtype, "norm0"))
        h = self._resampled_conv("conv0", nn.silu(h))
        extra = None
        if step is not None:
            extra = self._affine("affine_step", step, float(self.step_init == "reference"))
        affine = self._affine("affine", e)
        if style.scale_shift:
            scale, shift = jnp.split(affine, 2, axis=-1)
            h = _group_norm(h, style, self.dtype, "norm1") * (1 + scale) + shift
            if extra is not None:
                scale, shift = jnp.split(extra, 2, axis=-1)
                h = h * (1 + scale) + shift
        else:
            h = h + affine
            if extra is not None:
                h = h + extra
            h = _group_norm(h, style, self.dtype, "norm1")
        h = nn.silu(taps.tap(self, "norm1", h))
        h = nn.Dropout(self.dropout, deterministic=self.deterministic)(h)
        h = taps.tap(self, "increment", self._conv("conv1", h, gain=style.zero_gain))
        x = (h + self._skip(x)) * style.gain
        if self.attention:
            x = self._attend(taps.tap(self, "res", x))
        return taps.tap(self, "out", x)

    def _affine(self, name: str, e: Array, gain: float = 1.0) -> Array:
        features = self.features * (1 + self.style.scale_shift)
        inits = _inits(self.style, e.shape[-1], gain)
        return nn.Dense(features, dtype=self.dtype, name=name, **inits)(e)[:, None, None]

    def _resampled_conv(self, name: str, x: Array) -> Array:
        if self.resample == "up" and self.style.taps == (1, 1) and not self.loop:
            return self._conv(name, x, conv_general_dilated=convolution.upsampled_conv)
        return self._conv(name, self._resample(x))

    def _conv(self, name: str, x: Array, size: int = 3, gain: float = 1.0, **kwargs: Any) -> Array:
        fields = {**_inits(self.style, x.shape[-1] * size**2, gain), **_conv_form(self.loop), **kwargs}
        return nn.Conv(self.features, (size, size), padding=size // 2, dtype=self.dtype, name=name, **fields)(x)

    def _resample(self, x: Array) -> Array:
        if self.resample == "up":
            return convolution.upsample(x, self.style.taps)
        if self.resample == "down":
            return convolution.downsample(x, self.style.taps)
        return x

    def _skip(self, x: Array) -> Array:
        projected = x.shape[-1] != self.features or (self.resample and self.style.project_resampled_skip)
        if not projected:
            return self._resample(x)
        if self.resample == "up" and self.style.taps == (1, 1):  # the same before repeating pixels, and cheaper
            return taps.tap(self, "skip", self._resample(self._conv("skip", x, size=1)))
        return taps.tap(self, "skip", self._conv("skip", self._resample(x), size=1))

    def _attend(self, x: Array) -> Array:
        style, (b, height, width, c) = self.style, x.shape
        heads = c // style.head_width if style.head_width else 1
        gain = 1.0 if style.fan_in_init else math.sqrt(0.2)
        tokens = taps.tap(self, "norm2", _group_norm(x, style, self.dtype, "norm2")).reshape(b, height * width, c)
        tokens = keep(tokens)
        q, k, v = attention.qkv_heads(tokens, heads, self.dtype, **_inits(style, c, gain))
        taps.tap_heads(self, prefix="attention/", q=q, k=k, v=v)
        gathered = attention.attend(q, k, v)
        out = attention.merge_heads(gathered, c, self.dtype, **_inits(style, c, style.zero_gain))
        taps.tap(self, "attention/out", out)
        return (x + keep(out).reshape(x.shape)) * style.gain


class UNet(nn.Module):
    """EDM's pixel UNet. The defaults are the unconditional CIFAR-10 network; `resolution` is the nominal one.

    `noise_label` is EDM's c_noise = ln(sigma)/4. cond takes `label` (num_classes: no class) and, with
    augment_dim > 0, `augment` [b augment_dim]; `control` adds control metadata (conditioning.py) to the embedding.
    step_embed = "zero" or "reference" adds cond["step"] (SFD-v): a separate embedding and an `affine_step` per block,
    which "zero" zero-initialises. patch = 2 convolves patches of 2x2 pixels instead of pixels: a quarter of the work;
    `attention` then counts patches. `loop` selects convolution gradients that are fast inside loops on CPU: see
    `convolution.loop_conv`.
    """

    resolution: int = 32
    channels: int = 3
    width: int = 128
    channel_mult: tuple[int, ...] = (2, 2, 2)
    blocks: int = 4
    attention: tuple[int, ...] = (16,)  # resolutions at which blocks attend
    num_classes: int = 0
    augment_dim: int = 0
    control: conditioning.Control | None = None
    dropout: float = 0.0
    style: str = "ddpmpp"
    fourier_scale: float = 16.0  # of the frequencies that embed the noise label, style ncsnpp
    step_embed: str = ""
    loop: bool = False
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT
    patch: int = 1  # pixels along a side of what is convolved as one
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = EDM()

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        augment = {"augment": Signal((self.augment_dim,), group=CONTROL, required=False)} if self.augment_dim else {}
        return conditioning.signals(self, **augment)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w c"]:
        style = pick(STYLES, self.style, "UNet style")
        stride = self.patch * 2 ** (len(self.channel_mult) - 1)
        checks.check_inputs("UNet", x, self.channels, stride, cond, self.signals())
        conditioning.check_alone("UNet", self.control, augment_dim=self.augment_dim)
        embedding = [self._embed(style, embeddings.noise_labels(noise_label, x), cond or {})]
        if self.step_embed:
            embedding.append(self._embed_step(style, embeddings.step_value(x, cond, self.step_embed)))
        block = stacks.rematerialised(Block, self.remat)

        def run(x: Array, name: str, features: int, **kwargs: Any) -> Array:
            fields = {"dropout": self.dropout, "deterministic": deterministic, "dtype": self.dtype, **kwargs}
            fields.update(loop=self.loop, step_init=self.step_embed)
            return block(features, style, name=name, **fields)(x, *embedding)

        x = taps.tap(self, "in", x).astype(self.dtype)
        x = rearrange(x, "b (h p) (w q) c -> b h w (p q c)", p=self.patch, q=self.patch)
        x, skips = self._encode(style, run, x)
        x = self._decode(style, run, x, skips)
        x = nn.silu(_group_norm(x, style, self.dtype, "out_norm"))
        fields = {**_inits(style, x.shape[-1] * 9, style.zero_gain), **_conv_form(self.loop)}
        out = nn.Conv(self.channels * self.patch**2, (3, 3), padding=1, name="out_conv", **fields)
        x = rearrange(out(x.astype(jnp.float32)), "b h w (p q c) -> b (h p) (w q) c", p=self.patch, q=self.patch)
        return taps.tap(self, "out", x)

    def _embed(self, style: Style, noise_label: Array, cond: Mapping[str, ArrayLike]) -> Array:
        features = 4 * self.width
        e = self._embed_noise(style, noise_label)
        label = cond.get("label", jnp.full(e.shape[:1], self.num_classes))
        onehot = jax.nn.one_hot(label, self.num_classes, dtype=jnp.float32)  # num_classes itself maps to zeros
        if self.num_classes and not style.label_after_mlp:
            inits = _inits(style, self.num_classes)
            e = e + nn.Dense(e.shape[-1], name="map_label", **inits)(onehot * math.sqrt(self.num_classes))
        if self.augment_dim:
            augment = cond.get("augment", jnp.zeros((e.shape[0], self.augment_dim)))
            init = _inits(style, self.augment_dim)["kernel_init"]
            e = e + nn.Dense(e.shape[-1], use_bias=False, kernel_init=init, name="map_augment")(augment)
        e = nn.silu(nn.Dense(features, name="map_layer0", **_inits(style, e.shape[-1]))(e))
        e = nn.Dense(features, name="map_layer1", **_inits(style, features))(e)
        if self.num_classes and style.label_after_mlp:
            e = e + nn.Dense(features, use_bias=False, kernel_init=nn.initializers.normal(1.0), name="map_label")(
                onehot
            )
        if self.control:
            e = e + conditioning.ControlEmbed(features, self.control, name="control_embed")(noise_label, cond)
        return nn.silu(conditioning.embed_scalars(self, e, noise_label, cond))

    def _embed_step(self, style: Style, step: Array) -> Array:
        """The step embedding: layers like those of the noise label, which enter each block separately."""
        features = 4 * self.width
        e = self._embed_noise(style, step, "map_step")
        e = nn.silu(nn.Dense(features, name="map_step_layer0", **_inits(style, e.shape[-1]))(e))
        return nn.silu(nn.Dense(features, name="map_step_layer1", **_inits(style, features))(e))

    def _embed_noise(self, style: Style, noise_label: Array, name: str = "map_noise") -> Array:
        if style.embedding == "fourier":
            frequencies = self.param(name, nn.initializers.normal(self.fourier_scale), (self.width,))
            angles = noise_label[:, None] * 2 * jnp.pi * jax.lax.stop_gradient(frequencies)
            return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        swapped = style.embedding == "sincos"
        e = embeddings.sinusoid(noise_label, self.width, endpoint=swapped)
        return jnp.roll(e, self.width // 2, axis=-1) if swapped else e

    def _conv3(self, style: Style, x: Array, features: int, name: str, padding: int = 1) -> Array:
        fields = {**_inits(style, 9 * x.shape[-1]), **_conv_form(self.loop)}
        return nn.Conv(features, (3, 3), padding=padding, dtype=self.dtype, name=name, **fields)(x)

    def _encode(self, style: Style, run: Callable[..., Array], x: Array) -> tuple[Array, list[Array]]:
        image, skips = x, []
        for level, multiplier in enumerate(self.channel_mult):
            side = self.resolution // self.patch >> level
            if level == 0:
                x = taps.tap(self, "embedded", self._conv3(style, x, self.width, f"enc_{side}x{side}_conv"))
            else:
                x = run(x, f"enc_{side}x{side}_down", x.shape[-1], resample="down")
                if style.residual_input:  # convolve with padding for the filter, then filter and halve
                    image = self._conv3(style, image, x.shape[-1], f"enc_{side}x{side}_aux_residual", padding=2)
                    x = image = (x + convolution.downsample(image, style.taps, padding=0)) * math.sqrt(0.5)
                    taps.tap(self, f"enc_{side}x{side}_joined", x)
            skips.append(x)
            for i in range(self.blocks):
                x = run(x, f"enc_{side}x{side}_block{i}", self.width * multiplier, attention=side in self.attention)
                skips.append(x)
        return x, skips

    def _decode(self, style: Style, run: Callable[..., Array], x: Array, skips: list[Array]) -> Array:
        deepest = len(self.channel_mult) - 1
        for level in range(deepest, -1, -1):
            side = self.resolution // self.patch >> level
            if level == deepest:
                x = run(x, f"dec_{side}x{side}_in0", x.shape[-1], attention=True)
                x = run(x, f"dec_{side}x{side}_in1", x.shape[-1])
            else:
                x = run(x, f"dec_{side}x{side}_up", x.shape[-1], resample="up")
            for i in range(self.blocks + 1):
                attend = side in self.attention and (i == self.blocks or style.attention_in_decoder == "all")
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = run(x, f"dec_{side}x{side}_block{i}", self.width * self.channel_mult[level], attention=attend)
        return x
