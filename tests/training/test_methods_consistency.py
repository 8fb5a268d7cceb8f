"""Consistency models against their formulas, an exact trajectory, and a step written by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from method_parts import build_method

from jaxdiff import denoisers, solvers
from jaxdiff.methods import averaging, consistency, exported
from jaxdiff.methods.consistency import Options, consistent, follow, intervals, neighbours
from jaxdiff.methods.method import pseudo_huber

RATE, STD, LOW, HIGH = 0.01, 0.7, 0.002, 80.0
GAUSSIAN = denoisers.gaussian_mixture(np.zeros((1, 2)), np.array([STD]), np.ones(1))
RANGE = Options(sigma_min=LOW, sigma_max=HIGH, rho=7.0, mean=-1.1, std=2.0)


class Affine(nn.Module):
    """F(x, c) = w x + v c: its denoiser is known."""

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        w = self.param("w", nn.initializers.constant(0.3), ())
        v = self.param("v", nn.initializers.constant(-0.2), ())
        return w * x + v * noise_label.reshape(-1, *(1 for _ in x.shape[1:]))


class Net(nn.Module):
    """A small multilayer perceptron."""

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        h = nn.silu(nn.Dense(32)(jnp.concatenate([x, noise_label[:, None]], 1)))
        return nn.Dense(x.shape[1])(nn.silu(nn.Dense(32)(h)))


def sampler(steps, low=0.8):
    sigmas = solvers.grid(steps, low, HIGH)
    how = solvers.make("renoise", floor=LOW)
    return lambda d, unit, cond, key: solvers.solve(d, HIGH * unit, sigmas, how, cond, key=key, final_denoise=True)


def make(model, optimizer=None, **options):
    return build_method(consistency, model, optimizer or optax.sgd(RATE), solve=sampler(1), **options)


def exact(x, sigma):
    """Where the trajectory through x ends, for Gaussian data of standard deviation STD."""
    return x * np.sqrt((STD**2 + LOW**2) / (STD**2 + sigma**2))


def test_the_function_is_the_identity_at_the_end_and_has_the_published_weights():
    network = lambda x, c, cond: jnp.full_like(x, 3.0)  # noqa: E731
    f = consistent(denoisers.edm(network, 0.5), LOW)
    x = jax.random.uniform(jax.random.key(0), (40, 3), minval=1.0, maxval=2.0)
    np.testing.assert_allclose(f(x, LOW), x, rtol=1e-6)
    sigma = np.geomspace(LOW, HIGH, 40)
    found = np.asarray(f(x, jnp.float32(sigma)), np.float64)
    into = 0.5 * (sigma - LOW) / np.sqrt(sigma**2 + 0.25)  # of the network, as published
    skip = (found - into[:, None] * 3.0) / np.asarray(x)
    published = 0.25 / ((sigma - LOW) ** 2 + 0.25)
    assert np.abs(skip - published[:, None]).max() < 2.1 * LOW  # weights of x that differ by less than the end's noise
    np.testing.assert_allclose(skip[:, 0], (0.25 + sigma * LOW) / (sigma**2 + 0.25), atol=2e-5)


@pytest.mark.parametrize(
    ("total", "first", "last"), [(400_000, 10, 1280), (800, 2, 150), (5, 10, 10), (3, 10, 1280), (800_000, 10, 50)]
)
def test_the_grid_doubles_until_the_last_stage(total, first, last):
    """As published, and `last` is reached within a training run, whether or not last / first is a power of two."""
    stage = max(math.floor(total / (math.log2(last // first) + 1)), 1)
    steps = sorted({0, stage - 1, stage, 2 * stage, total // 2, total - 1, total, 10 * total})
    wanted = [min(first * 2 ** (k // stage), last) for k in steps]
    assert [int(intervals(jnp.int32(k), total, first, last)) for k in steps] == wanted
    assert wanted[0] == first and wanted[-1] == last
    if total > 10:
        assert int(intervals(jnp.int32(total - 1), total, first, last)) == last


def test_intervals_are_drawn_as_published_from_the_polynomial_grid():
    count, n = 12, 200_000
    low, high = jax.jit(lambda key: neighbours(key, n, jnp.int32(count), RANGE))(jax.random.key(1))
    grid = solvers.grid(count + 1, LOW, HIGH)[::-1]
    np.testing.assert_allclose(np.unique(low), grid[:-1], rtol=1e-5)
    np.testing.assert_allclose(np.unique(high), grid[1:], rtol=1e-5)
    index = np.searchsorted(grid, np.asarray(low) * 1.0001) - 1
    np.testing.assert_allclose(np.asarray(high), grid[index + 1], rtol=1e-5)
    mass = np.diff([math.erf((math.log(s) + 1.1) / (math.sqrt(2) * 2.0)) for s in grid])
    mass /= mass.sum()
    found = np.bincount(index, minlength=count) / n
    assert (np.abs(found - mass) < 5 * np.sqrt(mass / n)).all()


@pytest.mark.parametrize(("solver", "ratio"), [("euler", 4), ("heun", 8)])
def test_the_teacher_follows_the_trajectory_to_its_order(solver, ratio):
    x = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    high = jnp.array([1.0, 2.0])

    def error(width):
        low = high - width
        wanted = x * jnp.sqrt((STD**2 + low**2) / (STD**2 + high**2))[:, None]
        return float(jnp.abs(follow(GAUSSIAN, x, high, low, None, solver) - wanted).max())

    with jax.enable_x64(True):
        x, high = jnp.float64(x), jnp.float64(high)
        assert error(0.1) / error(0.05) == pytest.approx(ratio, rel=0.15)


def by_hand(params, batch, key, *, step, total, teacher=None, target=None, parts=RANGE):
    """The loss of one step in plain operations; its target is a constant."""
    keys = jax.random.split(key, 3)
    x0 = batch["image"]
    eps = jax.random.normal(keys[1], x0.shape)
    low, high = neighbours(keys[0], len(x0), intervals(jnp.int32(step), total, 10, 40), parts)

    def f(params, x, sigma):
        s = sigma[:, None]
        d = 0.25 / (s**2 + 0.25) * x + 0.5 * s / jnp.sqrt(s**2 + 0.25) * (
            params["w"] * x / jnp.sqrt(s**2 + 0.25) + params["v"] * jnp.log(s) / 4
        )
        return x - (s - LOW) / s * (x - d)

    x = x0 + high[:, None] * eps
    below = x0 + low[:, None] * eps if teacher is None else follow(teacher, x, high, low, None)
    wanted = jax.lax.stop_gradient(f(params if target is None else target, below, low))
    apart = f(params, x, high) - wanted
    c = 0.00054 * math.sqrt(x0.shape[1])
    return jnp.mean((jnp.sqrt((apart**2).sum(1) + c**2) - c) / (high - low))


@pytest.mark.parametrize("kind", ["training", "distillation", "averaged target"])
def test_two_steps_are_those_written_by_hand(kind):
    batch = {"image": STD * jax.random.normal(jax.random.key(3), (16, 2))}
    distil = kind == "distillation"
    options = {"distil": True, "analytic": GAUSSIAN} if distil else {}
    options |= {"target_decay": 0.9} if kind == "averaged target" else {}
    method = make(Affine(), total=4, last=40, average=averaging.constant(0.5), **options)
    state = method.init(jax.random.key(0), batch, *([{"teacher": {}}] if distil else []))
    step = jax.jit(method.step)
    params = {name: float(value) for name, value in state.params["student"].items()}
    target, ema = dict(params), dict(params)
    for k in range(2):
        key = jax.random.key(10 + k)
        state, metrics = step(state, batch, key)
        how = {"teacher": GAUSSIAN if distil else None, "target": target if kind == "averaged target" else None}
        loss, slope = jax.value_and_grad(by_hand)(jax.tree.map(jnp.float32, params), batch, key, step=k, total=4, **how)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
        params = {name: params[name] - RATE * float(slope[name]) for name in params}
        ema = {name: 0.5 * ema[name] + 0.5 * params[name] for name in params}
        target = {name: 0.9 * target[name] + 0.1 * params[name] for name in params}
    for name in params:
        np.testing.assert_allclose(state.params["student"][name], params[name], rtol=1e-4)
        np.testing.assert_allclose(state.averages["ema"][name], ema[name], rtol=1e-4)
        if kind == "averaged target":
            np.testing.assert_allclose(state.averages["target"][name], target[name], rtol=1e-4)
    assert state.frozen == ({"teacher": {}} if distil else {}) and float(metrics["intervals"]) == 20


@pytest.mark.parametrize("distil", [False, True])
def test_one_step_samples_learn_the_end_of_the_trajectory(distil):
    """Gaussian data: f must become x sqrt((s^2 + low^2) / (s^2 + sigma^2))."""
    steps, n = 1000, 256
    options = {"distil": True, "analytic": GAUSSIAN} if distil else {}
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    method = make(Net(), optimizer, total=steps, last=40, **options)
    outside = [{"teacher": {}}] if distil else []

    @jax.jit
    def run(key):
        batches = STD * jax.random.normal(key, (steps, n, 2))
        state = method.init(key, {"image": batches[0]}, *outside)
        keys = jax.random.split(jax.random.fold_in(key, 1), steps)
        return state, jax.lax.scan(lambda s, e: method.step(s, {"image": e[0]}, e[1]), state, (batches, keys))[0]

    z = jax.random.normal(jax.random.key(8), (500, 2))
    errors = [jnp.abs(method.sample(exported(s), z) - exact(HIGH * z, HIGH)).mean() for s in run(jax.random.key(2))]
    assert errors[1] < 0.15 * errors[0]


def test_two_steps_are_one_more_after_new_noise():
    state = jax.random.normal(jax.random.key(1), (3, 2))
    key = jax.random.split(jax.random.key(2), 3)
    f = consistent(GAUSSIAN, LOW)
    found = sampler(2)(f, state, None, key)
    fresh = jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(k, 0), (2,)))(key)
    again = f(HIGH * state, HIGH) + math.sqrt(0.8**2 - LOW**2) * fresh
    np.testing.assert_allclose(found, f(again, 0.8), rtol=1e-5)
    np.testing.assert_allclose(sampler(1)(f, state, None, None), f(HIGH * state, HIGH), rtol=1e-6)


def test_the_loss_is_smooth_at_zero_and_the_distance_far_away():
    a = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(pseudo_huber(a, jnp.zeros_like(a), 1e-4), [5.0, 0.0], atol=2e-4)
    slope = jax.grad(lambda a: pseudo_huber(a, jnp.zeros_like(a), 0.1).sum())(a)
    np.testing.assert_allclose(slope[0], a[0] / math.sqrt(25 + 0.02), rtol=1e-5)
    assert (slope[1] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma_min": 0.0}, "0 < sigma_min < sigma_max, got 0.0 and 80.0"),
        ({"first": 20, "last": 10}, "1 <= first <= last, got 20 and 10"),
        ({"first": 10, "last": 15}, "at least twice as large, got first=10 and last=15"),
        ({"target_decay": 1.0}, r"target_decay .*\[0, 1\).*got 1.0"),
        ({"guidance": 2.0}, "guidance=2.0 .*distil=True"),
        ({"analytic": GAUSSIAN}, "distil=True"),
        ({"solver": "unipc"}, "unknown solver of a consistency teacher 'unipc'.*heun, euler"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        make(Affine(), total=10, **options)


def test_distillation_says_when_its_teacher_is_missing():
    method = make(Affine(), total=10, distil=True, analytic=GAUSSIAN)
    with pytest.raises(ValueError, match=r"needs a teacher: init\(key, batch"):
        method.init(jax.random.key(0), {"image": jnp.zeros((2, 2))})
