"""EDM2: parity with the published network, and the magnitudes that its layers and its training preserve."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import GOLDEN

from jaxdiff import training, weights
from jaxdiff.configs import cifar10, imagenet64_edm2, imagenet512_edm2
from jaxdiff.methods import Parts, diffusion, optimizers
from jaxdiff.methods.diffusion import denoising_loss
from jaxdiff.methods.method import forced
from jaxdiff.models import EDM2, bind, edm2, magnitude
from jaxdiff.noise.levels import loss_weight
from jaxdiff.trees import by_name

SMALL = EDM2(
    resolution=16, width=32, channel_mult=(1, 2), blocks=1, attention=(8,), num_classes=3, channels_per_head=16
)


@functools.cache
def golden():
    """The public arrays by their names, and the recorded inputs and outputs."""
    files = [np.load(GOLDEN / f"edm2_tiny{suffix}.npz") for suffix in ("_0", "_1", "_2", "")]
    arrays = {name: file[name] for file in files for name in file.files}
    params = {name.removeprefix("param/"): a for name, a in arrays.items() if name.startswith("param/")}
    return params, {name: a for name, a in arrays.items() if not name.startswith("param/")}


def nhwc(array):
    return jnp.asarray(array.transpose(0, 2, 3, 1))


def labels(z):
    return {"label": jnp.asarray(z["in/labels"], jnp.int32)}


def magnitudes(params):
    """The root mean square of each output's weights, by name."""
    found = {}
    for name, leaf in by_name(params).items():
        *_, layer, kind = ("", *name.split("/"))
        if kind == "kernel":
            axes = tuple(range(leaf.ndim - magnitude.OUTPUT_AXES.get(layer, 1)))
            found[name] = np.sqrt(np.square(np.asarray(leaf, np.float64)).mean(axes))
    return found


def assert_forced(params):
    for name, sizes in magnitudes(params).items():
        np.testing.assert_allclose(sizes, 1, atol=2.5e-4, err_msg=name)


# ------------------------------------------------------------------------------------------ published values


def test_denoiser_and_uncertainty_are_the_published_ones():
    params, z = golden()
    denoise = weights.load_denoiser(params, "edm2", channels_per_head=16)
    found = jax.jit(lambda d, *a: d(*a))(denoise, nhwc(z["in/x"]), jnp.asarray(z["in/sigma"]), labels(z))
    np.testing.assert_allclose(found, nhwc(z["out/denoised"]), atol=2e-5)
    model, ours = weights.load(params, "edm2")
    assert model.channels_per_head == 64 and (model.res_balance, model.attn_balance) == (0.3, 0.3)
    found = model.apply({"params": ours}, jnp.asarray(z["in/sigma"]), method="log_variance")
    np.testing.assert_allclose(found, z["out/logvar"], atol=2e-5)


def test_training_is_the_published_one():
    """The loss, the denoised images, the forced weights, and the gradients with respect to those."""
    params, z = golden()
    model, ours = weights.load(params, "edm2", channels_per_head=16)
    ours = model.force(ours)
    sigma = jnp.asarray(z["train/sigma"])
    examples = {"x0": nhwc(z["train/x0"]), "eps": nhwc(z["train/noise"]), "sigma": sigma, "cond": labels(z)}

    @jax.jit
    def loss(params):
        denoise = model.published(bind(model, params))
        learned = model.apply({"params": params}, sigma, method="log_variance")
        return denoising_loss(denoise, examples, loss_weight("edm", model.published), learned)[0]

    value, gradients = jax.value_and_grad(loss)(ours)
    np.testing.assert_allclose(value, z["train/loss"], rtol=2e-5)
    x = examples["x0"] + sigma[:, None, None, None] * examples["eps"]
    denoised = model.published(bind(model, ours))(x, sigma, labels(z))
    np.testing.assert_allclose(denoised, nhwc(z["train/denoised"]), atol=2e-5)
    public, slopes = weights.save(model, ours, "edm2"), weights.save(model, gradients, "edm2")
    for name in z:
        if name.startswith("train/forced/"):
            np.testing.assert_allclose(public[name.removeprefix("train/forced/")], z[name], atol=2e-5, err_msg=name)
        if name.startswith("train/grad/"):
            np.testing.assert_allclose(slopes[name.removeprefix("train/grad/")], z[name], atol=2e-5, err_msg=name)


def test_weights_are_written_as_they_were_read():
    params, _ = golden()
    model, ours = weights.load(params, "edm2", channels_per_head=16)
    written = weights.save(model, ours, "edm2")
    assert set(written) == set(params)
    for name, array in params.items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)
    with pytest.raises(weights.WeightsError, match=r"not an 'edm2' checkpoint"):
        weights.load({"model.a": np.zeros(1)}, "edm2")
    rest = {name: a for name, a in params.items() if name != "unet.emb_noise.weight"}
    with pytest.raises(weights.WeightsError, match=r"unet.emb_noise.weight"):
        weights.load(rest, "edm2")


@pytest.mark.parametrize("field", ["label_balance", "concat_balance", "res_balance", "attn_balance"])
def test_balances_are_overrides(field):
    params, z = golden()
    inputs = nhwc(z["in/x"]), jnp.asarray(z["in/sigma"]), labels(z)
    plain = weights.load_denoiser(params, "edm2", channels_per_head=16)(*inputs)
    other = weights.load_denoiser(params, "edm2", channels_per_head=16, **{field: 0.4})(*inputs)
    assert float(jnp.abs(plain - other).max()) > 1e-3


@pytest.mark.parametrize("name", edm2.SIZES)
def test_parameter_counts(name):
    """125 M, 280 M, 498 M, 777 M, 1.1 B, 1.5 B."""
    config = imagenet512_edm2.get_config(name)
    model = EDM2(channels=4, num_classes=1000, **config.model.fields)
    inputs = jnp.zeros((1, 16, 16, 4)), jnp.zeros(1), {"label": jnp.zeros(1, jnp.int32)}
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    published = {"XS": 124.7, "S": 280.2, "M": 497.8, "L": 777.5, "XL": 1119.3, "XXL": 1523.2}
    assert round(count / 1e6, 1) == published[name]


def test_the_recipes_at_both_resolutions():
    small, large = imagenet64_edm2.get_config("M"), imagenet512_edm2.get_config("M")
    assert small.model.fields == large.model.fields and small.optim.learning_rate == 0.009
    assert (small.noise.mean, small.noise.std, large.noise.mean, large.noise.std) == (-0.8, 1.6, -0.4, 1.0)
    assert small.optim.decay_images == large.optim.decay_images / 2 == 35_000 * 2048
    assert large.ema.snapshot_every * 2048 == 2**23 and large.train.steps == 2**20


# ------------------------------------------------------------------------------------------ magnitudes


def unit(key, *shape):
    return jax.random.normal(jax.random.key(key), shape)


def test_operations_keep_unit_magnitude():
    a, b = unit(0, 4, 8, 8, 64), unit(1, 4, 8, 8, 32)
    size = lambda x: float(jnp.sqrt(jnp.square(x).mean()))  # noqa: E731
    np.testing.assert_allclose(size(magnitude.silu(a)), 1, rtol=0.02)
    for t in (0.3, 0.5, 0.8):
        np.testing.assert_allclose(size(magnitude.blend(a[..., :32], b, t)), 1, rtol=0.02)
        joined = magnitude.concat(a, b, t)
        np.testing.assert_allclose(size(joined), 1, rtol=0.02)
        parts = [float(jnp.square(x).sum()) for x in jnp.split(joined, [64], axis=-1)]
        np.testing.assert_allclose(parts[1] / parts[0], t**2 / (1 - t) ** 2, rtol=0.05)
    np.testing.assert_allclose(size(magnitude.normalize(7 * a, (-1,))), 1, rtol=1e-3)
    for layer in (magnitude.Conv(48), magnitude.Linear((48,)), magnitude.Linear((3, 2, 8))):
        params = layer.init(jax.random.key(2), a)
        grown = jax.tree.map(lambda kernel: 5 * kernel, params)  # the length of a kernel does not matter
        inner = (slice(None), slice(1, -1), slice(1, -1))
        np.testing.assert_allclose(size(layer.apply(grown, a)[inner]), 1, rtol=0.05)
    fourier = magnitude.Fourier(256)
    numbers = unit(3, 16)
    np.testing.assert_allclose(size(fourier.apply(fourier.init(jax.random.key(4), numbers), numbers)), 1, rtol=0.05)


def test_the_gradient_of_a_kernel_is_orthogonal_to_it():
    layer, x = magnitude.Conv(8), unit(0, 2, 6, 6, 4)
    params = layer.init(jax.random.key(1), x)
    gradient = jax.grad(lambda p: jnp.square(layer.apply(p, x)).sum() + layer.apply(p, x)[..., 0].sum())(params)
    kernel, slope = params["params"]["kernel"], gradient["params"]["kernel"]
    across = jnp.abs((kernel * slope).sum((0, 1, 2)))
    along = jnp.sqrt(jnp.square(kernel).sum((0, 1, 2)) * jnp.square(slope).sum((0, 1, 2)))
    assert (across < 1e-3 * along).all() and (along > 1).all()


def activations(model, params, x, noise_label, cond):
    """The magnitudes of the outputs of all blocks and their attention, by name."""
    _, captured = model.apply({"params": params}, x, noise_label, cond, mutable=["intermediates"])
    leaves = by_name(captured["intermediates"])
    wanted = ("tap:out", "tap:attention/q", "tap:attention/v", "tap:embedded")
    return {
        name: float(np.sqrt(np.square(np.asarray(leaf, np.float32)).mean()))
        for name, leaf in leaves.items()
        if name.endswith(wanted) and name != "tap:out"
    }


def inputs_of(n=8):
    return unit(0, n, 16, 16, 3), jnp.linspace(-1.0, 0.5, n), {"label": jnp.arange(n) % 3}


def steps_of(model, count, dtype=jnp.float32):
    """The parameters after each of `count` training steps at a large rate."""
    model = model.clone(dtype=dtype)
    parts = Parts(model, forced(optimizers(optax.adam(0.01, b2=0.99)), model.force))
    method = diffusion.build(diffusion.Options(uncertainty=True), parts)
    x, _, cond = inputs_of()
    batch = {"image": 0.5 * x, **cond}
    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(method.init)(jax.random.key(0), batch)
        step = jax.jit(method.step)
        yield state.params["student"], {}
        for i in range(count):
            state, metrics = step(state, batch, jax.random.key(i))
            yield state.params["student"], metrics


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_activations_and_weights_keep_unit_magnitude_in_training(dtype):
    """At the start and after steps that would have grown every weight."""
    losses = []
    for params, metrics in steps_of(SMALL, 6, dtype):
        assert_forced(params)
        losses.append(float(metrics.get("loss", np.inf)))
        if len(losses) in (1, 7):
            with jax.numpy_dtype_promotion("standard"):
                found = activations(SMALL.clone(dtype=dtype), params, *inputs_of())
            assert len(found) > 15
            for name, size in found.items():
                assert 0.7 < size < 1.4, (name, size)
    assert losses[-1] < losses[1]
    gains = {name: leaf for name, leaf in by_name(params).items() if name.endswith("gain")}
    assert len(gains) == 10 and all(float(gain) != 0 for gain in gains.values())  # they start at 0


def test_without_forcing_the_weights_grow():
    parts = Parts(SMALL, optimizers(optax.adam(0.1)))
    method = diffusion.build(diffusion.Options(), parts)
    x, _, cond = inputs_of()
    batch = {"image": 0.5 * x, **cond}
    state = jax.jit(method.init)(jax.random.key(0), batch)
    for i in range(3):
        state, _ = jax.jit(method.step)(state, batch, jax.random.key(i))
    assert max(sizes.max() for sizes in magnitudes(state.params["student"]).values()) > 1.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_forced_when_sharded(tmp_path, dtype):
    """FSDP over four of eight devices gives the parameters of one device."""
    states = {}
    for name, devices, fsdp in (("sharded", jax.devices(), 4), ("single", jax.devices()[:1], 1)):
        config = imagenet64_edm2.get_config("tiny")
        config.mesh.data, config.mesh.fsdp, config.mesh.min_size = -1, fsdp, 256
        config.model.dtype, config.train.steps, config.sample.count = dtype, 2, 0
        with jax.numpy_dtype_promotion("standard"):
            states[name] = training.train(config, tmp_path / name, quiet=True, devices=devices).state
        assert_forced(states[name].params["student"])
    kernel = states["sharded"].params["student"]["dec_8x8_in0"]["conv0"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    tolerance = 1e-4 if dtype == "float32" else 0.03
    ours, theirs = (by_name(states[name].params["student"]) for name in ("sharded", "single"))
    for name, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[name], atol=tolerance, err_msg=name)


def test_uncertainty_needs_a_network_that_learns_it():
    config = cifar10.get_config("tiny")
    config.diffusion.uncertainty = True
    with pytest.raises(ValueError, match=r"log_variance\(sigma\), which UNet does not; use model.name='edm2'"):
        training.build(config, training.load_data(config))


def test_uncertainty_learns_the_error():
    """The minimum of w e / exp(u) + u is u = ln(w e), where each noise level contributes the same gradient."""
    errors = jnp.array([0.5, 2.0, 8.0])
    examples = {"x0": jnp.zeros((3, 1)), "eps": jnp.zeros((3, 1)), "sigma": jnp.ones(3)}
    denoise = lambda x, sigma, cond: jnp.sqrt(errors)[:, None]  # noqa: E731
    slope = jax.grad(lambda u: denoising_loss(denoise, examples, lambda s: jnp.full_like(s, 3.0), u)[0])
    np.testing.assert_allclose(slope(jnp.log(3 * errors)), 0, atol=1e-6)
    assert (slope(jnp.log(3 * errors) + 1) > 0.1).all()


def test_every_field_but_running_ones_is_a_field_of_the_architecture():
    names = {field.name for field in dataclasses.fields(EDM2)}
    assert {"loop", "dtype", "remat", "dropout"} < names
    x, noise, cond = inputs_of(2)
    params = jax.jit(SMALL.init)(jax.random.key(0), x, noise, cond)["params"]
    params["out_gain"] = jnp.ones(())
    plain = SMALL.apply({"params": params}, x, noise, cond)
    for change in ({"loop": True}, {"remat": "full"}):
        np.testing.assert_allclose(SMALL.clone(**change).apply({"params": params}, x, noise, cond), plain, atol=1e-5)
    null = SMALL.apply({"params": params}, x, noise, {"label": jnp.full(2, 3)})
    np.testing.assert_allclose(SMALL.apply({"params": params}, x, noise), null, atol=1e-6)
