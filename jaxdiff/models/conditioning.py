"""What a network is told besides the noise level: control metadata, classes as tokens, padded texts.

Control (Berrada et al. 2024, arXiv 2411.03177; equations as recalled, see docs/conditioning.md):

    c = E_t(t) + E_h(phi_h) + gamma(u) E_l(phi_l)       E = Dense(silu(Dense(features))), the last Dense zero at first
    phi_h = crop, flip, aspect: they change composition; phi_l = original_size: it changes detail
    features of a number v: [cos(v f), sin(v f)], f_k = 10000^(-k/128), k < 128; of the flip: a row of a table
    gamma = (1 - cos(pi (1-u)^alpha)) / 2    power_inside_1mu      u = 0 at clean data, 1 at pure noise
            ((1 + cos(pi u)) / 2)^alpha      power_outside
            (1 + cos(pi u^alpha)) / 2        power_inside_u
            1                                constant: SDXL's form;   none: no low-level part

Semantic conditions, class and text, go through attention: `class_tokens` makes tokens of a class, and texts are padded
with noisy copies of their own tokens. With n real tokens y of M slots, s their standard deviation by channel:

    slot j holds y_(j mod n), and for j >= n  + scale sqrt(ceil(M/n) - 1) s eps,  eps ~ N(0, I)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from jaxdiff import denoisers
from jaxdiff.errors import concrete, pick
from jaxdiff.models import layers
from jaxdiff.models.layers import Cond

HIGH = {"crop": 2, "flip": 1, "aspect": 1}  # how many numbers of each, as jaxdiff.data records them
LOW = {"original_size": 2}
CONTROLS = HIGH | LOW
UNKNOWN = -1.0  # stands for a control that is not given: no control is negative

GAMMAS: dict[str, Callable[[Any, float], Any]] = {
    "power_inside_1mu": lambda u, alpha: (1 - jnp.cos(jnp.pi * (1 - u) ** alpha)) / 2,
    "power_outside": lambda u, alpha: ((1 + jnp.cos(jnp.pi * u)) / 2) ** alpha,
    "power_inside_u": lambda u, alpha: (1 + jnp.cos(jnp.pi * u**alpha)) / 2,
    "constant": lambda u, alpha: jnp.ones_like(u),
    "none": lambda u, alpha: jnp.zeros_like(u),
}


# ------------------------------------------------------------------------------------------ control


@dataclasses.dataclass(frozen=True)
class Control:
    """Which controls a network takes and how the low-level ones fade; the field `control` of the networks.

    time: the convention of the network's noise label, as its wrapper's name: edm, ddpm, flow; sigma_data is edm's.
    """

    time: str
    keys: tuple[str, ...] = tuple(CONTROLS)
    gamma: str = "power_inside_1mu"
    alpha: float = 8.0
    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        pick(denoisers.PROGRESS, self.time, "time of control")
        pick(GAMMAS, self.gamma, "gamma of control")
        if not self.keys or isinstance(self.keys, str):
            raise ValueError(f"control needs keys, a tuple of some of {', '.join(CONTROLS)}, got {self.keys!r}")
        for key in self.keys:
            pick(CONTROLS, key, "control")
        if self.alpha <= 0:
            raise ValueError(f"alpha, the steepness of gamma, must be positive, got {self.alpha}")

    def weight(self, noise_label: Float[Array, " b"]) -> Float[Array, " b"]:
        """gamma at the network's noise labels."""
        u = denoisers.PROGRESS[self.time](noise_label, self.sigma_data)
        return GAMMAS[self.gamma](u.clip(0, 1), self.alpha)


def make_control(fields: Mapping[str, Any]) -> Control:
    """`Control(**fields)`, unknown fields refused."""
    for name in fields:
        pick(Control.__dataclass_fields__, name, "field of control")
    given = dict(fields)
    if isinstance(given.get("keys"), list):
        given["keys"] = tuple(given["keys"])
    return Control(**given)


class ControlEmbed(nn.Module):
    """E_h(phi_h) + gamma(u) E_l(phi_l) of cond["control"], float32; what it lacks has a learned embedding."""

    features: int
    control: Control

    @nn.compact
    def __call__(self, noise_label: Float[Array, " b"], cond: Cond) -> Float[Array, "b e"]:
        given = check_control((cond or {}).get("control", {}), self.control.keys, noise_label.shape[0])
        high, low = ([key for key in group if key in self.control.keys] for group in (HIGH, LOW))
        c = self._embed("high", high, given) if high else jnp.zeros(())
        if low and self.control.gamma != "none":
            c = c + self.control.weight(noise_label)[:, None] * self._embed("low", low, given)
        return jnp.broadcast_to(c, (noise_label.shape[0], self.features))

    def _embed(self, name: str, keys: Sequence[str], given: Mapping[str, Array]) -> Float[Array, "b e"]:
        e = jnp.concatenate([self._describe(key, given[key]) for key in keys], axis=-1)
        e = nn.silu(nn.Dense(self.features, kernel_init=layers.xavier, name=f"{name}_in")(e))
        return nn.Dense(self.features, kernel_init=layers.zeros, name=f"{name}_out")(e)

    def _describe(self, key: str, values: Float[Array, "b n"]) -> Float[Array, "b f"]:
        if key == "flip":  # rows: no, yes, unknown
            rows = jnp.where(values[:, 0] < 0, 2, jnp.round(values[:, 0])).astype(jnp.int32)
            return nn.Embed(3, 256, embedding_init=nn.initializers.normal(1.0), name="flip")(rows)
        waves = layers.sinusoid(values.reshape(-1), 256).reshape(values.shape[0], -1)
        unknown = self.param(f"no_{key}", layers.zeros, waves.shape[1:])
        return jnp.where((values < 0).any(1, keepdims=True), unknown, waves)


def check_control(given: Any, keys: Sequence[str], batch: int) -> dict[str, Float[Array, "b n"]]:
    """cond["control"] as float32 [b n] under each of `keys`, unknown where it is not given."""
    wanted = ", ".join(f"{key!r}: [b, {CONTROLS[key]}]" for key in keys)
    if not isinstance(given, Mapping):
        raise ValueError(f"cond['control'] is a dict with any of {wanted}; got {jax.tree.map(jnp.shape, given)}")
    stray = [key for key in given if key not in keys]
    if stray:
        raise ValueError(
            f"unknown control {stray[0]!r}: this network takes {wanted}; leave it out, or build the network with it "
            "among control.keys"
        )
    values = {}
    for key in keys:
        shape = batch, CONTROLS[key]
        value = jnp.asarray(given.get(key, jnp.full(shape, UNKNOWN)), jnp.float32)
        if value.shape != shape and (value.shape != (batch,) or shape[1] > 1):
            raise ValueError(f"cond['control'][{key!r}] must have shape {list(shape)}, got {value.shape}")
        values[key] = value.reshape(shape)
    return values


def check_alone(model: str, control: Control | None, **others: Any) -> None:
    """A network's published form of control, where it has one, is taken alone."""
    used = [name for name, value in others.items() if value]
    if control is not None and used:
        raise ValueError(f"{model} takes control or its published form, {used[0]}={others[used[0]]}; set one of them")


def default_control(
    control: Control,
    size: Sequence[int],
    original_size: Sequence[float] = (),
    crop: Sequence[float] = (0, 0),
    flip: float = 0,
    aspect: float = 0.0,
) -> dict[str, np.ndarray]:
    """What samples of `size` (height, width) are told: by default that they are whole pictures, unflipped.

    original_size () is `size` itself; aspect, width / height as jaxdiff.data records it, 0 is that of original_size.
    """
    original_size = tuple(original_size) or tuple(size[:2])
    aspect = aspect or original_size[-1] / original_size[0]
    values = {"original_size": original_size, "crop": tuple(crop), "flip": (flip,), "aspect": (aspect,)}
    wrong = [name for name, value in values.items() if len(value) != CONTROLS[name]]
    if wrong:
        raise ValueError(f"{wrong[0]} of a sample is {CONTROLS[wrong[0]]} numbers, got {values[wrong[0]]}")
    return {key: np.asarray(values[key], np.float32) for key in control.keys}


# ------------------------------------------------------------------------------------------ classes


def class_tokens(model: Any, x: Array, cond: Cond, features: int) -> Float[Array, "b k {features}"]:
    """`model.class_tokens` tokens of cond["label"], from a table of the model that calls it while it is compact."""
    if model.class_tokens < 1:
        raise ValueError(f"class_tokens, how many tokens tell the class, must be at least 1, got {model.class_tokens}")
    label = (cond or {}).get("label", jnp.full(x.shape[:1], model.num_classes))
    width = model.class_tokens * features
    table = nn.Embed(model.num_classes + 1, width, embedding_init=nn.initializers.normal(0.02), name="label")
    return table(label).reshape(x.shape[0], model.class_tokens, features).astype(model.dtype)


# ------------------------------------------------------------------------------------------ texts


def check_texts(model: str, cond: Mapping[str, Any], **widths: int) -> None:
    """cond has `text` [b, l, width] and `pooled` [b, width], those of them that are named."""
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
                f"give that or build it with {key}_dim={shape[-1] if shape else 1}"
            )


def pad_text(
    text: Float[Array, "l d"], count: Any, total: int, kind: str = "noisy", scale: float = 0.02, key: Any = None
) -> Float[Array, "{total} d"]:
    """The first `count` tokens of one text and, up to `total`, zeros, copies (replicate) or noisy copies of them."""
    pick(PADDINGS, kind, "text padding")
    seen = concrete(count)
    if not total > 0 or (seen is not None and not 1 <= seen <= min(len(text), total)):
        raise ValueError(
            f"a text of {count} of {len(text)} tokens cannot fill {total} slots: it needs at least 1 token, at most as "
            "many as there are, and no more than slots; cut it, or give more slots"
        )
    if kind == "noisy" and key is None:
        raise ValueError("noisy padding draws noise: give key=")
    count = jnp.asarray(count).clip(1, min(len(text), total))
    slots = jnp.arange(total)
    copies = text[slots % count]
    if kind == "replicate":
        return copies
    extra = (slots >= count)[:, None]
    if kind == "zero":
        return jnp.where(extra, 0, copies)
    real = (jnp.arange(len(text)) < count)[:, None]
    mean = text.mean(0, where=real)
    std = jnp.sqrt(jnp.square(text - mean).mean(0, where=real))
    repeats = jnp.sqrt(((total - 1) // count).astype(text.dtype))  # ceil(total / count) - 1
    noise = scale * repeats * std * jax.random.normal(key, copies.shape, text.dtype)
    return copies + jnp.where(extra, noise, 0)


PADDINGS = {"zero": 0, "replicate": 0, "noisy": 0}


def padding(kind: str, scale: float = 0.02) -> Callable[[Any, Any], Any]:
    """(cond, keys [b]) -> cond with `text` padded where `text_mask` hides it, and no mask: every slot is then valid."""
    pick(PADDINGS, kind, "text padding")

    def pad(cond: Any, keys: Any) -> Any:
        if cond is None or "text" not in cond:
            return cond
        if "text_mask" not in cond:
            raise ValueError("padding a text needs cond['text_mask'] [b, l], true where a token is text")
        text, counts = jnp.asarray(cond["text"]), jnp.asarray(cond["text_mask"], jnp.int32).sum(-1)
        fill = lambda text, count, key: pad_text(text, count, len(text), kind, scale, key)  # noqa: E731
        return {**{k: v for k, v in cond.items() if k != "text_mask"}, "text": jax.vmap(fill)(text, counts, keys)}

    return pad
