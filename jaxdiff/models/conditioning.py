"""Conditioning besides the noise level: control metadata, class tokens, text.

Control (Berrada et al. 2024, arXiv 2411.03177; equations as recalled, see docs/conditioning.md):

    c = E_t(t) + E_h(phi_h) + gamma(u) E_l(phi_l)       E = Dense(silu(Dense(features))), the last Dense starts at 0
    phi_h = crop, flip, aspect, which affect composition; phi_l = original_size, which affects detail
    a number v is embedded as [cos(v f), sin(v f)], f_k = 10000^(-k/128), k < 128; the flip as a row of a table
    gamma = (1 - cos(pi (1-u)^alpha)) / 2    power_inside_1mu      u = 0 at clean data, 1 at pure noise
            ((1 + cos(pi u)) / 2)^alpha      power_outside
            (1 + cos(pi u^alpha)) / 2        power_inside_u
            1                                constant, as in SDXL;    none: no low-level part

Semantic conditioning (class, text) enters through attention: `class_tokens` turns a class into tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import CONTROL, CONTROLS, METHOD, Cond, Signal, label_signal
from jaxdiff.conventions import Convention
from jaxdiff.errors import choose
from jaxdiff.models import embeddings, initializers

HIGH, LOW = ("crop", "flip", "aspect"), ("original_size",)  # metadata that affect composition; detail
UNKNOWN = -1.0  # marks control metadata as not given: valid values are not negative

GAMMAS: dict[str, Callable[[Array, float], Array]] = {
    "power_inside_1mu": lambda u, alpha: (1 - jnp.cos(jnp.pi * (1 - u) ** alpha)) / 2,
    "power_outside": lambda u, alpha: ((1 + jnp.cos(jnp.pi * u)) / 2) ** alpha,
    "power_inside_u": lambda u, alpha: (1 + jnp.cos(jnp.pi * u**alpha)) / 2,
    "constant": lambda u, alpha: jnp.ones_like(u),
    "none": lambda u, alpha: jnp.zeros_like(u),
}


# ------------------------------------------------------------------------------------------ control


@dataclasses.dataclass(frozen=True)
class Control:
    """Which control metadata a network takes, and how the low-level ones fade: the field `control` of the networks.

    `convention` is the one the network is trained in: it maps a noise label to u.
    """

    convention: Convention
    keys: tuple[str, ...] = HIGH + LOW
    gamma: str = "power_inside_1mu"
    alpha: float = 8.0

    def __post_init__(self) -> None:
        choose(self.gamma, GAMMAS, "gamma of control")
        if not self.keys or isinstance(self.keys, str):
            raise ValueError(f"control.keys must be a non-empty tuple from {', '.join(HIGH + LOW)}, got {self.keys!r}")
        for key in self.keys:
            choose(key, HIGH + LOW, "control")
        if self.alpha <= 0:
            raise ValueError(f"alpha, the exponent of gamma, must be positive, got {self.alpha}")

    def weight(self, noise_label: Float[Array, " b"]) -> Float[Array, " b"]:
        """gamma at the network's noise labels."""
        u = self.convention.progress(noise_label)
        return GAMMAS[self.gamma](u.clip(0, 1), self.alpha)


def make_control(fields: Mapping[str, Any]) -> Control:
    """`Control(**fields)`; unknown fields are rejected."""
    for name in fields:
        choose(name, Control.__dataclass_fields__, "field of control")
    given = dict(fields)
    if isinstance(given.get("keys"), list):
        given["keys"] = tuple(given["keys"])
    return Control(**given)


class ControlEmbed(nn.Module):
    """E_h(phi_h) + gamma(u) E_l(phi_l), in float32; control metadata missing from cond get a learned embedding."""

    features: int
    control: Control

    @nn.compact
    def __call__(self, noise_label: Float[Array, " b"], cond: Cond) -> Float[Array, "b e"]:
        given = check_control(cond or {}, self.control.keys, noise_label.shape[0])
        high, low = ([key for key in group if key in self.control.keys] for group in (HIGH, LOW))
        c = self._embed("high", high, given) if high else jnp.zeros(())
        if low and self.control.gamma != "none":
            c = c + self.control.weight(noise_label)[:, None] * self._embed("low", low, given)
        return jnp.broadcast_to(c, (noise_label.shape[0], self.features))

    def _embed(self, name: str, keys: Sequence[str], given: Mapping[str, Array]) -> Float[Array, "b e"]:
        e = jnp.concatenate([self._describe(key, given[key]) for key in keys], axis=-1)
        e = nn.silu(nn.Dense(self.features, kernel_init=initializers.xavier, name=f"{name}_in")(e))
        return nn.Dense(self.features, kernel_init=initializers.zeros, name=f"{name}_out")(e)

    def _describe(self, key: str, values: Float[Array, "b n"]) -> Float[Array, "b f"]:
        if key == "flip":  # rows: no, yes, unknown
            rows = jnp.where(values[:, 0] < 0, 2, jnp.round(values[:, 0])).astype(jnp.int32)
            return nn.Embed(3, 256, embedding_init=nn.initializers.normal(1.0), name="flip")(rows)
        waves = embeddings.sinusoid(values.reshape(-1), 256).reshape(values.shape[0], -1)
        unknown = self.param(f"no_{key}", initializers.zeros, waves.shape[1:])
        return jnp.where((values < 0).any(1, keepdims=True), unknown, waves)


def check_control(cond: Mapping[str, Any], keys: Sequence[str], batch: int) -> dict[str, Float[Array, "b n"]]:
    """Control metadata as float32 [b n] for each of `keys`, UNKNOWN where not given."""
    values = {}
    for key in keys:
        shape = batch, CONTROLS[key]
        value = jnp.asarray(cond.get(key, jnp.full(shape, UNKNOWN)), jnp.float32)
        if value.shape != shape and (value.shape != (batch,) or shape[1] > 1):
            raise ValueError(f"cond[{key!r}] must have shape {list(shape)}, got {value.shape}")
        values[key] = value.reshape(shape)
    return values


def check_alone(model: str, control: Control | None, **others: int) -> None:
    """The field `control` and a network's published form of it are mutually exclusive."""
    used = [name for name, value in others.items() if value]
    if control is not None and used:
        raise ValueError(
            f"{model} takes control or its published form, {used[0]}={others[used[0]]}, not both; unset one of them"
        )


def default_control(
    signals: Mapping[str, Signal],
    size: Sequence[int],
    original_size: Sequence[float] = (),
    crop: Sequence[float] = (0, 0),
    flip: float = 0,
    aspect: float = 0.0,
) -> dict[str, np.ndarray]:
    """Control metadata for samples of `size` (height, width): by default uncropped, unflipped images.

    original_size defaults to `size`; aspect is width / height, as jaxdiff.data records it, and 0 takes that of
    original_size. The published forms count pixels, PIXELS per row and column of a latent.
    """
    wanted = {name: s for name, s in signals.items() if s.group == CONTROL or s.default is not None}
    if not wanted:
        return {}
    in_pixels = any(name in wanted for name in ("sizes", "aspect_ratio"))
    whole = tuple(size[:2])
    if in_pixels:
        whole = tuple(PIXELS * side for side in size[:2])
    height_width = tuple(original_size) or whole
    values: dict[str, Sequence[float]] = {
        "original_size": height_width,
        "resized_size": whole,
        "crop": tuple(crop),
        "flip": (flip,),
        "aspect": (aspect or height_width[-1] / height_width[0],),
        "aspect_ratio": (height_width[0] / height_width[-1],),
        "sizes": (*height_width, *crop, *whole),
    }
    found = {}
    for name, signal in wanted.items():
        default = signal.default
        if default is None:
            default = np.zeros(signal.batch_shape(1)[1:])
        value = np.asarray(values.get(name, default), np.float32)
        if value.shape != signal.shape:
            raise ValueError(f"sample.control.{name} takes {signal.shape[0]} numbers, got {value.tolist()}")
        found[name] = value
    return found


PIXELS = 8  # per row and column of the latents of Stable Diffusion and PixArt


# ------------------------------------------------------------------------------------------ declarations


def signals(model: nn.Module, **more: Signal) -> dict[str, Signal]:
    """What a network with the usual fields is conditioned on.

    The fields are num_classes or text_dim, pooled_dim, control, step_embed and scalars. `more` are signals
    specific to the network, placed after the semantic ones.
    """
    found: dict[str, Signal] = {}
    if getattr(model, "num_classes", 0):
        found["label"] = label_signal(model.num_classes)
    elif getattr(model, "text_dim", 0):
        found["text"] = Signal((None, model.text_dim))
        found["text_mask"] = Signal((None,), "bool", required=False)
        if getattr(model, "pooled_dim", 0):
            found["pooled"] = Signal((model.pooled_dim,))
    found |= more
    control = getattr(model, "control", None)
    for key in control.keys if control else ():
        found[key] = Signal((CONTROLS[key],), "float32", UNKNOWN, CONTROL)
    if getattr(model, "step_embed", ""):
        found["step"] = Signal((), group=METHOD, required=False)
    for name in getattr(model, "scalars", ()):
        if name in found or not name.isidentifier():
            raise ValueError(f"scalars={tuple(model.scalars)} must be names that are no other condition, got {name!r}")
        found[name] = Signal((), group=METHOD, required=False)
    return found


def embed(
    model: nn.Module,
    x: Array,
    noise_label: ArrayLike,
    cond: Cond,
    features: int,
    *extra: Array,
    frequencies: int = 256,
) -> Float[Array, "b e"]:
    """c = E_t [+ control + extra + E_step + scalars]; call it inside the compact `__call__`, which owns the layers."""
    times = embeddings.noise_labels(noise_label, x)
    c = embeddings.EmbedMLP(features, name="time")(embeddings.sinusoid(times, frequencies))
    if model.control:
        c = c + ControlEmbed(features, model.control, name="control_embed")(times, cond)
    for vector in extra:
        c = c + vector
    if model.step_embed:
        c = c + embeddings.StepEmbed(features, model.step_embed, name="step")(x, cond)
    return embed_scalars(model, c, x, cond)


def embed_scalars(model: nn.Module, c: Array, x: Array, cond: Cond) -> Float[Array, "b e"]:
    """c plus an embedding of each of `model.scalars`, zero at initialisation; call it inside the compact `__call__`."""
    for name in model.scalars:
        c = c + embeddings.StepEmbed(c.shape[-1], key=name, name=f"scalar_{name}")(x, cond)
    return c


def class_embedding(model: nn.Module, x: Array, cond: Cond, features: int) -> Float[Array, "b e"]:
    """The embedding of cond["label"], or of no class if it is not given."""
    label = (cond or {}).get("label", jnp.full(x.shape[:1], model.num_classes))
    init = nn.initializers.normal(0.02)
    return nn.Embed(model.num_classes + 1, features, embedding_init=init, name="label")(label)


# ------------------------------------------------------------------------------------------ classes


def class_tokens(model: nn.Module, x: Array, cond: Cond, features: int) -> Float[Array, "b k {features}"]:
    """`model.class_tokens` tokens for cond["label"]; call it inside the model's compact `__call__`."""
    if model.class_tokens < 1:
        raise ValueError(f"class_tokens, the number of tokens per class, must be at least 1, got {model.class_tokens}")
    label = (cond or {}).get("label", jnp.full(x.shape[:1], model.num_classes))
    width = model.class_tokens * features
    table = nn.Embed(model.num_classes + 1, width, embedding_init=nn.initializers.normal(0.02), name="label")
    return table(label).reshape(x.shape[0], model.class_tokens, features).astype(model.dtype)


# ------------------------------------------------------------------------------------------ text


def check_text(model: str, cond: Mapping[str, Any], **widths: int) -> None:
    """Check that cond has the named arrays: `text` [b, l, width], `pooled` [b, width]."""
    for key, width in widths.items():
        if key not in cond:
            raise ValueError(
                f"{model} needs cond[{key!r}]; its null condition is the empty prompt's embedding, "
                f"so guide with guided(denoise, scale, null={{{key!r}: ...}})"
            )
        shape = jnp.shape(cond[key])
        if len(shape) != 2 + (key == "text") or shape[-1] != width:
            axes = "[b, l, " if key == "text" else "[b, "
            raise ValueError(
                f"{model} was built for cond[{key!r}] of width {width}, shape {axes}{width}], got {shape}; "
                f"embed at that width, or build it with {key}_dim={shape[-1] if shape else 1}"
            )


def check_vectors(model: str, cond: Mapping[str, Any], widths: Mapping[str, int]) -> None:
    """Check that cond has a vector [b, width] for each name."""
    for name, width in widths.items():
        shape = jnp.shape(cond[name]) if name in cond else None
        if shape is None or len(shape) != 2 or shape[1] != width:
            raise ValueError(f"{model} needs cond[{name!r}] of shape [b, {width}], got {shape or 'none'}")
