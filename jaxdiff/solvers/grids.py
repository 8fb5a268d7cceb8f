"""Time grids: n noise levels from sigma_max down to sigma_min, in float64 so that finer grids contain coarser ones.

    polynomial  (sigma_max^(1/rho) + i/(n-1) (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho          (EDM; rho = 7)
    logsnr      geometric
    uniform     uniform in the time of the variance-preserving SDE whose range is [sigma_min, sigma_max]
    flow        uniform in rectified-flow time t = sigma / (1 + sigma)
    discrete    uniform in the index of a table of trained noise levels, log-interpolated between them

A polynomial, logsnr, flow or discrete grid (rho = 1) of K(n-1)+1 points contains the grid of n points.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.errors import check_number, pick

MOST = 1_000_000  # timestamps of a grid

Table = ArrayLike | None


def grid(
    n: int,
    sigma_min: float,
    sigma_max: float,
    kind: str = "polynomial",
    rho: float | None = None,
    table: Table = None,
) -> np.ndarray:
    """n descending noise levels; the last is sigma_min (sigma_max for n = 1), no zero is appended.

    Args:
        n: number of timestamps; a solver with one evaluation per step takes n - 1 evaluations.
        sigma_min: the lowest level.
        sigma_max: the highest level.
        kind: "polynomial" (EDM), "logsnr", "uniform", "flow" or "discrete".
        rho: bends the knots, linear in time^(1/rho): 7 for polynomial, 1 for the others unless given.
        table: ascending noise levels of a discrete model, `schedules.sigma_table(alpha_bar)`.

    Returns:
        float64 [n].

    Raises:
        ValueError: the range is empty, or only one of kind="discrete" and `table` is given.

    Example:
        >>> grid(4, sigma_min=0.01, sigma_max=80, kind="logsnr").round(2)
        array([8.e+01, 4.e+00, 2.e-01, 1.e-02])
    """
    build, default_rho = pick(GRIDS, kind, "grid kind")
    if n < 1:
        raise ValueError(f"a grid needs at least 1 timestamp, got n={n}")
    if n > MOST:
        raise ValueError(f"a grid has at most {MOST:,} timestamps, got n={n}")
    if rho is not None:
        check_number("rho", rho, 1e-3, 1e3)
    if not 0 < sigma_min < sigma_max < np.inf:
        raise ValueError(f"a grid needs 0 < sigma_min < sigma_max, got {sigma_min=} and {sigma_max=}")
    if (kind == "discrete") == (table is None):
        raise ValueError(
            "kind='discrete' and table (the model's ascending noise levels) go together: pass both or neither"
        )
    if n == 1:
        return np.array([float(sigma_max)])
    knots = build(n, float(sigma_min), float(sigma_max), rho or default_rho, table)
    knots[0], knots[-1] = sigma_max, sigma_min
    return knots


def _between(first: float, last: float, n: int, rho: float) -> np.ndarray:
    """n knots from first to last, linear in the rho-th root; so that nested grids agree exactly."""
    start, stop = first ** (1 / rho), last ** (1 / rho)
    return (start + np.arange(n) / (n - 1) * (stop - start)) ** rho


def _polynomial(n: int, low: float, high: float, rho: float, table: Table) -> np.ndarray:
    return _between(high, low, n, rho)


def _logsnr(n: int, low: float, high: float, rho: float, table: Table) -> np.ndarray:
    return np.exp(np.log(high) + np.arange(n) / (n - 1) * (np.log(low) - np.log(high)))


def _uniform(n: int, low: float, high: float, rho: float, table: Table, first_time: float = 1e-3) -> np.ndarray:
    """sigma(t)^2 = exp(slope t^2/2 + base t) - 1 with sigma(first_time) = low and sigma(1) = high."""
    at_low, at_high = np.log1p(low**2), np.log1p(high**2)
    slope = 2 * (at_low / first_time - at_high) / (first_time - 1)
    base = at_high - slope / 2
    time = _between(1.0, first_time, n, rho)
    return np.sqrt(np.expm1(slope * time**2 / 2 + base * time))


def _flow(n: int, low: float, high: float, rho: float, table: Table) -> np.ndarray:
    time = _between(high / (1 + high), low / (1 + low), n, rho)
    return time / (1 - time)


def _discrete(n: int, low: float, high: float, rho: float, table: Table) -> np.ndarray:
    levels = np.log(np.asarray(table, np.float64))
    if levels.ndim != 1 or not (np.diff(levels) > 0).all():
        raise ValueError("table must hold ascending noise levels, as schedules.sigma_table(alpha_bar) gives them")
    if np.log(low) < levels[0] - 1e-9 or np.log(high) > levels[-1] + 1e-9:
        raise ValueError(
            f"sigma {low:g}..{high:g} exceeds the table's {np.exp(levels[0]):g}..{np.exp(levels[-1]):g}; reduce it"
        )
    index = np.arange(1.0, len(levels) + 1)  # from 1, so that rho-th roots are defined
    ends = np.interp(np.log([high, low]), levels, index)
    return np.exp(np.interp(_between(ends[0], ends[1], n, rho), index, levels))


GRIDS = {
    "polynomial": (_polynomial, 7.0),
    "logsnr": (_logsnr, 1.0),
    "uniform": (_uniform, 1.0),
    "flow": (_flow, 1.0),
    "discrete": (_discrete, 1.0),
}
