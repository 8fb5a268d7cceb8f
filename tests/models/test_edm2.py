"""EDM2: parity with the published network, and the magnitudes that its layers and its training preserve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from paths import GOLDEN

from jaxdiff import training, weights
from jaxdiff.configs import cifar10, imagenet64_edm2, imagenet512_edm2
from jaxdiff.methods import Parts, diffusion, optimizers
from jaxdiff.methods.diffusion import denoising_loss
from jaxdiff.methods.method import update
from jaxdiff.methods.optimization import forced
from jaxdiff.models import EDM2, bind, edm2, magnitude
from jaxdiff.noise.levels import loss_weight
from jaxdiff.placement import BATCH
from jaxdiff.training.optim import learning_rate
from jaxdiff.training.sharding import make_mesh, state_shardings
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
        np.testing.assert_allclose(sizes, 1, atol=1e-3, err_msg=name)  # 1e-4 is added to each magnitude


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

    def loss(params):
        denoise = model.published(bind(model, params))
        learned = model.apply({"params": params}, sigma, method="log_variance")
        return denoising_loss(denoise, examples, loss_weight("edm", model.published), learned)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss))(ours)
    np.testing.assert_allclose(value, z["train/loss"], rtol=2e-5)
    x = examples["x0"] + sigma[:, None, None, None] * examples["eps"]
    denoised = jax.jit(lambda p, *a: model.published(bind(model, p))(*a))(ours, x, sigma, labels(z))
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


def test_balances_are_overrides():
    params, z = golden()
    inputs = nhwc(z["in/x"]), jnp.asarray(z["in/sigma"]), labels(z)
    run = jax.jit(lambda denoise, *a: denoise(*a))
    for one, two in (("label_balance", "concat_balance"), ("res_balance", "attn_balance")):
        other = weights.load_denoiser(params, "edm2", channels_per_head=16, **{one: 0.4, two: 0.4})
        assert float(jnp.abs(run(other, *inputs) - nhwc(z["out/denoised"])).max()) > 1e-3


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
    smallest = imagenet512_edm2.get_config("XS")
    with np.load(GOLDEN / "phema.npz") as z:  # the published schedule of XS
        how = {name: smallest.optim[name] for name in ("warmup_images", "decay", "decay_images")}
        rates = learning_rate(z["lr_nimg"], smallest.optim.learning_rate, **how)
        np.testing.assert_allclose(rates, z["lr"], rtol=1e-9)
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
    run = jax.jit(functools.partial(model.apply, mutable=["intermediates"]))
    _, captured = run({"params": params}, x, noise_label, cond)
    leaves = by_name(captured["intermediates"])
    wanted = ("tap:out", "tap:attention/q", "tap:attention/v", "tap:embedded")
    return {
        name: float(np.sqrt(np.square(np.asarray(leaf, np.float32)).mean()))
        for name, leaf in leaves.items()
        if name.endswith(wanted) and name != "tap:out"
    }


def inputs_of(n=8):
    return unit(0, n, 8, 8, 3), jnp.linspace(-1.0, 0.5, n), {"label": jnp.arange(n) % 3}


def train(model, count, mesh=None):
    """The parameters and losses before and after each of `count` steps at a large rate, on one device or sharded."""
    parts = Parts(model, forced(optimizers(optax.adam(0.01, b2=0.99)), model.force))
    method = diffusion.build(diffusion.Options(uncertainty=True), parts)
    x, _, cond = inputs_of()
    batch = {"image": 0.5 * x, **cond}
    shardings = None
    if mesh is not None:
        shardings = state_shardings(jax.eval_shape(method.init, jax.random.key(0), batch), mesh, min_size=256)
        batch = jax.device_put(batch, NamedSharding(mesh, BATCH))
    state = jax.jit(method.init, out_shardings=shardings)(jax.random.key(0), batch)
    step = jax.jit(method.step, out_shardings=shardings and (shardings, None))
    history = [(state.params["student"], np.inf)]
    for i in range(count):
        state, metrics = step(state, batch, jax.random.key(i))
        history.append((state.params["student"], float(metrics["loss"])))
    return history


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16],
    ids=["float32", "bfloat16_fsdp"],
)
def test_activations_and_weights_keep_unit_magnitude_in_training(dtype):
    """At the start and after steps that would have grown every weight; also in half precision and sharded."""
    model = SMALL.clone(dtype=dtype)
    mesh = make_mesh(2, 4) if dtype == jnp.bfloat16 else None
    with jax.numpy_dtype_promotion("strict" if mesh is None else "standard"):  # attention promotes half precision
        history = train(model, 3, mesh)
        sizes = [activations(model, params, *inputs_of()) for params, _ in (history[0], history[-1])]
    for params, _ in history:
        assert_forced(params)
    assert history[-1][1] < history[1][1]
    for found in sizes:
        assert len(found) > 15
        for name, size in found.items():
            assert 0.7 < size < 1.4, (name, size)
    gains = {name: leaf for name, leaf in by_name(params).items() if name.endswith("gain")}
    assert len(gains) == 11 and all(float(gain) != 0 for gain in gains.values())  # they start at 0
    if mesh is not None:
        kernel = params["dec_8x8_in0"]["conv0"]["kernel"]
        assert kernel.addressable_shards[0].data.size == kernel.size // 4


def test_without_forcing_the_weights_grow():
    layer, x = magnitude.Conv(8), unit(0, 2, 6, 6, 4)
    params = layer.init(jax.random.key(1), x)["params"]
    gradients = jax.grad(lambda p: layer.apply({"params": p}, x)[..., 0].sum())(params)
    plain = optimizers(optax.adam(0.1))
    for made, grown in ((plain, True), (forced(plain, magnitude.force), False)):
        optimizer = made.constant(None)
        new, _ = update(optimizer, gradients, optimizer.init(params), params, 0.5)  # a schedule's factor
        size = magnitudes(new)["kernel"][0]
        assert (size > 1.001) == grown and abs(size - 1) < (0.1 if grown else 2e-4)


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


def test_how_it_runs_does_not_change_it():
    model = SMALL.clone(channel_mult=(1,))
    x, noise, cond = inputs_of(2)
    params = jax.jit(model.init)(jax.random.key(0), x, noise, cond)["params"]
    params["out_gain"] = jnp.ones(())
    plain = jax.jit(model.apply)({"params": params}, x, noise, cond)
    for change in ({"loop": True}, {"remat": "full"}):
        other = jax.jit(model.clone(**change).apply)({"params": params}, x, noise, cond)
        np.testing.assert_allclose(other, plain, atol=1e-5)
    null = jax.jit(model.apply)({"params": params}, x, noise, {"label": jnp.full(2, 3)})
    np.testing.assert_allclose(jax.jit(model.apply)({"params": params}, x, noise), null, atol=1e-6)


def test_patches_are_channels_of_a_smaller_image():
    patched = EDM2(resolution=8, channels=1, width=16, channel_mult=(1,), blocks=1, attention=(), patch=2)
    plain = patched.clone(resolution=4, channels=4, patch=1)
    x, noise = unit(0, 2, 8, 8, 1), jnp.array([-0.5, 0.3])
    small = x.reshape(2, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(2, 4, 4, 4)
    params = jax.jit(patched.init)(jax.random.key(0), x, noise)["params"]
    params["out_gain"] = jnp.ones(())
    found = jax.jit(patched.apply)({"params": params}, x, noise)
    wanted = jax.jit(plain.apply)({"params": params}, small, noise)
    wanted = wanted.reshape(2, 4, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(x.shape)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert np.abs(found).max() > 0.1
