"""EMD: EM Distillation of a teacher into a one-step generator (Xie et al., NeurIPS 2024).

The generator g(z), z ~ N(0, I), is fitted by maximum likelihood to the teacher's noisy densities p_sigma. With
x = g(z) + sigma eps, p_g the density of x, D_T and D_S the denoisers of p_sigma and of p_g, the gradient is

    -grad KL(p_sigma | p_g) = E J_params(z)^T (x - g(z)) / sigma^2     over   rho(x, z) = p_sigma(x)/p_g(x) p(x|z) p(z)

E-step     K Langevin steps towards rho from fresh (eps, z): `langevin.py`
M-step     params <- params + rate weight(sigma) J_params(z)^T r,   r = x - g(z) = sigma eps after K steps, with noise
           cancelled. weight 1 is the paper's sigma^2 on the divergence.
score      D_S by denoising score matching on g(z), z from the prior, before each M-step: `score_distillation.py`

K = 1 with z fixed and complete cancellation is Diff-Instruct (variational score distillation): r = a gap, the
gradient of the reverse divergence KL(p_g | p_sigma).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdiff.conditions import Cond
from jaxdiff.denoisers import Denoiser, per_example
from jaxdiff.errors import pick
from jaxdiff.methods.langevin import DEFAULT, Chain, Generator, Langevin, e_step, normals
from jaxdiff.methods.method import Examples, Method, Metrics, Parts
from jaxdiff.methods.score_distillation import score_distillation
from jaxdiff.methods.score_rules import Networks, ScoreOptions
from jaxdiff.models import DTYPES
from jaxdiff.noise.levels import LossWeight, loss_weight
from jaxdiff.trees import Params

DIFF_INSTRUCT: dict[str, Any] = {"steps": 1, "scheme": "eps", "step_eps": 1.0, "cancel": "complete"}


@dataclass(frozen=True)
class Options(ScoreOptions, Langevin):
    """Options of `method.name = "emd"`. The generator takes one step from noise level sample.sigma_max."""

    weight: str | LossWeight = "x0"  # weight of |target - g(z)|^2, as diffusion.weight; x0 = sigma^2 on the divergence
    chain_dtype: str = ""  # dtype of the E-step's copies of the networks: float32, bfloat16; "": no copies
    mcmc_sigma: float = 0.3  # (0, inf) noise level for `jaxdiff sample --mcmc_steps`
    unroll: int = 1  # [1, 10000] of the chain's loop; on CPU use unroll = steps for models without loop convolutions


def build(options: Options, parts: Parts) -> Method:
    """Distil a teacher into g(z) = D(sigma_star z, sigma_star), where D starts from the teacher's weights.

    `Options(**DIFF_INSTRUCT)` gives Diff-Instruct.
    """
    weight = loss_weight(options.weight, parts.convention)
    dtype = None
    if options.chain_dtype:
        dtype = pick(DTYPES, options.chain_dtype, "emd.chain_dtype")

    def rule(networks: Networks, params: Params, examples: Examples) -> tuple[Params, Metrics]:
        sigma, cond = examples["sigma"], examples.get("cond")
        inputs = (examples["z"], examples["eps"], sigma, examples["key"], cond)
        end = e_step(networks.teacher, networks.score, networks.looped, *inputs, options, options.unroll)
        loss, gradients = m_step(networks.generate, params, end, sigma, cond, weight=weight)
        return gradients, {"loss": loss, **end.metrics}

    return score_distillation(options, parts, rule, chain_dtype=dtype, correct=partial(correct, chain=options))


def m_step(
    generate: Callable[[Params, Array, Cond], Array],
    params: Params,
    chain: Chain,
    sigma: Array,
    cond: Cond = None,
    *,
    weight: LossWeight = jnp.ones_like,
) -> tuple[Array, Params]:
    """(loss, gradient) of mean weight(sigma) |target - g(z)|^2 / 2, target = g(z) + residual held constant.

    `generate(params, z, cond)` is run forward and backward once. Means are over pixels and examples.
    """
    made, pull = jax.vjp(lambda p: generate(p, chain.z, cond), params)
    residual = chain.residual  # zero where a chain was not finite
    weighted = per_example(weight(sigma), made) * residual
    (gradient,) = pull((-weighted / made.size).astype(made.dtype))
    return 0.5 * (weighted * residual).mean(), gradient


def correct(
    teacher: Denoiser,
    student: Denoiser,
    generate: Generator,
    z: Array,
    key: Array,
    cond: Cond = None,
    *,
    sigma: float,
    steps: int = 0,
    chain: Langevin = DEFAULT,
) -> tuple[Array, Array]:
    """Samples g(z), and the teacher's denoised x after a long joint chain from them at one noise level."""
    levels = jnp.full(z.shape[0], sigma, jnp.float32)
    keys = key if key.ndim else jax.random.split(key, z.shape[0])
    eps = normals(keys, jnp.int32(-1), z)
    chain = replace(chain, scheme="eps,z", step_x=0.0, steps=steps or chain.steps)
    end = e_step(teacher, student, generate, z, eps, levels, keys, cond, chain)
    return generate(z, cond), teacher(generate(end.z, cond) + end.carried, levels, cond)
