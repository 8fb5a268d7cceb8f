"""Autoencoders beyond parity: batches of a set, keys, vmap, half precision, messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import autoencoders
from jaxdiff.models import TAESD, AutoencoderKL

KL = AutoencoderKL(channels=2, width=4, channel_mult=(1,), blocks=1, groups=2, scale=0.5, shift=0.25)
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 2, 4, 3), np.uint8)
X = jnp.asarray(IMAGES / np.float32(127.5) - 1)


def shapes_of(model, x=X[:1]):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), x))["params"]


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 2, jnp.float32), shapes_of(KL))


@pytest.fixture(scope="module")
def moments(params):
    """Mean and standard deviation of the latents of IMAGES, through vmap over single images."""
    one = lambda x: KL.apply({"params": params}, x[None], method="posterior")  # noqa: E731
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, 0], jax.jit(jax.vmap(one))(X))


def test_a_set_is_encoded_in_batches_of_one_program(params, moments):
    before = autoencoders._run._cache_size()
    z = autoencoders.encode(KL, params, IMAGES, batch_size=2)
    assert autoencoders._run._cache_size() == before + 1
    assert z.shape == (5, 2, 4, 2) and isinstance(z, np.ndarray)
    np.testing.assert_allclose(z, moments[0], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(autoencoders.encode(KL, params, np.asarray(X), batch_size=2), z)


def test_the_draw_of_an_image_depends_on_its_number_alone(params, moments):
    key = jax.random.key(3)
    draws = autoencoders.encode(KL, params, IMAGES, batch_size=2, key=key)
    noise = [jax.random.normal(jax.random.fold_in(key, i), (2, 4, 2)) for i in range(5)]
    np.testing.assert_allclose(draws, moments[0] + moments[1] * np.stack(noise), rtol=0, atol=1e-5)


def test_latents_are_decoded_and_clipped(params, moments):
    z = 10 * moments[0]
    images = autoencoders.decode(KL, params, z, batch_size=5)
    raw = autoencoders._run("decode", KL, params, jnp.asarray(z), None)
    assert images.shape == X.shape and jnp.abs(raw).max() > 1
    np.testing.assert_allclose(images, raw.clip(-1, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", [KL, TAESD(channels=2, width=4, blocks=(1,), pool=True)])
def test_half_precision_is_of_the_network_only(model):
    model = model.clone(dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # flax's norms and jax.nn's attention promote by themselves
        params = shapes_of(model)
        z = jax.eval_shape(lambda p, x: model.apply({"params": p}, x, method="encode"), params, X)
        program = jax.make_jaxpr(lambda p, z: model.apply({"params": p}, z, method="decode"))(params, z)
    assert (
        {leaf.dtype for leaf in jax.tree.leaves(params)}
        == {z.dtype}
        == {program.out_avals[0].dtype}
        == {np.dtype("float32")}
    )
    convolutions = [line for line in str(program).splitlines() if "= conv_general_dilated" in line]
    assert convolutions and all("bf16[" in line for line in convolutions)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shapes_of(AutoencoderKL(), jnp.zeros((1, 12, 16, 3))), r"encoder of AutoencoderKL.*divisible by 8, got 12x16"),
        (lambda: shapes_of(AutoencoderKL(), jnp.zeros((1, 8, 8, 4))), r"encoder of AutoencoderKL.*channels=3.*\[b, h, w, 3\].*got \(1, 8, 8, 4\)"),
        (lambda: shapes_of(AutoencoderKL(width=48)), r"width=48.*groups=32"),
        (lambda: KL.apply({"params": {}}, jnp.zeros((1, 8, 8, 4)), method="decode"), r"decoder of AutoencoderKL.*channels=2.*\[b, h, w, 2\].*got \(1, 8, 8, 4\)"),
        (lambda: shapes_of(TAESD(), jnp.zeros((1, 12, 16, 3))), r"encoder of TAESD.*divisible by 8, got 12x16"),
        (lambda: TAESD().apply({"params": {}}, jnp.zeros((1, 8, 8, 16)), method="decode"), r"decoder of TAESD.*channels=4.*got \(1, 8, 8, 16\)"),
        (lambda: autoencoders.encode(TAESD(), {}, np.zeros((1, 8, 8, 3), np.float32), key=jax.random.key(0)), r"TAESD.*key"),
        (lambda: autoencoders.decode(KL, {}, np.zeros((0, 8, 8, 2), np.float32)), r"got 0 inputs"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()
