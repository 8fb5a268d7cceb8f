"""Networks: exact sizes, start-up behaviour, layouts, precision, and messages."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import denoisers, flops, models, solvers
from jaxdiff.models import DiT, MMDiT, UNet, convolution, dit, embeddings, mmdit, stacks, transformer
from jaxdiff.trees import by_name

TEXT = {"text": jnp.zeros((1, 7, 2048)), "pooled": jnp.zeros((1, 2048))}


def count(model, side, channels, cond=None):
    """Parameters, from shapes alone."""
    x = jnp.zeros((1, side, side, channels))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.zeros(1), cond))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


ADM64 = {
    "resolution": 64,
    "width": 192,
    "channel_mult": (1, 2, 3, 4),
    "blocks": 3,
    "attention": (32, 16, 8),
    "style": "adm",
}


@pytest.mark.parametrize(
    ("model", "side", "expected"),
    [
        (UNet(augment_dim=9), 32, 55_733_891),
        (UNet(augment_dim=9, num_classes=10), 32, 55_735_299),
        (UNet(resolution=64, channel_mult=(1, 2, 2, 2), augment_dim=9), 64, 61_805_571),
        (UNet(augment_dim=9, style="ncsnpp"), 32, 56_397_827 + 128),  # + its constant frequencies
        (UNet(**ADM64, num_classes=1000), 64, 295_899_267),
    ],
)
def test_unet_sizes(model, side, expected):
    assert count(model, side, 3) == expected


def test_the_fourier_scale_is_that_of_the_frequencies_alone():
    """iCT draws the frequencies of NCSN++ with standard deviation 0.02 instead of 16."""

    def initial(**fields):
        model = UNet(resolution=8, width=64, channel_mult=(1,), blocks=1, attention=(), style="ncsnpp", **fields)
        return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)), jnp.zeros(1))["params"]

    wide, narrow = by_name(initial()), by_name(initial(fourier_scale=0.02))
    (name,) = (name for name in wide if not np.array_equal(wide[name], narrow[name]))
    frequencies = narrow[name]
    np.testing.assert_allclose(800 * frequencies, wide[name], rtol=1e-5)
    assert 0.015 < frequencies.std() < 0.025


@pytest.mark.parametrize(
    ("size", "expected"), [("S", 32_865_056), ("B", 130_315_808), ("L", 457_840_672), ("XL", 674_834_720)]
)
@pytest.mark.parametrize("scan", [False, True])
def test_dit_sizes(size, expected, scan):
    assert count(DiT(**dit.SIZES[size], scan=scan), 32, 4) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (mmdit.SIZES["XL"], 1_331_800_720),
        ({"qk_norm": False}, 1_331_792_656),
        ({"heads": 18}, 1_331_799_824),
        ({"depth": 18, "heads": 18}, 853_694_224),
        ({**mmdit.SIZES["XL"], "scan": True}, 1_331_800_720),
    ],
)
def test_mmdit_sizes(fields, expected):
    assert count(MMDiT(**fields), 32, 4, TEXT) == expected


def test_mmdit_small_sizes_and_sd3_medium():
    for size, millions in [("S", 64.20), ("B", 253.14), ("L", 901.76)]:
        assert abs(count(MMDiT(**mmdit.SIZES[size]), 32, 4, TEXT) / 1e6 - millions) < 0.005
    medium = MMDiT(depth=24, width=1536, heads=24, channels=16, text_dim=4096, qk_norm=False)
    assert count(medium, 32, 16, {**TEXT, "text": jnp.zeros((1, 7, 4096))}) == 2_028_328_000


# ------------------------------------------------------------------------------------ small models to run

SMALL_UNET = {"resolution": 8, "width": 16, "channel_mult": (1, 2), "blocks": 1, "attention": (4,), "num_classes": 5}
SMALL_VIT = {"depth": 3, "width": 32, "heads": 4}
SMALL = {
    "ddpmpp": (UNet(**SMALL_UNET, augment_dim=9), 3),
    "ncsnpp": (UNet(**SMALL_UNET, style="ncsnpp"), 3),
    "adm": (UNet(**{**SMALL_UNET, "width": 64}, style="adm"), 3),
    "dit": (DiT(**SMALL_VIT, num_classes=5, learn_variance=False), 4),
    "mmdit": (MMDiT(**SMALL_VIT, text_dim=6, pooled_dim=5), 4),
}
CONDS = {"mmdit": {"text": jax.random.normal(jax.random.key(7), (2, 3, 6)), "pooled": jnp.ones((2, 5))}}


def make(name, seed=0, **changes):
    """A small model with every parameter random, an input and a condition."""
    model, channels = SMALL[name]
    model = model.clone(**changes)
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, channels))
    cond = CONDS.get(name, {"label": jnp.array([1, 4])})
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(seed), x, jnp.ones(2), cond))["params"]
    rng = np.random.default_rng(seed)
    spread = lambda s: 0.7 / np.sqrt(max(1, math.prod(s.shape[:-1])))  # noqa: E731
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s.shape) * spread(s) + (len(s.shape) == 1), jnp.float32), shapes
    )
    return model, params, x, cond


@pytest.mark.parametrize("name", ["ddpmpp", "dit", "mmdit"])
def test_networks_start_at_zero_output(name):
    model, channels = SMALL[name]
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, channels))
    cond = CONDS.get(name, {"label": jnp.array([1, 4])})
    out, _ = jax.jit(lambda: model.init_with_output(jax.random.key(0), x, jnp.ones(2), cond))()
    np.testing.assert_allclose(out, 0, atol=1e-3 if name == "ddpmpp" else 0)


@pytest.mark.parametrize("name", SMALL)
def test_every_network_solves_with_every_condition_used(name, count_traces):
    model, params, x, cond = make(name)
    apply = count_traces(models.bind(model, params))

    @jax.jit
    def sample(x, cond):
        return solvers.solve(denoisers.edm(apply), x, solvers.grid(4, 0.1, 10), "euler", cond)

    out = sample(10 * x, cond)
    assert out.shape == x.shape and jnp.isfinite(out).all()
    for key in cond:
        changed = {**cond, key: cond[key] + 1 if key != "label" else 4 - cond[key]}
        assert jnp.abs(sample(10 * x, changed) - out).max() > 1e-4, key
    assert apply.traces == 1


@pytest.mark.slow
def test_networks_vmap_over_seeds_and_grad_through_a_solve():
    """One network for all; the others are trained elsewhere."""
    model, params, x, cond = make("mmdit")

    def sample(params, seed):
        noise = jax.random.normal(jax.random.key(seed), x.shape)
        return solvers.solve(denoisers.edm(models.bind(model, params)), 5 * noise, [5.0, 0.5, 0.1], "euler", cond)

    batch = jax.jit(jax.vmap(sample, (None, 0)))(params, jnp.arange(2))
    np.testing.assert_allclose(batch[1], jax.jit(sample)(params, 1), rtol=1e-4, atol=1e-4)
    gradients = jax.jit(jax.grad(lambda p: jnp.square(sample(p, 0)).mean()))(params)
    # nothing passed in, constants, biases that norms remove, and the queries of a stream that ends
    unused = ("map_augment", "map_noise", "bias", "['last_block']['text_q_norm']")
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert jnp.isfinite(leaf).all()
        names = jax.tree_util.keystr(path)
        if not any(name in names for name in unused):
            assert jnp.abs(leaf).max() > 0, path


@pytest.mark.parametrize("name", [pytest.param("adm", marks=pytest.mark.slow), "dit", "mmdit"])
def test_bfloat16_compute_stays_close_and_returns_float32(name):
    model, params, x, cond = make(name)
    full = jax.jit(models.bind(model, params))(x, jnp.ones(2), cond)
    with jax.numpy_dtype_promotion("standard"):  # flax's norms and jax.nn's attention promote by themselves
        half = jax.jit(models.bind(model.clone(dtype=jnp.bfloat16), params))(x, jnp.ones(2), cond)
    assert half.dtype == jnp.float32
    assert 0 < jnp.abs(half - full).max() < 0.06 * jnp.abs(full).max()


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("dit", "dots_no_batch"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("dit", "dots"), ("dit", "full"), ("ncsnpp", True)]),
    ],
)
def test_remat_changes_memory_not_values(name, remat):
    model, params, x, cond = make(name)
    loss = lambda model: jax.jit(jax.grad(lambda p: jnp.square(models.bind(model, p)(x, jnp.ones(2), cond)).sum()))  # noqa: E731
    plain, saved = loss(model)(params), loss(model.clone(remat=remat))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), plain, saved)


def test_remat_policies_recompute_everything_attention_or_no_product():
    """Products of a gradient: those without, with one more forward pass, and in between."""
    model, params, x, cond = make("dit", depth=1)

    def gradient(remat):
        net = model.clone(remat=remat)
        return jax.grad(lambda p: jnp.square(models.bind(net, p)(x, jnp.ones(2), cond)).sum())

    work = {name: flops.total(jax.make_jaxpr(gradient(name))(params).jaxpr) for name in ("", *stacks.REMAT)}
    assert work["full"] > work["dots_no_batch"] > work["dots"] == work[""]
    attention = 2 * (2 * 2 * 16 * 16 * model.width)  # q k' and the sum over v, multiply-adds of two images of 16 tokens
    assert work["dots_no_batch"] - work["dots"] == attention


@pytest.mark.parametrize("name", ["dit", "mmdit"])
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_blocks_equal_unrolled_ones(name, remat):
    model, params, x, cond = make(name)
    depth = model.depth - (name == "mmdit")
    stacked = stacks.stack_blocks(params, depth)
    out = jax.jit(models.bind(model, params))(x, jnp.ones(2), cond)
    scanned = jax.jit(models.bind(model.clone(scan=True, remat=remat), stacked))(x, jnp.ones(2), cond)
    np.testing.assert_allclose(scanned, out, rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, stacks.unstack_blocks(stacked), dict(params))


@pytest.mark.parametrize("name", ["ddpmpp", "dit"])
def test_a_missing_label_is_the_null_label(name):
    model, params, x, _ = make(name)
    apply = jax.jit(models.bind(model, params))
    none, null = apply(x, jnp.ones(2)), apply(x, jnp.ones(2), {"label": jnp.full(2, 5)})
    np.testing.assert_allclose(none, null, atol=3e-6)


@pytest.mark.parametrize("name", SMALL)
def test_examples_of_a_batch_do_not_mix(name):
    model, params, x, cond = make(name)
    apply = jax.jit(models.bind(model, params))
    swapped = apply(x[::-1], jnp.array([2.0, 1.0]), jax.tree.map(lambda a: a[::-1], cond))
    np.testing.assert_allclose(swapped[::-1], apply(x, jnp.array([1.0, 2.0]), cond), rtol=1e-4, atol=1e-5)


def test_dropout_needs_its_key_and_changes_the_output():
    model, params, x, cond = make("ddpmpp", dropout=0.5)
    still = jax.jit(models.bind(model, params))(x, jnp.ones(2), cond)
    noisy = jax.jit(models.bind(model, params, dropout=jax.random.key(3)))(x, jnp.ones(2), cond)
    assert jnp.abs(still - noisy).max() > 1e-3


def test_augmentation_labels_enter_the_unet_as_control():
    model, params, x, cond = make("ddpmpp")
    apply = jax.jit(models.bind(model, params))
    base = apply(x, jnp.ones(2), cond)
    zeros = apply(x, jnp.ones(2), {**cond, "augment": jnp.zeros((2, 9))})
    ones = apply(x, jnp.ones(2), {**cond, "augment": jnp.ones((2, 9))})
    np.testing.assert_array_equal(base, zeros)
    assert jnp.abs(base - ones).max() > 1e-3


def test_mmdit_ignores_masked_text_and_the_order_of_text_tokens():
    model, params, x, cond = make("mmdit")
    apply = jax.jit(models.bind(model, params))
    base = apply(x, jnp.ones(2), cond)
    padded = {**cond, "text": jnp.pad(cond["text"], ((0, 0), (0, 2), (0, 0)), constant_values=9.0)}
    mask = jnp.array([[1, 1, 1, 0, 0]] * 2)
    np.testing.assert_allclose(apply(x, jnp.ones(2), {**padded, "text_mask": mask}), base, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        apply(x, jnp.ones(2), {**cond, "text": cond["text"][:, ::-1]}), base, rtol=1e-4, atol=1e-5
    )
    assert jnp.abs(apply(x, jnp.ones(2), padded) - base).max() > 1e-3


def test_mmdit_can_do_without_pooled_text():
    model = SMALL["mmdit"][0].clone(pooled_dim=0)
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((2, 8, 8, 4)), 1.0, {"text": jnp.zeros((2, 3, 6))})
    )
    assert "pooled" not in shapes["params"]


def test_position_tables_are_cropped_in_the_centre_and_constant():
    model, params, _, cond = make("mmdit", position_table=8)
    x = jax.random.normal(jax.random.key(0), (2, 8, 12, 4))
    out = jax.jit(lambda p: jnp.square(models.bind(model, p)(x, jnp.ones(2), cond) - 1).sum())
    assert jnp.abs(jax.jit(jax.grad(out))(params)["positions"]).max() == 0
    table = params["positions"]
    corner, inside = table.at[0, 0, 0].add(1), table.at[2, 1, 0].add(1)
    assert out({**params, "positions": corner}) == out(params)
    assert out({**params, "positions": inside}) != out(params)


# ------------------------------------------------------------------------------------ layers


def test_sincos_positions_follow_their_definition_column_first():
    table = embeddings.sincos_positions(3, 5, 8)
    square = embeddings.position_table(6, 8)
    np.testing.assert_array_equal(square, embeddings.sincos_positions(6, 6, 8))
    omega = np.array([1.0, 1e-2])
    for row, column in [(0, 0), (1, 4), (2, 3)]:
        encode = lambda p: [*np.sin(p * omega), *np.cos(p * omega)]  # noqa: E731
        np.testing.assert_allclose(table[row, column], [*encode(column), *encode(row)], rtol=1e-6)


def test_resampled_positions_contain_the_base_grid():
    base, fine = embeddings.sincos_positions(16, 16, 32), embeddings.sincos_positions(32, 32, 32, base=16)
    np.testing.assert_array_equal(fine[::2, ::2], base)
    np.testing.assert_array_equal(embeddings.sincos_positions(16, 16, 32, base=16), base)
    assert np.abs(embeddings.sincos_positions(32, 32, 32)[::2, ::2] - base).max() > 1


def test_sinusoid_frequencies_and_endpoint():
    value = jnp.array([3.0])
    for endpoint, last in [(False, 10000.0 ** (-3 / 4)), (True, 1e-4)]:
        out = embeddings.sinusoid(value, 8, endpoint=endpoint)[0]
        np.testing.assert_allclose([out[0], out[4]], [np.cos(3), np.sin(3)], rtol=1e-6)
        np.testing.assert_allclose([out[3], out[7]], [np.cos(3 * last), np.sin(3 * last)], rtol=1e-6)


def test_patches_round_trip_in_row_column_channel_order():
    x = jnp.arange(2 * 4 * 6 * 3.0).reshape(2, 4, 6, 3)
    tokens = transformer.patchify(x, 2)
    np.testing.assert_array_equal(tokens[0, 1], x[0, :2, 2:4].reshape(-1))
    np.testing.assert_array_equal(transformer.unpatchify(tokens, 2, 4, 6), x)


@pytest.mark.parametrize("taps", [(1, 1), (1, 3, 3, 1)])
def test_resampling_equals_a_direct_sum(taps):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 6, 6, 2)).astype(np.float32)
    f = np.outer(taps, taps) / np.sum(taps) ** 2
    pad, k = (len(taps) - 1) // 2, len(taps)
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    down = np.stack(
        [
            [(padded[0, 2 * i : 2 * i + k, 2 * j : 2 * j + k] * f[..., None]).sum((0, 1)) for j in range(3)]
            for i in range(3)
        ]
    )
    np.testing.assert_allclose(convolution.downsample(jnp.asarray(x), taps)[0], down, rtol=1e-5, atol=1e-6)
    up = np.zeros((12 + 2 * pad, 12 + 2 * pad, 2))  # scatter: each pixel spreads 4 f around 2i
    for i in range(6):
        for j in range(6):
            up[2 * i : 2 * i + k, 2 * j : 2 * j + k] += 4 * f[..., None] * x[0, i, j]
    up = up[pad : pad + 12, pad : pad + 12]
    np.testing.assert_allclose(convolution.upsample(jnp.asarray(x), taps)[0], up, rtol=1e-5, atol=1e-6)


def test_normalisation_survives_a_large_mean():
    x = 30 + 0.05 * jax.random.normal(jax.random.key(0), (1, 4, 256))
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(transformer.normalize(x), exact, atol=1e-3)


# ------------------------------------------------------------------------------------ messages


def call(model, shape=(1, 8, 8, 3), cond=None):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(shape), jnp.zeros(1), cond))


UNCONDITIONAL = UNet(**{**SMALL_UNET, "num_classes": 0})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: call(UNCONDITIONAL, (1, 8, 8, 4)), r"UNet.*channels=3.*\[b, h, w, 3\].*got \(1, 8, 8, 4\)"),
        (lambda: call(UNCONDITIONAL, (1, 7, 8, 3)), r"divisible by 2, got 7x8"),
        (lambda: call(UNCONDITIONAL, cond={"label": 1}), r"UNet.*'label'.*unconditional"),
        (lambda: call(SMALL["dit"][0], (1, 8, 8, 4), {"text": 1}), r"DiT.*'text'.*label"),
        (lambda: call(SMALL["dit"][0], (1, 9, 8, 4)), r"DiT.*divisible by 2, got 9x8"),
        (lambda: call(SMALL["mmdit"][0], (1, 8, 8, 4)), r"MMDiT.*cond\['text'\].*null="),
        (lambda: call(SMALL["mmdit"][0], (1, 8, 8, 4), {"text": jnp.zeros((1, 3, 7)), "pooled": jnp.zeros((1, 5))}), r"\[b, l, 6\], got \(1, 3, 7\).*text_dim=7"),
        (lambda: call(SMALL["mmdit"][0], (1, 8, 8, 4), {"text": jnp.zeros((1, 3, 6)), "text_mask": jnp.ones((1, 4)), "pooled": jnp.zeros((1, 5))}), r"cond\['text_mask'\].*\(1, 3\).*got \(1, 4\)"),
        (lambda: call(SMALL["mmdit"][0].clone(position_table=2), (1, 8, 8, 4), CONDS["mmdit"]), r"4x4.*2x2"),
        (lambda: call(UNet(**{**SMALL_UNET, "style": "adn"})), r"'adn'.*did you mean 'adm'"),
        (lambda: models.build("unett"), r"'unett'.*did you mean 'unet'.*unet, dit, mmdit"),
        (lambda: models.build("dit", widht=3), r"DiT.*'widht'.*did you mean 'width'"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_models_are_built_by_name():
    assert models.build("dit", depth=2, width=8, heads=2) == DiT(depth=2, width=8, heads=2)


def test_unet_of_patches_is_a_unet_of_rearranged_pixels():
    fields = {"width": 8, "channel_mult": (1, 2), "blocks": 1, "attention": (4,)}
    patches = UNet(resolution=16, channels=1, patch=2, **fields)
    pixels = UNet(resolution=8, channels=4, **fields)
    x = jax.random.normal(jax.random.key(0), (2, 16, 16, 1))
    grid = jnp.stack([x[:, i::2, j::2, 0] for i in range(2) for j in range(2)], axis=-1)
    params = jax.jit(patches.init)(jax.random.key(1), x, jnp.ones(2))
    params = jax.tree.map(lambda a: a + 0.1, params)  # the output layer starts at zero
    out = patches.apply(params, x, jnp.ones(2))
    expected = pixels.apply(params, grid, jnp.ones(2))
    for k, (i, j) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        np.testing.assert_allclose(out[:, i::2, j::2, 0], expected[..., k], rtol=1e-6, atol=1e-6)
