"""FACM: a consistency model anchored in flow matching (Peng et al. 2025, arXiv 2507.03738).

    consistency, tau = 0    u_tgt = v - t du/dt;   target u - a(t) clip(u - u_tgt, +-1),   a = 1 - (1 - t)^q
                            sin(pi t / 2) e / sg(e + c)^p,   e the mean square of u - target
    anchor, tau = sigma     the mean square of u(x, sigma, sigma) - v

The sum of both, each with its weight. The derivative of a network that is not a flow is unreliable: the anchor keeps
it one. The published anchor also has a cosine distance over channels, left out here.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxdiff.denoisers import per_example
from jaxdiff.methods import flow_map, flow_targets
from jaxdiff.methods.flow_targets import AnchoredOptions, Networks
from jaxdiff.methods.method import Examples, Method, Metrics, Parts

check_sample = flow_map.check_ends


@dataclass(frozen=True)
class Options(AnchoredOptions):
    """Options of `method.name = "facm"`."""

    loss_power: float = 0.5  # [0, inf) p of the consistency loss's adaptive weight
    relaxation: float = 0.5  # [0, inf) q: near the data, where t is small, targets move less
    clip: float = 1.0  # [0, inf) largest change of a pixel's velocity in a target
    consistency_weight: float = 1.0  # [0, inf) of the consistency loss
    anchor_weight: float = 1.0  # [0, inf) of the anchor
    derivative: str = "jvp"  # du/dt by jvp, or by central difference for networks without forward mode


def build(options: Options, parts: Parts) -> Method:
    """Train a flow map at tau = 0 and tau = sigma; with `distil`, along the trajectories of its teacher."""
    flow_targets.check_tau("FACM", parts)
    flow_targets.check_derivative(options.derivative, parts.model)

    def rule(networks: Networks, examples: Examples) -> tuple[Array, Metrics]:
        x, sigma = flow_targets.noisy(examples), examples["sigma"]
        dim, t = x[0].size, sigma / (1 + sigma)
        clean = networks.anchor(x, examples)
        tau = jnp.zeros_like(sigma)
        made, wanted, seen = flow_targets.tangent_target(networks, x, examples, tau, clean, options.derivative)
        base, time = jax.lax.stop_gradient(made), per_example(t, x)
        change = jnp.clip((wanted - base) / time, -options.clip, options.clip)
        wanted = base + time * per_example(1 - (1 - t) ** options.relaxation, x) * change
        losses, error = flow_targets.velocity_loss(made, wanted, sigma, options.loss_power, dim * options.loss_offset)
        losses = jnp.sin(jnp.pi / 2 * t) * losses / dim ** (1 - options.loss_power)  # of means instead of sums
        own = networks.student(x, sigma, sigma, examples.get("cond"))
        anchors, apart = flow_targets.velocity_loss(own, clean, sigma, 0.0, 1.0)
        value = options.consistency_weight * losses.mean() + options.anchor_weight * anchors.mean() / dim
        return value, {**error, **seen, "anchor_error": apart["error"]}

    levels = flow_targets.draw_levels(options)
    return flow_map.flow_map(options, parts, levels, rule, flow_map.by_ends(parts, diagonal=True))
