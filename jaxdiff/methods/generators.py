"""Generators: a network that turns noise into images in one step, or in a few.

    one step   g(z) = D(sigma_0 z, sigma_0),  z ~ N(0, I)
    n steps    x_1 = D(sigma_0 z_0, sigma_0),  x_{k+1} = D(x_k + sigma_k z_k, sigma_k)       (the solver `renoise`)

One step starts at sample.sigma_max; several take the levels of the grid that samples are drawn on. Each example of a
training batch takes one of the steps, k uniform. What step k > 0 adds noise to, its origin, is

    student    x_k, made by the student's earlier steps: the inputs it will see (backward simulation, DMD2)
    data       a real image

and zero for k = 0. With the origin held constant, every step is a generator g(z_k) like the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from ml_collections import ConfigDict

from jaxdiff import denoisers, solvers
from jaxdiff.conditions import Cond
from jaxdiff.denoisers import per_example
from jaxdiff.errors import check_sigma, choose, pick
from jaxdiff.methods.langevin import normals
from jaxdiff.methods.method import Batch, Examples, Parts, data_of
from jaxdiff.placement import along_batch
from jaxdiff.trees import Params


@dataclass(frozen=True)
class StudentSteps:
    """Options of students that may take several steps: as many as sample.timestamps."""

    origin: str = "student"  # what later steps add noise to in training: student (its own earlier steps), data

    def __post_init__(self) -> None:
        choose(self.origin, ("student", "data"), "origin of a student's steps")


def check_sample(options: object, sample: ConfigDict) -> None:
    """A generator takes one step from sigma_star = sample.sigma_max, or the steps of `renoise` if it can."""
    one = sample.solver == "euler" and sample.timestamps == 1
    several = isinstance(options, StudentSteps) and sample.solver == "renoise" and not sample.options.get("floor", 0.0)
    if not (one or several) or not sample.final_denoise or sample.afs:
        more = ", or sample.solver='renoise' for several steps" if isinstance(options, StudentSteps) else ""
        raise ValueError(
            f"a one-step generator takes one step from sigma_star = sample.sigma_max: set sample.solver='euler', "
            f"sample.timestamps=1{more}, sample.final_denoise=True and sample.afs=False, got {sample.solver!r}, "
            f"{sample.timestamps}, {sample.final_denoise} and {sample.afs}"
        )
    if sample.guidance != 1.0:
        raise ValueError(
            f"the generator already learns the guided teacher; sample.guidance={sample.guidance} would guide it twice: "
            "set it to 1"
        )


class Generator:
    """The student as a function of noise, and the steps its training draws."""

    def __init__(self, parts: Parts, input_scale: str = "sigma", origin: str = "") -> None:
        self.parts, self.origin = parts, origin
        self.sigma_star = parts.sampling.sigma_max
        check_sigma(self.sigma_star)
        scales = {"sigma": 1.0, "one": (1 + self.sigma_star**-2) ** 0.5}
        self.scale = pick(scales, input_scale, "input_scale of a generator")
        steps = parts.sampling.timestamps if origin else 1
        self.levels = parts.sampling.grid(steps) if steps > 1 else np.zeros(0)
        if len(self.levels) and input_scale != "sigma":
            raise ValueError(f"input_scale={input_scale!r} is for one step; set it to 'sigma' for {len(self.levels)}")

    def __call__(
        self,
        params: Params,
        z: Array,
        cond: Cond = None,
        start: Examples | None = None,
        *,
        net: nn.Module | None = None,
    ) -> Array:
        """g(z), from the origin and the level in `start` if it takes several steps."""
        denoise = self.parts.denoiser(params, model=net)
        if start is None:
            return denoisers.one_step(denoise, self.sigma_star, self.scale)(z, cond)
        return denoise(start["origin"] + per_example(start["sigma"], z) * z, start["sigma"], cond)

    @property
    def reads_data(self) -> bool:
        """Whether its later steps start from real images, whose conditioning they then have."""
        return bool(len(self.levels)) and self.origin == "data"

    def draw(self, key: Array, batch: Batch) -> Examples:
        """The step that each example takes; nothing if there is only one."""
        if not len(self.levels):
            return {}
        images, keys = data_of(batch), jax.random.split(key, 1 + len(data_of(batch)))
        drawn = {"index": jax.random.randint(keys[0], images.shape[:1], 0, len(self.levels)), "key": keys[1:]}
        return {"step": along_batch(drawn | ({"image": images} if self.reads_data else {}))}

    def begin(self, params: Params, examples: Examples) -> Examples:
        """The examples with the origin and the level that their steps start from."""
        if not len(self.levels):
            return examples
        step, z = examples["step"], examples["z"]
        if self.reads_data:
            origin = jnp.where(per_example(step["index"] > 0, z), step["image"], 0.0)
        else:
            origin = self._walk(params, step, z, examples.get("cond"))
        sigma = jnp.asarray(self.levels, jnp.float32)[step["index"]]
        return {**examples, "start": {"origin": jax.lax.stop_gradient(origin), "sigma": sigma}}

    def _walk(self, params: Params, step: Examples, z: Array, cond: Cond) -> Array:
        """x_k of the student's own earlier steps, k the step of each example."""
        denoise = self.parts.denoiser(params)
        origin = x = jnp.zeros_like(z)
        for k, sigma in enumerate(self.levels[:-1]):
            x = denoise(x + jnp.float32(sigma) * normals(step["key"], jnp.int32(k), z), jnp.float32(sigma), cond)
            origin = jnp.where(per_example(step["index"] == k + 1, z), x, origin)
        return origin

    def sample(self, params: Params, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        """Images from unit noise."""
        if not len(self.levels):
            return self(params, noise, cond)
        start, denoise = jnp.float32(self.levels[0]) * noise, self.parts.denoiser(params)
        return solvers.solve(denoise, start, self.levels, "renoise", cond, key=key, final_denoise=True)
