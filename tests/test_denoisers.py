"""Denoisers against closed forms, finite differences and each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import denoisers as dn
from jaxdiff import schedules


def log_density(x, sigma, means, stds, weights):
    """log sum_k w_k N(x; m_k, s_k^2 + sigma^2), written without the library."""
    var = stds**2 + sigma**2
    parts = jnp.log(weights) - 0.5 * (((x - means) ** 2 / var[:, None]).sum(1) + means.shape[1] * jnp.log(var))
    return jax.scipy.special.logsumexp(parts)


@pytest.fixture
def mixture():
    rng = np.random.default_rng(0)
    return rng.normal(size=(5, 3)), rng.uniform(0.2, 0.7, 5), rng.dirichlet(np.ones(5))


@pytest.mark.parametrize("sigma", [0.01, 0.3, 2.0, 40.0])
def test_mixture_score_is_the_gradient_of_the_log_density(x64, mixture, sigma):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 3)) * (1 + sigma))
    expected = jax.vmap(jax.grad(lambda x: log_density(x, sigma, *map(jnp.asarray, mixture))))(x)
    np.testing.assert_allclose(dn.score(dn.gaussian_mixture(*mixture))(x, sigma), expected, rtol=1e-9, atol=1e-10)


def test_mixture_with_one_sigma_per_example_equals_one_at_a_time(x64, mixture):
    denoise = dn.gaussian_mixture(*mixture)
    x, sigma = jnp.ones((4, 3)), jnp.array([0.1, 0.5, 2.0, 9.0])
    one_by_one = jnp.concatenate([denoise(x[i : i + 1], float(sigma[i])) for i in range(4)])
    np.testing.assert_allclose(denoise(x, sigma), one_by_one, rtol=1e-12)


def test_mixture_of_one_is_gaussian_and_a_label_picks_a_component(x64, mixture):
    means, stds, weights = mixture
    x = jnp.asarray(np.random.default_rng(2).normal(size=(6, 3)))
    one = dn.gaussian(means[0], stds[0])
    np.testing.assert_allclose(dn.gaussian_mixture(means[:1], stds[:1])(x, 0.7), one(x, 0.7), rtol=1e-12)
    denoise = dn.gaussian_mixture(means, stds, weights)
    np.testing.assert_allclose(denoise(x, 0.7, {"label": jnp.zeros(6, int)}), one(x, 0.7), rtol=1e-12)
    np.testing.assert_allclose(denoise(x, 0.7, {"label": jnp.full(6, 5)}), denoise(x, 0.7), rtol=1e-12)


def test_mixture_on_images_and_diagonal_covariances_flatten(x64):
    rng = np.random.default_rng(3)
    means, stds = rng.normal(size=(3, 2, 2, 1)), rng.uniform(0.2, 1, (3, 2, 2, 1))
    x = rng.normal(size=(5, 2, 2, 1))
    flat = dn.gaussian_mixture(means.reshape(3, 4), stds.reshape(3, 4))(jnp.asarray(x.reshape(5, 4)), 0.4)
    np.testing.assert_allclose(dn.gaussian_mixture(means, stds)(jnp.asarray(x), 0.4).reshape(5, 4), flat, rtol=1e-12)


# A Gaussian's exact prediction in each convention, turned back into a denoiser by the wrapper, must be exact.
MEAN, STD = 0.3, 0.5


def exact(x, sigma):
    return (STD**2 * x + sigma**2 * MEAN) / (STD**2 + sigma**2)


@pytest.mark.parametrize("sigma", [0.02, 0.7, 30.0])
def test_edm_wrapper_undoes_its_own_preconditioning(x64, sigma):
    def network(x_in, noise_label, cond):
        s = jnp.exp(4 * noise_label.astype(jnp.float64))[:, None]
        total = jnp.sqrt(s**2 + 0.25)
        x = x_in * total
        return (exact(x, s) - 0.25 / total**2 * x) / (s * 0.5 / total)

    x = jnp.linspace(-3, 3, 8).reshape(4, 2) * (1 + sigma)
    np.testing.assert_allclose(dn.edm(network)(x, sigma), exact(x, sigma), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
@pytest.mark.parametrize("step", [0, 250, 999])
def test_ddpm_wrapper_gives_timesteps_and_undoes_the_prediction(x64, prediction, step):
    abar = schedules.linear_alpha_bar()
    sigma = schedules.sigma_table(abar)[step]

    def network(x_t, timestep, cond):
        np.testing.assert_allclose(timestep, step, atol=1e-3)
        a, s = np.sqrt(abar[step]), np.sqrt(1 - abar[step])
        x0 = exact(x_t / a, sigma)
        eps = (x_t - a * x0) / s
        return {"eps": eps, "v": a * eps - s * x0, "x0": x0}[prediction]

    x = jnp.linspace(-3, 3, 8).reshape(4, 2) * (1 + sigma)
    np.testing.assert_allclose(dn.ddpm(network, abar, prediction)(x, sigma), exact(x, sigma), rtol=1e-9, atol=1e-9)


def test_ddpm_timesteps_are_linear_in_log_sigma_between_knots_and_clamped_outside():
    seen = []

    def network(x, timestep, cond):
        seen.append(float(timestep[0]))
        return jnp.concatenate([x, jnp.ones_like(x)], -1)  # twice the channels: variances, to be dropped

    table = schedules.sigma_table(schedules.linear_alpha_bar())
    denoise = dn.ddpm(network, schedules.linear_alpha_bar())
    x = jnp.ones((2, 4, 4, 3))
    for sigma in (np.sqrt(table[10] * table[11]), table[0] / 2, table[-1] * 2):
        assert denoise(x, float(sigma)).shape == x.shape
    np.testing.assert_allclose(seen, [10.5, 0, 999], atol=1e-2)


@pytest.mark.parametrize("sigma", [1.0, 1e3, 1e5])
def test_flow_keeps_its_digits_at_large_sigma(sigma):
    """The network's input is x / (1 + sigma), in float32 as in float64."""
    seen = []
    x = jnp.linspace(-3, 3, 8).reshape(4, 2) * (1 + sigma)
    dn.flow(lambda x_t, t, cond: seen.append(x_t) or x_t)(x, sigma)
    np.testing.assert_allclose(seen[0], np.asarray(x, np.float64) / (1 + sigma), rtol=1e-6)


@pytest.mark.parametrize("sigma", [0.1, 1.0, 20.0])
def test_flow_wrapper_and_velocity_are_inverse(x64, sigma):
    def network(x_t, t, cond):
        t = t.astype(jnp.float64)[:, None] / 1000
        x = x_t / (1 - t)
        x0 = exact(x, t / (1 - t))
        return (x - x0) / (t / (1 - t)) - x0

    denoise = dn.flow(network)
    x = jnp.linspace(-3, 3, 8).reshape(4, 2) * (1 + sigma)
    np.testing.assert_allclose(denoise(x, sigma), exact(x, sigma), rtol=1e-5, atol=1e-6)
    t = sigma / (1 + sigma)
    back = dn.velocity(denoise)(x, sigma)
    np.testing.assert_allclose(
        back, network((1 - t) * x, jnp.full(4, 1000 * t, jnp.float32), None), rtol=1e-4, atol=1e-5
    )


def test_transforms_agree_with_their_definitions(x64):
    denoise, x, sigma = dn.gaussian(MEAN, STD), jnp.linspace(-2, 2, 6).reshape(3, 2), jnp.array([0.2, 1.0, 5.0])
    s = sigma[:, None]
    x0 = exact(x, s)
    np.testing.assert_allclose(dn.score(denoise)(x, sigma), -(x - MEAN) / (STD**2 + s**2), rtol=1e-12)
    np.testing.assert_allclose(dn.noise_prediction(denoise)(x, sigma), (x - x0) / s, rtol=1e-12)
    np.testing.assert_allclose(dn.velocity(denoise)(x, sigma), (x - x0) / s - x0, rtol=1e-12)
    np.testing.assert_allclose(dn.one_step(denoise, 2.5)(x), exact(2.5 * x, 2.5), rtol=1e-12)


def test_thresholding_clips_to_the_percentile_and_rescales(x64):
    x0 = jnp.asarray(np.random.default_rng(0).normal(size=(3, 40)) * np.array([[0.1], [1.0], [5.0]]))
    out = dn.thresholded(lambda x, sigma, cond=None: x0, percentile=90)(x0, 1.0)
    for i in range(3):
        s = max(1.0, np.percentile(np.abs(x0[i]), 90))
        np.testing.assert_allclose(out[i], np.clip(x0[i], -s, s) / s, rtol=1e-12)
    np.testing.assert_array_equal(out[0], x0[0])


# ------------------------------------------------------------------------------------------------ guidance


def labelled(x, sigma, cond=None):
    """A denoiser that scales by the label; label 9 (or none) is the null condition."""
    label = jnp.full(x.shape[0], 9) if cond is None else cond["label"]
    extra = 0.0 if cond is None or "pooled" not in cond else cond["pooled"]
    return x * (1 + label.astype(x.dtype))[:, None] + extra


def test_guidance_is_one_batched_call_with_null_and_equals_two_without(count_traces):
    x, cond = jnp.ones((4, 2)), {"label": jnp.arange(4)}
    expected = 10 * x + 2.5 * (labelled(x, 1.0, cond) - 10 * x)
    once, twice = count_traces(labelled), count_traces(labelled)
    np.testing.assert_allclose(dn.guided(once, 2.5, null={"label": 9})(x, 1.0, cond), expected)
    np.testing.assert_allclose(dn.guided(twice, 2.5)(x, jnp.ones(4), cond), expected)
    assert (once.traces, twice.traces) == (1, 2)


def test_guidance_scales_zero_one_per_example_and_without_condition():
    x, cond = jnp.ones((4, 2)), {"label": jnp.arange(4)}
    null, full = 10 * x, labelled(x, 1.0, cond)
    np.testing.assert_allclose(dn.guided(labelled, 0.0, null={"label": 9})(x, 1.0, cond), null)
    np.testing.assert_allclose(dn.guided(labelled, 1.0, null={"label": 9})(x, 1.0, cond), full)
    scale = jnp.array([0.0, 1.0, 0.0, 1.0])
    np.testing.assert_allclose(
        dn.guided(labelled, scale, {"label": 9})(x, 1.0, cond), jnp.where(scale[:, None] == 1, full, null)
    )
    np.testing.assert_allclose(dn.guided(labelled, 7.0, null={"label": 9})(x, 1.0), null)


def test_null_keeps_the_keys_it_does_not_name():
    x, cond = jnp.ones((3, 2)), {"label": jnp.arange(3), "pooled": jnp.full((3, 2), 5.0)}
    np.testing.assert_allclose(dn.guided(labelled, 0.0, null={"label": 9})(x, 1.0, cond), 10 * x + 5)


@pytest.mark.parametrize("per_example", [False, True])
def test_guidance_interval_leaves_other_noise_levels_alone(per_example):
    guided = jax.jit(dn.guided(labelled, 3.0, null={"label": 9}, interval=(0.5, 2.0)))
    x, cond = jnp.ones((4, 2)), {"label": jnp.arange(4)}
    full, blend = labelled(x, 1.0, cond), 10 * x + 3 * (labelled(x, 1.0, cond) - 10 * x)
    for sigma, expected in [(0.5, full), (0.51, blend), (2.0, blend), (2.1, full)]:
        np.testing.assert_allclose(guided(x, jnp.full(4, sigma) if per_example else sigma, cond), expected)


def told(x, sigma, cond):
    """A denoiser in which label and crop act together; label 9 and crop -1 are null."""
    label, top = cond["label"].astype(x.dtype), cond["crop"][:, 0]
    return x * (1 + label)[:, None] + (top * (2 + label))[:, None]


def test_control_is_guided_apart_from_the_label(count_traces):
    """D_00 + scale (beta (D_cs - D_0s) + D_0s - D_00), each evaluated by itself."""
    x, null, control_null = jnp.ones((4, 2)), {"label": 9}, {"crop": -1.0}
    cond = {"label": jnp.arange(4), "crop": jnp.arange(8.0).reshape(4, 2)}
    no_control, no_label = {"crop": jnp.full((4, 2), -1.0)}, jnp.full(4, 9)
    full, free = told(x, 1.0, cond), told(x, 1.0, {**cond, **no_control})
    base = told(x, 1.0, {"label": no_label, **no_control})
    guided = partial(dn.guided, null=null, control_null=control_null)
    for scale, beta in [(2.5, 0.3), (1.0, 0.0), (0.0, 0.4), (1.5, jnp.array([0.0, 1.0, 2.0, 0.5]))]:
        counted = count_traces(told)
        sigma = jnp.full(4, 0.7) if scale == 2.5 else 0.7
        out = guided(counted, scale, control_scale=beta)(x, sigma, cond)
        wanted = base + scale * (jnp.reshape(beta, (-1, 1)) * (full - free) + free - base)
        np.testing.assert_allclose(out, wanted, rtol=1e-5)
        assert counted.traces == 1  # of three times the batch
    joint = guided(told, 2.5)(x, 1.0, cond)  # control_scale 1: two evaluations, and the same formula
    np.testing.assert_allclose(joint, base + 2.5 * (full - base), rtol=1e-5)
    near = guided(told, 2.5, control_scale=jnp.float32(1.0))(x, 1.0, cond)
    np.testing.assert_allclose(near, joint, rtol=1e-5)
    np.testing.assert_allclose(guided(told, 1.0, control_scale=jnp.float32(1.0))(x, 1.0, cond), full, rtol=1e-5)


def test_autoguidance_moves_away_from_the_weak_model():
    weak = lambda x, sigma, cond=None: 0.5 * labelled(x, sigma, cond)  # noqa: E731
    x, cond = jnp.ones((4, 2)), {"label": jnp.arange(4)}
    full = labelled(x, 1.0, cond)
    np.testing.assert_allclose(dn.guided(labelled, 2.0, weak=weak)(x, 1.0, cond), 1.5 * full)


def test_denoisers_jit_vmap_and_grad(mixture):
    denoise = dn.gaussian_mixture(*mixture)
    x = jnp.ones((4, 3))
    eager = denoise(x, 0.5)
    np.testing.assert_allclose(jax.jit(denoise)(x, 0.5), eager, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda x: denoise(x, 0.5))(x), eager, rtol=1e-6)
    assert jnp.isfinite(jax.grad(lambda s: denoise(x, s).sum())(0.5))


def test_half_precision_networks_keep_the_denoiser_in_float32():
    denoise = dn.edm(lambda x, label, cond: x.astype(jnp.bfloat16))
    assert denoise(jnp.ones((2, 3)), 0.5).dtype == jnp.float32
    assert denoise(jnp.ones((2, 3), jnp.bfloat16), 0.5).dtype == jnp.float32


def test_integers_are_taken_as_float32():
    x, exact_one = jnp.ones((2, 3), int), dn.gaussian(0.0, 1.0)
    for function in (exact_one, dn.score(exact_one), dn.noise_prediction(exact_one), dn.velocity(exact_one)):
        assert function(x, 1.0).dtype == jnp.float32


# ------------------------------------------------------------------------------------------------ bad input

IDENTITY = dn.gaussian(0.0, 1.0)
X = jnp.ones((2, 3))
NETWORK = lambda x, noise_label, cond: x  # noqa: E731


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: IDENTITY(X, 0.0), r"sigma.*got 0.0.*0.002"),
        (lambda: IDENTITY(X, jnp.array([1.0, -2.0])), r"sigma.*got -2.0"),
        (lambda: IDENTITY(X, float("nan")), r"sigma.*got nan"),
        (lambda: IDENTITY(X, jnp.ones(3)), r"\(2,\), got shape \(3,\)"),
        (lambda: dn.gaussian_mixture(np.ones((2, 3)), 1.0)(X, 1.0, {"labels": jnp.zeros(2, int)}), r"'labels'.*did you mean 'label'"),
        (lambda: dn.ddpm(NETWORK, schedules.linear_alpha_bar(), "epsilon"), r"'epsilon'.*did you mean 'eps'.*eps, v, x0"),
        (lambda: dn.ddpm(NETWORK, [0.1, 0.5]), r"alpha_bar.* from 0.1 to 0.5.*linear_alpha_bar"),
        (lambda: dn.guided(IDENTITY, 1.0, null={"label": 1}, weak=IDENTITY), r"null .* or weak"),
        (lambda: dn.guided(IDENTITY, 2.0, {"label": 9}, control_scale=0.5), r"control_scale=0.5.*control_null="),
        (lambda: dn.guided(IDENTITY, 1.0, interval=(2, 1)), r"interval.*got \(2, 1\)"),
        (lambda: dn.guided(IDENTITY, 1.0, {"text": 0.0})(X, 1.0, {"label": jnp.ones(2)}), r"\['text'\].*\['label'\]"),
        (lambda: dn.gaussian_mixture(np.ones((2, 3)), 1.0)(jnp.ones((2, 4)), 1.0), r"\(3,\), got x of shape \(2, 4\)"),
        (lambda: dn.gaussian_mixture(np.ones((2, 3)), 1.0, [1.0]), r"2 components.*2 positive weights"),
        (lambda: dn.gaussian_mixture(np.ones((2, 3)), 1.0)(X, 1.0, {"label": jnp.array([0, 5])}), r"labels.*0\.\.1"),
        (lambda: dn.one_step(IDENTITY, -1.0), r"sigma.*got -1.0"),
        (lambda: dn.thresholded(IDENTITY, 0), r"percentile.*got 0"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
