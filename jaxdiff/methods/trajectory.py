"""Trajectory distillation: jumps learn from a teacher's solver (after CTM, Kim et al. 2024, arXiv 2310.02279).

    x_mu  = the teacher's solver from x at sigma to mu in [tau, sigma], `substeps` steps
    X_tgt = X(x_mu, mu -> tau)                                by the target network

mu = sigma^(1-f) max(tau, sigma_min)^f with f ~ U(0, 1): with f near 1 the teacher makes all of the way, with f near 0
the student learns from itself. `full` is the share of examples with f = 1. On a share of the batch tau = sigma, and the
target is the teacher's D. CTM compares both sides at sigma = 0, with LPIPS and a discriminator; here they are compared
as velocities, without either.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxdiff.conditions import Cond
from jaxdiff.denoisers import Denoiser, per_example
from jaxdiff.errors import choose
from jaxdiff.methods import flow_map, flow_targets
from jaxdiff.methods.consistency import follow
from jaxdiff.methods.flow_targets import Networks, PairOptions
from jaxdiff.methods.method import Examples, Method, Metrics, Parts

check_sample = flow_map.check_jumps


@dataclass(frozen=True)
class Options(PairOptions):
    """Options of `method.name = "trajectory"`."""

    distil: bool = True  # its targets are the teacher's
    solver: str = "heun"  # the teacher's solver: heun, euler
    substeps: int = 2  # [1, 1000] steps of the teacher from sigma to mu
    full: float = 0.1  # [0, 1] share of examples on which the teacher makes all of the way
    target_decay: float = 0.0  # [0, 1) decay of an averaged target network; 0: the online network is the target

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self.solver, ("heun", "euler"), "solver of a trajectory's teacher")
        if not self.distil:
            raise ValueError("trajectory targets are the teacher's: set trajectory.distil=True")
        if self.substeps < 1 or not 0 <= self.full <= 1:
            raise ValueError(f"trajectory needs substeps >= 1 and full in [0, 1], got {self.substeps} and {self.full}")


def path(teacher: Denoiser, x: Array, sigma: Array, mid: Array, cond: Cond, options: Options) -> tuple[Array, Array]:
    """The teacher's x at `mid`, after steps at levels that fall geometrically, and the G that jumps there."""
    end, before = x, sigma
    for i in range(1, options.substeps + 1):
        after = sigma * (mid / sigma) ** (i / options.substeps)
        end, before = follow(teacher, end, before, after, cond, options.solver), after
    share = per_example(jnp.maximum(1 - mid / sigma, 1e-6), x)
    return end, x + (end - x) / share


def build(options: Options, parts: Parts) -> Method:
    """Distil a teacher's trajectories into jumps between any two of its noise levels."""
    flow_targets.check_tau("trajectory distillation", parts)
    pairs = flow_targets.draw_pairs(options)

    def levels(key: Array, n: int, step: Array) -> tuple[dict[str, Array], Metrics]:
        drawn, seen = pairs(key, n, step)
        first, second = jax.random.split(jax.random.fold_in(key, 3))
        share = jnp.where(jax.random.bernoulli(second, options.full, (n,)), 1.0, jax.random.uniform(first, (n,)))
        low = jnp.minimum(jnp.maximum(drawn["tau"], options.sigma_min), drawn["sigma"])
        return {**drawn, "mid": drawn["sigma"] * (low / drawn["sigma"]) ** share}, seen

    def rule(networks: Networks, examples: Examples) -> tuple[Array, Metrics]:
        assert networks.teacher is not None
        x, cond = flow_targets.noisy(examples), examples.get("cond")
        sigma, mid, tau = examples["sigma"], examples["mid"], examples["tau"]
        end, first = path(networks.teacher, x, sigma, mid, cond, options)
        second = networks.target(end, mid, tau, cond)
        twice = flow_targets.composed(first, second, sigma, mid, tau)
        same = per_example((sigma == tau).astype(x.dtype), x)
        wanted = jax.lax.stop_gradient(same * networks.anchor(x, examples) + (1 - same) * twice)
        made = networks.student(x, sigma, tau, cond)
        losses, error = flow_targets.velocity_loss(made, wanted, sigma, options.loss_power, options.loss_offset)
        return jnp.mean(losses), error

    return flow_map.flow_map(options, parts, levels, rule, flow_map.by_jumps(parts))
