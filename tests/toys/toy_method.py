"""A method from outside the package: denoising with an L1 loss, |D(x0 + sigma eps) - x0|, mean over pixels."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxdiff.denoisers import per_example
from jaxdiff.methods import METHODS, Entry, Method
from jaxdiff.methods.method import advance, data_of, start, update


@dataclass(frozen=True)
class Options:
    """Options of `method.name = "absolute"`."""

    scale: float = 1.0  # of the loss


def build(options, parts):
    optimizer = parts.optimizers.scheduled

    def init(key, batch, frozen=None):
        return start({"student": parts.initial(key, batch)}, {"student": optimizer}, ("ema",))

    def step(state, batch, key):
        x0, cond = data_of(batch), parts.cond.of(batch)
        level, noise = jax.random.split(key)
        sigma, eps = parts.sigmas(level, len(x0)), jax.random.normal(noise, x0.shape)

        def loss(params):
            x = x0 + per_example(sigma, x0) * eps
            return options.scale * jnp.abs(parts.denoiser(params)(x, sigma, cond) - x0).mean()

        value, gradients = jax.value_and_grad(loss)(state.params["student"])
        params, opt_state = update(optimizer, gradients, state.opt_state["student"], state.params["student"])
        return advance(state, params, opt_state, parts.rate(state.step + 1, len(x0))), {"loss": value}

    def sample(params, noise, cond=None, key=None):
        return parts.sampling.solve(parts.denoiser(params), noise, cond, key)

    return Method(init, step, sample, parts.denoiser)


METHODS["absolute"] = Entry(Options, build, data=True)
