"""The latent UNet: exact sizes, start-up behaviour, conditions, precision, gradients, and messages.

That its outputs are those of the public implementation is tested in tests/weights/test_weights_sd_unet.py.
"""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import InvalidRngError

from jaxdiff import models
from jaxdiff.models import LatentUNet, latent_unet
from jaxdiff.weights import sd_unet

SMALL = LatentUNet(
    width=8, channel_mult=(2,), blocks=1, depths=(0,), heads=0, head_width=4, groups=4, text_dim=6, pooled_dim=5,
    sizes=3, size_width=4, step_embed="reference",
)  # fmt: skip
COND = {
    "text": jax.random.normal(jax.random.key(7), (2, 5, 6)),
    "text_mask": jnp.ones((2, 5), int),
    "pooled": jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0], [-1.0, 0.0, 0.5, 1.0, 2.0]]),
    "sizes": jnp.array([[512.0, 0.0, 64.0], [300.0, 7.0, 0.0]]),
    "step": jnp.array([4.0, 8.0]),
}
X = jax.random.normal(jax.random.key(1), (2, 4, 4, 4))
T = jnp.array([10.0, 700.0])


def shapes_of(model, x, cond):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.zeros(1), cond))["params"]


@pytest.fixture(scope="module")
def small():
    """Random parameters of SMALL, and its compiled network (x, noise_label, cond, params=...)."""
    rng = np.random.default_rng(0)

    def draw(path, s):
        spread = 0.1 if len(s.shape) == 1 else 1 / math.sqrt(math.prod(s.shape[:-1]))
        return jnp.asarray(rng.normal(size=s.shape) * spread + (path[-1].key == "scale"), jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes_of(SMALL, X, COND))
    apply = jax.jit(lambda x, t, cond, params: models.bind(SMALL, params)(x, t, cond))
    return params, lambda x, t, cond, params=params: apply(x, t, cond, params)


# ------------------------------------------------------------------------------------ sizes and start


@pytest.mark.parametrize(
    ("size", "parameters", "arrays", "checksum"),
    [("sd1", 859_520_964, 686, 3291303659), ("sdxl", 2_567_463_684, 1680, 271055786)],
)
def test_sizes_and_public_names_of_the_published_networks(size, parameters, arrays, checksum):
    """The numbers that tests/golden/make_sd_unet.py prints."""
    model = LatentUNet(**latent_unet.SIZES[size])
    cond = {"text": jnp.zeros((1, 1, model.text_dim))}
    if size == "sdxl":
        cond |= {"pooled": jnp.zeros((1, 1280)), "sizes": jnp.zeros((1, 6))}
    shapes = shapes_of(model, jnp.zeros((1, 8, 8, 4)), cond)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == parameters
    names = [name for entry in sd_unet.entries(model, shapes) for name in entry.public]
    assert len(names) == arrays
    assert zlib.crc32("\n".join(sorted(names)).encode()) == checksum


def test_the_network_starts_at_zero_output_with_blocks_that_pass_their_input_on():
    def last_layers():
        params = SMALL.init(jax.random.key(0), X, T, COND)["params"]
        return params["out_conv"], params["up0_block1"]["conv1"], params["mid_transformer0"]["out"]

    kernels = jax.jit(last_layers)()
    assert [leaf.shape[-1] for leaf in jax.tree.leaves(kernels)] == [4, 4, 16, 16, 16, 16]
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, jnp.zeros_like(leaf)), kernels)


# ------------------------------------------------------------------------------------ conditions


def test_every_condition_is_used(small):
    apply = small[1]
    out = apply(X, T, COND)
    assert out.shape == X.shape and 0.1 < jnp.abs(out).max() < 10
    assert jnp.abs(apply(X, T + 1, COND) - out).max() > 1e-3
    for key in COND:
        changed = COND[key].at[:, -1].add(-1) if COND[key].ndim > 1 else COND[key] + 1
        assert jnp.abs(apply(X, T, {**COND, key: changed}) - out).max() > 1e-3, key


def test_examples_of_a_batch_do_not_mix(small):
    apply = small[1]
    swapped = apply(X[::-1], T[::-1], jax.tree.map(lambda leaf: leaf[::-1], COND))
    np.testing.assert_allclose(swapped[::-1], apply(X, T, COND), rtol=0, atol=1e-5)


def test_masked_text_and_the_order_of_text_tokens_are_ignored(small):
    apply = small[1]
    out = apply(X, T, COND)
    np.testing.assert_allclose(apply(X, T, {**COND, "text": COND["text"][:, ::-1]}), out, rtol=0, atol=1e-5)
    mask = {"text_mask": jnp.array([[1, 1, 1, 0, 0]] * 2)}
    hidden = [apply(X, T, {**COND, **mask, "text": COND["text"].at[:, 3:].add(shift)}) for shift in (0.0, 9.0)]
    np.testing.assert_array_equal(*hidden)
    assert jnp.abs(hidden[0] - out).max() > 1e-3


def test_a_step_embedding_that_ends_in_zeros_changes_nothing(small):
    params, apply = small
    shapes = shapes_of(SMALL.clone(step_embed="zero"), X, COND)
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(jnp.shape, params)
    zero = {**params, "step": {**params["step"], "out": jax.tree.map(jnp.zeros_like, params["step"]["out"])}}
    outs = [apply(X, T, {**COND, "step": step}, zero) for step in (COND["step"], COND["step"] + 9)]
    np.testing.assert_array_equal(*outs)


# ------------------------------------------------------------------------------------ how it runs


def test_bfloat16_compute_stays_close_and_returns_float32(small):
    params, apply = small
    full = apply(X, T, COND)
    with jax.numpy_dtype_promotion("standard"):  # flax's norms and jax.nn's attention promote by themselves
        half = jax.jit(models.bind(SMALL.clone(dtype=jnp.bfloat16), params))(X, T, COND)
    assert half.dtype == jnp.float32
    assert 0 < jnp.abs(half - full).max() < 0.06 * jnp.abs(full).max()


def test_loop_and_remat_reach_every_layer():
    """Read off the program; strided convolutions are those that `convolution.loop_conv` does not make fast."""
    model = SMALL.clone(channel_mult=(1, 2), depths=(0, 0), loop=True, remat=True)
    apply = lambda params: model.apply({"params": params}, X, T, COND)  # noqa: E731
    program = str(jax.make_jaxpr(apply)(shapes_of(model, X, COND)))
    assert program.count("remat2[") + program.count("checkpoint[") == 8 + 1  # residual and transformer blocks
    strides = [program.count(f"window_strides=({n}, {n})") for n in (1, 2)]
    assert strides == [2 * 8 + 4 + 5, 0]  # in, out, down, up; five blocks change the number of channels


def test_dropout_needs_its_key_and_changes_a_block():
    model, params = SMALL.clone(dropout=0.5), shapes_of(SMALL, X, COND)
    with pytest.raises(InvalidRngError, match="dropout"):
        jax.eval_shape(lambda p: model.apply({"params": p}, X, T, COND, deterministic=False), params)
    block = latent_unet.Block(4, groups=2, dropout=0.5, deterministic=False)
    inputs = X, T[:, None]
    shapes = jax.eval_shape(lambda: block.clone(deterministic=True).init(jax.random.key(0), *inputs))
    ones = jax.tree.map(lambda s: jnp.ones(s.shape), shapes)
    run = jax.jit(lambda key: block.apply(ones, *inputs, rngs={"dropout": key}))
    assert jnp.abs(run(jax.random.key(0)) - run(jax.random.key(1))).max() > 1e-3


def test_it_is_built_by_name():
    assert models.build("latent_unet", width=64, text_dim=32) == LatentUNet(width=64, text_dim=32)


# ------------------------------------------------------------------------------------ messages


def call(shape=(2, 4, 4, 4), without=(), cond=None, **changes):
    cond = {key: value for key, value in {**COND, **(cond or {})}.items() if key not in without}
    return shapes_of(SMALL.clone(**changes), jnp.zeros(shape), cond)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2, 4, 4, 3)}, r"LatentUNet.*channels=4.*\[b, h, w, 4\].*got \(2, 4, 4, 3\)"),
        ({"shape": (2, 4, 6, 4), "channel_mult": (1, 2, 2)}, r"divisible by 4, got 4x6"),
        ({"cond": {"label": 1}}, r"LatentUNet.*'label'.*text, text_mask, pooled, sizes, step"),
        ({"pooled_dim": 0, "sizes": 0}, r"LatentUNet.*'pooled'.*text, text_mask, step"),
        ({"without": ("text",)}, r"cond\['text'\].*null="),
        ({"without": ("pooled",)}, r"cond\['pooled'\].*null="),
        ({"cond": {"text": jnp.zeros((2, 5, 7))}}, r"cond\['text'\].*\[b, l, 6\], got \(2, 5, 7\).*text_dim=7"),
        ({"cond": {"text": jnp.zeros((2, 6))}}, r"\[b, l, 6\], got \(2, 6\)"),
        ({"cond": {"pooled": jnp.zeros((2, 4))}}, r"\[b, 5\], got \(2, 4\).*pooled_dim=4"),
        ({"without": ("sizes",)}, r"sizes=3.*cond\['sizes'\].*\[b, 3\], got none"),
        ({"cond": {"size": jnp.zeros((2, 3))}, "without": ("sizes",)}, r"'size'.*did you mean 'sizes'"),
        ({"cond": {"sizes": jnp.zeros((2, 6))}}, r"\[b, 3\], got \(2, 6\)"),
        ({"cond": {"sizes": jnp.zeros(3)}}, r"\[b, 3\], got \(3,\)"),
        ({"heads": 2}, r"heads=2, head_width=4"),
        ({"head_width": 0}, r"heads=0, head_width=0"),
        ({"head_width": 5}, r"16.*head_width=5"),
        ({"depths": (1, 0)}, r"\(2,\), depths=\(1, 0\)"),
        ({"groups": 32}, r"width=8.*groups=32"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**arguments)
