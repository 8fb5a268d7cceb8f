"""Taps, their catalogue, selection, capture and extraction: identities, costs, seeds, devices, messages."""

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdiff import features, flops, models
from jaxdiff.conventions import DDPM, EDM, Flow
from jaxdiff.features import massive, scoring
from jaxdiff.models import MDT, DiT, Flux, LatentUNet, MMDiT, PixArt, UNet, latent_unet, stacks, taps

LATENT = LatentUNet(width=8, channel_mult=(2,), blocks=1, depths=(1,), heads=2, groups=4, text_dim=6)
PIXEL = UNet(resolution=8, width=8, channel_mult=(1,), blocks=1, attention=())
TRANSFORMER = DiT(depth=4, width=16, heads=2, num_classes=3, learn_variance=False)
MASKED = MDT(depth=3, width=16, heads=2, decoder=1, num_classes=3, learn_variance=False)
PROMPTED = PixArt(depth=2, width=16, heads=2, text_dim=6, learn_variance=False)
JOINT = MMDiT(depth=3, width=16, heads=2, text_dim=6, pooled_dim=5)
ROTARY = Flux(channels=4, depth=2, single_depth=2, width=16, heads=2, text_dim=6, pooled_dim=5, axes=(2, 2, 4))
TEXT = {"text": jax.random.normal(jax.random.key(7), (2, 5, 6))}
MASK = {"text_mask": jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])}
CASES = {
    "latent": (LATENT, 4, {**TEXT, **MASK}),
    "pixel": (PIXEL, 3, None),
    "dit": (TRANSFORMER, 4, {"label": jnp.array([0, 2])}),
    "mdt": (MASKED, 4, {"label": jnp.array([0, 2])}),
    "pixart": (PROMPTED, 4, {**TEXT, **MASK}),
    "mmdit": (JOINT, 4, {**TEXT, **MASK, "pooled": jnp.ones((2, 5))}),
    "flux": (ROTARY, 4, {**TEXT, **MASK, "pooled": jnp.ones((2, 5))}),
}
SIGMA = jnp.array([0.3, 0.7])


def make(name, width=8):
    """Model, random parameters, noisy images (8 x width), condition."""
    model, channels, cond = CASES[name]
    x = jax.random.normal(jax.random.key(1), (2, 8, width, channels))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(2), cond))["params"]
    rng = np.random.default_rng(0)
    draw = lambda s: rng.normal(size=s.shape) * 0.7 / math.sqrt(math.prod(s.shape[:-1])) + (len(s.shape) == 1)  # noqa: E731
    return model, jax.tree.map(lambda s: jnp.asarray(draw(s), jnp.float32), shapes), x, cond


@functools.cache
def everything(name):
    """Model, parameters, noisy images (8 x 16), condition, all activations and the denoised images."""
    model, params, x, cond = make(name, 16)

    def run(params):
        taps = features.capture(model, params, x, SIGMA, cond, "re:.|map|modulation")  # all, these too
        return taps, denoiser(model, params)(x, SIGMA, cond) if name not in ("latent", "pixel") else None

    return model, params, x, cond, *jax.jit(run)(params)


def denoiser(model, params):
    return model.published(models.bind(model, params))


@functools.cache
def table_of(name, **changes):
    model, channels, cond = CASES[name]
    return features.catalog(model.clone(**changes), (2, 8, 16, channels), cond)


# ------------------------------------------------------------------------------------ the catalogue


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "latent")) for name in CASES])
def test_catalogue_has_what_capture_returns_in_its_order(name):
    taps, table = everything(name)[4], table_of(name)
    assert list(table) == list(taps)
    assert [tap.shape for tap in table.values()] == [value.shape for value in taps.values()]
    assert [tap.order for tap in table.values()] == list(range(len(taps)))
    assert not [tap.name for tap in table.values() if "other" in (tap.kind, tap.stage)]


def test_kinds_stages_and_grids():
    table = table_of("latent", channel_mult=(1, 2), depths=(0, 1))
    seen = {name: (tap.kind, tap.stage, tap.grid) for name, tap in table.items()}
    assert seen["in"] == ("in", "in", (8, 16)) and seen["embedded"][:2] == ("embedded", "in")
    assert seen["down0_block0/out"] == ("res_out", "down", (8, 16))
    assert seen["down0_conv"] == ("sampler", "down", (4, 8))
    assert seen["mid_transformer0/block0/cross_attention/q"] == ("cross_q", "mid", (4, 8))
    assert seen["mid_transformer0/block0/cross_attention/k"] == ("cross_k", "mid", None)
    assert seen["mid_transformer0/block0/self_attention/map"] == ("self_map", "mid", None)
    assert seen["up1_transformer1/block0/mlp/inner"] == ("inner", "up", (4, 8))
    assert seen["up1_transformer1/block0/out"][0] == "block_out" and seen["up1_transformer1/out"][0] == "vit_out"
    assert seen["up1_conv"] == ("sampler", "up", (8, 16)) and seen["out"] == ("out", "out", (8, 16))
    joint, pixel = table_of("mmdit"), table_of("pixel", channel_mult=(1, 2), attention=(4,), style="ncsnpp")
    assert not [tap.name for t in (table, pixel) for tap in t.values() if "other" in (tap.kind, tap.stage)]
    assert joint["blocks_0/text/q"].grid is None and joint["blocks_0/image/q"].grid == (4, 8)
    rotary = table_of("flux")
    assert rotary["single_1/text/k"].grid is None and rotary["single_1/image/norm0"].grid == (4, 8)
    kinds = {name: rotary[f"single_0/image{name}"].kind for name in ("/out", "/q", "_mlp/inner")}
    assert kinds == {"/out": "block_out", "/q": "self_q", "_mlp/inner": "inner"}
    assert not [tap.name for tap in rotary.values() if "other" in (tap.kind, tap.stage)]
    stages = [pixel[name].stage for name in ("enc_4x4_joined", "dec_4x4_in0/attention/q", "dec_8x8_up/out")]
    masked, prompted = table_of("mdt"), table_of("pixart")
    outputs = [(tap.name, tap.stage) for tap in masked.values() if tap.kind == "block_out"]
    assert outputs == [(f"{name}_0/dit/out", "blocks") for name in ("encode_in", "encode_out", "decode")]
    assert [tap.name for tap in masked.values() if tap.kind == "skip"] == ["encode_out_0/skip", "decode_0/skip"]
    assert prompted["blocks_1/cross_attention/k"].grid is None and prompted["blocks_1/res_cross"].grid == (4, 8)
    assert stages == ["down", "mid", "up"] and pixel["dec_4x4_in0/attention/q"].kind == "self_q"


def test_operations_to_reach_an_activation_are_those_of_its_program():
    """XLA's own count, in which what is not needed is left out; it adds elementwise work, skips products with padding."""
    model, params, x, cond = make("latent", 16)
    last = 0
    for name in ("down0_block0/out", "mid_transformer0/block0/cross_attention/q", "up0_block1/out"):
        run = partial(features.capture, model, x=x, sigma=SIGMA, cond=cond, select=name)
        counted, ours = jax.jit(run).lower(params=params).cost_analysis()["flops"], table_of("latent")[name].flops
        assert max(last, 0.85 * counted) < ours < 1.15 * counted
        last = ours


def test_costs_of_loops_and_branches():
    a, one = jnp.zeros((3, 4)), 2 * 4 * 4 * 3

    def square(m):
        return m.T @ m

    def loop(a):
        return jax.lax.scan(lambda total, _: (total + square(a), square(a)), jnp.zeros((4, 4)), None, length=5)

    def branch(a):
        return jax.lax.cond(a[0, 0] > 0, square, lambda a: square(a) @ square(a), a)

    def several(a):
        return square(a), a + 1, square(a) @ a.T

    def conv(x):
        return jax.lax.conv(x, jnp.zeros((7, 2, 3, 3)), (2, 2), "SAME")

    assert flops.to_reach(jax.make_jaxpr(loop)(a)) == [5 * 2 * one] * 2
    assert flops.to_reach(jax.make_jaxpr(branch)(a)) == [2 * one + 2 * 4**3]
    assert flops.to_reach(jax.make_jaxpr(several)(a)) == [one, 0, one + 2 * 4 * 4 * 3]
    assert flops.to_reach(jax.make_jaxpr(conv)(jnp.zeros((1, 2, 8, 8)))) == [2 * 7 * 4 * 4 * 2 * 9]


# ------------------------------------------------------------------------------------ names of the reference


def reference_ids(down, mid, up, blocks):
    """Reference names written out from its grammar: transformer depths in order of execution, None without one."""

    def vit(place, depth):
        inner = ["self-q", "self-k", "self-v", "self-map", "cross-q", "cross-map", "ffn-inner", "out"]
        return [f"{place}-block{b}-{tap}" for b in range(depth) for tap in inner] + [f"{place}-out"]

    ids = ["unet-in", "unet-after-conv-in", "unet-out"] + vit("mid-vit", mid)
    for stage, depths, repeats, sampler in [("down", down, blocks, "down"), ("up", up, blocks + 1, "up")]:
        for level, depth in enumerate(depths):
            for repeat in range(repeats):
                place = f"{stage}-level{level}-repeat{repeat}"
                ids += [f"{place}-res-increment", f"{place}-res-out"] + (vit(f"{place}-vit", depth) if depth else [])
            ids += [f"{stage}-level{level}-{sampler}sampler-out"] * (level < len(depths) - 1)
    return ids + [f"mid-repeat{i}-res-{tap}" for i in range(2) for tap in ("increment", "out")]


@pytest.mark.parametrize(
    ("size", "side", "layout", "count", "channels"),
    [
        (
            "sd1",
            64,
            ((1, 1, 1, 0), 1, (0, 1, 1, 1), 2),
            197,
            {
                "sd1": 3520,
                "sd1_legacy": 3520,
                "sd1_amalgamation": 3034,
                "sd1_amalgamation_small": 1600,
                "sd1_vpd": 3508,
            },
        ),
        pytest.param(
            "sdxl",
            128,
            ((0, 2, 10), 10, (10, 2, 0), 2),
            612,
            {"sdxl": 3840, "sdxl_legacy": 2240, "sdxl_segmentation": 4480, "pgv2": 1280, "pgv2_segmentation": 2560},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_reference_names_of_stable_diffusion(size, side, layout, count, channels):
    model = LatentUNet(**latent_unet.SIZES[size])
    cond = {name: jnp.zeros((1, *(n or 77 for n in signal.shape))) for name, signal in model.signals().items()}
    table, names = features.catalog(model, (1, side, side, 4), cond), features.reference_names(model)
    assert len(names) == count and set(names) == set(reference_ids(*layout))
    assert len(set(names.values())) == count and set(names.values()) <= set(table)
    stages = ("down", "up") if size == "sd1" else ("down", "mid", "up")  # grids of 1/4 and 1/2 of the latent's
    extra = {f"attn-{stage}_cross": f"{stage}/cross_maps" for stage in stages}
    assert features.reference_names(table) == {**names, **extra}
    kept = features.Filter(min_grid=1 / 4).keep(table)
    assert len(kept) < 0.6 * len(table)
    for selection, total in channels.items():
        chosen = features.select(table, features.SELECTIONS[selection])
        assert sum(table[name].channels for name in chosen) == total
        if not selection.endswith(("legacy", "vpd")):  # the rules that need no measurement agree with the paper's lists
            assert set(chosen) <= set(kept)
    if size == "sd1":  # grids of the published selection
        assert [table[names[name]].grid[0] for name in features.SELECTIONS["sd1"]] == [16, 16, 32, 64]


def test_reference_names_of_pixart():
    names, table = features.reference_names(PROMPTED), table_of("pixart")
    inner = ["self-q", "self-k", "self-v", "self-map", "cross-q", "cross-map", "ffn-inner", "out"]
    assert list(names) == [f"vit-block{i}-{tap}" for i in (0, 1) for tap in inner]
    assert names == features.reference_names(table) and len(set(names.values())) == 16
    assert names["vit-block1-self-k"] == "blocks_1/attention/k" and len(features.reference_names(PixArt())) == 224
    with pytest.raises(ValueError, match=r"LatentUNet, PixArt and Flux, not of DiT"):
        features.reference_names(TRANSFORMER)
    assert features.reference_names(table_of("dit")) == {}


def test_reference_names_of_flux():
    """Single blocks count on after the double ones; queries and keys are those before their norms."""
    names, table = features.reference_names(ROTARY), table_of("flux")
    single, double = ["q", "k", "v", "out"], ["q", "k", "v", "out", "norm-out", "ffn-inner"]
    wanted = [(i, tap) for i in (0, 1) for tap in double] + [(i, tap) for i in (2, 3) for tap in single]
    assert list(names) == [f"vit-block{i}-{tap}" for i, tap in wanted]
    assert names == features.reference_names(table) and set(names.values()) <= set(table)
    assert names["vit-block3-out"] == "single_1/image/out" and len(features.reference_names(Flux())) == 266
    _, params, _, _, taps, _ = everything("flux")
    for i, (block, prefix) in enumerate([("blocks_0", "image_"), ("single_0", "")]):
        for part in "qk":
            raw = np.asarray(taps[names[f"vit-block{2 * i}-{part}"]]).reshape(2, 32, 2, 8)
            scale = params[block][f"{prefix}{part}_norm"]["scale"]
            normed = raw / np.sqrt(np.square(raw).mean(-1, keepdims=True) + 1e-6) * scale
            np.testing.assert_allclose(normed.reshape(2, 32, 16), taps[f"{block}/image/{part}"], atol=1e-5)


def test_selections_take_names_of_the_reference():
    table = table_of("latent", channel_mult=(1, 2), depths=(0, 1))
    chosen = features.select(
        table, ["up-level0-repeat1-vit-block0-self-map", "up-level0-upsampler-out", "attn-up_cross"]
    )
    assert chosen == ("up1_transformer1/block0/self_attention/map", "up1_conv", "up/cross_maps")
    assert "up1_conv" not in features.select(table, ["up1_*", "up1_*/**", "!up-level0-upsampler-out"])
    with pytest.raises(ValueError, match=r"similar names are .*up-level0-repeat1-res-out"):
        features.select(table, "up-level0-repeat7-res-out")


def test_maps_of_a_stage_are_means_over_heads_and_layers():
    model = LATENT.clone(channel_mult=(1, 1, 1, 1), depths=(0, 1, 2, 1), groups=4)  # grids 8x16, 4x8, 2x4, 1x2
    x, cond = jax.random.normal(jax.random.key(1), (2, 8, 16, 4)), {**TEXT, **MASK}
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(2), cond))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(0.5 * rng.normal(size=s.shape), jnp.float32), shapes)
    run = jax.jit(lambda p: features.capture(model, p, x, SIGMA, cond, ["**/cross_attention/map", "*/cross_maps"]))
    taps = {name: np.asarray(value) for name, value in run(params).items()}
    assert [name for name in taps if name.endswith("cross_maps")] == ["down/cross_maps", "up/cross_maps"]
    for stage, repeats, levels in (("down", 1, (1, 2)), ("up", 2, (2, 1))):
        parts = []
        for level in levels:
            layers = [(i, b) for i in range(repeats) for b in range(level)]
            place = "{}{}_transformer{}/block{}/cross_attention/map"
            maps = np.mean([taps[place.format(stage, level, i, b)] for i, b in layers], axis=0).mean(1)
            grid = maps.reshape(2, 8 >> level, 16 >> level, 5)
            parts.append(grid.repeat(2**level, axis=1).repeat(2**level, axis=2))
        np.testing.assert_allclose(taps[f"{stage}/cross_maps"], np.concatenate(parts, -1), rtol=0, atol=1e-6)
    np.testing.assert_allclose(taps["up/cross_maps"].sum(-1), 2, rtol=1e-5)
    assert not [name for name in features.select(features.catalog(model, x, cond), "**") if name.endswith("maps")]


def test_noise_levels_of_timesteps():
    """sqrt((1 - a) / a), a the product of 1 - beta; Stable Diffusion's t = 50, and the 51 that PNDM makes of it."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    signal = np.prod(1 - betas[:51])
    assert features.sigma_of(50, LatentUNet.published) == pytest.approx(math.sqrt((1 - signal) / signal), rel=1e-9)
    levels = [features.sigma_of(t, DDPM("sqrt_linear")) for t in (50, 51)]
    assert [f"{sigma:.4f}" for sigma in levels] == ["0.2256", "0.2281"]
    assert features.sigma_of(250, Flow()) == pytest.approx(1 / 3)  # x = 0.75 x0 + 0.25 eps


# ------------------------------------------------------------------------------------ values


def test_taps_of_the_latent_unet_add_up():
    _, params, _, _, taps, _ = everything("latent")
    tap = lambda name: np.asarray(taps[name], np.float64)  # noqa: E731
    close = partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    block = "up0_transformer0/block0"
    close(tap("mid_block1/out"), tap("mid_transformer0/out") + tap("mid_block1/increment"))
    close(tap("up0_block0/out"), tap("up0_block0/skip") + tap("up0_block0/increment"))
    close(tap("up0_transformer0/out"), tap("up0_block0/out") + tap("up0_transformer0/increment"))
    close(tap(f"{block}/res_cross") - tap(f"{block}/res_self"), tap(f"{block}/cross_attention/out"))
    close(tap(f"{block}/out") - tap(f"{block}/res_cross"), tap(f"{block}/mlp/out"))
    weights = params["up0_transformer0"]["block0"]["cross_attention"]
    attend(close, tap, f"{block}/cross_attention", weights["out"])
    attend(close, tap, f"{block}/self_attention", params["up0_transformer0"]["block0"]["self_attention"]["out"])
    hidden = tap(f"{block}/cross_attention/map")[0, :, :, 3:]
    np.testing.assert_array_equal(hidden, np.zeros_like(hidden))


def attend(close, tap, place, out):
    """The attention written out: its map from q and k, its output from the map and v."""
    attention = tap(f"{place}/map")
    close(attention.sum(-1), np.ones(attention.shape[:-1]))
    heads = attention.shape[1]
    v = tap(f"{place}/v").reshape(2, attention.shape[-1], heads, -1)
    gathered = np.einsum("bhnm,bmhd->bnhd", attention, v)
    close(
        np.einsum("bnhd,hdc->bnc", gathered, np.asarray(out["kernel"])) + np.asarray(out["bias"]), tap(f"{place}/out")
    )


def test_taps_of_the_other_networks_add_up():
    close = partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    _, params, _, _, taps, _ = everything("pixel")
    tap = lambda name: np.asarray(taps[name], np.float64)  # noqa: E731
    attended = tap("dec_8x8_in0/res") + tap("dec_8x8_in0/attention/out").reshape(tap("dec_8x8_in0/res").shape)
    close(tap("dec_8x8_in0/out"), attended * math.sqrt(0.5))
    attend(close, tap, "dec_8x8_in0/attention", params["dec_8x8_in0"]["out"])
    _, params, _, _, taps, _ = everything("dit")
    attend(close, tap, "blocks_2/attention", params["blocks_2"]["attention"]["out"])
    _, params, _, _, taps, _ = everything("mdt")
    attend(close, tap, "decode_0/dit/attention", params["decode_0"]["dit"]["attention"]["out"])  # its map has the bias
    dense = params["decode_0"]["skip"]
    before = tap("encode_out_0/dit/out") + np.asarray(params["decoder_positions"]).reshape(32, 16)
    joined = np.concatenate([before, tap("embedded")], -1) @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
    close(tap("decode_0/skip"), joined)
    _, params, _, _, taps, _ = everything("pixart")
    close(tap("blocks_1/res_cross") - tap("blocks_1/res_self"), tap("blocks_1/cross_attention/out"))
    attend(close, tap, "blocks_1/cross_attention", params["blocks_1"]["cross_attention"]["out"])
    assert (tap("blocks_1/cross_attention/map")[0, :, :, 3:] == 0).all()
    _, params, _, _, taps, _ = everything("mmdit")
    joint = tap("blocks_1/joint/map")
    n = taps["blocks_1/image/q"].shape[1]
    assert n == 4 * 8 and joint.shape == (2, 2, n + 5, n + 5)
    v = np.concatenate([tap("blocks_1/image/v"), tap("blocks_1/text/v")], axis=1).reshape(2, n + 5, 2, 8)
    gathered = np.einsum("bhnm,bmhd->bnhd", joint, v)[:, :n]
    out = params["blocks_1"]["image_out"]
    close(np.einsum("bnhd,hdc->bnc", gathered, out["kernel"]) + out["bias"], tap("blocks_1/image/attention"))
    assert (joint[0, :, :, n + 3 :] == 0).all() and (joint[1, :, :, n + 3 :] > 0).all()


@pytest.mark.parametrize("name", ["dit", "mdt", "pixart", "mmdit", "flux"])
def test_modulated_norms_follow_from_the_stream_before_them(name):
    """With no channel dropped it is the network's own activation."""
    taps, table = everything(name)[4], table_of(name)
    kinds = {tap.name: tap.kind for tap in table.values()}
    names = [name for name in table if name.endswith("/norm0") and table[name].grid]
    assert len(names) >= 2
    for norm in names:
        x, modulation = taps[massive.stream_of(kinds, norm)], taps[massive.modulation_of(norm)]
        np.testing.assert_allclose(massive.modulated(x, modulation), taps[norm], rtol=0, atol=2e-5)
        assert table[massive.modulation_of(norm)].grid is None
    assert not [name for name in features.select(table, "**") if name.endswith("modulation")]


def test_dropped_channels_of_a_block_do_not_matter():
    """A constant of 1000 in two channels of the stream: found, ruinous to the other channels, gone when dropped."""
    model, params, x, cond = make("dit")
    offset = jnp.zeros(16).at[jnp.array([3, 11])].set(1000.0)
    loud = {**params, "patches": {**params["patches"], "bias": params["patches"]["bias"] + offset}}
    norm, stream = "blocks_0/norm0", "embedded"
    run = partial(features.extract, model, x0=x, seed=0, sigma=0.3, cond=cond)
    found = run(loud, select=[norm, stream])
    channels = features.massive_channels(found[stream])
    assert channels == (3, 11) and not features.massive_channels(run(params, select=stream)[stream])
    others = [i for i in range(16) if i not in channels]
    both = [run(p, select=norm, drop={norm: channels})[norm] for p in (params, loud)]
    np.testing.assert_allclose(both[0], both[1], rtol=0, atol=1e-4)
    spread = lambda f: np.asarray(f)[..., others].std((1, 2)).mean()  # noqa: E731
    assert spread(found[norm]) < 0.02 * spread(both[1])
    subject = scoring.Subject(model, loud, null={"label": 0})
    assert scoring.without_massive(subject, x, [norm, "out"], 0.3, ratio=10).drop == {norm: channels}


@pytest.mark.parametrize("name", ["dit", "mdt", "pixart", "mmdit", "flux"])
def test_in_and_out_are_what_the_convention_gives_and_takes(name):
    model, _, x, _, taps, denoised = everything(name)
    given = {}

    def network(scaled, label, cond):
        given["in"] = scaled
        return taps["out"]

    np.testing.assert_allclose(model.published(network)(x, SIGMA), denoised, rtol=0, atol=1e-5)
    np.testing.assert_allclose(given["in"], taps["in"], rtol=1e-6)


def test_a_selection_has_the_values_of_all():
    model, params, x, cond, taps, _ = everything("mmdit")
    chosen = ["blocks_*/image/q", "re:^blocks_1/.*/out$", "!**/text*/**"]
    some = jax.jit(lambda p: features.capture(model.apply, p, x, SIGMA, cond, chosen))(params)
    assert list(some) == ["blocks_0/image/q", "blocks_1/image/q", "blocks_1/image_mlp/out", "blocks_1/image/out"]
    for name, value in some.items():
        np.testing.assert_allclose(value, taps[name], rtol=0, atol=1e-5 * jnp.abs(taps[name]).max())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("dit", "blocks_1/out"),
        ("mdt", "encode_out_0/dit/out"),
        ("mmdit", "blocks_1/image/out"),
        ("flux", "single_1/image/out"),
    ],
)
def test_scanned_and_rematerialised_networks_have_the_same_taps(name, place):
    model, params, x, cond, taps, _ = everything(name)
    scanned = model.clone(scan=True, remat=True)
    stacked = params
    for stack in {key.removesuffix("_0") for key in params if key.endswith("_0")}:
        stacked = stacks.stack_blocks(stacked, sum(key.startswith(f"{stack}_") for key in params), stack)
    value = jax.jit(lambda p: features.capture(scanned, p, x, SIGMA, cond, place))(stacked)[place]
    np.testing.assert_allclose(value, taps[place], rtol=0, atol=1e-5)
    assert features.catalog(scanned, x, cond) == table_of(name)


# ------------------------------------------------------------------------------------ costs


def compiled(function, *args):
    program = jax.jit(function).lower(*args).compile()
    return program.cost_analysis().get("flops", 0), program.memory_analysis().temp_size_in_bytes


def forward(model, x, cond, **kwargs):
    def forward(params):
        out = model.apply({"params": params}, x, SIGMA, cond, **kwargs)
        return out[0] if kwargs else out

    return forward


@pytest.mark.parametrize("name", [pytest.param("latent", marks=pytest.mark.slow), *list(CASES)[1:]])
def test_taps_leave_no_trace_in_the_program(name, monkeypatch):
    model, params, x, cond = make(name)
    tapped = jax.jit(forward(model, x, cond)).lower(params).as_text()
    assert jax.jit(forward(model, x, cond, mutable=["intermediates"])).lower(params).as_text() == tapped
    monkeypatch.setattr(taps, "tap", lambda module, name, value: value)
    assert jax.jit(forward(model, x, cond)).lower(params).as_text() == tapped


def test_activations_cost_nothing_unless_selected():
    model, params, x, cond = make("dit")
    assert compiled(forward(model, x, cond, mutable=["intermediates"]), params) == compiled(
        forward(model, x, cond), params
    )


@pytest.mark.parametrize("scan", [False, True])
def test_an_early_activation_costs_only_what_comes_before(scan):
    model, params, x, cond = make("dit", 16)
    model = model.clone(scan=scan)
    params = stacks.stack_blocks(params, 4) if scan else params
    table = table_of("dit")
    for name in ("blocks_0/out", "blocks_1/out"):
        flops, _ = compiled(lambda p, name=name: features.capture(model, p, x, SIGMA, cond, name), params)
        assert table[name].flops < flops < 1.25 * table[name].flops < 0.7 * table["out"].flops


# ------------------------------------------------------------------------------------ extraction

SELECT = ["in", "blocks_1/attention/q"]


@functools.cache
def images():
    """Model, parameters, eight clean images, condition."""
    model, params, x, _ = make("dit", 16)
    return (
        model,
        params,
        jnp.concatenate([x] * 4) * jnp.linspace(0.1, 0.8, 8)[:, None, None, None],
        {"label": jnp.arange(8) % 3},
    )


def test_extraction_is_capture_of_seeded_noise_on_the_grid():
    model, params, x0, cond = images()
    index = jnp.array([5, 0, 7, 1, 2, 3, 4, 6])
    out = features.extract(model, params, x0, 3, 0.4, cond, SELECT, index=index)
    keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), i) for i in index]
    eps = jnp.stack([jax.random.normal(key, x0.shape[1:]) for key in keys])
    raw = jax.jit(lambda x: features.capture(model, params, x, 0.4, cond, SELECT))(x0 + 0.4 * eps)
    assert list(out) == SELECT and [value.shape[1:3] for value in out.values()] == [(8, 16), (4, 8)]
    for name in SELECT:
        np.testing.assert_allclose(out[name].reshape(raw[name].shape), raw[name], rtol=0, atol=1e-4)


def test_the_seed_and_the_index_decide_on_any_devices_and_in_any_batch():
    model, params, x0, cond = images()
    run = partial(features.extract, model, params, sigma=0.4, select=SELECT)
    whole, again, other = (run(x0, seed, cond=cond) for seed in (3, 3, 4))
    parts = [run(x0[i : i + 4], 3, cond={"label": cond["label"][i : i + 4]}, index=range(i, i + 4)) for i in (0, 4)]
    spread = NamedSharding(Mesh(np.asarray(jax.devices()), ("data",)), PartitionSpec("data"))
    sharded = run(jax.device_put(x0, spread), 3, cond=jax.device_put(cond, spread))
    assert len(sharded["in"].sharding.device_set) == 8
    for name in SELECT:
        np.testing.assert_array_equal(whole[name], again[name])
        np.testing.assert_allclose(jnp.concatenate([part[name] for part in parts]), whole[name], rtol=0, atol=1e-5)
        np.testing.assert_allclose(sharded[name], whole[name], rtol=0, atol=1e-5)
        assert jnp.abs(other[name] - whole[name]).max() > 1e-2


def test_draws_pooling_projection_and_type():
    model, params, x0, cond = images()
    name = SELECT[1]
    run = partial(features.extract, model, params, x0, 3, 0.4, cond, name)
    draws = run(draws=3, average=False)[name]
    assert draws.shape == (3, 8, 4, 8, 16) and jnp.abs(draws[0] - draws[2]).max() > 1e-2
    mean, components = features.fit_pca(draws, 2)
    reduced = run(draws=3, side=4, project={name: (mean, components)}, dtype=jnp.bfloat16)[name]
    assert reduced.shape == (8, 2, 4, 2) and reduced.dtype == jnp.bfloat16
    expected = (draws.mean(0).reshape(8, 2, 2, 4, 2, 16).mean((2, 4)) - mean) @ components
    np.testing.assert_allclose(reduced.astype(jnp.float32), expected, rtol=0.01, atol=0.01 * jnp.abs(expected).max())


def test_pca_finds_the_directions_of_most_variance():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    rows = rng.normal(size=(4000, 5)) * [5, 3, 1, 0.1, 0.1] @ basis.T + 7
    mean, components = features.fit_pca(rows.reshape(40, 10, 10, 5), 2)
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(np.abs(components.T @ basis[:, :2]), np.eye(2), atol=0.05)
    assert (np.abs(components).argmax(0) == components.argmax(0)).all()


# ------------------------------------------------------------------------------------ patterns and messages

NAMES = ["in", "up0/res", "up0/a/q", "up0/a/map", "up1/a/q", "up1/a/k", "up1/b/q", "out"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("up1/a/q", "up1/a/q"),
        ("up?/*/q", "up0/a/q up1/a/q up1/b/q"),
        ("up*", ValueError),
        ("**/q", "up0/a/q up1/a/q up1/b/q"),
        ("**", "in up0/res up0/a/q up1/a/q up1/a/k up1/b/q out"),
        ("**/map", "up0/a/map"),
        (["!**/q"], "in up0/res up1/a/k out"),
        (["out", "up0/**", "!up0/res"], "up0/a/q out"),
        (["!up0/res", "up0/**", "out"], "up0/a/q out"),
        ("re:a/[kq]$", "up0/a/q up1/a/q up1/a/k"),
        (["up1/**", "!**/map"], "up1/a/q up1/a/k up1/b/q"),
        (["in", "!in"], ValueError),
        ([], ValueError),
    ],
)
def test_patterns(patterns, expected):
    if expected is ValueError:
        with pytest.raises(ValueError, match=r"of 8.*'up\*'|nothing of 8"):
            features.select(NAMES, patterns)
    else:
        assert features.select(NAMES, patterns) == tuple(expected.split())


def call(change):
    model, params, x, cond = make("mmdit")
    arguments = {"x0": x, "seed": 0, "sigma": 0.5, "cond": cond, "select": "in", **change}
    return jax.eval_shape(lambda p: features.extract(model, p, **arguments), params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"select": "blocks_1/images/q"}, r"'blocks_1/images/q'.*blocks_1/image/q, "),
        ({"select": "re:xyz"}, r"'re:xyz'.*attention, inner, k, "),
        ({"select": ["**", "!**/nothing"]}, r"'\*\*/nothing'"),
        ({"index": [1]}, r"\(2,\), got shape \(1,\)"),
        ({"draws": 0}, r"got draws=0"),
        ({"sigma": 0.0}, r"sigma.*got 0.0"),
        ({"select": "**/out", "project": {"blocks_0/img/out": (0, 0)}}, r"'blocks_0/img/out'.*did you mean 'blocks_0/image/out'"),
        ({"select": "**/text/k", "project": {"blocks_0/text/k": (0, 0)}}, r"blocks_0/text/k.*\(2, 5, 16\)"),
        ({"x0": jnp.zeros((2, 8, 10, 4)), "select": "in", "side": 4}, r"8x10.*side <= 4"),
        ({"drop": {"blocks_0/image/norm0": [1]}}, r"'blocks_0/image/norm0', which is not selected"),
        ({"drop": {"in": [1]}}, r"norm0 of blocks with adaLN \(blocks_0/image/norm0, .*not 'in'"),
    ],
)  # fmt: skip
def test_bad_requests_say_what_to_do(change, message):
    with pytest.raises(ValueError, match=message):
        call(change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: features.sigma_of(1000, DDPM()), r"0\.\.999, got 1000"),
        (lambda: features.sigma_of(0.5, DDPM()), r"integer.*got 0\.5"),
        (lambda: features.sigma_of(50, EDM()), r"EDM\(sigma_data=0\.5\) has no timesteps; give sigma"),
        (lambda: features.sigma_of(1000, Flow()), r"between 0 and 1000, got 1000"),
        (lambda: features.massive_channels(np.ones((2, 3)), 0.5), r"above 1, got ratio=0\.5"),
    ],
)
def test_what_has_no_noise_level_or_no_outliers(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_catalogue_and_pca_messages():
    with pytest.raises(ValueError, match=r"MLP|\[b, h, w, c\], got \(2, 2\)"):
        features.catalog(models.MLP(), (2, 2))
    with pytest.raises(ValueError, match=r"Quiet.*taps\.tap"):
        features.catalog(Quiet(), (1, 2, 2, 1))
    with pytest.raises(ValueError, match="1 to 3 components, got 4"):
        features.fit_pca(np.zeros((5, 3)), 4)


class Quiet(nn.Module):
    @nn.compact
    def __call__(self, x, noise_label, cond=None):
        return nn.Dense(1)(x)


def test_other_networks_need_their_convention():
    class Loud(nn.Module):
        @nn.compact
        def __call__(self, x, noise_label, cond=None):
            return taps.tap(self, "half", nn.Dense(1, name="half")(x))

    params = {"half": {"kernel": jnp.full((1, 1), 0.5), "bias": jnp.zeros(1)}}
    x = jnp.full((1, 2, 2, 1), 3.0)
    with pytest.raises(ValueError, match=r"Loud.*convention="):
        features.capture(Loud(), params, x, 1.0)
    out = features.capture(Loud(), params, x, 1.0, convention=EDM(1.0))
    np.testing.assert_allclose(out["half"], np.full(x.shape, 1.5 / math.sqrt(2)), rtol=1e-6)
