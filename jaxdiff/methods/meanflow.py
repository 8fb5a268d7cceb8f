"""MeanFlow: a flow map by its own average velocity (Geng et al. 2025, arXiv 2505.13447).

    u = average velocity of G from t to r;  v = eps - x0 (data), or that of the teacher's D
    loss = E |u - sg(v - (t - r) du/dt)|^2 / sg(|.|^2 + c)^p,     du/dt = v J_z u + du/dt: one forward-mode product

sigma and tau are drawn as logit-normal t and r, since ln sigma = logit t; on a share of the batch tau = sigma, where
the loss is flow matching. Guidance is learned inside training, so sampling needs none: from a teacher it is the
teacher's; from data D = w x0 + k G(x, sigma, sigma, cond) + (1 - w - k) G(x, sigma, sigma, null), a scale of w/(1 - k).
Examples whose condition is dropped have the same formula, whose fixed point is their own D.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxdiff.methods import flow_map, flow_targets
from jaxdiff.methods.flow_targets import Networks, PairOptions
from jaxdiff.methods.method import Examples, Method, Metrics, Parts

check_sample = flow_map.check_jumps


@dataclass(frozen=True)
class Options(PairOptions):
    """Options of `method.name = "meanflow"`."""

    derivative: str = "jvp"  # du/dt by jvp, or by central difference for networks without forward mode
    warmup: int = 0  # [0, inf) steps over which du/dt grows from 0 to its full share


def build(options: Options, parts: Parts) -> Method:
    """Train a flow map by MeanFlow; with `distil`, along the trajectories of the teacher it starts from."""
    flow_targets.check_tau("MeanFlow", parts)
    flow_targets.check_derivative(options.derivative, parts.model)

    def rule(networks: Networks, examples: Examples) -> tuple[Array, Metrics]:
        x, sigma = flow_targets.noisy(examples), examples["sigma"]
        clean = networks.anchor(x, examples)
        share = flow_targets.warmed_up(networks.step, options.warmup)
        made, wanted, seen = flow_targets.tangent_target(
            networks, x, examples, examples["tau"], clean, options.derivative, share
        )
        losses, error = flow_targets.velocity_loss(made, wanted, sigma, options.loss_power, options.loss_offset)
        return jnp.mean(losses), {**error, **seen}

    return flow_map.flow_map(options, parts, flow_targets.draw_pairs(options), rule, flow_map.by_jumps(parts))
