"""The solvers of dx/dsigma = (x - D(x, sigma)) / sigma, from t = sigma_i to s = sigma_{i+1} < t.

Every solver with one network evaluation per step is a table with one row per step,

    x_{i+1} = a_i x_i + b_{i0} m_i + b_{i1} m_{i-1} + ... + c_i xi,    m = D (x0 form) or d = (x - D)/t (noise form),

so a new solver is a function that fills the table. With lambda = -ln sigma, h = lambda_{i+1} - lambda_i:

    euler          a = s/t, b0 = 1 - s/t                                          (= DDIM = DPM-Solver++(1))
    ipndm          a = 1, b_j = (s - t) beta_j, beta the Adams-Bashforth weights     (Zhang & Chen 2023)
    dpmpp2m, 3m    exponential integrator with backward differences of m          (Lu et al. 2022); see `_dpmpp`
    unipc          dpmpp2m with each state corrected, at no cost, once D is known there   (Zhao et al. 2023)
    ancestral      euler to s_down, then noise up to s: s_down^2 + c^2 = s^2
    renoise        x0 = D, then noise up to s: how a consistency model takes several steps   (Song et al. 2023)
    sde_dpmpp2m    dpmpp2m of the SDE: h -> (1 + eta) h in the exponentials, c = s sqrt(1 - e^{-2 eta h})
    heun           y = x + (s-t) d; x + (s-t) (d + d(y, s)) / 2                  (two evaluations; EDM churn optional)
    dpm2           m = t^{1-r} s^r; y = x + (m-t) d; x + (s-t) (d(y, m)/(2r) + (1 - 1/(2r)) d)   (two evaluations)

The affine invariants a + sum b = 1 (x0 form) and sum b = s - t (noise form) hold for each row: a constant D is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from jaxdiff.denoisers import Cond, Denoiser
from jaxdiff.errors import check_number, pick
from jaxdiff.trees import AnyArray

Rows = dict[str, AnyArray]  # one entry per step in every array
Table = Callable[[AnyArray, ModuleType], Rows]  # (sigmas, numpy or jax.numpy)
Row = dict[str, Array]  # of one step
Past = tuple[Array, ...]  # earlier estimates, newest first


class Solver(NamedTuple):
    """A table of numbers per step, and the step that uses one row of it.

    `table(sigmas, xp)` is built in float64 NumPy when the grid is known and in jax.numpy when it is traced.
    `step(first, denoise, cond, x, past, row, key)` returns the next x and past; its first evaluation goes to
    `first`, which the analytical first step replaces.
    """

    table: Table
    step: Callable[..., tuple[Array, Past]]
    history: int = 0
    evaluations: int = 1
    stochastic: bool = False

    def timestamps(self, nfe: int, afs: bool = False, final_denoise: bool = False) -> int:
        """The grid size for `nfe` evaluations; the inverse of `nfe`."""
        steps, left = divmod(nfe + afs - final_denoise, self.evaluations)
        if left or steps < 1 - (final_denoise and not afs):
            each = f"{self.evaluations} with {afs=}, {final_denoise=}"
            raise ValueError(f"{nfe} evaluations are not a whole number of steps of {each}")
        return steps + 1

    def nfe(self, timestamps: int, afs: bool = False, final_denoise: bool = False) -> int:
        """Network evaluations of a solve over `timestamps`."""
        return self.evaluations * (timestamps - 1) - afs + final_denoise


def standard_normal(key: Array, x: Array) -> Array:
    """Noise like x from one key, or from one key per example (so that an image does not depend on its batch)."""
    if key.ndim == 0:
        return jax.random.normal(key, x.shape, x.dtype)
    return jax.vmap(lambda k: jax.random.normal(k, x.shape[1:], x.dtype))(key)


# ------------------------------------------------------------------------------- one evaluation per step


def _linear(rows: Table, terms: int, form: str = "x0", stochastic: bool = False) -> Solver:
    """A solver whose step is a row of coefficients: a, b [terms], and c when stochastic."""
    if form not in ("x0", "noise"):
        raise ValueError(f"form must be 'x0' or 'noise', got {form!r}")

    def table(sigmas: AnyArray, xp: ModuleType) -> Rows:
        return {"sigma": sigmas[:-1], **rows(sigmas, xp)}

    def step(
        first: Denoiser, denoise: Denoiser, cond: Cond, x: Array, past: Past, row: Row, key: Array | None
    ) -> tuple[Array, Past]:
        estimate = first(x, row["sigma"], cond)
        if form == "noise":
            estimate = (x - estimate) / row["sigma"]
        recent = (estimate, *past)
        x = row["a"] * x + sum(row["b"][j] * m for j, m in enumerate(recent))
        if stochastic:
            assert key is not None
            x = x + row["c"] * standard_normal(key, x)
        return x, recent[: terms - 1]

    return Solver(table, step, history=terms - 1, stochastic=stochastic)


def euler() -> Solver:
    """Euler, which is DDIM and DPM-Solver++ of order 1."""

    def rows(sigmas: AnyArray, xp: ModuleType) -> Rows:
        ratio = sigmas[1:] / sigmas[:-1]
        return {"a": ratio, "b": (1 - ratio)[:, None]}

    return _linear(rows, terms=1)


_ADAMS_BASHFORTH = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def ipndm(order: int = 4) -> Solver:
    """Improved PNDM: Adams-Bashforth with constant weights, order min(order, i + 1) at step i."""
    _check_order("ipndm", order, 4)

    def rows(sigmas: AnyArray, xp: ModuleType) -> Rows:
        weights = np.zeros((len(sigmas) - 1, order))
        for i in range(len(weights)):
            beta = _ADAMS_BASHFORTH[min(order, i + 1) - 1]
            weights[i, : len(beta)] = beta
        return {"a": np.ones(len(weights)), "b": (sigmas[1:] - sigmas[:-1])[:, None] * weights}

    return _linear(rows, terms=order, form="noise")


def dpmpp2m(form: str = "x0", lower_order_final: bool = True) -> Solver:
    """DPM-Solver++(2M)."""
    return _linear(lambda sigmas, xp: _dpmpp(sigmas, xp, 2, form, 1.0, lower_order_final), terms=2, form=form)


def dpmpp3m(form: str = "x0", kappa: float = 1.0, lower_order_final: bool = True) -> Solver:
    """DPM-Solver++(3M). kappa = 1 is the published solver, of order 2. Steps with kappa = 2 have order 3, but the first
    one is an Euler step, so the whole has order 2, reached late where that step is as easy as from sigma_max = 80."""
    return _linear(lambda sigmas, xp: _dpmpp(sigmas, xp, 3, form, kappa, lower_order_final), terms=3, form=form)


def _dpmpp(sigmas: AnyArray, xp: ModuleType, order: int, form: str, kappa: float, lower_order_final: bool) -> Rows:
    """Rows of DPM-Solver++, an exponential integrator of m in lambda:

    x0 form:    x' = (s/t) x + h (psi1 m_i + psi2 G1 + psi3 G2),    psi_k at -h
    noise form: x' = x - s h (psi1 m_i + psi2 G1 + psi3 G2),        psi_k at +h

    with G1 = E0 + r0/(r0+r1) (E0 - E1), G2 = kappa (E0 - E1)/(r0+r1), E0 = (m_i - m_{i-1})/r0,
    E1 = (m_{i-1} - m_{i-2})/r1, and r0, r1 the previous two steps in lambda over h. The published
    order-2 step is h psi1 (m_i + E0/2).
    """
    h, r0, r1 = _lambda_steps(sigmas, xp)
    psi1, psi2, psi3 = (_psi(k, -h if form == "x0" else h, xp) for k in (1, 2, 3))
    curve = kappa * psi3 / (r0 + r1)
    bend = psi2 * r0 / (r0 + r1)
    e0, e1 = (psi2 + bend + curve) / r0, -(bend + curve) / r1  # weights of m_i - m_{i-1} and m_{i-1} - m_{i-2}
    half, zero = psi1 / (2 * r0), 0 * h
    by_order = [(psi1, zero, zero), (psi1 + half, -half, zero), (psi1 + e0, e1 - e0, -e1)]
    orders = _dpmpp_orders(len(sigmas) - 1, order, lower_order_final)
    b = xp.stack(
        [h * sum(xp.where(orders == q + 1, by_order[q][j], 0.0) for q in range(order)) for j in range(order)], axis=1
    )
    if form == "x0":
        return {"a": sigmas[1:] / sigmas[:-1], "b": b}
    return {"a": np.ones(len(h)), "b": -sigmas[1:, None] * b}


def unipc(lower_order_final: bool = True) -> Solver:
    """UniPC of order 2 (B2, x0 form): the DPM-Solver++(2M) predictor with the UniC corrector.

    Once m_i = D(x_i, t_i) is known, the step that led to x_i is redone from the corrected x_{i-1} with it:
    x_{i-1} (s/t) + h psi1 (m_{i-1} + rho1 (m_{i-1} - m_{i-2})/r0 + rho2 (m_i - m_{i-1})), rho1 + rho2 = psi2/psi1,
    -r0 rho1 + rho2 = 2 psi3/psi1; after a first-order step rho1 = 0, rho2 = 1/2.
    """

    def table(sigmas: AnyArray, xp: ModuleType) -> Rows:
        predict = _dpmpp(sigmas, xp, 2, "x0", 1.0, lower_order_final)
        h, r0, _ = _lambda_steps(sigmas, xp)
        psi1, psi2, psi3 = (_psi(k, -h, xp) for k in (1, 2, 3))
        second = _dpmpp_orders(len(h), 2, lower_order_final) == 2
        rho1 = xp.where(second, (psi2 - 2 * psi3) / psi1 / (1 + r0), 0.0)
        rho2 = xp.where(second, psi2 / psi1 - rho1, 0.5)
        old = rho1 / r0
        correct = xp.stack([0 * h, predict["a"], *(h * psi1 * w for w in (rho2, 1 + old - rho2, -old))], axis=1)
        none = np.array([[1.0, 0.0, 0.0, 0.0, 0.0]])  # no correction at the first step
        return {"sigma": sigmas[:-1], **predict, "correct": xp.concatenate([none, correct[:-1]])}

    def step(
        first: Denoiser, denoise: Denoiser, cond: Cond, x: Array, past: Past, row: Row, key: Array | None
    ) -> tuple[Array, Past]:
        m1, m2, origin = past
        m = first(x, row["sigma"], cond)
        x = sum(w * v for w, v in zip(row["correct"], (x, origin, m, m1, m2), strict=True))
        return row["a"] * x + row["b"][0] * m + row["b"][1] * m1, (m, m1, x)

    return Solver(table, step, history=3)


def _dpmpp_orders(steps: int, order: int, lower_order_final: bool) -> np.ndarray:
    """Order of each step: it rises from 1 and, with lower_order_final, falls to 1 at the end."""
    i = np.arange(steps)
    return np.where(i + 1 < order, i + 1, np.minimum(order, steps - i if lower_order_final else order))


def _lambda_steps(sigmas: AnyArray, xp: ModuleType) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Steps h in lambda, and the ratios of the previous two to each (1 where there is none)."""
    h = xp.log(sigmas[:-1] / sigmas[1:])
    one = xp.concatenate([h[:1], h[:-1]])
    two = xp.concatenate([h[:2], h[:-2]])[: len(h)]
    return h, one / h, two / h


def _psi(k: int, z: AnyArray, xp: ModuleType) -> AnyArray:
    """psi_1 = (e^z - 1)/z, psi_{k+1} = (psi_k - 1/k!)/z; as a power series where |z| < 1 to avoid cancellation."""
    series = sum(z**j * (1 / math.factorial(j + k)) for j in range(16))
    safe = xp.where(xp.abs(z) < 1, 1.0, z)
    closed = xp.expm1(safe) / safe
    for j in range(1, k):
        closed = (closed - 1 / math.factorial(j)) / safe
    return xp.where(xp.abs(z) < 1, series, closed)


def ancestral(eta: float = 1.0) -> Solver:
    """Euler ancestral sampling; eta = 0 is Euler, 1 the full posterior noise."""
    _check_eta("ancestral", eta)

    def rows(sigmas: AnyArray, xp: ModuleType) -> Rows:
        t, s = sigmas[:-1], sigmas[1:]
        up = xp.minimum(s, eta * s * xp.sqrt(1 - (s / t) ** 2))
        down = xp.sqrt(s**2 - up**2)
        return {"a": down / t, "b": (1 - down / t)[:, None], "c": up}

    return _linear(rows, terms=1, stochastic=True)


def renoise(floor: float = 0.0) -> Solver:
    """D(x, t) + sqrt(s^2 - floor^2) noise; `floor` is the noise left by D, a consistency model's lowest level."""
    check_number("renoise: floor, a noise level,", floor, 0)

    def rows(sigmas: AnyArray, xp: ModuleType) -> Rows:
        s = sigmas[1:]
        return {"a": 0 * s, "b": xp.ones_like(s)[:, None], "c": xp.sqrt(xp.maximum(s**2 - floor**2, 0.0))}

    return _linear(rows, terms=1, stochastic=True)


def sde_dpmpp2m(eta: float = 1.0) -> Solver:
    """SDE-DPM-Solver++(2M); eta = 0 is DPM-Solver++(2M) without the lower-order end."""
    _check_eta("sde_dpmpp2m", eta)

    def rows(sigmas: AnyArray, xp: ModuleType) -> Rows:
        h, r0, _ = _lambda_steps(sigmas, xp)
        a = xp.exp(-(1 + eta) * h)
        lead = -xp.expm1(-(1 + eta) * h)
        second = xp.where(np.arange(len(sigmas) - 1) == 0, 0.0, lead / (2 * r0))
        return {
            "a": a,
            "b": xp.stack([lead + second, -second], axis=1),
            "c": sigmas[1:] * (xp.sqrt(-xp.expm1(-2 * eta * h)) if eta else 0.0),
        }

    return _linear(rows, terms=2, stochastic=True)


# ------------------------------------------------------------------------------- two evaluations per step


def heun(churn: float = 0.0, churn_min: float = 0.0, churn_max: float = math.inf, churn_noise: float = 1.0) -> Solver:
    """Heun's method, on the last step too; with EDM's churn: each t in [churn_min, churn_max] is first raised to

    t (1 + min(churn/n, sqrt(2) - 1)) by fresh noise of standard deviation churn_noise, n the number of timestamps.
    """
    check_number("heun: churn", churn, 0)
    check_number("heun: churn_noise", churn_noise, 0)

    def table(sigmas: AnyArray, xp: ModuleType) -> Rows:
        t = sigmas[:-1]
        gain = min(churn / len(sigmas), math.sqrt(2) - 1)
        inside = (t >= churn_min) & (t <= churn_max)
        raised = xp.where(inside, t * (1 + gain), t)
        spread = churn_noise * math.sqrt((1 + gain) ** 2 - 1)
        return {"sigma": raised, "next": sigmas[1:], "c": xp.where(inside, spread * t, 0.0)}

    def step(
        first: Denoiser, denoise: Denoiser, cond: Cond, x: Array, past: Past, row: Row, key: Array | None
    ) -> tuple[Array, Past]:
        if churn:
            assert key is not None
            x = x + row["c"] * standard_normal(key, x)
        width = row["next"] - row["sigma"]
        slope = (x - first(x, row["sigma"], cond)) / row["sigma"]
        ahead = x + width * slope
        slope_ahead = (ahead - denoise(ahead, row["next"], cond)) / row["next"]
        return x + width * (slope + slope_ahead) / 2, past

    return Solver(table, step, evaluations=2, stochastic=churn > 0)


def dpm2(r: float = 0.5) -> Solver:
    """DPM-Solver-2 with its middle evaluation at t^{1-r} s^r."""
    if not 0 < r <= 1:
        raise ValueError(f"dpm2: r must be in (0, 1], got {r}")

    def table(sigmas: AnyArray, xp: ModuleType) -> Rows:
        return {"sigma": sigmas[:-1], "middle": sigmas[:-1] ** (1 - r) * sigmas[1:] ** r, "next": sigmas[1:]}

    def step(
        first: Denoiser, denoise: Denoiser, cond: Cond, x: Array, past: Past, row: Row, key: Array | None
    ) -> tuple[Array, Past]:
        slope = (x - first(x, row["sigma"], cond)) / row["sigma"]
        middle = x + (row["middle"] - row["sigma"]) * slope
        slope_middle = (middle - denoise(middle, row["middle"], cond)) / row["middle"]
        return x + (row["next"] - row["sigma"]) * (slope_middle / (2 * r) + (1 - 1 / (2 * r)) * slope), past

    return Solver(table, step, evaluations=2)


def _check_order(name: str, order: int, highest: int) -> None:
    if order not in range(1, highest + 1):
        raise ValueError(f"{name}: order must be 1..{highest}, got {order}")


def _check_eta(name: str, eta: float) -> None:
    check_number(f"{name}: eta", eta, 0, 2, "0 is the deterministic solver, 1 the usual noise")


SOLVERS: dict[str, Callable[..., Solver]] = {
    "euler": euler,
    "heun": heun,
    "dpm2": dpm2,
    "ipndm": ipndm,
    "dpmpp2m": dpmpp2m,
    "dpmpp3m": dpmpp3m,
    "unipc": unipc,
    "ancestral": ancestral,
    "renoise": renoise,
    "sde_dpmpp2m": sde_dpmpp2m,
}


def make(name: str, **options: object) -> Solver:
    """A solver by its name in SOLVERS, with that solver's keyword options."""
    build = pick(SOLVERS, name, "solver")
    try:
        return build(**options)
    except TypeError as error:
        raise ValueError(f"solver {name!r} does not take {options}: {error}") from None
