"""MDT: exact sizes, an independent implementation, hidden tokens in both forms, start-up behaviour, and messages.

That its outputs are those of the public implementation is tested in tests/weights/test_weights_mdt.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxdiff import models
from jaxdiff.models import MDT, embeddings, mdt, stacks

ROWS, COLUMNS, KEPT = 2, 3, 3  # tokens of X, and how many of the 6 are seen
SMALL = MDT(depth=6, width=16, heads=2, decoder=2, num_classes=3, mask_ratio=(0.4, 0.4))
SHALLOW = SMALL.clone(depth=2, decoder=0)
X = jax.random.normal(jax.random.key(1), (2, 2 * ROWS, 2 * COLUMNS, 4))
T = jnp.array([3.0, 700.0])
COND = {"label": jnp.array([0, 2])}
KEY = jax.random.key(5)


def shapes_of(model, shape=X.shape, cond=None):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(shape), jnp.zeros(1), cond))["params"]


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)

    def draw(s):
        spread = 0.3 if len(s.shape) == 1 else 0.7 / math.sqrt(s.shape[0] if s.shape[0] > 2 else 4)
        return jnp.asarray(rng.normal(size=s.shape) * spread, jnp.float32)

    return jax.tree.map(draw, shapes_of(SMALL))


@pytest.fixture(scope="module")
def run(params):
    """Outputs under a mask key or none; form "drop" leaves tokens out, by two buckets and in scanned blocks."""
    drop = SMALL.clone(mask_buckets=2, scan=True, remat=True)
    programs = {
        name: jax.jit(lambda key, x, t, cond, params, model=model: models.bind(model, params, mask=key)(x, t, cond))
        for name, model in {"mask": SMALL, "drop": drop}.items()
    }

    def run(key, form="mask", x=X, t=T, cond=COND, params=params):
        for name in ("encode_in", "encode_out", "decode") if form == "drop" else ():
            params = stacks.stack_blocks(params, 2, name)
        return programs[form](key, x, t, cond, params)

    return run


# ------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("fields", "side", "expected"),
    [
        (mdt.SIZES["S"], 32, 38_454_872),
        (mdt.SIZES["B"], 32, 150_931_856),
        (mdt.SIZES["L"], 32, 507_015_776),
        (mdt.SIZES["XL"], 32, 742_263_904),
        ({"mask_ratio": ()}, 32, 718_342_176),
        ({}, 64, 745_429_088),
    ],
)
def test_sizes(fields, side, expected):
    shapes = shapes_of(MDT(**fields, scan=fields != mdt.SIZES["S"]), (1, side, side, 4))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == expected


# ------------------------------------------------------------------------------------ an independent implementation


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def dense(p, x):
    kernel = p["kernel"].reshape(x.shape[-1], -1)
    return x @ kernel + p["bias"].reshape(-1)


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def block(p, x, c, places, skip=None):
    """One example's tokens x [n d], which stand at `places` (row, column) of the grid."""
    if skip is not None:
        x = dense(p["skip"], np.concatenate([x, skip], -1))
    heads, d = SMALL.heads, x.shape[-1]
    table, p = p["position_bias"], p["dit"]
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = np.split(dense(p["modulation"]["dense"], silu(c)), 6)
    q, k, v = np.split(dense(p["attention"]["qkv"], norm(x) * (1 + scale_a) + shift_a), 3, axis=-1)
    out = np.zeros_like(x)
    for h in range(heads):
        part = slice(h * d // heads, (h + 1) * d // heads)
        logits = q[:, part] @ k[:, part].T / np.sqrt(d / heads)
        for i, (ya, xa) in enumerate(places):
            for j, (yb, xb) in enumerate(places):
                logits[i, j] += table[(ya - yb + ROWS - 1) * (2 * COLUMNS - 1) + xa - xb + COLUMNS - 1, h]
        share = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, part] = share / share.sum(-1, keepdims=True) @ v[:, part]
    merge = {"kernel": p["attention"]["out"]["kernel"].reshape(d, d), "bias": p["attention"]["out"]["bias"]}
    x = x + gate_a * dense(merge, out)
    hidden = gelu(dense(p["mlp"]["in"], norm(x) * (1 + scale_m) + shift_m))
    return x + gate_m * dense(p["mlp"]["out"], hidden)


def reference(params, x, t, label, seen=None):
    """The network on one example in NumPy; `seen` lists the tokens that are not hidden."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    angles = t * 10000.0 ** (-np.arange(128) / 128)
    c = dense(p["time"]["out"], silu(dense(p["time"]["in"], np.concatenate([np.cos(angles), np.sin(angles)]))))
    c = c + p["label"]["embedding"][label]
    places = [(row, column) for row in range(ROWS) for column in range(COLUMNS)]
    patches = np.stack([x[2 * r : 2 * r + 2, 2 * s : 2 * s + 2].reshape(-1) for r, s in places])
    start = dense(p["patches"], patches) + p["positions"].reshape(len(places), -1)
    some = list(range(len(places))) if seen is None else list(seen)
    h, kept, there = start[some], [], [places[i] for i in some]
    for i in range(2):
        h = block(p[f"encode_in_{i}"], h, c, there)
        kept.append(h)
    for i in range(2):
        h = block(p[f"encode_out_{i}"], h, c, there, kept.pop())
    full = np.broadcast_to(p["mask_token"], start.shape).copy()
    full[some] = h
    full = full + p["decoder_positions"].reshape(start.shape)
    filled = block(p["side"], full, c, places)
    h = np.stack([full[i] if i in some else filled[i] for i in range(len(places))])
    for i in range(2):
        h = block(p[f"decode_{i}"], h, c, places, start)
    shift, scale = np.split(dense(p["final"]["modulation"]["dense"], silu(c)), 2)
    h = dense(p["final"]["out"], norm(h) * (1 + scale) + shift)
    out = np.zeros((2 * ROWS, 2 * COLUMNS, 8))
    for token, (r, s) in zip(h, places, strict=True):
        out[2 * r : 2 * r + 2, 2 * s : 2 * s + 2] = token.reshape(2, 2, 8)
    return out


@pytest.mark.parametrize("hide", [False, True])
def test_outputs_of_an_independent_implementation(hide, params, run):
    """That both forms of hiding agree is tested below."""
    out, seen = run(KEY if hide else None), [None, None]
    if hide:
        _, order = jax.random.split(SMALL.apply({}, rngs={"mask": KEY}, method=lambda model: model.make_rng("mask")))
        seen = [np.flatnonzero(row < KEPT) for row in np.asarray(mdt.random_ranks(order, 2, ROWS * COLUMNS))]
    for i in range(2):
        wanted = reference(params, np.asarray(X[i]), float(T[i]), int(COND["label"][i]), seen[i])
        assert 0.3 < np.abs(wanted).max() < 30
        np.testing.assert_allclose(out[i], wanted, rtol=0, atol=2e-5)


# ------------------------------------------------------------------------------------ hidden tokens


def test_masked_keys_give_what_dropped_tokens_give(run):
    outs = {form: run(KEY, form) for form in ("mask", "drop")}
    np.testing.assert_allclose(outs["drop"], outs["mask"], rtol=0, atol=5e-6)
    assert jnp.abs(outs["mask"] - run(None)).max() > 1e-2
    assert jnp.abs(run(jax.random.key(6)) - outs["mask"]).max() > 1e-2


def test_nothing_is_hidden_without_a_mask_key_or_when_deterministic():
    """Hiding is what sorts."""

    def hides(model, params, **given):
        apply = lambda params: model.apply({"params": params}, X, T, COND, **given)  # noqa: E731
        return "sort[" in str(jax.make_jaxpr(apply)(params))

    rngs, shapes = {"mask": KEY, "dropout": KEY}, shapes_of(SHALLOW)
    assert hides(SHALLOW, shapes, deterministic=False, rngs=rngs)
    assert not hides(SHALLOW, shapes, deterministic=False, rngs={"dropout": KEY})
    assert not hides(SHALLOW, shapes, rngs=rngs)
    never = SHALLOW.clone(mask_ratio=())
    assert not hides(never, shapes, deterministic=False, rngs=rngs)
    assert set(shapes) - set(shapes_of(never)) == {"mask_token", "side"}


def encoded(model, key):
    """What the first encoder block is called with in each branch, (tokens, shared), for a batch of 3 times 64 tokens."""
    found, x = [], jnp.zeros((3, 16, 16, 4))
    tables = {"params": jax.tree.map(lambda s: jnp.zeros(s.shape), shapes_of(model, x.shape))}

    def look(call, args, kwargs, context):
        if context.module.name == "encode_in_0":
            found.append(args)
        return call(*args, **kwargs)

    with nn.intercept_methods(look):
        model.apply(tables, x, 1.0, deterministic=False, rngs={"mask": key})
    return found


def test_one_fraction_is_masked_in_all_examples_uniform_in_its_range():
    """64 (1 - r) for r in [0.3, 0.5] is 32 to 44.8."""
    model = SHALLOW.clone(mask_ratio=(0.3, 0.5))
    masks = jax.jit(jax.vmap(lambda key: encoded(model, key)[0][1].mask))
    seen = np.asarray(masks(jax.random.split(KEY, 500)))
    counts = seen.sum(-1)
    assert (counts == counts[:, :1]).all()
    assert counts.min() == 32 and counts.max() == 44
    np.testing.assert_allclose(counts[:, 0].mean(), 64 * 0.6 - 0.5, atol=0.6)  # floor takes half off
    np.testing.assert_allclose(seen.mean((0, 1)), counts.mean() / 64, atol=0.06)  # every place alike
    assert (seen[:, 0] != seen[:, 1]).any(-1).all()


def test_buckets_drop_the_tokens_at_the_middle_of_equal_parts_of_the_range():
    lengths = set()
    model = SHALLOW.clone(mask_ratio=(0.3, 0.5), mask_buckets=4)
    jax.eval_shape(lambda: lengths.update(tokens.shape[1] for tokens, _ in encoded(model, KEY)))
    assert lengths == {math.floor(64 * (1 - r)) for r in (0.475, 0.425, 0.375, 0.325)}


def test_offsets_are_numbered_apart():
    index = mdt.relative_index(ROWS, COLUMNS)
    places = [(row, column) for row in range(ROWS) for column in range(COLUMNS)]
    offsets = {}
    for i, (ya, xa) in enumerate(places):
        for j, (yb, xb) in enumerate(places):
            offsets.setdefault((ya - yb, xa - xb), set()).add(int(index[i, j]))
    assert all(len(numbers) == 1 for numbers in offsets.values())
    assert {number for numbers in offsets.values() for number in numbers} == set(range(3 * 5))


# ------------------------------------------------------------------------------------ start and use


def test_it_starts_at_zero_output_hidden_or_not_with_blocks_that_do_something(params, run):
    @jax.jit
    def start():
        made = SMALL.init(jax.random.key(0), X, T, COND)["params"]
        shown = {name: made[name] for name in ("positions", "decoder_positions")}
        block = made["decode_0"]
        return made["final"]["out"], shown, (block["position_bias"], block["skip"]["kernel"])

    last, tables, (bias, skip) = start()
    for key in (None, KEY):
        np.testing.assert_array_equal(run(key, params={**params, "final": {**params["final"], "out": last}}), 0)
    for table in tables.values():
        np.testing.assert_array_equal(table, embeddings.sincos_positions(ROWS, COLUMNS, 16))
    assert 0.01 < jnp.std(bias) < 0.03 and jnp.std(skip) > 0.1


def test_examples_of_a_batch_do_not_mix_and_labels_are_used(run):
    out = run(None)
    swapped = run(None, x=X[::-1], t=T[::-1], cond={"label": COND["label"][::-1]})
    np.testing.assert_allclose(swapped[::-1], out, rtol=0, atol=1e-5)
    assert jnp.abs(run(None, cond={"label": 2 - COND["label"]}) - out).max() > 1e-3


def test_bfloat16_compute_stays_close_and_returns_float32(params, run):
    full = run(None)
    with jax.numpy_dtype_promotion("standard"):  # jax.nn's attention promotes by itself
        half = jax.jit(models.bind(SMALL.clone(dtype=jnp.bfloat16), params))(X, T, COND)
    assert half.dtype == jnp.float32
    assert 0 < jnp.abs(half - full).max() < 0.06 * jnp.abs(full).max()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: shapes_of(SMALL, (1, 4, 7, 4)), r"MDT.*divisible by 2, got 4x7"),
        (lambda p: shapes_of(SMALL, (1, 4, 6, 3)), r"MDT.*channels=4.*got \(1, 4, 6, 3\)"),
        (lambda p: shapes_of(SMALL, cond={"text": 1}), r"MDT.*'text'.*label"),
        (lambda p: shapes_of(SMALL.clone(grid=4)), r"4x4.*8x8, got 4x6"),
        (lambda p: models.bind(SMALL, p)(jnp.zeros((1, 8, 8, 4)), jnp.zeros(1)), r"2x3.*4x6, got 8x8"),
        (lambda p: shapes_of(SMALL.clone(depth=5)), r"depth=5, decoder=2"),
        (lambda p: shapes_of(SMALL.clone(decoder=6)), r"depth=6, decoder=6"),
        (lambda p: shapes_of(SMALL.clone(mask_ratio=(0.5, 0.3))), r"0 < low <= high < 1.*got \(0.5, 0.3\)"),
        (lambda p: shapes_of(SMALL.clone(mask_ratio=(0.4,))), r"mask_ratio.*got \(0.4,\)"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message, params):
    with pytest.raises(ValueError, match=message):
        call(params)
