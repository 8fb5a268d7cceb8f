"""sCM and sCD: continuous-time consistency models (Lu & Song 2024, arXiv 2410.11081).

With sigma = s tan(theta), s = sigma_data, the network's velocity F = (cos^2 x - G)/(s sin), G = G(x, sigma, 0), which
is minus the output of an EDM network. Its tangent, zero if G is the end of the trajectory, is

    g = cos dG/dtheta = (dG/dln sigma) / sin           g_w = ((1 - w) cos^2 (G - D) + w dG/dln sigma) / sin

with w warmed up from 0 to 1 (D = x0, or the teacher's), which is the published
-cos^2 (s F - dx/dtheta) - w cos sin (x_theta + s dF/dtheta). Then, |g| the root mean square over pixels,

    g <- g / (|g| + c),     loss = E exp(-u(sigma)) |F - sg(F) - g|^2 / dim + u(sigma)

where u is learned beside the network: the logarithm of the loss at a noise level, linear in Fourier features of
ln sigma. Targets with `distil` are the teacher's trajectories (sCD), else those of the data (sCT).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxdiff.denoisers import per_example
from jaxdiff.methods import flow_map, flow_targets
from jaxdiff.methods.flow_targets import FlowMapOptions, Networks
from jaxdiff.methods.method import Examples, Method, Metrics, Parts
from jaxdiff.models.embeddings import sinusoid
from jaxdiff.trees import Params

check_sample = flow_map.check_ends
FEATURES = 32  # of ln sigma, from which u is computed


@dataclass(frozen=True)
class Options(FlowMapOptions):
    """Options of `method.name = "scm"`."""

    mean: float = -1.0  # (-inf, inf) of ln sigma
    std: float = 1.4  # [0, inf) of ln sigma
    warmup: int = 10_000  # [0, inf) steps over which w grows from 0 to 1
    normalize: float = 0.1  # [0, inf) c: tangents are divided by |g| + c; 0: not normalized
    learn_weight: bool = True  # learn u; False: u = 0
    derivative: str = "jvp"  # dG/dln sigma by jvp, or by central difference for networks without forward mode

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance != 1.0 and not self.distil:
            raise ValueError(f"guidance={self.guidance} applies to the teacher and needs distil=True")
        if self.normalize < 0 or self.warmup < 0:
            raise ValueError(f"scm needs normalize >= 0 and warmup >= 0, got {self.normalize} and {self.warmup}")


def tangent(made: Array, slope: Array, clean: Array, sigma: Array, share: Array | float, sigma_data: float) -> Array:
    """g_w of G = `made` and dG/dln sigma = `slope`."""
    share, total = jnp.asarray(share, sigma.dtype), sigma**2 + sigma_data**2
    near = per_example((1 - share) * sigma_data**2 / total, made) * (made - clean)
    return (near + share * slope) / per_example(sigma / jnp.sqrt(total), made)


def log_weight(params: Params, sigma: Array) -> Array:
    """u(sigma)."""
    found = sinusoid(5 * jnp.log(sigma).astype(jnp.float32), FEATURES) @ params["scale"] + params["bias"]
    return found.astype(sigma.dtype)


def build(options: Options, parts: Parts) -> Method:
    """Train the end of the trajectory, tau = 0; the network needs no tau."""
    flow_targets.check_derivative(options.derivative, parts.model)
    sigma_data = getattr(parts.convention, "sigma_data", 0.5)

    def rule(networks: Networks, examples: Examples) -> tuple[Array, Metrics]:
        x, sigma, cond = flow_targets.noisy(examples), examples["sigma"], examples.get("cond")
        clean = networks.anchor(x, examples)
        base, slope = flow_targets.total_derivative(
            lambda x, sigma: networks.target(x, sigma, 0.0, cond), x, sigma, clean, options.derivative
        )
        made = base if networks.target is networks.student else networks.student(x, sigma, 0.0, cond)
        share = flow_targets.warmed_up(networks.step, options.warmup)
        g = tangent(base, slope, clean, sigma, share, sigma_data)
        size = jnp.sqrt(jnp.square(g).reshape(len(x), -1).mean(1))
        if options.normalize:
            g = g / per_example(size + options.normalize, x)
        scale = per_example(jnp.sqrt(sigma**2 + sigma_data**2) / (sigma_data * sigma), x)
        apart = scale * (jax.lax.stop_gradient(base) - made) - jax.lax.stop_gradient(g)  # F - sg(F) - g
        errors = jnp.square(apart).reshape(len(x), -1).mean(1)
        level = jnp.zeros_like(errors)
        if options.learn_weight:
            level = log_weight(networks.params["weight"], sigma)
        value = (jnp.exp(-level) * errors + level).mean()
        return value, {"error": errors.mean(), "tangent": size.mean()}

    def heads() -> dict[str, Params]:
        if not options.learn_weight:
            return {}
        return {"weight": {"scale": jnp.zeros(FEATURES, jnp.float32), "bias": jnp.zeros((), jnp.float32)}}

    return flow_map.flow_map(options, parts, flow_targets.draw_levels(options), rule, flow_map.by_ends(parts), heads)
