"""Denoising score matching against its formula, with a network whose output is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from method_parts import build_method

from jaxdiff import denoisers, noise, solvers
from jaxdiff.conditions import Conditions, Signal
from jaxdiff.methods import METHODS, averaging, diffusion, exported
from jaxdiff.methods.method import accumulate, data_of

RATE = 0.1
CLASSES = 5


class Scaled(nn.Module):
    """F(x, c, cond) = w x + v[label]: linear, so that gradients have a closed form."""

    num_classes: int = 0

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        out = self.param("w", nn.initializers.constant(2.0), ()) * x
        if self.num_classes:
            table = self.param("v", nn.initializers.normal(1.0), (self.num_classes + 1,))
            out = out + table[cond["label"]].reshape(-1, *(1 for _ in x.shape[1:]))
        return out


def make(model, **options):
    sigmas = solvers.grid(3, 0.1, 2.0)
    sampler = lambda d, unit, cond, key: solvers.solve(d, sigmas[0] * unit, sigmas, "euler", cond)  # noqa: E731
    return build_method(diffusion, model, optax.sgd(RATE), solve=sampler, **options)


@pytest.fixture
def batch():
    key = jax.random.key(5)
    images = jax.random.uniform(key, (6, 4, 4, 1), minval=-1.0, maxval=1.0)
    return {"image": images, "label": jnp.arange(6) % CLASSES}


def start(method, batch):
    return jax.jit(method.init)(jax.random.key(0), batch)


def by_hand(w, x0, key, levels, weight, sigma_data=0.5):
    """The loss, the plain error and d loss / d w of F = w x in EDM's convention, in NumPy and float64."""
    keys = jax.random.split(key, 4)
    sigma = np.asarray(levels(keys[0], len(x0)), np.float64).reshape(-1, 1, 1, 1)
    eps = np.asarray(jax.random.normal(keys[1], x0.shape), np.float64)
    x0 = np.asarray(x0, np.float64)
    x, s2 = x0 + sigma * eps, sigma_data**2
    skip, out, into = s2 / (sigma**2 + s2), sigma * sigma_data / np.sqrt(sigma**2 + s2), 1 / np.sqrt(sigma**2 + s2)
    error = skip * x + out * w * into * x - x0
    weights = np.asarray(weight(sigma.ravel().astype(np.float32)), np.float64)
    slope = (2 * error * out * into * x).mean((1, 2, 3))
    squares = (error**2).mean((1, 2, 3))
    return (weights * squares).mean(), squares.mean(), (weights * slope).mean()


class Hiding(nn.Module):
    """F = w x, or 2 w x where tokens are hidden."""

    mask_ratio: tuple = (0.3, 0.5)

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        w = self.param("w", nn.initializers.constant(2.0), ())
        return w * x * (2 if self.has_rng("mask") and not deterministic else 1)


def test_a_network_that_can_hide_tokens_learns_from_both_losses(batch):
    key, x0 = jax.random.key(3), {"image": batch["image"]}
    levels, weight = noise.make_levels("lognormal"), noise.make_weight("edm")
    for ratio in ((0.3, 0.5), ()):
        method = make(Hiding(ratio))
        state, metrics = jax.jit(method.step)(start(method, x0), x0, key)
        value, error, slope = by_hand(2.0, batch["image"], key, levels, weight)
        if ratio:
            hidden, _, steeper = by_hand(4.0, batch["image"], key, levels, weight)
            value, slope = value + hidden, slope + 2 * steeper
        np.testing.assert_allclose([metrics["loss"], metrics["error"]], [value, error], rtol=1e-4)
        np.testing.assert_allclose(state.params["student"]["w"], 2.0 - RATE * slope, rtol=1e-4)


@pytest.mark.parametrize("name", ["edm", "min_snr"])
def test_loss_gradient_and_update_are_those_of_the_formula(batch, name):
    levels, weight = noise.levels.uniform(0.1, 3.0), noise.levels.make_weight(name)
    method = make(Scaled(), sigmas=levels, weight=weight)
    key = jax.random.key(9)
    new, metrics = jax.jit(method.step)(start(method, batch), batch, key)
    loss, error, slope = by_hand(2.0, batch["image"], key, levels, weight)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["error"], error, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], abs(slope), rtol=1e-5)
    np.testing.assert_allclose(new.params["student"]["w"], 2.0 - RATE * slope, rtol=1e-6)
    assert int(new.step) == 1


def test_coupled_noise_is_what_the_image_is_diffused_with(batch):
    """A coupling that turns the batch's noises around: images, labels and levels stay in their place."""
    levels, weight = noise.levels.uniform(0.1, 3.0), noise.levels.make_weight("edm")
    seen = {}

    def couple(x0, eps, cond, key):
        seen.update(x0=x0, cond=cond)
        return eps[::-1], {"seen": jnp.float32(3.0)}

    key = jax.random.key(9)
    methods = [make(Scaled(CLASSES), sigmas=levels, weight=weight, couple=c) for c in (None, couple)]
    state = start(methods[0], batch)
    plain, coupled = (m.step(state, batch, key)[1] for m in methods)
    assert coupled["seen"] == 3.0 and "seen" not in plain
    assert (seen["x0"] == batch["image"]).all() and (seen["cond"]["label"] == batch["label"]).all()
    # the same noise for the reversed batch at reversed levels is the same loss, example by example
    back = {name: value[::-1] for name, value in batch.items()}
    reversed_levels = lambda key, n: levels(key, n)[::-1]  # noqa: E731
    other = make(Scaled(CLASSES), sigmas=reversed_levels, weight=weight).step(state, back, key)[1]
    np.testing.assert_allclose(coupled["loss"], other["loss"], rtol=1e-6)
    assert abs(float(coupled["loss"] / plain["loss"]) - 1) > 1e-3


def test_the_defaults_are_edms(batch):
    explicit = make(Scaled(), sigmas=noise.levels.lognormal(-1.2, 1.2), weight=noise.levels.edm_weight(0.5))
    methods = make(Scaled()), explicit
    values = [jax.jit(m.step)(start(m, batch), batch, jax.random.key(1))[1]["loss"] for m in methods]
    assert values[0] == values[1]
    assert METHODS["diffusion"].build is diffusion.build


def test_the_exact_denoiser_cannot_be_improved(batch):
    """At the optimum of a Gaussian data set the weighted error is E sigma^2 s^2 / (sigma^2 + s^2)."""
    std, sigma = 0.7, 0.9
    x0 = std * jax.random.normal(jax.random.key(2), (40_000, 1))

    class Zero(nn.Module):
        @nn.compact
        def __call__(self, x, noise_label, cond=None, *, deterministic=True):
            return self.param("w", nn.initializers.zeros, ()) * x

    # with sigma_data = std EDM's skip connection alone is the exact denoiser
    method = make(
        Zero(),
        convention=lambda network: denoisers.edm(network, std),
        sigmas=lambda key, n: jnp.full(n, sigma),
        weight=noise.levels.make_weight("x0"),
    )
    _, metrics = jax.jit(method.step)(start(method, {"image": x0}), {"image": x0}, jax.random.key(1))
    np.testing.assert_allclose(metrics["loss"], sigma**2 * std**2 / (sigma**2 + std**2), rtol=0.03)
    assert metrics["grad_norm"] < 0.02


def test_a_step_depends_on_its_key_and_nothing_hidden(batch):
    method = make(Scaled(CLASSES), null={"label": CLASSES}, cond_dropout=0.5)
    state, step = start(method, batch), jax.jit(method.step)
    one, other, again = (step(state, batch, jax.random.key(k))[1]["loss"] for k in (1, 2, 1))
    assert one == again and one != other


def test_accumulation_gives_the_gradient_of_the_whole_batch(batch):
    whole, sliced = (
        make(Scaled(CLASSES), null={"label": CLASSES}, cond_dropout=0.3, accum_steps=n, average=averaging.constant(0.5))
        for n in (1, 3)
    )
    state = start(whole, batch)
    wanted, values = jax.jit(whole.step)(state, batch, jax.random.key(3))
    found, metrics = jax.jit(sliced.step)(state, batch, jax.random.key(3))
    for name in values:
        np.testing.assert_allclose(metrics[name], values[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"batch of 6 .*accum_steps=4"):
        jax.eval_shape(make(Scaled(), accum_steps=4).step, state, batch, jax.random.key(0))


def test_slices_of_an_accumulated_batch_are_every_nth_example():
    means, (outputs, parts) = accumulate(lambda _, x, i: (x, (x, jnp.full(x.shape, i))), 0.0, jnp.arange(6.0), 3)
    np.testing.assert_allclose(means, [(0 + 1 + 2) / 3, (3 + 4 + 5) / 3])
    np.testing.assert_array_equal(outputs, np.arange(6))  # put together in the batch's own order
    np.testing.assert_array_equal(parts, [0, 1, 2, 0, 1, 2])


def test_the_exported_parameters_are_the_average_and_enough_to_sample(batch):
    method = make(Scaled(CLASSES), average=averaging.constant(0.9))
    state, _ = jax.jit(method.step)(start(method, batch), batch, jax.random.key(1))
    assert float(jnp.abs(state.averages["ema"]["w"] - state.params["student"]["w"])) > 0
    unit, cond = jax.random.normal(jax.random.key(4), (3, 4, 4, 1)), {"label": jnp.array([0, 1, CLASSES])}
    sigmas = solvers.grid(3, 0.1, 2.0)
    wanted = solvers.solve(method.denoiser(state.averages["ema"]), sigmas[0] * unit, sigmas, "euler", cond)
    np.testing.assert_allclose(jax.jit(method.sample)(exported(state), unit, cond), wanted, rtol=1e-5)
    sigma = jnp.full(3, 0.7)
    network = lambda x, label, cond: Scaled(CLASSES).apply({"params": state.averages["ema"]}, x, label, cond)  # noqa: E731
    np.testing.assert_allclose(
        method.denoiser(exported(state))(unit, sigma, cond), denoisers.edm(network)(unit, sigma, cond), rtol=1e-6
    )


def test_latents_go_before_images_and_only_conditions_are_passed_on():
    batch = {
        "image": jnp.zeros((2, 8, 8, 3)),
        "latent": jnp.ones((2, 2, 2, 4)),
        "label": jnp.zeros(2, int),
        "caption_id": 1,
    }
    assert data_of(batch).shape == (2, 2, 2, 4)
    conditions = Conditions({"label": Signal((), "int32", 5)})
    assert set(conditions.of(batch)) == {"label"}
    assert conditions.of({"image": jnp.zeros((2, 8, 8, 3))}) is None


# ------------------------------------------------------------------------------------------ dropping conditions


SIGNALS = Conditions(
    {
        "text": Signal((3, 2), null=0.0),
        "text_mask": Signal((3,), "bool", null=False),
        "pooled": Signal((2,), null=0.0),
        "flip": Signal((1,), null=-1.0, group="control"),
        "crop": Signal((2,), null=-1.0, group="control"),
        "step": Signal((), group="method"),
    }
)


def test_groups_are_dropped_apart_and_each_as_a_whole():
    n, rates = 20_000, {"semantic": 0.3, "control": 0.1}
    control = {"flip": jnp.ones((n, 1)), "crop": jnp.ones((n, 2))}
    text = {"text": jnp.ones((n, 3, 2)), "text_mask": jnp.ones((n, 3), bool), "pooled": jnp.ones((n, 2))}
    cond = {**text, **control, "step": jnp.full(n, 7.0)}
    out = jax.jit(lambda key: SIGNALS.dropout(key, cond, rates))(jax.random.key(0))
    gone = {name: (np.asarray(out[name]) == 0).reshape(n, -1) for name in text}
    gone |= {name: np.asarray(out[name] == -1) for name in control}
    assert all((rows.all(1) == rows.any(1)).all() for rows in gone.values())
    gone = {name: rows.all(1) for name, rows in gone.items()}
    assert all((gone[name] == gone["text"]).all() for name in text) and (gone["flip"] == gone["crop"]).all()
    for found, rate in [(gone["text"], 0.3), (gone["flip"], 0.1), (gone["text"] & gone["flip"], 0.03)]:
        assert abs(found.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / n)
    kept = SIGNALS.dropout(jax.random.key(0), cond, {"control": 0.1})
    np.testing.assert_array_equal(kept["flip"], out["flip"])  # its draw is its own
    np.testing.assert_array_equal(kept["text"], cond["text"])
    np.testing.assert_array_equal(out["step"], cond["step"])  # it has no null value
    assert all(out[name].dtype == cond[name].dtype for name in cond)


def test_labels_are_dropped_at_their_rate():
    n, rate = 20_000, 0.15
    labels = jnp.arange(n) % CLASSES
    conditions = Conditions({"label": Signal((), "int32", CLASSES)})
    out = conditions.dropout(jax.random.key(0), {"label": labels}, {"semantic": rate})["label"]
    gone = np.asarray(out == CLASSES)
    assert abs(gone.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / n)
    np.testing.assert_array_equal(out[~gone], labels[~gone])
    untouched = conditions.dropout(jax.random.key(0), {"label": labels}, {"semantic": 0.0})["label"]
    np.testing.assert_array_equal(untouched, labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cond_dropout": -0.1}, r"cond_dropout .* got -0.1"),
        ({"control_dropout": 0.1, "null": {"label": 5}}, r"control_dropout=0.1 needs control"),
        ({"control_dropout": 1.0}, r"control_dropout .* got 1.0"),
    ],
)
def test_wrong_dropping(options, message):
    with pytest.raises(ValueError, match=message):
        make(Scaled(CLASSES), **options)


def test_the_parameters_of_a_weight_are_options(batch):
    """min_snr is min(1 / sigma^2, gamma): with a small gamma the loss is gamma times the plain error."""
    x0 = {"image": batch["image"]}
    method = make(Scaled(), weight="min_snr", weight_options={"gamma": 1e-3})
    _, metrics = jax.jit(method.step)(start(method, x0), x0, jax.random.key(0))
    np.testing.assert_allclose(metrics["loss"], 1e-3 * metrics["error"], rtol=1e-4)
    with pytest.raises(ValueError, match="min_snr"):
        make(Scaled(), weight="min_snr", weight_options={"gama": 1.0})
