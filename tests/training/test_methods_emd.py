"""EMD against mathematics: moments of its chains in closed form, gradients of both divergences, an independent loop.

In one dimension the teacher is N(m, s^2), the generator a z + b, and a level is (alpha, sigma) as the paper writes it:
x_t = alpha x0 + sigma eps. Inside the library that is the level sigma / alpha.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from method_parts import build_method

from jaxdiff import denoisers, models, schedules
from jaxdiff.methods import emd, exported
from jaxdiff.methods.diffusion import denoising_loss
from jaxdiff.methods.emd import DIFF_INSTRUCT, correct, m_step
from jaxdiff.methods.langevin import Langevin, e_step
from jaxdiff.noise.levels import edm_weight

REFERENCE = {"alpha": 0.8, "sigma": 0.6, "m": 1.0, "s": 0.5, "a": 1.2, "b": -0.3}
OTHERS = [
    {"alpha": 0.5, "sigma": 0.9, "m": -0.5, "s": 1.5, "a": 0.7, "b": 0.4},
    {"alpha": 1.0, "sigma": 2.0, "m": 0.3, "s": 0.8, "a": -1.1, "b": 0.0},
]


# ------------------------------------------------------------------------------------------ oracles, in float64


def moments(alpha, sigma, m, s, a, b, step_eps, step_z, steps, cancel_initial=True):
    """Mean and covariance of (eps, z, N) after the chain, N the ledger of noise: a linear recursion."""
    v_t, v_s, delta = alpha**2 * s**2 + sigma**2, alpha**2 * a**2 + sigma**2, alpha * (m - b)
    u = np.array([sigma, alpha * a])
    precision = np.eye(2) + (1 / v_t - 1 / v_s) * np.outer(u, u)
    rates = np.diag([step_eps, step_z])
    matrix = np.zeros((3, 3))
    matrix[:2, :2] = np.eye(2) - rates @ precision
    matrix[2, 2] = 1 - step_eps
    drift = np.concatenate([rates @ precision @ (u * delta / v_s), [0.0]])
    noise = np.zeros((3, 2))
    noise[0, 0] = noise[2, 0] = np.sqrt(2 * step_eps)
    noise[1, 1] = np.sqrt(2 * step_z)
    mean, cov = np.zeros(3), np.eye(3)
    cov[2, 2] = cov[0, 2] = cov[2, 0] = float(cancel_initial)
    for _ in range(steps):
        mean, cov = matrix @ mean + drift, matrix @ cov @ matrix.T + noise @ noise.T
    return mean, cov


def ascent(alpha, sigma, mean, cov, cancelled):
    """(-d/da, -d/db) of the divergence as the M-step estimates it: (alpha/sigma) E[eps~ z], (alpha/sigma) E[eps~]."""
    product = cov[0, 1] + mean[0] * mean[1]
    if cancelled:
        product -= cov[2, 1] + mean[2] * mean[1]
    return alpha / sigma * product, alpha / sigma * (mean[0] - (mean[2] if cancelled else 0.0))


def divergence(alpha, sigma, m, s, a, b, reverse=False):
    """KL(teacher | student) of the noisy densities, or the other way round."""
    (mu_p, v_p), (mu_q, v_q) = (
        (alpha * m, alpha**2 * s**2 + sigma**2),
        (alpha * b, alpha**2 * a**2 + sigma**2),
    )
    if reverse:
        mu_p, v_p, mu_q, v_q = mu_q, v_q, mu_p, v_p
    return 0.5 * (np.log(v_q / v_p) + (v_p + (mu_p - mu_q) ** 2) / v_q - 1)


def slopes(point, reverse=False, h=1e-6):
    """(d/da, d/db) of a divergence by central differences."""
    out = []
    for name in ("a", "b"):
        up, down = ({**point, name: point[name] + sign * h} for sign in (1, -1))
        out.append((divergence(**up, reverse=reverse) - divergence(**down, reverse=reverse)) / (2 * h))
    return np.array(out)


def run(point, examples, **options):
    """(chain, (d/da, d/db), level) of the library's E- and M-step; the weight is that of the bare divergence."""
    numbers = {name: jnp.float32(value) for name, value in point.items()}
    chain, gradient = _run(numbers, examples, tuple(sorted(options.items())))
    return chain, np.array([gradient["a"], gradient["b"]]), point["sigma"] / point["alpha"]


@partial(jax.jit, static_argnums=(1, 2))  # one program for all points
def _run(point, examples, options):
    params = {"a": point["a"], "b": point["b"]}
    keys = jax.random.split(jax.random.key(0), 3)
    z, eps = (jax.random.normal(k, (examples, 1)) for k in keys[:2])
    sigma = jnp.full(examples, point["sigma"] / point["alpha"])
    generate = lambda p, z, cond=None: p["a"] * z + p["b"]  # noqa: E731
    pair = (denoisers.gaussian(point["m"], point["s"]), denoisers.gaussian(params["b"], jnp.abs(params["a"])))
    chain = e_step(*pair, lambda z, cond: generate(params, z), z, eps, sigma, keys[2], chain=Langevin(**dict(options)))
    _, gradient = m_step(generate, params, chain, sigma, weight=lambda sigma: sigma**-2)
    return chain, gradient


def test_the_oracles_agree_with_each_other():
    point = REFERENCE
    np.testing.assert_allclose(divergence(**point), 0.575862, atol=1e-6)
    np.testing.assert_allclose(divergence(**point, reverse=True), 1.321290, atol=1e-6)
    np.testing.assert_allclose(slopes(point), (-0.149626, -0.649189), atol=1e-6)
    np.testing.assert_allclose(slopes(point, reverse=True), (0.877672, -1.6), atol=1e-6)
    for point in (REFERENCE, *OTHERS):  # many small steps: the forward slopes; one step of eps: the reverse ones
        end = moments(**point, step_eps=1e-3, step_z=1e-3, steps=30_000)
        np.testing.assert_allclose(ascent(point["alpha"], point["sigma"], *end, False), -slopes(point), atol=2e-3)
        end = moments(**point, step_eps=0.16, step_z=0.0, steps=1)
        expected = -0.16 * slopes(point, reverse=True)
        np.testing.assert_allclose(ascent(point["alpha"], point["sigma"], *end, True), expected, atol=1e-8)


@pytest.mark.parametrize(
    ("step_eps", "step_z", "steps", "mean", "var", "none", "complete", "kept"),
    [
        (0.16, 0.0, 1, (0.192, 0), (0.930439, 1, -0.105321), (-0.140428, 0.256), -0.140428, -0.140428),
        (0.16, 0.0, 8, (0.740506, 0), (0.967046, 1, -0.406201), (-0.541601, 0.987341), -0.541601, -0.541601),
        (0.16, 0.0, 16, (0.836058, 0), (1.009079, 1, -0.458616), (-0.611487, 1.114744), -0.611487, -0.611487),
        (0.16, 0.04, 1, (0.192, 0.0768), (0.930439, 0.923182, -0.117055), (-0.136413, 0.256), -0.106923, -0.136413),
        (0.16, 0.16, 16, (0.486732, 0.778771), (0.923359, 0.668659, -0.261231), (0.157096, 0.648976), 0.417898, 0.415648),
        (0.01, 0.01, 4000, (0.486891, 0.779026), (0.838109, 0.577721, -0.267065), (0.149648, 0.649189), 0.403505, 0.403505),
    ],
)  # fmt: skip
def test_the_recursion_gives_the_table_of_finite_chains(step_eps, step_z, steps, mean, var, none, complete, kept):
    level = (REFERENCE["alpha"], REFERENCE["sigma"])
    found, cov = moments(**REFERENCE, step_eps=step_eps, step_z=step_z, steps=steps)
    np.testing.assert_allclose(found[:2], mean, atol=1e-6)
    np.testing.assert_allclose((cov[0, 0], cov[1, 1], cov[0, 1]), var, atol=1e-6)
    np.testing.assert_allclose(ascent(*level, found, cov, False), none, atol=1e-6)
    np.testing.assert_allclose(ascent(*level, found, cov, True)[0], complete, atol=1e-6)
    end = moments(**REFERENCE, step_eps=step_eps, step_z=step_z, steps=steps, cancel_initial=False)
    np.testing.assert_allclose(ascent(*level, *end, True)[0], kept, atol=1e-6)


@pytest.mark.parametrize(
    ("point", "step_eps", "step_z", "steps"),
    [
        (REFERENCE, 0.16, 0.0, 1),
        (REFERENCE, 0.16, 0.16, 16),
        (OTHERS[0], 0.16, 0.0, 8),
        (OTHERS[0], 0.16, 0.16, 16),
        (OTHERS[1], 0.16, 0.04, 1),
    ],
)
def test_chains_have_the_moments_of_the_recursion(point, step_eps, step_z, steps):
    """Means, variances and gradients within five standard errors, in all modes of cancellation."""
    examples = 200_000 if steps == 1 else 20_000
    options = {"step_eps": step_eps, "step_z": step_z, "steps": steps}
    if not step_z:
        options["scheme"] = "eps"
    for cancel, initial in (("none", True), ("last", True), ("complete", True), ("complete", False)):
        mean, cov = moments(**point, step_eps=step_eps, step_z=step_z, steps=steps, cancel_initial=initial)
        chain, gradient, level = run(point, examples, cancel=cancel, cancel_initial=initial, **options)
        eps, z, clean = (
            np.asarray(a, np.float64)[:, 0] for a in (chain.carried / level, chain.z, chain.residual / level)
        )
        for values, wanted in ((eps, mean[0]), (z, mean[1]), (eps * z, cov[0, 1] + mean[0] * mean[1])):
            assert abs(values.mean() - wanted) < 5 * values.std() / examples**0.5
        for values, index in ((eps, 0), (z, 1)):
            assert abs(values.var() / cov[index, index] - 1) < 5 * (2 / examples) ** 0.5
        wanted = ascent(point["alpha"], point["sigma"], mean, cov, cancel == "complete")
        errors = np.array([(clean * z).std(), clean.std()]) / level / examples**0.5
        assert (np.abs(-gradient - wanted) < 5 * errors + 1e-5).all(), (cancel, gradient, wanted)


def test_many_dimensions_with_a_linear_generator():
    """z of three dimensions, x of four: moments and gradients after six steps, and in the limit the forward slopes."""
    rng = np.random.default_rng(0)
    d, m, level, examples = 4, 3, 0.7, 40_000
    matrix, shift, mean = rng.normal(size=(d, m)) * 0.6, rng.normal(size=d), rng.normal(size=d)
    root = rng.normal(size=(d, d)) * 0.4
    v_t, v_s = root @ root.T + level**2 * np.eye(d), matrix @ matrix.T + level**2 * np.eye(d)
    delta, inverse = mean - shift, np.linalg.inv(v_s)
    u = np.concatenate([level * np.eye(d), matrix], 1)
    precision = np.eye(d + m) + u.T @ (np.linalg.inv(v_t) - inverse) @ u

    def recursion(steps, step_eps, step_z):
        rates = np.diag([step_eps] * d + [step_z] * m)
        center, cov = np.zeros(d + m), np.eye(d + m)
        move = np.eye(d + m) - rates @ precision
        for _ in range(steps):
            center = move @ center + rates @ u.T @ np.linalg.inv(v_t) @ delta
            cov = move @ cov @ move.T + 2 * rates
        return center, cov

    def gradients(center, cov):
        second = cov + np.outer(center, center)
        return -second[:d, d:] / level, -center[:d] / level

    limit = gradients(*recursion(40_000, 1e-3, 1e-3))
    want_a = (inverse - inverse @ (v_t + np.outer(delta, delta)) @ inverse) @ matrix
    np.testing.assert_allclose(limit[0], want_a, atol=2e-3)
    np.testing.assert_allclose(limit[1], -inverse @ delta, atol=1e-6)

    params = {"a": jnp.asarray(matrix, jnp.float32), "b": jnp.asarray(shift, jnp.float32)}
    generate = lambda p, z, cond=None: z @ p["a"].T + p["b"]  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 3)
    z, eps = jax.random.normal(keys[0], (examples, m)), jax.random.normal(keys[1], (examples, d))
    sigma = jnp.full(examples, level)
    pair = (gaussian_with(mean, v_t, level), gaussian_with(shift, v_s, level))
    options = {"steps": 6, "step_eps": 0.1, "step_z": 0.06, "cancel": "none"}

    @jax.jit
    def both():
        chain = e_step(*pair, lambda z, c: generate(params, z), z, eps, sigma, keys[2], chain=Langevin(**options))
        return chain, m_step(generate, params, chain, sigma, weight=lambda s: s**-2)[1]

    chain, gradient = both()
    center, cov = recursion(6, 0.1, 0.06)
    found = np.concatenate([chain.carried / level, chain.z], 1)
    np.testing.assert_allclose(found.mean(0), center, atol=5 * (cov.diagonal().max() / examples) ** 0.5)
    np.testing.assert_allclose(np.cov(found.T), cov, atol=0.04)
    want = gradients(center, cov)  # m_step takes means over the d pixels too
    np.testing.assert_allclose(d * np.asarray(gradient["a"]), want[0], atol=0.04)
    np.testing.assert_allclose(d * np.asarray(gradient["b"]), want[1], atol=0.04)


def gaussian_with(center, cov, level):
    """The denoiser of a Gaussian whose noisy covariance is `cov`, at one level."""
    gain = jnp.asarray(level**2 * np.linalg.inv(cov), jnp.float32)
    return lambda x, sigma, cond=None: x - (x - jnp.asarray(center, jnp.float32)) @ gain.T


def test_drifts_are_the_gradient_of_the_log_density():
    """J_z^T and the score gap against finite differences of log p - log q - |eps|^2/2 - |z|^2/2, g a tanh network."""
    rng = np.random.default_rng(1)
    d, level, h = 3, 0.8, 1e-4
    w1, w2 = rng.normal(size=(d, 5)), rng.normal(size=(5, d))
    covs = [r @ r.T + np.eye(d) * 0.3 for r in rng.normal(size=(2, d, d)) * 0.7]
    means = rng.normal(size=(2, d))
    z, eps = rng.normal(size=(2, d))

    def log_rho(eps, z):
        x = np.tanh(z @ w1) @ w2 + level * eps
        logs = [-0.5 * (x - m) @ np.linalg.solve(c, x - m) for m, c in zip(means, covs, strict=True)]
        return logs[0] - logs[1] - 0.5 * eps @ eps - 0.5 * z @ z

    numeric = np.array(
        [
            (log_rho(eps + h * e, z + h * k) - log_rho(eps - h * e, z - h * k)) / (2 * h)
            for e, k in [(v, 0 * v) for v in np.eye(d)] + [(0 * v, v) for v in np.eye(d)]
        ]
    )

    teacher, student = (gaussian_with(*pair, level) for pair in zip(means, covs, strict=True))
    generate = lambda z, cond: jnp.tanh(z @ jnp.asarray(w1, jnp.float32)) @ jnp.asarray(w2, jnp.float32)  # noqa: E731
    start = (jnp.asarray(z, jnp.float32)[None], jnp.asarray(eps, jnp.float32)[None], jnp.array([level]))
    for scheme in ("eps,z", "x,z"):
        options = {"steps": 1, "step_eps": 0.1, "step_z": 0.1, "scheme": scheme, "cancel": "last"}
        moved = e_step(teacher, student, generate, *start, jax.random.key(0), chain=Langevin(**options))
        rest = Langevin(**{**options, "step_z": 0.0})
        still = e_step(teacher, student, generate, *start, jax.random.key(0), chain=rest)
        if scheme == "eps,z":
            drift_eps = (moved.residual / level - start[1]) / 0.1
            calm = e_step(
                student, student, generate, *start, jax.random.key(0), chain=Langevin(**options)
            )  # only -z and noise
            drift_z = (moved.z - calm.z) / 0.1 - start[0]
            np.testing.assert_allclose(np.concatenate([drift_eps[0], drift_z[0]]), numeric, rtol=2e-4, atol=2e-4)
        np.testing.assert_array_equal(moved.carried, still.carried)  # both from the same (eps, z)


def reference_chain(point, z, eps, normals, scheme, step_eps, step_z, alpha, sigma):
    """The chain as the paper writes it, with alpha and sigma, in float64, and its ledger of noise."""
    a, b, m, s = (point[name] for name in "abms")
    v_t, v_s = alpha**2 * s**2 + sigma**2, alpha**2 * a**2 + sigma**2
    gap = lambda x: -(x - alpha * m) / v_t + (x - alpha * b) / v_s  # noqa: E731
    step_x = step_eps * sigma**2
    x, ledger, drifts = alpha * (a * z + b) + sigma * eps, eps, 0.0 * eps
    for n, k in normals:
        g = a * z + b
        if scheme.startswith("eps"):
            x = alpha * g + sigma * eps
            pull = alpha * a * gap(x)
            drifts = (1 - step_eps) * drifts + step_eps * sigma * gap(x)  # the gaps alone
            eps = (1 - step_eps) * eps + step_eps * sigma * gap(x) + np.sqrt(2 * step_eps) * n
            ledger = (1 - step_eps) * ledger + np.sqrt(2 * step_eps) * n
        else:
            pull = alpha / sigma**2 * a * (x - alpha * g)
            drifts = (1 - step_eps) * drifts + step_eps * sigma * gap(x)
            x = x + step_x * (gap(x) - (x - alpha * g) / sigma**2) + np.sqrt(2 * step_x) * n
            ledger = (1 - step_x / sigma**2) * ledger + np.sqrt(2 * step_x) * n / sigma
        if scheme.endswith("z"):
            z = z + step_z * (pull - z) + np.sqrt(2 * step_z) * k
    g = a * z + b
    if scheme.startswith("x"):
        eps = (x - alpha * g) / sigma
    return eps, z, ledger, drifts


@pytest.mark.parametrize("scheme", ["eps,z", "x,z", "eps", "x"])
def test_paths_in_any_coordinate_and_their_ledger(scheme):
    """Step by step the paper's chain, whatever alpha: only sigma / alpha counts. The noise taken out is its ledger."""
    examples, steps, level = 50, 6, 0.75
    key = jax.random.key(3)
    z, eps = (np.asarray(jax.random.normal(k, (examples, 1)), np.float64) for k in jax.random.split(jax.random.key(1)))
    keys = jax.random.split(key, examples)
    normal = jax.vmap(lambda key, i: jax.random.normal(jax.random.fold_in(key, i), (1,)), (0, None))
    normals = [[np.asarray(normal(keys, 2 * i + j), np.float64) for j in (0, 1)] for i in range(steps)]
    options = {"scheme": scheme, "step_eps": 0.16, "step_z": 0.07}
    a, b = REFERENCE["a"], REFERENCE["b"]
    arguments = (
        denoisers.gaussian(REFERENCE["m"], REFERENCE["s"]),
        denoisers.gaussian(b, a),
        lambda z, cond: a * z + b,
        jnp.asarray(z, jnp.float32),
        jnp.asarray(eps, jnp.float32),
        jnp.full(examples, level),
        key,
    )
    chains = {
        (cancel, unroll): e_step(*arguments, chain=Langevin(steps=steps, cancel=cancel, **options), unroll=unroll)
        for cancel in ("complete", "last", "none")
        for unroll in (1, steps)
    }
    for alpha, sigma in ((0.8, 0.6), (1.0, 0.75), (0.5, 0.375)):
        want = reference_chain(REFERENCE, z, eps, normals, alpha=alpha, sigma=sigma, **options)
        for (cancel, _), chain in chains.items():
            if cancel != "complete":
                last = np.sqrt(2 * 0.16) * normals[-1][0] if cancel == "last" else 0.0
                np.testing.assert_allclose(chain.residual / level, want[0] - last, atol=2e-5)
                continue
            apart = chain.carried
            if scheme == "x,z":
                apart = apart - (a * chain.z + b)
            np.testing.assert_allclose(apart / level, want[0], atol=2e-5)
            np.testing.assert_allclose(chain.z, want[1], atol=2e-5)
            np.testing.assert_allclose(chain.residual / level, want[3], atol=2e-5)
            if scheme != "x,z":
                np.testing.assert_allclose((apart - chain.residual) / level, want[2], atol=2e-5)


def test_x_and_eps_are_one_scheme_when_z_rests():
    for steps in (1, 7):
        one, other = (run(REFERENCE, 100, scheme=scheme, steps=steps, cancel="none") for scheme in ("eps", "x"))
        np.testing.assert_allclose(one[1], other[1], rtol=1e-4)


def test_the_joint_chain_in_x_reaches_the_teacher():
    """gamma 0.02 in the paper's coordinate, 400 steps: x has the teacher's moments, the gradient is the forward one."""
    options = {"scheme": "x,z", "steps": 400, "step_x": 0.02 / 0.8**2, "step_z": 0.02, "cancel": "none"}
    chain, gradient, _ = run(REFERENCE, 20_000, **options)
    x = 0.8 * np.asarray(chain.carried)
    assert abs(x.mean() - 0.8) < 0.03 and abs(x.var() - 0.53) < 0.03
    np.testing.assert_allclose(-gradient, (0.14, 0.65), atol=0.05)


@pytest.mark.parametrize("scheme", ["eps,z", "x,z", "eps", "x"])
def test_equal_densities_leave_nothing_to_learn(scheme):
    """With complete cancellation the gradient is zero to the bit, in every scheme."""
    same = {**REFERENCE, "m": REFERENCE["b"], "s": REFERENCE["a"]}
    options = {"steps": 5, "scheme": scheme, "step_z": 0.01}
    _, gradient, _ = run(same, 500, **options)
    _, noisy, _ = run(same, 500, cancel="none", **options)
    np.testing.assert_array_equal(gradient, 0.0)
    assert np.abs(noisy).max() > 1e-3


def test_a_joint_chain_in_x_is_at_rest_where_the_generator_fits():
    """Teacher N(0, 0.5^2), sigma 0.05, K = 16: z's noise moves g(z) by more than x follows, and none of it is learnt.

    The fixed point is a = s: the slope at the optimum is zero and it points back to it from both sides.
    """
    options = {"steps": 16, "scheme": "x,z", "step_z": 1e-3}
    for share, sign in ((0.7, 1), (1.0, 0), (1.3, -1)):
        point = {"alpha": 1.0, "sigma": 0.05, "m": 0.0, "s": 0.5, "a": 0.5 * share, "b": 0.0}
        _, gradient, level = run(point, 4096, **options)
        assert np.sign(-gradient[0] * level**2) == sign, (share, gradient)


@pytest.mark.parametrize("scheme", ["eps,z", "x,z", "eps", "x"])
def test_a_rounded_generator_leaks_nothing_into_the_gradient(scheme):
    """A chain on a bfloat16 copy of g, the M-step on g itself: without a gap there is nothing to learn."""
    z, eps = (jax.random.normal(k, (64, 3)) for k in jax.random.split(jax.random.key(0)))
    exact, sigma = denoisers.gaussian(0.0, 0.5), jnp.full(64, 0.05)
    generate = lambda a, z, cond=None: a * z  # noqa: E731
    rounded = lambda z, cond: (0.5 * z.astype(jnp.bfloat16)).astype(jnp.float32)  # noqa: E731
    chain = e_step(exact, exact, rounded, z, eps, sigma, jax.random.key(1), chain=Langevin(scheme=scheme))
    assert float(m_step(generate, jnp.float32(0.5), chain, sigma)[1]) == 0


def test_chains_are_float32_under_x64(x64):
    """The same numbers as without it, whatever the dtype of the arguments."""
    z, eps = (np.random.default_rng(i).normal(size=(6, 2)) for i in (0, 1))
    pair = (denoisers.gaussian(0.3, 0.5), denoisers.gaussian(0.0, 0.9))

    def ends(dtype, scheme):
        start = (jnp.asarray(v, dtype) for v in (z, eps, np.full(6, 0.7)))
        return e_step(*pair, lambda z, c: 0.8 * z, *start, jax.random.key(2), chain=Langevin(scheme=scheme, steps=3))

    for scheme in ("eps,z", "x,z"):
        wide = ends(jnp.float64, scheme)
        assert wide.z.dtype == wide.residual.dtype == jnp.float32
        with jax.enable_x64(False):
            narrow = ends(jnp.float32, scheme)
        np.testing.assert_allclose(wide.residual, narrow.residual, rtol=1e-5)
        np.testing.assert_allclose(wide.z, narrow.z, rtol=1e-5)


def test_one_step_without_z_is_diff_instruct():
    """Against the gradient of variational score distillation written by itself, for a network with biases."""
    model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(2)])
    keys = jax.random.split(jax.random.key(0), 4)
    z, eps = (jax.random.normal(k, (64, 2)) for k in keys[:2])
    params = model.init(keys[2], z)["params"]
    sigma = jnp.linspace(0.1, 3.0, 64)
    teacher, student = denoisers.gaussian(0.4, 0.5), denoisers.gaussian(-0.2, 1.1)
    generate = lambda p, z, cond=None: model.apply({"params": p}, z)  # noqa: E731
    chain = e_step(
        teacher,
        student,
        lambda z, c: generate(params, z),
        z,
        eps,
        sigma,
        keys[3],
        chain=Langevin(**{**DIFF_INSTRUCT, "step_eps": 0.16}),
    )
    _, gradient = m_step(generate, params, chain, sigma)

    def surrogate(p):
        x0 = generate(p, z)
        x = jax.lax.stop_gradient(x0 + sigma[:, None] * eps)
        direction = teacher(x, sigma) - student(x, sigma)
        return -(x0 * jax.lax.stop_gradient(direction)).mean()

    chex.assert_trees_all_close(
        gradient, jax.tree.map(lambda g: 0.16 * g, jax.grad(surrogate)(params)), rtol=1e-5, atol=1e-8
    )


def test_every_parametrisation_makes_the_same_chain():
    """One exact denoiser spoken as eps, v and x0 networks on a VP table."""
    alpha_bar = schedules.linear_alpha_bar()
    table = schedules.sigma_table(alpha_bar)

    def as_network(denoise, prediction):
        def net(x, timestep, cond):
            sigma = jnp.asarray(table, jnp.float32)[jnp.round(timestep).astype(int)][:, None]
            x = x * jnp.sqrt(1 + sigma**2)
            x0 = denoise(x, sigma[:, 0])
            noise = (x - x0) / sigma
            alpha, s = 1 / jnp.sqrt(1 + sigma**2), sigma / jnp.sqrt(1 + sigma**2)
            return {"x0": x0, "eps": noise, "v": alpha * noise - s * x0}[prediction]

        return net

    sigma = jnp.asarray(table[[100, 300, 500, 700]], jnp.float32)
    z, eps = (jax.random.normal(k, (4, 2)) for k in jax.random.split(jax.random.key(0)))
    ends = []
    for prediction in ("x0", "eps", "v"):
        pair = [
            denoisers.ddpm(as_network(d, prediction), alpha_bar, prediction)
            for d in (denoisers.gaussian(0.3, 0.4), denoisers.gaussian(-0.1, 0.9))
        ]
        options = {"steps": 4, "step_z": 0.01}
        ends.append(e_step(*pair, lambda z, c: 0.9 * z, z, eps, sigma, jax.random.key(1), chain=Langevin(**options)))
    for end in ends[1:]:
        np.testing.assert_allclose(end.residual, ends[0].residual, rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(end.z, ends[0].z, atol=2e-4)


def test_the_score_is_fitted_to_the_generator():
    """The loss of D_S is least at the exact denoiser of g(z) + sigma eps, p + q x in the linear case."""
    point, level, examples = REFERENCE, 0.75, 400_000
    keys = jax.random.split(jax.random.key(0), 2)
    z, eps = (jax.random.normal(k, (examples, 1)) for k in keys)
    made = {"x0": point["a"] * z + point["b"], "sigma": jnp.full(examples, level), "eps": eps}
    q = point["a"] ** 2 / (point["a"] ** 2 + level**2)
    best = {"p": jnp.float32(point["b"] * (1 - q)), "q": jnp.float32(q)}

    def loss(params):
        return denoising_loss(lambda x, sigma, cond=None: params["p"] + params["q"] * x, made, edm_weight())[0]

    slope, off = jax.grad(loss)(best), jax.grad(loss)({**best, "q": best["q"] + 0.1})
    assert max(abs(float(v)) for v in slope.values()) < 0.05 < 10 * 0.05 < abs(float(off["q"]))


# ------------------------------------------------------------------------------------------ which divergence


def settle(level, step_z, steps, cancel, iterations=400, examples=512):
    """The mean |a| of the last half of SGD on a z + b, two-mode teacher, exact scores."""
    teacher = denoisers.gaussian_mixture([[-2.0], [2.0]], 0.5)
    generate = lambda p, z, cond=None: p["a"] * z + p["b"]  # noqa: E731
    sigma = jnp.full(examples, level)
    options = {"steps": steps, "step_eps": 0.05, "step_z": step_z, "cancel": cancel}
    options["scheme"] = "eps,z" if step_z else "eps"
    scale = 2.0 / steps if cancel == "complete" and steps == 1 else 0.3

    def move(params, key):
        keys = jax.random.split(key, 3)
        z, eps = (jax.random.normal(k, (examples, 1)) for k in keys[:2])
        student = denoisers.gaussian(params["b"], params["a"])
        chain = e_step(
            teacher, student, lambda z, c: generate(params, z), z, eps, sigma, keys[2], chain=Langevin(**options)
        )
        _, gradient = m_step(generate, params, chain, sigma)
        params = jax.tree.map(lambda p, g: p - scale * g, params, gradient)
        return params, params["a"]

    start = {"a": jnp.float32(1.0), "b": jnp.float32(0.5)}
    run = jax.jit(lambda keys: jax.lax.scan(move, start, keys)[1])
    path = np.asarray(run(jax.random.split(jax.random.key(0), iterations)))
    return np.abs(path[iterations // 2 :]).mean()


@pytest.mark.parametrize(
    ("log_snr", "reverse", "forward_none", "gentle"),
    [(1.0, 1.804, 2.056, 2.182), pytest.param(0.0, 1.880, 2.044, 2.050, marks=pytest.mark.slow)],
)
def test_a_generator_that_cannot_fit_settles_where_its_divergence_says(log_snr, reverse, forward_none, gentle):
    """Diff-Instruct at the reverse optimum; EMD at the forward one, which matches moments: a^2 = 4.25."""
    level = float(np.exp(-log_snr / 2))
    assert abs(settle(level, 0.0, 1, "complete") - reverse) < 0.03
    assert abs(settle(level, 0.05, 32, "none") - forward_none) < 0.04
    assert abs(settle(level, 0.005, 32, "complete") - gentle) < 0.05


# ------------------------------------------------------------------------------------------ the method


class Affine(nn.Module):
    """p + q x + r label, the smallest network with a condition."""

    num_classes: int = 3
    channels: int = 2

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        p = self.param("p", nn.initializers.constant(0.3), (2,))
        q = self.param("q", nn.initializers.constant(0.4), ())
        r = self.param("r", nn.initializers.constant(0.1), ())
        label = 0.0 if cond is None else cond["label"].astype(jnp.float32)[:, None]
        return p + q * x + r * label + 0.01 * jnp.asarray(noise_label, jnp.float32).reshape(-1, 1)


TEACHER = {"p": jnp.array([0.5, -0.2]), "q": jnp.float32(0.5), "r": jnp.float32(0.2)}
BATCH = {"image": jnp.zeros((16, 2)), "label": jnp.zeros(16, jnp.int32)}


def make(**options):
    options = {"sigma_max": 2.0, "steps": 3, "step_z": 0.01, "average": lambda step, batch: jnp.float32(1.0), **options}
    return build_method(emd, options.pop("model", Affine()), optax.sgd(0.1), optax.sgd(0.05), **options)


def test_a_generator_starts_as_the_teacher_at_one_level():
    method = make()
    state = method.init(jax.random.key(0), BATCH, {"teacher": TEACHER})
    for params in (state.params["student"], state.averages["ema"], state.params["score"]):
        chex.assert_trees_all_equal(params, TEACHER)
    z, cond = jax.random.normal(jax.random.key(1), (5, 2)), {"label": jnp.arange(5) % 3}
    exact = denoisers.edm(lambda x, noise, cond: Affine().apply({"params": TEACHER}, x, noise, cond))
    np.testing.assert_allclose(method.sample(exported(state), z, cond), exact(2.0 * z, 2.0, cond), rtol=1e-6)
    scaled = make(input_scale="one").sample(exported(state), z, cond)
    np.testing.assert_allclose(scaled, exact(5**0.5 * z, 2.0, cond), rtol=1e-6)


def test_a_step_is_the_three_parts_written_by_hand():
    """Score first, then E-step and M-step with the new score; fresh draws for each; nothing else changes."""
    method = make(score_updates=2, average=lambda step, batch: jnp.float32(0.1), guidance=1.5, null={"label": 3})
    state = method.init(jax.random.key(0), BATCH, {"teacher": TEACHER})
    key = jax.random.key(7)
    new, metrics = jax.jit(method.step)(state, BATCH, key)

    def denoise(params):
        return denoisers.edm(lambda x, noise, cond: Affine().apply({"params": params}, x, noise, cond))

    def draw(key):
        keys = jax.random.split(key, 4)
        z, eps = (jax.random.normal(k, (16, 2)) for k in keys[:2])
        sigma = jnp.exp(-1.2 + 1.2 * jax.random.normal(keys[2], (16,)))
        return z, eps, sigma, {"label": jax.random.randint(keys[3], (16,), 0, 3)}

    matching, chains = jax.random.split(key)
    score = TEACHER
    for k in jax.random.split(matching, 2):
        z, eps, sigma, cond = draw(jax.random.split(k)[0])
        x0 = denoise(TEACHER)(2.0 * z, 2.0, cond)

        def loss(score, x0=x0, sigma=sigma, eps=eps, cond=cond):
            error = (denoise(score)(x0 + sigma[:, None] * eps, sigma, cond) - x0) ** 2
            return (((sigma**2 + 0.25) / (0.5 * sigma) ** 2)[:, None] * error).mean()

        score = jax.tree.map(lambda p, g: p - 0.05 * g, score, jax.grad(loss)(score))
    chex.assert_trees_all_close(new.params["score"], score, rtol=1e-5)

    drawn, noise = jax.random.split(chains)
    z0, eps, sigma, cond = draw(drawn)
    keys, z, level = jax.random.split(noise, 16), z0, sigma[:, None]
    u, clean = level * eps, jnp.zeros_like(z0)
    normal = jax.vmap(lambda k, i: jax.random.normal(jax.random.fold_in(k, i), (2,)), (0, None))
    for i in range(3):
        g, pull = jax.vjp(lambda z: denoise(TEACHER)(2.0 * z, 2.0, cond), z)
        full, base = (denoise(TEACHER)(g + u, sigma, c) for c in (cond, {"label": jnp.full(16, 3)}))
        gap = base + 1.5 * (full - base) - denoise(score)(g + u, sigma, cond)
        clean = 0.84 * clean + 0.16 * gap
        u = 0.84 * u + 0.16 * gap + 0.32**0.5 * level * normal(keys, 2 * i)
        z = 0.99 * z + 0.01 * pull(gap / level**2)[0] + 0.02**0.5 * normal(keys, 2 * i + 1)

    def surrogate(params):
        made = denoise(params)(2.0 * z, 2.0, cond)
        return 0.5 * ((jax.lax.stop_gradient(made + clean) - made) ** 2).mean()

    value, gradient = jax.value_and_grad(surrogate)(TEACHER)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, TEACHER, gradient)
    chex.assert_trees_all_close(new.params["student"], params, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-4)
    chex.assert_trees_all_close(
        new.averages["ema"], jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, TEACHER, params), rtol=1e-5
    )
    chex.assert_trees_all_equal(new.frozen, {"teacher": TEACHER})
    np.testing.assert_allclose(metrics["eps_square"], jnp.square(u / level).mean(), rtol=1e-4)


def test_the_score_is_trained_at_the_levels_of_the_chains():
    """By default the levels drawn for D_S and for chains have one distribution; a narrower one is warned of."""
    chains = {"sigma_sampler": "polynomial", "sigma_options": {"sigma_min": 0.02, "sigma_max": 80.0}}
    drawn = []

    class Watched(Affine):
        def __call__(self, x, noise_label, cond=None, *, deterministic=True):
            jax.debug.callback(lambda label: drawn.append(np.exp(4 * np.asarray(label))), noise_label, ordered=True)
            return super().__call__(x, noise_label, cond, deterministic=deterministic)

    method = make(model=Watched(), steps=1, scheme="eps", **chains)
    batch = {"image": jnp.zeros((2000, 2)), "label": jnp.zeros(2000, jnp.int32)}
    state = method.init(jax.random.key(0), batch, {"teacher": TEACHER})
    drawn.clear()
    jax.jit(method.step)(state, batch, jax.random.key(1))[0].step.block_until_ready()
    jax.effects_barrier()
    levels = [sigma.ravel() for sigma in drawn if sigma.size == 2000 and np.ptp(sigma) > 0]
    above = [float((sigma > 10).mean()) for sigma in levels]  # of the score's update and of the chains, 37 % each
    assert len(above) >= 3 and all(0.33 < share < 0.41 for share in above), above
    with pytest.warns(UserWarning, match=r"4[0-9] % of the chains' noise levels.*score_levels='chain'"):
        jax.eval_shape(make(score_levels="noise", **chains).init, jax.random.key(0), batch, {"teacher": TEACHER})


def test_a_gradient_taken_outside_sees_a_constant_chain():
    """With the E-step inside a loss, derivatives by the scores are zero and those by the generator unchanged."""
    keys = jax.random.split(jax.random.key(0), 3)
    z, eps = (jax.random.normal(k, (8, 2)) for k in keys[:2])
    sigma = jnp.full(8, 0.7)

    def loss(params, teacher, score):
        generate = lambda p, z: p["a"] * jnp.tanh(z) + p["b"]  # noqa: E731
        pair = (denoisers.gaussian(teacher, 0.5), denoisers.gaussian(score, 0.9))
        chain = e_step(
            *pair, lambda z, c: generate(params, z), z, eps, sigma, keys[2], chain=Langevin(steps=3, step_z=0.01)
        )
        made = generate(params, chain.z)
        return 0.5 * ((jax.lax.stop_gradient(made + chain.residual) - made) ** 2).mean(), chain

    params = {"a": jnp.float32(0.8), "b": jnp.float32(0.1)}
    slopes, chain = jax.grad(loss, (0, 1, 2), has_aux=True)(params, 0.3, -0.2)
    assert float(slopes[1]) == float(slopes[2]) == 0
    _, wanted = m_step(lambda p, z, c: p["a"] * jnp.tanh(z) + p["b"], params, chain, sigma)
    chex.assert_trees_all_close(slopes[0], wanted, rtol=1e-4)


def test_a_chain_that_explodes_is_left_out_of_the_update():
    """One example of non-finite scores: the others' gradient, and a finite one."""
    keys = jax.random.split(jax.random.key(0), 3)
    z, eps = (jax.random.normal(k, (8, 2)) for k in keys[:2])
    sigma = jnp.full(8, 0.7)
    bad = jnp.arange(8) == 5
    teacher = lambda x, sigma, cond: jnp.where(bad[:, None], jnp.nan, 0.5 * x)  # noqa: E731
    student = lambda x, sigma, cond: 0.6 * x  # noqa: E731
    generate = lambda p, z, cond=None: p * z  # noqa: E731
    each = jax.random.split(keys[2], 8)
    chain = e_step(teacher, student, lambda z, c: generate(0.9, z), z, eps, sigma, each, chain=Langevin(steps=2))
    np.testing.assert_array_equal(chain.finite, ~bad)
    assert all(np.isfinite(value) for value in chain.metrics.values())
    assert float(chain.metrics["nonfinite"]) == pytest.approx(1 / 8)
    loss, gradient = m_step(generate, jnp.float32(0.9), chain, sigma)
    kept = jnp.flatnonzero(~bad)
    rest = e_step(
        lambda x, sigma, cond: 0.5 * x,
        student,
        lambda z, c: generate(0.9, z),
        z[kept],
        eps[kept],
        sigma[kept],
        each[kept],
        chain=Langevin(steps=2),
    )
    wanted = m_step(generate, jnp.float32(0.9), rest, sigma[kept])
    np.testing.assert_allclose(8 / 7 * gradient, wanted[1], rtol=1e-4)
    np.testing.assert_allclose(8 / 7 * loss, wanted[0], rtol=1e-4)


def test_the_drift_of_z_can_be_bounded():
    teacher, student = denoisers.gaussian(0.0, 0.1), denoisers.gaussian(0.0, 3.0)
    z, eps = (3 * jax.random.normal(k, (4, 2)) for k in jax.random.split(jax.random.key(0)))
    inputs = (teacher, student, lambda z, c: 3 * z, z, eps, jnp.full(4, 0.05), jax.random.key(1))
    free = e_step(*inputs, chain=Langevin(steps=1, step_z=1e-3))
    held = e_step(*inputs, chain=Langevin(steps=1, step_z=1e-3, clip_z=2.0))
    assert float(free.metrics["z_drift"]) > 0.1 > 0.0021 > float(held.metrics["z_drift"])


def test_corrected_samples_are_the_teachers():
    """300 joint steps from a generator that is wrong: what the teacher makes of x has the teacher's moments."""
    z = jax.random.normal(jax.random.key(0), (4000, 1))
    generate = lambda z, cond: 1.2 * z - 0.3  # noqa: E731
    pair = (denoisers.gaussian(1.0, 0.5), denoisers.gaussian(-0.3, 1.2))
    options = {"sigma": 0.75, "steps": 300, "chain": Langevin(step_eps=0.05, step_z=0.05, cancel="none")}
    before, after = jax.jit(lambda: correct(*pair, generate, z, jax.random.key(1), **options))()
    np.testing.assert_array_equal(before, generate(z, None))
    spread = 0.25 / (0.25 + 0.75**2) ** 0.5  # of E[x0 | x]
    assert abs(after.mean() - 1.0) < 0.03 and abs(after.std() / spread - 1) < 0.08


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "z"}, r"unknown EMD scheme 'z'.*choose one of eps,z, x,z, eps, x"),
        ({"cancel": "all"}, "unknown noise cancellation 'all'"),
        ({"steps": 0}, "at least one Langevin step, got steps=0"),
        ({"step_eps": 1.5}, r"step_eps must be in \(0, 1\]"),
        ({"step_x": 0.1}, "step_x=0.1 .*scheme='eps,z'"),
        ({"score_levels": "all"}, "unknown score_levels 'all'"),
        ({"score_updates": 0}, "score_updates .*got 0"),
        ({"guidance": 2.0, "model": Affine(num_classes=0)}, "guidance=2.0 needs a network"),
        ({"input_scale": "two"}, "unknown input_scale of a generator 'two'"),
        ({"sigma_max": 0.0}, "sigma must be positive"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_memory_does_not_grow_with_the_length_of_the_chain():
    """XLA's temporaries of a whole step, K = 2 and K = 16."""
    model = models.DiT(channels=1, patch=2, depth=1, width=32, heads=4, learn_variance=False)
    batch = {"image": jnp.zeros((8, 8, 8, 1))}
    teacher = jax.eval_shape(lambda: model.init(jax.random.key(0), batch["image"], 1.0)["params"])
    sizes = []
    for steps in (2, 16):
        method = build_method(emd, model, optax.sgd(0.1), steps=steps)
        shapes = jax.eval_shape(method.init, jax.random.key(0), batch, {"teacher": teacher})
        program = jax.jit(method.step).lower(shapes, batch, jax.random.key(0)).compile()
        sizes.append(program.memory_analysis().temp_size_in_bytes)
    assert sizes[1] <= 1.05 * sizes[0], sizes


def test_a_step_lowers_for_accelerators():
    model = models.UNet(resolution=8, channels=1, width=8, channel_mult=(1,), blocks=1, attention=())
    batch = {"image": jnp.zeros((8, 8, 8, 1))}
    method = build_method(emd, model, optax.sgd(0.1), steps=2, score_updates=2)
    teacher = jax.eval_shape(lambda: model.init(jax.random.key(0), batch["image"], 1.0)["params"])
    shapes = jax.eval_shape(method.init, jax.random.key(0), batch, {"teacher": teacher})
    key = jax.eval_shape(lambda: jax.random.key(0))
    exported = jax.export.export(jax.jit(method.step), platforms=["tpu", "cuda"])(shapes, batch, key)
    assert exported.platforms == ("tpu", "cuda") and "stablehlo.while" in exported.mlir_module()
