"""The head: a classifier of real and generated images on an activation of a denoiser (DMD2, Yin et al. 2024).

    C(x, sigma) = MLP(mean over positions of MLP(activation(x, sigma)))         x = x0 + sigma eps
    head loss   E_fake softplus(C) + E_real softplus(-C) + r1 E_real |grad_x C|^2
    generator   gan E_fake softplus(-C)

Without r1 the loss is least at C = log p_real(x) / p_fake(x), so that exp(C) is the ratio of the noisy densities. The
activation is a tap of the student score, which the head's loss then trains too, or of the frozen teacher.

Weights that are functions of the ratio use it clipped, and divided by its running mean at similar noise levels, since a
head that is wrong by a factor would otherwise scale the loss:

    r = exp(clip(C, -10, 10)) / mean_bin(sigma),        weight = h(r) / mean

Both means are over earlier steps, so an example's weight does not depend on its batch or on how it is accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from jaxdiff.conditions import Cond
from jaxdiff.denoisers import per_example
from jaxdiff.errors import choose
from jaxdiff.methods.method import Batch, Examples, Metrics, Parts, data_of
from jaxdiff.models import initializers, taps
from jaxdiff.trees import Params

Logits = Callable[..., Array]  # (x, sigma, cond) -> [b]
BINS = 16  # of ln sigma
EDGES = np.log(np.geomspace(0.002, 80.0, BINS + 1)[1:-1])  # between them
LIMIT = 10.0  # of logits, in ratios


@dataclass(frozen=True)
class HeadOptions:
    """Options of methods with a head."""

    gan: float = 1e-3  # [0, inf) weight of the adversarial term in the generator's loss
    head_on: str = "score"  # the network it reads: score (which its loss trains too), teacher (frozen)
    tap: str = ""  # the activation it reads, by its name in jaxdiff.features; "": one in the middle
    head_width: int = 128  # [1, 2**20] of its hidden layers
    head_rate: float = 0.0  # [0, inf) its learning rate; 0: score_rate
    head_weight: float = 0.01  # [0, inf) weight of its loss beside that of the student score
    r1: float = 0.0  # [0, inf) weight of |grad_x C|^2 on real images; 0: off

    def check_head(self) -> None:
        choose(self.head_on, ("score", "teacher"), "network of a head")
        if min(self.gan, self.head_weight, self.r1, self.head_rate) < 0 or self.head_width < 1:
            raise ValueError(
                f"gan, head_weight, head_rate and r1 are not negative and head_width is at least 1, got {self.gan}, "
                f"{self.head_weight}, {self.head_rate}, {self.r1} and {self.head_width}"
            )


class Classifier(nn.Module):
    """An activation [b ... c] to logits [b]: an MLP at every position, their mean, an MLP. It starts as C = 0."""

    width: int

    @nn.compact
    def __call__(self, h: Array) -> Array:
        h = nn.LayerNorm(name="norm")(h.astype(jnp.float32))
        h = nn.silu(nn.Dense(self.width, name="positions")(h))
        h = h.mean(axis=tuple(range(1, h.ndim - 1))) if h.ndim > 2 else h
        h = nn.silu(nn.Dense(self.width, name="pooled")(h))
        return nn.Dense(1, kernel_init=initializers.zeros, name="logit")(h)[:, 0]


def middle(found: Mapping[str, Array]) -> str:
    """The activation in the middle: of the blocks' outputs on the coarsest grid, the middle one."""
    outputs = [n for n in found if n.endswith("/out") and not any(part in n for part in ("attention", "mlp", "text"))]
    if not outputs:
        raise ValueError("a head needs a network with activations; add taps.tap(self, name, x) to its blocks")
    positions = {name: int(np.prod(found[name].shape[1:-1])) for name in outputs}
    coarsest = [name for name in outputs if positions[name] == min(positions.values())]
    return coarsest[len(coarsest) // 2]


def classify(real: Array, fake: Array) -> Array:
    """The loss of a head with these logits."""
    return jax.nn.softplus(fake).mean() + jax.nn.softplus(-real).mean()


class Head:
    """A head on activations of `model`: its logits, its loss."""

    def __init__(self, options: HeadOptions, parts: Parts, model: nn.Module) -> None:
        self.options, self.parts, self.model = options, parts, model
        self.network = Classifier(options.head_width)

    def init(self, key: Array, batch: Batch, params: Params) -> Params:
        """Its parameters; `params` are those of the network it reads."""
        x, sigma = data_of(batch), jnp.ones(len(data_of(batch)))
        cond = {**(self.parts.cond.example(len(x)) or {}), **(self.parts.cond.of(batch) or {})}
        shape = jax.eval_shape(lambda: self.activation(params, x, sigma, cond or None))
        return self.network.init(key, jnp.zeros(shape.shape, jnp.float32))["params"]

    def activation(self, params: Params, x: Array, sigma: Array, cond: Cond, net: nn.Module | None = None) -> Array:
        """The activation that the head reads."""
        model, seen = net or self.model, {}
        apply, params = taps.unrolled(model), taps.unstacked(model, self.parts.weights(params))

        def network(x: Array, label: Array, cond: Cond) -> Array:
            out, found = taps.record(apply, params, x, label, cond)
            seen.update(found)
            return out

        self.parts.convention(network)(x, sigma, cond)
        return seen[choose(self.options.tap or middle(seen), seen, "activation of a head")]

    def logits(self, head: Params, params: Params, net: nn.Module | None = None) -> Logits:
        """C of these parameters, as a function of (x, sigma, cond)."""

        def logits(x: Array, sigma: Array, cond: Cond = None) -> Array:
            return jnp.asarray(self.network.apply({"params": head}, self.activation(params, x, sigma, cond, net)))

        return logits

    def loss(self, logits: Logits, fake: Examples, real: Examples) -> tuple[Array, Metrics]:
        """Its loss on examples with x0, eps, sigma and cond."""
        x_fake, x_real = (e["x0"] + per_example(e["sigma"], e["x0"]) * e["eps"] for e in (fake, real))
        on_fake = logits(x_fake, fake["sigma"], fake.get("cond"))
        on_real = logits(x_real, real["sigma"], real.get("cond"))
        loss = classify(on_real, on_fake)
        metrics = {"head_loss": loss, "head_fake": on_fake.mean(), "head_real": on_real.mean()}
        if self.options.r1:
            slope = jax.grad(lambda x: logits(x, real["sigma"], real.get("cond")).sum())(x_real)
            metrics["head_r1"] = jnp.square(slope).reshape(len(slope), -1).sum(1).mean()
            loss = loss + self.options.r1 * metrics["head_r1"]
        return loss, metrics


def adversarial(logits: Logits, x: Array, sigma: Array, cond: Cond) -> tuple[Array, Array]:
    """(loss, slope) of the generator's term mean softplus(-C(x)), by x."""
    return jax.value_and_grad(lambda x: jax.nn.softplus(-logits(x, sigma, cond)).mean())(x)


# ------------------------------------------------------------------------------------------ weights by the ratio


class RatioWeight(NamedTuple):
    """h(r) over its running mean; `decay` is that of the running means, per step."""

    h: Callable[[Array], Array]
    decay: float = 0.99

    def check(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"ratio_decay lies between 0 and 1, such as 0.99, got {self.decay}")

    def initial(self) -> Array:
        """The running means for a head that knows nothing, r = 1: of the ratio in each bin of sigma, and of h."""
        return jnp.append(jnp.ones(BINS), self.h(jnp.ones(())))

    def weights(self, means: Array, logits: Array, sigma: Array) -> tuple[Array, Array]:
        """The weights [b] of examples, and (sums, counts) from which the means are updated."""
        index = jnp.searchsorted(jnp.asarray(EDGES, jnp.float32), jnp.log(sigma).astype(jnp.float32))
        raw = jnp.exp(jnp.clip(logits, -LIMIT, LIMIT))
        found = self.h(raw / means[:BINS][index])
        member = jax.nn.one_hot(index, BINS, dtype=raw.dtype)
        sums = jnp.append(raw @ member, found.sum()), jnp.append(member.sum(0), float(len(raw)))
        return jax.lax.stop_gradient((found / means[BINS], jnp.stack(sums)))

    def updated(self, means: Array, sums: Array) -> Array:
        """The running means after a step; bins without examples keep theirs."""
        total, count = sums
        here = total / jnp.maximum(count, 1e-9)
        return jnp.where(count > 0, self.decay * means + (1 - self.decay) * here, means)
