"""Autoencoders: outputs of the public implementations, exact sizes, round trips, the names of each release."""

import math
import runpy
import zlib

import jax
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import weights
from jaxdiff.models import TAESD, AutoencoderKL, taesd, vae

seeded = runpy.run_path(str(GOLDEN / "seeded.py"))
TOLD = {"sd_vae": {"groups": 4}, "sd3_vae": {"groups": 4}, "taesd": {}}  # unlike any published one
KIND = {"sd_vae": "sd_vae", "sd3_vae": "sd_vae", "taesd": "taesd"}


def nhwc(x):
    return np.moveaxis(x, 1, -1)


@pytest.fixture(scope="module")
def golden():
    """name -> (weights, inputs and outputs)."""
    files = {name: dict(np.load(GOLDEN / f"{name}.npz")) for name in TOLD}
    return {name: (seeded["weights"](arrays["lines"]), arrays) for name, arrays in files.items()}


@pytest.fixture(scope="module")
def loaded(golden):
    """name -> (model, parameters)."""
    return {name: weights.load(golden[name][0], KIND[name], **TOLD[name]) for name in TOLD}


def near(ours, public):
    public = nhwc(public)
    assert 0.2 < public.std() < 3
    np.testing.assert_allclose(ours, public, rtol=0, atol=2e-5)


# ------------------------------------------------------------------------------------ the public implementations


def run(loaded, arrays, key=None):
    """(latents, images)"""
    model, params = loaded

    @jax.jit
    def both(params, x, z, key):
        apply = lambda *args, method: model.apply({"params": params}, *args, method=method)  # noqa: E731
        return apply(x, key, method="encode"), apply(z, method="decode")

    return both(params, nhwc(arrays["in/x"]), nhwc(arrays["in/z"]), key)


def test_draws_from_the_posterior_and_images_with_quant_convolutions(golden, loaded):
    arrays, key = golden["sd_vae"][1], jax.random.key(0)
    draw, image = run(loaded["sd_vae"], arrays, key)
    noise = jax.random.normal(key, draw.shape)
    near(draw, arrays["out/mean"] + arrays["out/std"] * np.moveaxis(noise, -1, 1))
    near(image, arrays["out/image"])


@pytest.mark.parametrize(("name", "latent"), [("sd3_vae", "mean"), ("taesd", "latent")])
def test_latents_and_images(name, latent, golden, loaded):
    """SD3: no quant convolutions, shifted latents, and the mode of the posterior without a key."""
    arrays = golden[name][1]
    z, image = run(loaded[name], arrays)
    near(z, arrays[f"out/{latent}"])
    near(image, arrays["out/image"])


def test_pooling_is_added_before_the_convolutions():
    """With convolutions of zeros a block is relu(x + V relu(norm(W x))), the norm over pixels and a quarter of 4 c."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 5, 4))
    w, v, scale, bias = (rng.normal(size=shape) for shape in [(4, 16), (16, 4), (16,), (16,)])
    h = (x @ w).reshape(2, 15, 4, 4)
    h = (h - h.mean((1, 3), keepdims=True)) / np.sqrt(h.var((1, 3), keepdims=True) + 1e-5)
    expected = np.maximum(x + np.maximum(h.reshape(2, 3, 5, 16) * scale + bias, 0) @ v, 0)
    pool = {"pool_in": {"kernel": w[None, None]}, "pool_out": {"kernel": v[None, None]}}
    still = {f"conv{i}": {"kernel": np.zeros((3, 3, 4, 4)), "bias": np.zeros(4)} for i in range(3)}
    params = {**pool, **still, "pool_norm": {"scale": scale, "bias": bias}}
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
    out = jax.jit(taesd.Block(pool=True).apply)({"params": params}, x.astype(np.float32))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ sizes and names


def shapes_of(model, kind):
    arguments = weights.KINDS[kind].example(model)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *arguments))["params"]


@pytest.mark.parametrize(
    ("model", "kind", "parameters", "arrays", "checksum"),
    [
        (AutoencoderKL(), "sd_vae", 83_653_863, 248, 1563987883),
        (AutoencoderKL(**vae.SIZES["sd3"]), "sd_vae", 83_819_683, 244, 2836515529),
        (TAESD(), "taesd", 2_445_063, 134, 4203665116),
        (TAESD(channels=16), "taesd", 2_458_899, 134, 4203665116),
        (TAESD(channels=32, pool=True), "taesd", 2_677_027, 158, 175841385),  # taef2
    ],
)
def test_sizes_and_public_names_of_the_published_networks(model, kind, parameters, arrays, checksum):
    """The numbers that tests/golden/make_autoencoders.py prints."""
    shapes = shapes_of(model, kind)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == parameters
    names = [name for entry in weights.KINDS[kind].entries(model, shapes) for name in entry.public]
    assert len(names) == arrays and zlib.crc32("\n".join(sorted(names)).encode()) == checksum


@pytest.mark.parametrize("name", TOLD)
def test_public_arrays_round_trip(name, golden, loaded):
    arrays, (model, params) = golden[name][0], loaded[name]
    back = weights.save(model, params, KIND[name])
    assert set(back) == set(arrays)
    for key in arrays:
        np.testing.assert_array_equal(back[key], arrays[key], err_msg=key)


def test_the_architecture_is_inferred_and_latents_are_scaled_as_published(golden, loaded):
    shared = {"width": 8, "channel_mult": (1, 2), "blocks": 1, "groups": 4}
    assert loaded["sd_vae"][0] == AutoencoderKL(**shared, scale=0.18215)
    assert loaded["sd3_vae"][0] == AutoencoderKL(**shared, channels=16, quant=False, scale=1.5305, shift=0.0609)
    assert weights.load(golden["sd_vae"][0], "sdxl_vae", groups=4)[0] == AutoencoderKL(**shared, scale=0.13025)
    assert loaded["taesd"][0] == TAESD(channels=6, width=8, blocks=(1, 2, 1))


def same(params, others):
    jax.tree.map(np.testing.assert_array_equal, params, others)


def test_attention_under_its_early_names(golden, loaded):
    early = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def rename(name):
        for now, then in early.items():
            name = name.replace(f"attentions.0.{now}.", f"attentions.0.{then}.")
        return name

    arrays = {rename(name): array for name, array in golden["sd_vae"][0].items()}
    assert len(set(arrays) - set(golden["sd_vae"][0])) == 2 * 4 * 2
    same(weights.load(arrays, "sd_vae", groups=4)[1], loaded["sd_vae"][1])


def test_taesd_under_the_names_of_its_repository_and_flat(golden, loaded):
    """The decoder's list starts with a tanh there, so that its places are higher by one."""
    repository, flat = {}, {}
    for name, array in golden["taesd"][0].items():
        side, _, place, *rest = name.split(".")
        stem = ".".join([side, str(int(place) + (side == "decoder")), *rest[:-1]])
        repository[f"{stem}.{rest[-1]}"] = array
        bias = rest[-1] == "bias"
        flat[f"{stem}.{'bias' if bias else 'kernel'}"] = array if bias else array.transpose(2, 3, 1, 0)
    for arrays in (repository, flat):
        model, params = weights.load(arrays, "taesd")
        assert model == loaded["taesd"][0]
        same(params, loaded["taesd"][1])


def test_taesd_with_pooling_round_trips():
    model = TAESD(channels=3, width=4, blocks=(1, 2), pool=True)
    params = jax.tree.map(lambda s: np.random.default_rng(0).random(s.shape, np.float32), shapes_of(model, "taesd"))
    arrays = weights.save(model, params, "taesd")
    assert arrays["encoder.layers.3.pool.0.weight"].shape == (16, 4, 1, 1)
    again, back = weights.load(arrays, "taesd")
    assert again == model
    same(back, params)


# ------------------------------------------------------------------------------------ messages


def test_every_misfit_is_counted_and_named(golden):
    arrays = {**golden["sd_vae"][0], "encoder.conv_in.bias": np.zeros(9), "extra": np.zeros(1)}
    del arrays["quant_conv.bias"]
    with pytest.raises(weights.WeightsError) as error:
        weights.load(arrays, "sd_vae", groups=4)
    for part in ("1 missing (quant_conv.bias)", "1 unexpected (extra)", "encoder.conv_in.bias is (9,), expected (8,)"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda sd, sd3: weights.load(sd3, "sdxl_vae", groups=4), r"'sdxl_vae'.*scale, shift.*scale=\.\.\."),
        (lambda sd, sd3: weights.load({"encoder.mid.attn_1.q.weight": np.zeros(1)}, "sd_vae"), r"Stable Diffusion.*diffusers"),
        (lambda sd, sd3: weights.load(sd, "taesd"), r"'taesd'.*'encoder.layers.0.weight'"),
        (lambda sd, sd3: weights.load({"0.weight": np.zeros(1)}, "taesd"), r"encoder or decoder of TAESD"),
        (lambda sd, sd3: weights.load(sd, "sd_vae"), r"width=8.*groups=32"),
        (lambda sd, sd3: weights.load_denoiser(sd, "sd_vae"), r"AutoencoderKL.*load\(\)"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(load, message, golden):
    with pytest.raises(ValueError, match=message):
        load(golden["sd_vae"][0], golden["sd3_vae"][0])
