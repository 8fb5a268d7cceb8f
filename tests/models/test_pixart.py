"""PixArt: start-up behaviour, conditions, the null text, precision, and messages.

That its outputs and sizes are those of the public implementation is tested in tests/weights/test_weights_pixart.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import models
from jaxdiff.models import PixArt

SMALL = PixArt(
    depth=2, width=12, heads=2, text_dim=6, null_tokens=5, size_embed=True, learn_variance=False, step_embed="reference"
)
COND = {
    "text": jax.random.normal(jax.random.key(7), (2, 5, 6)),
    "text_mask": jnp.ones((2, 5), int),
    "original_size": jnp.array([[51.0, 7.0], [30.0, 64.0]]),
    "aspect_ratio": jnp.array([[1.5], [0.7]]),
    "step": jnp.array([4.0, 8.0]),
}
X = jax.random.normal(jax.random.key(1), (2, 4, 6, 4))
T = jnp.array([10.0, 700.0])


def shapes_of(model, shape=X.shape, cond=COND):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(shape), jnp.zeros(1), cond))["params"]


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)

    def draw(s):
        spread = 0.1 if len(s.shape) == 1 else 1 / math.sqrt(math.prod(s.shape[:-1]))
        return jnp.asarray(rng.normal(size=s.shape) * spread, jnp.float32)

    return jax.tree.map(draw, shapes_of(SMALL))


@pytest.fixture(scope="module")
def apply(params):
    """The compiled network (x, noise_label, cond, params=...)."""
    program = jax.jit(lambda x, t, cond, params: models.bind(SMALL, params)(x, t, cond))
    return lambda x, t, cond, params=params: program(x, t, cond, params)


def without(*keys):
    return {key: value for key, value in COND.items() if key not in keys}


# ------------------------------------------------------------------------------------ start and conditions


def test_it_starts_at_zero_output_with_gates_that_are_open(params, apply):
    @jax.jit
    def start():
        made = SMALL.init(jax.random.key(0), X, T, COND)["params"]
        block = made["blocks_1"]
        return made["final"]["out"], block["cross_attention"]["out"], block["table"], made["null_text"]

    last, cross, table, null = start()
    np.testing.assert_array_equal(apply(X, T, COND, {**params, "final": {**params["final"], "out": last}}), 0)
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, jnp.zeros_like(leaf)), cross)
    np.testing.assert_allclose([table.std(), null.std()], [12**-0.5, 6**-0.5], rtol=0.3)


def test_every_condition_is_used(apply):
    out = apply(X, T, COND)
    assert out.shape == X.shape and 0.1 < jnp.abs(out).max() < 10
    assert jnp.abs(apply(X, T + 1, COND) - out).max() > 1e-3
    changes = {key: value.at[..., -1].add(-1) for key, value in COND.items()}
    for key, value in changes.items():
        assert jnp.abs(apply(X, T, {**COND, key: value}) - out).max() > 1e-3, key


def test_examples_of_a_batch_do_not_mix(apply):
    swapped = apply(X[::-1], T[::-1], jax.tree.map(lambda leaf: leaf[::-1], COND))
    np.testing.assert_allclose(swapped[::-1], apply(X, T, COND), rtol=0, atol=1e-5)


def test_masked_text_the_order_of_its_tokens_and_their_number_are_ignored(apply):
    out, text = apply(X, T, COND), COND["text"]
    np.testing.assert_allclose(apply(X, T, {**COND, "text": text[:, ::-1]}), out, rtol=0, atol=1e-5)
    three = {"text_mask": jnp.array([[1, 1, 1, 0, 0]] * 2)}
    hidden = [apply(X, T, {**COND, **three, "text": text.at[:, 3:].add(shift)}) for shift in (0.0, 9.0)]
    np.testing.assert_array_equal(*hidden)
    assert jnp.abs(hidden[0] - out).max() > 1e-3
    two, twice = jnp.array([[1, 1, 0, 0, 0]] * 2), jnp.array([[1, 1, 1, 1, 0]] * 2)
    again = text.at[:, 2:4].set(text[:, :2])  # every token once, or every token twice
    outs = [apply(X, T, {**COND, "text": again, "text_mask": mask}) for mask in (two, twice)]
    np.testing.assert_allclose(*outs, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ the null text


def test_the_null_text_stands_in_where_there_is_no_other(params, apply):
    null = jnp.broadcast_to(params["null_text"], (2, 5, 6))
    wanted = apply(X, T, {**COND, "text": null})
    mixed = apply(X, T, {**COND, "text_mask": jnp.array([[0] * 5, [1] * 5])})
    np.testing.assert_allclose(mixed[0], wanted[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(mixed[1], apply(X, T, COND)[1], rtol=0, atol=1e-5)

    def total(null_text):  # no text at all
        out = models.bind(SMALL, {**params, "null_text": null_text})(X, T, without("text", "text_mask"))
        return out.sum(), out

    (_, out), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(params["null_text"])
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(slope, 0)  # a constant


def test_shorter_texts_are_padded_to_the_null_text(apply):
    short = {**COND, "text": COND["text"][:, :3], "text_mask": jnp.array([[1, 1, 1], [0, 0, 0]])}
    hidden = {**COND, "text_mask": jnp.array([[1, 1, 1, 0, 0], [0] * 5])}
    np.testing.assert_allclose(apply(X, T, short), apply(X, T, hidden), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ how it runs


def test_bfloat16_compute_stays_close_and_returns_float32(params, apply):
    full = apply(X, T, COND)
    with jax.numpy_dtype_promotion("standard"):  # jax.nn's attention promotes by itself
        half = jax.jit(models.bind(SMALL.clone(dtype=jnp.bfloat16), params))(X, T, COND)
    assert half.dtype == jnp.float32
    assert 0 < jnp.abs(half - full).max() < 0.06 * jnp.abs(full).max()


def test_it_is_built_by_name():
    assert models.build("pixart", width=384, text_dim=32) == PixArt(width=384, text_dim=32)


PLAIN = SMALL.clone(null_tokens=0, size_embed=False, step_embed="")


def call(cond=COND, shape=X.shape, model=SMALL):
    return shapes_of(model, shape, cond)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2, 4, 4, 3)}, r"PixArt.*channels=4.*\[b, h, w, 4\].*got \(2, 4, 4, 3\)"),
        ({"shape": (2, 5, 4, 4)}, r"PixArt.*divisible by 2, got 5x4"),
        ({"cond": {**COND, "label": 1}}, r"PixArt.*'label'.*text, text_mask, original_size, aspect_ratio, step"),
        ({"cond": {}, "model": PLAIN}, r"cond\['text'\].*null=\{'text': ...\}\).*null_tokens=120"),
        ({"cond": without("text")}, r"PixArt.*cond\['text'\]"),
        ({"cond": {**COND, "text": jnp.zeros((2, 5, 7))}}, r"cond\['text'\].*\[b, l, 6\], got \(2, 5, 7\).*text_dim=7"),
        ({"cond": {**COND, "text": jnp.zeros((2, 6))}}, r"\[b, l, 6\], got \(2, 6\)"),
        ({"cond": {**COND, "text": jnp.zeros((2, 9, 6)), "text_mask": jnp.ones((2, 9))}}, r"null_tokens=5.*got 9"),
        ({"cond": {**COND, "text_mask": jnp.ones((2, 4))}}, r"cond\['text_mask'\].*\(2, 5\).*got \(2, 4\)"),
        ({"cond": without("original_size")}, r"size_embed.*'original_size'\].*\[b, 2\], got none"),
        ({"cond": without("aspect_ratio")}, r"size_embed.*'aspect_ratio'\].*\[b, 1\], got none"),
        ({"cond": {**without("aspect_ratio"), "crop": jnp.ones((2, 1))}}, r"PixArt.*'crop'"),
        ({"cond": {**COND, "aspect_ratio": jnp.ones(2)}}, r"'aspect_ratio'\].*\[b, 1\], got \(2,\)"),
        ({"model": SMALL.clone(width=16)}, r"size_embed.*3.*got 16"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**arguments)
