"""Solvers against direct formulas, golden vectors, orders of convergence and the public implementation's states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import denoisers, solvers

MEAN, STD = 0.3, 0.5
START = np.array([[80, -40, 24.3]])
GRID13 = solvers.grid(13, 0.006, 80)
GAUSSIAN = denoisers.gaussian(MEAN, STD)
DETERMINISTIC = ["euler", "heun", "dpm2", "ipndm", "dpmpp2m", "dpmpp3m", "unipc"]


def exact(t, start=START, top=80.0):
    return MEAN + (start - MEAN) * np.sqrt((STD**2 + t**2) / (STD**2 + top**2))


# ------------------------------------------------------------------------ an independent, direct implementation


def reference(name, D, x, sigmas, afs=False, order=None, kappa=1.0, form="x0"):
    """Every state of the solver, step by step, in the formulas of the papers and plain NumPy."""
    states, past, lam = [x], [], -np.log(sigmas)
    n = len(sigmas)
    for i in range(n - 1):
        t, s, h = sigmas[i], sigmas[i + 1], lam[i + 1] - lam[i]
        d = x / np.sqrt(1 + t**2) if afs and i == 0 else (x - D(x, t)) / t
        slope = lambda y, u: (y - D(y, u)) / u  # noqa: E731
        past.insert(0, x - t * d if form == "x0" and name.startswith("dpmpp") else d)
        m = past
        if name == "euler":
            x = x + (s - t) * d
        elif name == "heun":
            x = x + (s - t) * (d + slope(x + (s - t) * d, s)) / 2
        elif name == "dpm2":
            middle = np.sqrt(t * s)
            x = x + (s - t) * slope(x + (middle - t) * d, middle)
        elif name == "ipndm":
            beta = [[1], [1.5, -0.5], np.array([23, -16, 5]) / 12, np.array([55, -59, 37, -9]) / 24][
                min(order, i + 1) - 1
            ]
            x = x + (s - t) * sum(b * past[j] for j, b in enumerate(beta))
        else:
            q = i + 1 if i + 1 < order else min(order, n - 1 - i)
            r0 = (lam[i] - lam[i - 1]) / h if q > 1 else 1
            r1 = (lam[i - 1] - lam[i - 2]) / h if q > 2 else 1
            E0 = (m[0] - m[1]) / r0 if q > 1 else 0
            E1 = (m[1] - m[2]) / r1 if q > 2 else 0
            G1, G2 = E0 + r0 / (r0 + r1) * (E0 - E1), kappa * (E0 - E1) / (r0 + r1)
            if form == "x0":
                p1 = np.exp(-h) - 1
                p2, p3 = p1 / h + 1, (p1 / h + 1) / h - 0.5
                update = -p1 * m[0] + (p2 * G1 - p3 * G2 if q == 3 else -p1 * E0 / 2)
                x = s / t * x + update
            else:
                p1 = np.exp(h) - 1
                p2, p3 = p1 / h - 1, (p1 / h - 1) / h - 0.5
                x = x - s * (p1 * m[0] + (p2 * G1 + p3 * G2 if q == 3 else p1 * E0 / 2))
        states.append(x)
    return np.stack(states)


@pytest.fixture(scope="module")
def mixture():
    rng = np.random.default_rng(0)
    return rng.uniform(-0.6, 0.6, (5, 4)), rng.uniform(0.15, 0.25, 5), rng.dirichlet(np.ones(5))


CASES = [
    ("euler", {}, "euler", {}),
    ("heun", {}, "heun", {}),
    ("dpm2", {}, "dpm2", {}),
    *[("ipndm", {"order": q}, "ipndm", {"order": q}) for q in (1, 2, 3, 4)],
    ("dpmpp2m", {}, "dpmpp", {"order": 2}),
    ("dpmpp2m", {"form": "noise"}, "dpmpp", {"order": 2, "form": "noise"}),
    *[
        ("dpmpp3m", {"form": form, "kappa": kappa}, "dpmpp", {"order": 3, "form": form, "kappa": kappa})
        for form in ("x0", "noise")
        for kappa in (1.0, 2.0)
    ],
]


@pytest.mark.parametrize("afs", [False, True])
@pytest.mark.parametrize(("name", "options", "direct", "direct_options"), CASES)
def test_solvers_equal_their_direct_formulas(x64, mixture, name, options, direct, direct_options, afs):
    denoise = denoisers.gaussian_mixture(*mixture)
    x = np.random.default_rng(1).normal(size=(3, 4)) * 80
    sigmas = solvers.grid(9, 0.006, 80)
    expected = reference(direct, lambda x, t: np.asarray(denoise(jnp.asarray(x), t)), x, sigmas, afs, **direct_options)
    states = solvers.solve(denoise, jnp.asarray(x), sigmas, solvers.make(name, **options), afs=afs, trajectory=True)
    np.testing.assert_allclose(states, expected, rtol=1e-9, atol=1e-12)


def test_states_of_the_public_implementation_are_reproduced(x64):
    fixture = np.load(GOLDEN / "solver_trajectories.npz")
    denoise = denoisers.gaussian_mixture(fixture["gmm/means"], fixture["gmm/std"], fixture["gmm/w"])
    sigmas = solvers.grid(int(fixture["in/n"]), *map(float, fixture["in/sigma"]))
    x = jnp.asarray(fixture["in/noise"] * sigmas[0])
    named = {"ipndm4": "ipndm", "dpmpp3m_kappa1": "dpmpp3m", "dpmpp3m_eps_kappa1": solvers.dpmpp3m("noise", kappa=1.0)}
    names = [name.removeprefix("traj/") for name in fixture.files if name.startswith("traj/")]
    assert len(names) == 9
    for name in names:
        solver = name.removesuffix("_afs")
        states = solvers.solve(
            denoise, x, sigmas, named.get(solver, solver), afs=name.endswith("_afs"), trajectory=True
        )
        np.testing.assert_allclose(states, fixture[f"traj/{name}"], rtol=1e-6, err_msg=name)


def test_unipc_equals_the_public_implementation(x64):
    golden = np.load(GOLDEN / "unipc.npz")
    denoise = denoisers.gaussian_mixture(golden["means"], golden["stds"], golden["weights"])
    states = solvers.solve(denoise, jnp.asarray(golden["states"][0]), golden["sigmas"], "unipc", trajectory=True)
    np.testing.assert_allclose(states, golden["states"], rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------ golden vectors and tables

GOLDEN_ENDS = [
    ("euler", {}, [0.69762051, 0.09894471, 0.41973516]),
    ("heun", {}, [0.85040633, 0.02168915, 0.46574344]),
    ("dpm2", {}, [0.82783373, 0.03310290, 0.45894617]),
    ("ipndm", {}, [0.81675607, 0.03870427, 0.45561036]),
    ("ipndm", {"order": 3}, [0.80630000, 0.04399134, 0.45246173]),
    ("dpmpp2m", {}, [0.83001474, 0.03200007, 0.45960293]),
    ("dpmpp3m", {}, [0.88071143, 0.00636549, 0.47486919]),
    ("dpmpp3m", {"kappa": 2.0}, [0.89072961, 0.00129983, 0.47788595]),
    ("dpmpp3m", {"form": "noise"}, [0.79896071, 0.04770242, 0.45025166]),
]


@pytest.mark.parametrize(("name", "options", "end"), GOLDEN_ENDS)
def test_golden_end_states_on_the_gaussian(x64, name, options, end):
    out = solvers.solve(GAUSSIAN, jnp.asarray(START), GRID13, solvers.make(name, **options))
    np.testing.assert_allclose(out[0], end, rtol=1e-6, atol=1e-8)


def test_golden_teacher_targets_and_student_states_on_the_gaussian(x64):
    targets = solvers.solve(GAUSSIAN, jnp.asarray(START), GRID13, "dpmpp3m", trajectory=(4, 8))
    expected = [[11.19887482, -5.21097435, 3.58196983], [1.12387586, -0.11658968, 0.54809311]]
    np.testing.assert_allclose(targets[:, 0], expected, rtol=1e-7)
    student = solvers.solve(GAUSSIAN, jnp.asarray(START), GRID13[::4], "euler", afs=True, trajectory=(1, 2, 3))
    expected = [
        [10.93469299, -5.46734649, 3.32141300],
        [0.97267840, -0.06480314, 0.49111405],
        [0.54454253, 0.16738108, 0.36947676],
    ]
    np.testing.assert_allclose(student[:, 0], expected, rtol=1e-7)


def test_golden_coefficient_rows():
    rows = solvers.dpmpp3m().table(GRID13, np)
    golden = {
        0: [0.639464, 0.360536, 0, 0],
        1: [0.620242, 0.582598, -0.202840, 0],
        2: [0.598913, 0.800194, -0.575968, 0.176861],
        9: [0.348929, 1.419894, -1.141668, 0.372845],
        10: [0.289448, 1.128891, -0.418339, 0],
        11: [0.221429, 0.778571, 0, 0],
    }
    for i, row in golden.items():
        np.testing.assert_allclose([rows["a"][i], *rows["b"][i]], row, atol=6e-7)


@pytest.mark.parametrize("name", solvers.SOLVERS)
@pytest.mark.parametrize("n", [2, 3, 4, 13])
def test_a_constant_denoiser_is_kept(x64, name, n):
    """a + sum b = 1: at a fixed point x = D no solver moves, and from x = D + t xi the end is D + s xi."""
    constant = lambda x, sigma, cond=None: jnp.full_like(x, 0.7)  # noqa: E731
    sigmas = solvers.grid(n, 0.006, 80)
    if solvers.make(name).stochastic:
        with pytest.raises(ValueError, match="draws noise"):
            solvers.solve(constant, jnp.zeros((1, 1)), sigmas, name)
        return
    out = solvers.solve(constant, jnp.full((2, 3), 0.7) + 80.0, sigmas, name)
    np.testing.assert_allclose(out, 0.7 + 0.006, rtol=1e-9)


@pytest.mark.parametrize(
    ("solver", "slope"),
    [
        ("euler", 1.0),
        ("heun", 2.0),
        ("dpm2", 2.0),
        (solvers.ipndm(2), 2.0),
        (solvers.ipndm(3), 2.0),
        (solvers.ipndm(4), 2.0),
        ("dpmpp2m", 2.0),
        ("dpmpp3m", 2.0),
        (solvers.dpmpp3m(kappa=2.0, lower_order_final=False), 3.0),
        ("unipc", 3.0),
    ],
)
@pytest.mark.parametrize("kind", ["polynomial", "logsnr"])
def test_orders_of_convergence(x64, solver, slope, kind):
    def error(steps):
        out = solvers.solve(GAUSSIAN, jnp.asarray(START), solvers.grid(steps + 1, 0.006, 80, kind), solver)
        return np.abs(out - exact(0.006)).max()

    measured = np.log2(error(128) / error(512)) / 2
    if slope == 3.0 and kind == "logsnr":  # the Gaussian is kind to uniform steps in lambda
        assert measured > 2.85
    else:
        assert abs(measured - slope) < 0.15


@pytest.mark.parametrize("kind", ["polynomial", "logsnr"])
def test_a_third_order_solver_that_starts_with_euler_is_of_second_order(x64, kind):
    """From sigma 2 the first step is no longer almost exact, and its error of second order remains."""
    start = jnp.array([2.0, -1.0, 0.6])
    wanted = 0.3 + (start - 0.3) * np.sqrt((0.25 + 0.006**2) / (0.25 + 4.0))
    solver, errors = solvers.dpmpp3m(kappa=2.0, lower_order_final=False), []
    for steps in (512, 2048):
        out = solvers.solve(denoisers.gaussian(0.3, 0.5), start, solvers.grid(steps + 1, 0.006, 2.0, kind), solver)
        errors.append(float(jnp.abs(out - wanted).max()))
    assert np.log2(errors[0] / errors[1]) / 2 == pytest.approx(2.0, abs=0.1)


def test_adams_bashforth_reaches_its_order_on_a_uniform_grid_with_exact_history(x64):
    for order, expected in [(3, 3.0), (4, 3.9)]:
        errors = []
        for steps in (256, 1024):
            sigmas = np.linspace(2, 0.2, steps + 1)
            x = exact(sigmas[:, None], np.array([[1.5]]), 2.0)
            slopes = (x - np.asarray(GAUSSIAN(jnp.asarray(x), jnp.asarray(sigmas)))) / sigmas[:, None]
            state = x[order - 1]
            history = list(slopes[: order - 1][::-1])
            rows = solvers.ipndm(order).table(sigmas, np)["b"]
            for i in range(order - 1, steps):
                x0 = (STD**2 * state + sigmas[i] ** 2 * MEAN) / (STD**2 + sigmas[i] ** 2)
                history.insert(0, (state - x0) / sigmas[i])
                state = state + sum(b * history[j] for j, b in enumerate(rows[i]))
            errors.append(abs(state - x[-1]).max())
        assert abs(np.log2(errors[0] / errors[1]) / 2 - expected) < 0.2


def test_one_step_orders_coincide(x64):
    x = jnp.asarray(START)
    euler = solvers.solve(GAUSSIAN, x, GRID13, "euler", trajectory=True)
    np.testing.assert_allclose(solvers.solve(GAUSSIAN, x, GRID13, solvers.ipndm(1), trajectory=True), euler, rtol=1e-12)
    two = solvers.solve(GAUSSIAN, x, GRID13[:2], "dpmpp3m")
    np.testing.assert_allclose(two, euler[1], rtol=1e-12)


def test_the_analytic_first_step_is_nearly_exact_at_large_sigma(x64):
    x = jnp.asarray(START)
    free = x / np.sqrt(1 + 80.0**2)
    slope = denoisers.noise_prediction(denoisers.gaussian(0.0, 0.5))(x, 80.0)
    np.testing.assert_allclose(np.abs(free / slope - 1), 3.9e-5, rtol=0.02)


def test_heun_with_256_steps_samples_the_mixture(mixture):
    means, stds, weights = mixture
    n = 20_000
    x = 80 * jax.random.normal(jax.random.key(0), (n, 4))
    out = jax.jit(
        lambda x: solvers.solve(denoisers.gaussian_mixture(*mixture), x, solvers.grid(257, 0.002, 80), "heun")
    )(x)
    out = np.asarray(out, np.float64)
    mean = weights @ means
    second = np.einsum("k,ki,kj->ij", weights, means, means) + np.eye(4) * (weights @ (stds**2 + 0.002**2))
    assert np.abs(out.mean(0) - mean).max() < 4 * out.std(0).max() / np.sqrt(n)
    products = out[:, :, None] * out[:, None, :]
    assert (np.abs(products.mean(0) - second) < 4 * products.std(0) / np.sqrt(n)).all()


# ------------------------------------------------------------------------ stochastic solvers


@pytest.mark.parametrize(
    "solver", [solvers.ancestral(), solvers.sde_dpmpp2m(), solvers.ancestral(0.4), solvers.sde_dpmpp2m(0.5)]
)
def test_noise_levels_stay_exact_for_a_point_of_data(solver):
    """With D constant, x = D + t xi must become D + s xi': a^2 t^2 + c^2 = s^2 for every row."""
    rows = solver.table(GRID13, np)
    np.testing.assert_allclose(rows["a"] ** 2 * GRID13[:-1] ** 2 + rows["c"] ** 2, GRID13[1:] ** 2, rtol=1e-12)
    np.testing.assert_allclose(rows["a"] + rows["b"].sum(1), 1, rtol=1e-12)


@pytest.mark.parametrize("name", ["ancestral", "sde_dpmpp2m"])
def test_stochastic_solvers_sample_the_gaussian(name):
    n = 40_000
    x = 80 * jax.random.normal(jax.random.key(1), (n, 1))
    out = jax.jit(lambda x, key: solvers.solve(GAUSSIAN, x, solvers.grid(400, 0.006, 80), name, key=key))(
        x, jax.random.key(2)
    )
    assert abs(float(out.mean()) - MEAN) < 5 * STD / np.sqrt(n)
    assert abs(float(out.std()) / STD - 1) < 0.03


def test_no_noise_is_the_deterministic_solver(x64):
    x, key = jnp.asarray(START), jax.random.key(0)
    np.testing.assert_allclose(
        solvers.solve(GAUSSIAN, x, GRID13, solvers.ancestral(0.0), key=key),
        solvers.solve(GAUSSIAN, x, GRID13, "euler"),
        rtol=1e-12,
    )
    plain = solvers.solve(GAUSSIAN, x, GRID13, solvers.dpmpp2m(lower_order_final=False))
    np.testing.assert_allclose(solvers.solve(GAUSSIAN, x, GRID13, solvers.sde_dpmpp2m(0.0), key=key), plain, rtol=1e-9)


def test_churn_raises_the_noise_level_as_stated(x64):
    rows = solvers.heun(churn=40.0, churn_min=0.05, churn_max=50.0).table(GRID13, np)
    inside = (GRID13[:-1] >= 0.05) & (GRID13[:-1] <= 50)
    np.testing.assert_allclose(rows["sigma"] / GRID13[:-1], np.where(inside, np.sqrt(2), 1), rtol=1e-12)
    np.testing.assert_allclose(rows["c"] ** 2 + GRID13[:-1] ** 2, rows["sigma"] ** 2, rtol=1e-12)
    x = 80 * jax.random.normal(jax.random.key(1), (20_000, 1))
    out = solvers.solve(GAUSSIAN, x, solvers.grid(65, 0.006, 80), solvers.heun(churn=10.0), key=jax.random.key(3))
    assert abs(float(out.std()) / STD - 1) < 0.03


def test_one_key_per_example_makes_samples_independent_of_the_batch():
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(5), i))(jnp.arange(6))
    x = 80 * jnp.linspace(-1, 1, 12).reshape(6, 2)
    solve = lambda x, keys: solvers.solve(GAUSSIAN, x, GRID13, "ancestral", key=keys)  # noqa: E731
    whole = solve(x, keys)
    np.testing.assert_allclose(whole[3:], solve(x[3:], keys[3:]), rtol=1e-6)
    assert not np.allclose(whole, solve(x, keys[::-1]))


# ------------------------------------------------------------------------ composing


@pytest.mark.parametrize("name", solvers.SOLVERS)
def test_jit_vmap_and_grad_compose_and_trace_once(name, count_traces, mixture):
    denoise = count_traces(denoisers.gaussian_mixture(*mixture))
    sigmas = solvers.grid(7, 0.01, 20)

    @jax.jit
    def sample(x, key):
        return solvers.solve(denoise, x, sigmas, name, key=key)

    keys = jax.random.split(jax.random.key(0), 3)
    x = 20 * jax.random.normal(jax.random.key(1), (3, 5, 4))
    first = sample(x[0], keys[0])
    traces = denoise.traces
    assert traces == solvers.make(name).evaluations  # the body of the scan, traced once
    sample(x[1], keys[1])
    assert denoise.traces == traces
    np.testing.assert_allclose(jax.vmap(sample)(x, keys)[0], first, rtol=2e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: sample(x, keys[0]).sum()))(x[0])
    assert jnp.isfinite(gradient).all() and jnp.abs(gradient).max() > 0


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_gradient_through_a_solve_is_right(x64, name):
    """On a Gaussian the solve is affine in x, so its slope is known from two solves."""
    run = lambda x: solvers.solve(GAUSSIAN, x, GRID13, name).sum()  # noqa: E731
    slope = run(jnp.ones((1, 1)) * 80) - run(jnp.ones((1, 1)) * 79)
    np.testing.assert_allclose(jax.grad(run)(jnp.ones((1, 1)) * 3)[0, 0], slope, rtol=1e-9)


@pytest.mark.parametrize("name", solvers.SOLVERS)
def test_traced_grids_equal_known_ones_and_do_not_recompile(name, count_traces):
    denoise = count_traces(GAUSSIAN)
    x, key = jnp.asarray(START, jnp.float32), jax.random.key(0)
    run = jax.jit(lambda x, sigmas: solvers.solve(denoise, x, sigmas, name, key=key))
    for sigmas in (GRID13, solvers.grid(13, 0.02, 80, "logsnr")):
        known = solvers.solve(GAUSSIAN, x, sigmas, name, key=key)
        np.testing.assert_allclose(run(x, jnp.asarray(sigmas, jnp.float32)), known, rtol=2e-4, atol=2e-5)
    assert denoise.traces == solvers.make(name).evaluations


@pytest.mark.parametrize("solver", [*solvers.SOLVERS, solvers.heun(churn=2.0, churn_min=2.0), solvers.sde_dpmpp2m(0.0)])
def test_gradients_with_respect_to_the_grid_are_finite(solver):
    run = lambda sigmas: solvers.solve(GAUSSIAN, X * sigmas[0], sigmas, solver, key=jax.random.key(0)).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(run))(jnp.asarray(GRID13[::3], jnp.float32))
    assert jnp.isfinite(gradient).all() and jnp.abs(gradient).max() > 0


def test_chosen_states_equal_the_whole_trajectory_and_memory_follows_them():
    x = 80 * jax.random.normal(jax.random.key(0), (64, 32))
    sigmas = solvers.grid(129, 0.006, 80)
    whole = solvers.solve(GAUSSIAN, x, sigmas, "dpmpp3m", trajectory=True)
    assert whole.shape == (129, 64, 32)
    np.testing.assert_array_equal(whole[0], x)
    np.testing.assert_allclose(whole[-1], solvers.solve(GAUSSIAN, x, sigmas, "dpmpp3m"), rtol=1e-6)
    some = solvers.solve(GAUSSIAN, x, sigmas, "dpmpp3m", trajectory=(0, 64, 128))
    np.testing.assert_allclose(some, whole[jnp.array([0, 64, 128])], rtol=1e-6)

    def temporary(n, keep):
        program = jax.jit(lambda x: solvers.solve(GAUSSIAN, x, solvers.grid(n, 0.006, 80), "dpmpp3m", trajectory=keep))
        return program.lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(513, (256, 512)) <= temporary(33, (16, 32)) + 16 * 1024  # the coefficient table alone grows


def test_ending_at_zero_is_one_more_euler_step_and_counts_its_evaluation(x64, count_traces):
    x = jnp.asarray(START)
    end = solvers.solve(GAUSSIAN, x, GRID13, "heun")
    np.testing.assert_allclose(
        solvers.solve(GAUSSIAN, x, GRID13, "heun", final_denoise=True), GAUSSIAN(end, 0.006), rtol=1e-12
    )
    assert solvers.heun().nfe(18, final_denoise=True) == 35
    assert solvers.euler().nfe(4, afs=True) == 2
    for name in DETERMINISTIC:
        for afs, final_denoise in [(False, False), (True, False), (True, True)]:
            method = solvers.make(name)
            assert method.timestamps(method.nfe(9, afs, final_denoise), afs, final_denoise) == 9
    calls = []
    counting = lambda x, sigma, cond=None: (jax.debug.callback(lambda: calls.append(1)), GAUSSIAN(x, sigma))[1]  # noqa: E731
    solvers.solve(counting, x, GRID13, "dpm2", afs=True, final_denoise=True).block_until_ready()
    jax.effects_barrier()
    assert len(calls) == solvers.dpm2().nfe(13, afs=True, final_denoise=True) == 24


def test_conditions_reach_the_denoiser(mixture):
    denoise = denoisers.gaussian_mixture(*mixture)
    x = 80 * jax.random.normal(jax.random.key(0), (200, 4))
    out = solvers.solve(denoise, x, solvers.grid(40, 0.002, 80), "heun", {"label": jnp.full(200, 2)})
    np.testing.assert_allclose(out.mean(0), mixture[0][2], atol=4 * mixture[1][2] / np.sqrt(200))


def test_states_are_carried_in_float32_at_least():
    for dtype, expected in [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)]:
        assert solvers.solve(GAUSSIAN, jnp.ones((1, 3), dtype), GRID13, "ipndm").dtype == expected


# ------------------------------------------------------------------------ bad input

X = jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solvers.solve(GAUSSIAN, X, [0.1, 1.0]), r"sigmas\[0\]=0.1.*sigmas\[::-1\]"),
        (lambda: solvers.solve(GAUSSIAN, X, [1.0, 0.5, 0.5]), r"sigmas\[1\]=0.5"),
        (lambda: solvers.solve(GAUSSIAN, X, [1.0, 0.0]), r"0.*(final_denoise|final_denoise)=True"),
        (lambda: solvers.solve(GAUSSIAN, X, [1.0, -0.5]), r"sigma.*got -0.5"),
        (lambda: solvers.solve(GAUSSIAN, X, [1.0]), r"2 timestamps, got shape \(1,\)"),
        (lambda: solvers.solve(GAUSSIAN, X, GRID13, "dpmpp3"), r"'dpmpp3'.*did you mean 'dpmpp3m'.*euler, "),
        (lambda: solvers.solve(GAUSSIAN, X, GRID13, "ancestral"), r"ancestral.*key="),
        (lambda: solvers.solve(GAUSSIAN, X, GRID13, "ancestral", key=jax.random.split(jax.random.key(0), 3)), r"\(2,\), got shape \(3,\)"),
        (lambda: solvers.heun().timestamps(5), r"5 evaluations.*2"),
        (lambda: solvers.solve(denoisers.gaussian_mixture(np.ones((2, 3)), 1.0), X, GRID13, cond={"class": 1}), r"'class'.*label"),
        (lambda: solvers.solve(GAUSSIAN, X, GRID13, trajectory=(3, 13)), r"0\.\.12, got \(3, 13\)"),
        (lambda: solvers.solve(GAUSSIAN, X, GRID13, trajectory=True, final_denoise=True), r"trajectory"),
        (lambda: solvers.ipndm(5), r"ipndm.*1\.\.4, got 5"),
        (lambda: solvers.dpm2(0), r"\(0, 1\], got 0"),
        (lambda: solvers.ancestral(-1), r"eta.*got -1"),
        (lambda: solvers.heun(-1), r"churn.*got -1"),
        (lambda: solvers.dpmpp2m("eps"), r"'x0' or 'noise', got 'eps'"),
        (lambda: solvers.make("euler", order=3), r"'euler'.*'order'"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()
