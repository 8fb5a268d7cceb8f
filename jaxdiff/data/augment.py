"""EDM's geometric augmentation, whose parameters condition the network (Karras et al. 2022, appendix F.2, table 6).

    parameter                                    transformation of the image           labels
    flip_x, flip_y    fair coins                 mirrored                              flip_x, flip_y
    scale             N(0, 1)                    enlarged by 2^(scale / 5)             scale
    rotation          U(-pi, pi)                 rotated                               cos(rotation) - 1, sin(rotation)
    anisotropy        N(0, 1)                    stretched by 2^(anisotropy / 5) along anisotropy cos(angle),
    anisotropy_angle  U(-pi, pi)                 a direction, shrunk across it         anisotropy sin(angle)
    translation       N(0, I), (x, y)            moved by (width, height) / 8 each     translation

Each amount is kept with probability p, else 0, which is no transformation; anisotropy and its angle are kept
independently, and flip_x always unless p = 0. A network that is given the labels learns all of these images and draws
unaugmented ones when the labels are zero.

Images are mirrored exactly. The rest is one affine map G, in the order above, resampled as in StyleGAN2-ADA: reflect
beyond the borders, double the resolution with the low-pass filter h of the sym6 wavelet, interpolate linearly at
G^-1 of each pixel, halve the resolution with the same filter. With A[i, o] = h[i - 2 o + 5], doubling is 2 A and
halving its transpose; the filter is orthogonal, so an image without transformation is returned as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxdiff.data.examples import Batch, Fetch
from jaxdiff.errors import choose

LABELS = 9
NAMES = ("flip_x", "flip_y", "scale", "rotation", "anisotropy", "anisotropy_angle", "translation")
SYM6 = (
    0.015404109327027373, 0.0034907120842174702, -0.11799011114819057, -0.048311742585633, 0.4910559419267466,
    0.787641141030194, 0.3379294217276218, -0.07263752278646252, -0.021060292512300564, 0.04472490177066578,
    0.0017677118642428036, -0.007800708325034148,
)  # fmt: skip
BORDER = 3  # pixels around the result that its filter reaches
CHUNK = 64  # images transformed at once: those at twice the resolution, with their borders, are 36 times as large

Parameters = Mapping[str, Array]  # NAMES, each [n], translation [n 2]


def draw(key: Array, n: int, p: float) -> dict[str, Array]:
    """The parameters of n images."""
    keys = dict(zip((*NAMES, "kept"), jax.random.split(key, len(NAMES) + 1), strict=True))

    def angle(name: str) -> Array:
        return jax.random.uniform(keys[name], (n,), minval=-np.pi, maxval=np.pi)

    amounts = {
        "flip_x": jax.random.bernoulli(keys["flip_x"], shape=(n,)).astype(jnp.float32),
        "flip_y": jax.random.bernoulli(keys["flip_y"], shape=(n,)).astype(jnp.float32),
        "scale": jax.random.normal(keys["scale"], (n,)),
        "rotation": angle("rotation"),
        "anisotropy": jax.random.normal(keys["anisotropy"], (n,)),
        "anisotropy_angle": angle("anisotropy_angle"),
        "translation": jax.random.normal(keys["translation"], (n, 2)),
    }
    uniforms = jax.random.uniform(keys["kept"], (len(NAMES), n))
    return keep(amounts, dict(zip(NAMES, uniforms, strict=True)), p)


def keep(amounts: Mapping[str, ArrayLike], uniforms: Mapping[str, ArrayLike], p: float) -> dict[str, Array]:
    """The parameters from drawn amounts: each where its uniform is below p (flip_x: always, unless p = 0), else 0."""
    found = {}
    for name in NAMES:
        amount = jnp.asarray(amounts[name], jnp.float32)
        kept = jnp.asarray(uniforms[name]) < (float(p > 0) if name == "flip_x" else p)
        found[name] = jnp.where(kept.reshape(-1, *(1 for _ in amount.shape[1:])), amount, 0.0)
    return found


def labels_of(parameters: Parameters) -> Array:
    """What the network is conditioned on, [n 9]."""
    a = parameters
    columns = [
        a["flip_x"],
        a["flip_y"],
        a["scale"],
        jnp.cos(a["rotation"]) - 1,
        jnp.sin(a["rotation"]),
        a["anisotropy"] * jnp.cos(a["anisotropy_angle"]),
        a["anisotropy"] * jnp.sin(a["anisotropy_angle"]),
        *(a["translation"][:, i] for i in range(2)),
    ]
    return jnp.stack(columns, axis=1)


def apply(images: ArrayLike, parameters: Mapping[str, ArrayLike]) -> tuple[Array, Array]:
    """The augmented images [n h w c] in [-1, 1], and the labels [n 9] of their augmentation.

    Parameters that are left out are zero: no such transformation.
    """
    for name in parameters:
        choose(name, NAMES, "augmentation parameter")
    x = jnp.asarray(images, jnp.float32)
    if x.ndim != 4:
        raise ValueError(f"augmentation takes images [n h w c], got {x.shape}")
    expected = {name: (len(x), 2) if name == "translation" else (len(x),) for name in NAMES}
    a = {name: jnp.asarray(parameters.get(name, jnp.zeros(expected[name])), jnp.float32) for name in NAMES}
    shapes = {name: value.shape for name, value in a.items() if value.shape != expected[name]}
    if shapes:
        raise ValueError(f"augmentation of {len(x)} images takes parameters [n], translation [n 2]; got {shapes}")
    return jax.lax.map(lambda pair: _transform(*pair), (x, a), batch_size=CHUNK), labels_of(a)


# ------------------------------------------------------------------------------------------ one image


def _transform(image: Array, a: Mapping[str, Array]) -> Array:
    height, width, _ = image.shape
    image = jnp.where(a["flip_x"] == 1, image[:, ::-1], image)
    image = jnp.where(a["flip_y"] == 1, image[::-1], image)
    fine = _filtered(image, _doubling(height), _doubling(width))
    moved = _resampled(fine, _inverse(a, height, width), (height, width))
    return _filtered(moved, _halving(height), _halving(width))


def _inverse(a: Mapping[str, Array], height: int, width: int) -> Array:
    """G^-1 [2 3], from pixels (x, y) of the result to those of the image, both counted from the centre."""
    turn = partial(_rotation, a["anisotropy_angle"])
    stretch = 2.0 ** (a["anisotropy"] / 5)
    linear = _rotation(a["rotation"]) / 2.0 ** (a["scale"] / 5)
    linear = linear @ turn(sign=-1) @ jnp.diag(jnp.stack([1 / stretch, stretch])) @ turn()
    shift = a["translation"] * jnp.array([width / 8, height / 8])
    return jnp.concatenate([linear, -(linear @ shift)[:, None]], axis=1)


def _rotation(angle: Array, sign: int = 1) -> Array:
    cos, sin = jnp.cos(angle), sign * jnp.sin(angle)
    return jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])


def _resampled(fine: Array, inverse: Array, size: tuple[int, int]) -> Array:
    """Pixels of the doubled result, with a border for the filter, taken from the doubled image; 0 outside of it.

    The map turns about the corner between the four middle pixels of the image, half a doubled pixel from the middle of
    the doubled one, whose filter is one tap longer to the left.
    """
    sides = [2 * (side + 2 * BORDER) for side in size]
    y, x = ((np.arange(side) - side / 2 + 1) / 2 for side in sides)  # in pixels of the result
    grid = np.stack([*np.meshgrid(x, y), np.ones(sides)]).astype(np.float32)
    source = jnp.einsum("ij,jhw->ihw", inverse, grid, precision="highest")
    rows, columns = (2 * source[i] + fine.shape[1 - i] / 2 - 1 for i in (1, 0))
    top, left = jnp.floor(rows), jnp.floor(columns)
    total = jnp.zeros((*sides, fine.shape[-1]))
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = (1 - jnp.abs(rows - top - i)) * (1 - jnp.abs(columns - left - j))
        total += weight[..., None] * _pixels(fine, top.astype(jnp.int32) + i, left.astype(jnp.int32) + j)
    return total


def _pixels(image: Array, row: Array, column: Array) -> Array:
    """The pixels at these places, 0 outside of the image."""
    height, width, _ = image.shape
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return jnp.where(inside[..., None], image[row.clip(0, height - 1), column.clip(0, width - 1)], 0.0)


def _filtered(image: Array, rows: np.ndarray, columns: np.ndarray) -> Array:
    return jnp.einsum("ih,hwc,jw->ijc", rows, image, columns, precision="highest")


def _lowpass(coarse: int) -> np.ndarray:
    """A [2 coarse, coarse]."""
    taps = np.asarray(SYM6) / np.sum(SYM6)
    tap = np.arange(2 * coarse)[:, None] - 2 * np.arange(coarse) + 5
    return np.where((tap >= 0) & (tap < len(taps)), taps[tap.clip(0, len(taps) - 1)], 0.0)


def _doubling(side: int) -> np.ndarray:
    """From `side` pixels to twice as many and their reflections, as far as an image reflects."""
    reflected = np.eye(side)[np.pad(np.arange(side), side - 1, mode="reflect")]
    return (2 * _lowpass(len(reflected)) @ reflected).astype(np.float32)


def _halving(side: int) -> np.ndarray:
    """From twice the pixels, with their border, to `side`."""
    return _lowpass(side + 2 * BORDER).T[BORDER:-BORDER].astype(np.float32)


# ------------------------------------------------------------------------------------------ batches


def check(p: float, name: str, shape: tuple[int, ...], latent: bool) -> None:
    """Reject an impossible probability, and data that are not images."""
    if not 0 <= p <= 1:
        raise ValueError(f"augment is the probability of each transformation, in [0, 1], got {p}")
    if p and (latent or len(shape) != 3):
        kind = "latents" if latent else "points"
        raise ValueError(f"dataset {name!r} holds {kind} of shape {shape}, which cannot be augmented; remove augment")


def augmented(fetch: Fetch, seed: int, p: float) -> Fetch:
    """Batches of augmented images and, in "augment", their labels: functions of (seed, position) alone."""

    def fetch_all(positions: range, executor: Executor | None) -> Batch:
        batch = fetch(positions, executor)
        high, low = np.divmod(np.arange(positions.start, positions.stop), 2**32)
        with jax.default_device(_host()):
            images, labels = _augment(batch["image"], np.uint32(seed), high.astype(np.uint32), low.astype(np.uint32), p)
            return {**batch, "image": np.asarray(images), "augment": np.asarray(labels)}

    return fetch_all


@partial(jax.jit, static_argnames="p")
def _augment(images: Array, seed: Array, high: Array, low: Array, p: float) -> tuple[Array, Array]:
    def one(high: Array, low: Array) -> dict[str, Array]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), high), low)
        return jax.tree.map(lambda value: value[0], draw(key, 1, p))

    return apply(images, jax.vmap(one)(high, low))


def _host() -> jax.Device | None:
    """The CPU, so that accelerators are left to the training step; None if JAX was started without it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
