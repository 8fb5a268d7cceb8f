"""Shortcut models: a jump is two jumps of half its length (Frans et al. 2025, arXiv 2410.12557).

    X_tgt = X(X(x, sigma -> mu), mu -> tau),   mu halfway in flow time,   so   G_tgt = a G_1 + (1 - a) G_2
    a = tau (sigma - mu) / (mu (sigma - tau)),  G_1 = G(x, sigma, mu),  G_2 = G(X(x, sigma -> mu), mu, tau)

On a share of the batch tau = sigma, and the target is D: x0 (data) or the teacher's. No derivative of the network is
needed. The published model draws lengths 2^-k and trains them on a quarter of the batch; here lengths are drawn as
MeanFlow's, and `diagonal` is 0.75.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxdiff import flow_maps
from jaxdiff.denoisers import per_example
from jaxdiff.methods import flow_map, flow_targets
from jaxdiff.methods.flow_targets import Networks, PairOptions
from jaxdiff.methods.method import Examples, Method, Metrics, Parts

check_sample = flow_map.check_jumps


@dataclass(frozen=True)
class Options(PairOptions):
    """Options of `method.name = "shortcut"`."""

    diagonal: float = 0.75  # [0, 1] share of the batch with tau = sigma
    loss_power: float = 0.0  # [0, inf) p of the adaptive weight; 0: squared error


def halfway(sigma: Array, tau: Array) -> Array:
    """The noise level halfway between two in flow time t = sigma/(1 + sigma)."""
    t = (sigma / (1 + sigma) + tau / (1 + tau)) / 2
    rest = (1 / (1 + sigma) + 1 / (1 + tau)) / 2  # 1 - t, which has no digits left at large sigma
    return t / rest


def build(options: Options, parts: Parts) -> Method:
    """Train a flow map by self-consistency; with `distil`, its diagonal is that of the teacher it starts from."""
    flow_targets.check_tau("a shortcut model", parts)

    def rule(networks: Networks, examples: Examples) -> tuple[Array, Metrics]:
        x, sigma, tau = flow_targets.noisy(examples), examples["sigma"], examples["tau"]
        cond = examples.get("cond")
        mid = halfway(sigma, tau)
        first = networks.target(x, sigma, mid, cond)
        second = networks.target(flow_maps.moved(x, first, sigma, mid), mid, tau, cond)
        twice = flow_targets.composed(first, second, sigma, mid, tau)
        same = per_example((sigma == tau).astype(x.dtype), x)
        wanted = jax.lax.stop_gradient(same * networks.anchor(x, examples) + (1 - same) * twice)
        made = networks.student(x, sigma, tau, cond)
        losses, error = flow_targets.velocity_loss(made, wanted, sigma, options.loss_power, options.loss_offset)
        return jnp.mean(losses), error

    return flow_map.flow_map(options, parts, flow_targets.draw_pairs(options), rule, flow_map.by_jumps(parts))
