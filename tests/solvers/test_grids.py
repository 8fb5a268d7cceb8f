"""Grids against golden values, definitions and the nesting that distillation relies on."""

import numpy as np
import pytest

from jaxdiff import schedules, solvers

GOLDEN = {
    3: [80, 3.107122, 0.006],
    4: [80, 10.929297, 0.669886, 0.006],
    5: [80, 19.003388, 3.107122, 0.268292, 0.006],
    6: [80, 25.963283, 6.787685, 1.289125, 0.145405, 0.006],
    7: [80, 31.729821, 10.929297, 3.107122, 0.669886, 0.093615, 0.006],
}
TABLE = schedules.sigma_table(schedules.sqrt_linear_alpha_bar())


@pytest.mark.parametrize("n", GOLDEN)
def test_polynomial_grid_equals_the_published_timestamps(n):
    np.testing.assert_allclose(solvers.grid(n, 0.006, 80), GOLDEN[n], rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("kind", ["polynomial", "logsnr", "flow", "discrete"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_finer_grid_contains_the_coarser_one(kind, k):
    low, high = (TABLE[0], TABLE[-1]) if kind == "discrete" else (0.006, 80)
    options = {"kind": kind, "table": TABLE if kind == "discrete" else None}
    for n in (3, 4, 7):
        coarse, fine = solvers.grid(n, low, high, **options), solvers.grid(k * (n - 1) + 1, low, high, **options)
        np.testing.assert_allclose(fine[::k], coarse, rtol=1e-13)


@pytest.mark.parametrize("kind", solvers.GRIDS)
def test_grids_descend_between_their_ends(kind):
    low, high = (TABLE[3], TABLE[900]) if kind == "discrete" else (0.002, 14.6)
    sigmas = solvers.grid(25, low, high, kind=kind, table=TABLE if kind == "discrete" else None)
    assert sigmas.dtype == np.float64 and len(sigmas) == 25
    assert (sigmas[0], sigmas[-1]) == (high, low)
    assert (np.diff(sigmas) < 0).all()


def test_grid_definitions():
    flow = solvers.grid(5, 0.1, 9, "flow")
    np.testing.assert_allclose(np.diff(flow / (1 + flow)), np.diff(flow / (1 + flow))[0])
    logsnr = solvers.grid(5, 0.1, 9, "logsnr")
    np.testing.assert_allclose(logsnr[1:] / logsnr[:-1], logsnr[1] / logsnr[0])
    # variance-preserving time: log(1 + sigma^2) is a quadratic through the origin, uniform in t from 1 to 1e-3
    uniform = solvers.grid(30, 0.01, 50, "uniform")
    t = np.linspace(1, 1e-3, 30)
    curve = np.log1p(uniform**2) / t
    np.testing.assert_allclose(np.polyval(np.polyfit(t, curve, 1), t), curve, rtol=1e-9)
    # the model's own levels, when the knots fall on them
    np.testing.assert_allclose(
        solvers.grid(4, TABLE[0], TABLE[999], "discrete", table=TABLE), TABLE[[999, 666, 333, 0]]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solvers.grid(0, 0.1, 1), "at least 1 timestamp, got n=0"),
        (lambda: solvers.grid(4, 1, 0.1), "0 < sigma_min < sigma_max, got sigma_min=1 and sigma_max=0.1"),
        (lambda: solvers.grid(4, 0, 1), "0 < sigma_min"),
        (lambda: solvers.grid(4, 0.1, 1, "karras"), "unknown grid kind 'karras'.*polynomial, logsnr, uniform"),
        (lambda: solvers.grid(4, 0.1, 1, "discrete"), "go together"),
        (lambda: solvers.grid(4, 0.1, 1, table=TABLE), "go together"),
        (lambda: solvers.grid(4, 0.1, 99, "discrete", table=TABLE), "table.s 0.0291"),
        (lambda: solvers.grid(4, 0.1, 1, "discrete", table=TABLE[::-1]), "ascending noise levels"),
    ],
)
def test_bad_grids_say_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()
