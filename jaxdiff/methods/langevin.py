"""The E-step of EM Distillation: Langevin chains on (eps, z).

With x = g(z) + sigma eps, D_T and D_S the denoisers of the teacher's noisy density p_sigma and of the generator's p_g,
K steps towards rho(x, z) = p_sigma(x)/p_g(x) p(x|z) p(z) from fresh (eps, z); a = gamma_eps, b = gamma_z, n and m
unit normals, gap = D_T(x) - D_S(x), which is sigma^2 (score_T - score_S):

    eps <- eps + a (gap / sigma - eps) + sqrt(2a) n
    z   <- z   + b (J_z^T gap / sigma^2 - z) + sqrt(2b) m             both from the same (eps, z)

or with x carried instead of eps, x = g(z) + sigma eps at the start and c = gamma_x / sigma^2:

    x   <- x   + c (gap - (x - g(z))) + sigma sqrt(2c) n
    z   <- z   + b (J_z^T (x - g(z)) / sigma^2 - z) + sqrt(2b) m

or with z fixed: four schemes "eps,z", "x,z", "eps", "x"; with z fixed, x is eps with step size c. The result is the
residual r = x - g(z) = sigma eps with noise cancelled, which in all schemes is carried beside the chain. "complete":

    r <- r + c (gap - r),      c = a in the schemes with eps

the decayed sum of the gaps alone, without the noise of any step and, in "x,z", without the distance by which x lags
behind a moving g(z); it is zero when the densities agree. "last": without the last step's noise, which leaves
expectations unchanged. "none": nothing is cancelled. `cancel_initial`: r starts from zero, not from the initial eps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jax import Array

from jaxdiff.conditions import Cond
from jaxdiff.denoisers import Denoiser, per_example
from jaxdiff.errors import choose
from jaxdiff.methods.method import Metrics

Generator = Callable[[Array, Cond], Array]  # (z, cond) -> x0
SCHEMES = ("eps,z", "x,z", "eps", "x")
CANCEL = ("complete", "last", "none")


@dataclass(frozen=True)
class Langevin:
    """The settings of a chain."""

    steps: int = 16  # [1, 10000] K: Langevin steps of the E-step
    scheme: str = "eps,z"  # variables of the chain: eps,z or x,z or eps or x
    step_eps: float = 0.16  # (0, 1] gamma_eps
    step_z: float = 1.6e-5  # [0, inf) gamma_z
    step_x: float = 0.0  # [0, inf) gamma_x of the schemes with x; 0: gamma_eps sigma^2, which makes "x" equal "eps"
    cancel: str = "complete"  # noise cancelled in the residual: complete, last, none
    cancel_initial: bool = True  # also cancel the initial eps
    clip_z: float = 0.0  # [0, inf) bound on the RMS of z's drift before gamma_z; 0: off

    def __post_init__(self) -> None:
        choose(self.scheme, SCHEMES, "EMD scheme")
        choose(self.cancel, CANCEL, "noise cancellation")
        if self.steps < 1:
            raise ValueError(f"a chain needs at least one Langevin step, got steps={self.steps}")
        if not 0 < self.step_eps <= 1 or self.step_z < 0 or self.step_x < 0:
            raise ValueError(
                f"step_eps must be in (0, 1], step_z and step_x non-negative, got {self.step_eps}, {self.step_z}, "
                f"{self.step_x}; larger Langevin steps diverge"
            )
        if self.step_x and not self.scheme.startswith("x"):
            raise ValueError(
                f"step_x={self.step_x} applies to the schemes x and x,z, got scheme={self.scheme!r}; set step_eps"
            )

    @property
    def carries_x(self) -> bool:
        """Whether the chain carries x instead of sigma eps; with z fixed they differ by a constant."""
        return self.scheme == "x,z"

    @property
    def moves_z(self) -> bool:
        return self.scheme.endswith(",z")


DEFAULT = Langevin()


class Chain(NamedTuple):
    """The end of a chain. Examples that became non-finite are flagged and set to zero."""

    z: Array
    carried: Array  # sigma eps, or x in the scheme "x,z"
    residual: Array  # x - g(z), noise cancelled
    finite: Array  # [b]
    metrics: Metrics


def e_step(
    teacher: Denoiser,
    student: Denoiser,
    generate: Generator,
    z: Array,
    eps: Array,
    sigma: Array,
    key: Array,
    cond: Cond = None,
    chain: Langevin = DEFAULT,
    unroll: int = 1,
) -> Chain:
    """K Langevin steps on (eps, z) towards rho.

    `teacher` and `student` are denoisers of the two densities; `generate(z, cond)` is differentiated by z alone, once
    per step. sigma [b] is the noise level of each chain; `key` is one key, or one per chain, which makes chains
    independent of the batch. The carry is float32; the result has no gradient.
    """
    z, eps, sigma = (jnp.asarray(a, jnp.float32) for a in (z, eps, sigma))
    level = per_example(sigma, z)
    rate = chain.step_x / level**2 if chain.step_x else jnp.float32(chain.step_eps)
    first = generate(z, cond)
    keys = key if key.ndim else jax.random.split(key, z.shape[0])

    def advance(carry: tuple[Array, Array, Array], index: Array) -> tuple[tuple[Array, Array, Array], Metrics]:
        at, z, clean = carry
        made, pull = first, None
        if chain.moves_z:
            made, pull = jax.vjp(lambda z: generate(z, cond), z)
        if chain.carries_x:
            x, apart = at, at - made
        else:
            x, apart = made + at, at
        gap = teacher(x, sigma, cond) - student(x, sigma, cond)
        push = jnp.sqrt(2 * rate) * level * normals(keys, 2 * index, at)
        after = at + rate * (gap - apart)
        if chain.cancel == "complete":
            clean = clean + rate * (gap - clean)
        else:
            clean = after + push if chain.cancel == "none" else after
        seen = {"score_gap": _mean_square(gap / level)}
        if pull is not None:
            force = apart if chain.carries_x else gap
            z, seen["z_drift"] = move_z(z, pull, force / level**2, index, made.dtype)
        at, z, clean = (a.astype(jnp.float32) for a in (after + push, z, clean))
        return (at, z, clean), seen

    def move_z(
        z: Array, pull: Callable[[Array], tuple[Array]], force: Array, index: Array, dtype: Dtype
    ) -> tuple[Array, Array]:
        (drift,) = pull(force.astype(dtype))
        if chain.clip_z:
            drift *= jnp.minimum(1.0, chain.clip_z / jnp.sqrt(per_example(_mean_square(drift), z) + 1e-20))
        noise = jnp.sqrt(2 * chain.step_z) * normals(keys, 2 * index + 1, z)
        return z + chain.step_z * (drift - z) + noise, _mean_square(chain.step_z * drift)

    at = first + level * eps if chain.carries_x else level * eps
    start = level * eps
    if chain.cancel == "complete" and chain.cancel_initial:
        start = jnp.zeros_like(start)
    (at, end, clean), seen = jax.lax.scan(advance, (at, z, start), jnp.arange(chain.steps), unroll=unroll)
    if chain.carries_x and chain.cancel != "complete":
        clean -= generate(end, cond)
    at, end, clean = jax.lax.stop_gradient((at, end, clean))
    finite = jnp.isfinite(_mean_square(end) + _mean_square(clean) + _mean_square(at))
    end, clean, at = (jnp.where(per_example(finite, z), a, 0.0) for a in (end, clean, at))
    metrics = {name: jnp.sqrt(_mean_of(values.mean(0), finite)) for name, values in seen.items()}
    metrics |= {"z_square": _mean_of(_mean_square(end), finite), "nonfinite": 1 - finite.astype(jnp.float32).mean()}
    metrics |= {"residual": jnp.sqrt(_mean_of(_mean_square(clean / level), finite))}
    if not chain.carries_x:
        metrics |= {"eps_square": _mean_of(_mean_square(at / level), finite)}
    return Chain(end, at, clean, finite, metrics)


def normals(keys: Array, index: Array, like: Array) -> Array:
    """Unit normals, drawn per example from its own key."""

    def draw(key: Array) -> Array:
        return jax.random.normal(jax.random.fold_in(key, index), like.shape[1:], like.dtype)

    return jax.vmap(draw)(keys)


def _mean_square(x: Array) -> Array:
    return jnp.square(x).reshape(x.shape[0], -1).mean(1)


def _mean_of(values: Array, finite: Array) -> Array:
    return jnp.where(finite, values, 0.0).sum() / jnp.maximum(finite.astype(jnp.float32).sum(), 1.0)
