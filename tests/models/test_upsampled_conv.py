"""`convolution.upsampled_conv` and `convolution.conv` against XLA's convolution: values, both modes, vmap, platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff.models import convolution

LAYOUT = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
PADDING = ((1, 1), (1, 1))


def inputs(shape=(2, 5, 6, 3), features=4):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.normal(size=(3, 3, shape[-1], features)).astype(np.float32))


def plain(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), PADDING, **LAYOUT)


def upsampled(x, kernel):
    return convolution.upsampled_conv(x, kernel, (1, 1), PADDING, **LAYOUT)


PAIRS = {
    "conv": (lambda x, k: convolution.conv(x, k, (1, 1), PADDING, **LAYOUT), plain),
    "upsampled": (upsampled, lambda x, k: plain(convolution.upsample(x), k)),
}


def near(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(other).max()))


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_both_modes_are_those_of_the_plain_form(name):
    ours, theirs = PAIRS[name]
    x, kernel = inputs()
    tangents = (jnp.cos(x), jnp.sin(kernel))
    near(jax.jit(ours)(x, kernel), theirs(x, kernel))
    near(jax.jvp(ours, (x, kernel), tangents), jax.jvp(theirs, (x, kernel), tangents))
    made, pull = jax.vjp(ours, x, kernel)
    near(pull(jnp.cos(made)), jax.vjp(theirs, x, kernel)[1](jnp.cos(made)))


@pytest.mark.parametrize("name", PAIRS)
def test_they_can_be_mapped(name):
    ours, theirs = PAIRS[name]
    x, kernel = inputs()
    near(
        jax.vmap(ours, (None, 0))(x, jnp.stack([kernel, 2 * kernel])),
        jnp.stack([theirs(x, kernel)] * 2) * jnp.array([1.0, 2.0])[:, None, None, None, None],
    )


def test_borders_and_single_pixels():
    """Every pixel of the smallest image is a border."""
    x, kernel = inputs((1, 1, 1, 2))
    near(upsampled(x, kernel), plain(convolution.upsample(x), kernel))


def test_the_low_resolution_form_has_four_ninths_of_the_products():
    """Read off the program for CPU: one product of (h + 1)(w + 1) rows by 4c times 4f, and no convolution."""
    x, kernel = inputs((1, 8, 8, 3))
    text = jax.jit(upsampled).trace(x, kernel).lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.convolution" not in text
    assert "tensor<81x12xf32>, tensor<12x16xf32>" in text


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_keep_the_plain_form(platform):
    x, kernel = inputs()
    text = jax.jit(upsampled).trace(x, kernel).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.convolution") == 1
    conv = jax.jit(PAIRS["conv"][0]).trace(x, kernel).lower(lowering_platforms=(platform,)).as_text()
    assert "optimization_barrier" not in conv


@pytest.mark.parametrize(("size", "padding"), [(5, PADDING), (3, ((0, 0), (1, 1)))])
def test_other_kernels_and_paddings_are_refused(size, padding):
    x, _ = inputs()
    with pytest.raises(ValueError, match="3x3 kernel and padding 1"):
        convolution.upsampled_conv(x, jnp.ones((size, size, 3, 4)), (1, 1), padding, **LAYOUT)
