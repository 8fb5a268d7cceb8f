"""FLUX and SD3.5 transformers: outputs of the public implementation, both namings, round trips, sizes, strictness."""

import math
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import models, weights
from jaxdiff.models import Flux, MMDiT, embeddings, flux

sys.path.insert(0, str(GOLDEN))
import seeded

AXES = {"axes": (4, 6, 6)}  # what the arrays of the tiny network do not tell
# names of the original release that are not those of blocks
OUTER = {
    "x_embedder": "img_in", "context_embedder": "txt_in", "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.guidance_embedder": "guidance_in", "time_text_embed.text_embedder": "vector_in",
    "norm_out.linear": "final_layer.adaLN_modulation.1", "proj_out": "final_layer.linear",
}  # fmt: skip


def nhwc(x):
    return jnp.asarray(np.moveaxis(x, 1, -1))


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "flux.npz"))


@pytest.fixture(scope="module")
def arrays(golden):
    return seeded.weights(golden["weights/dev"])


def cond_of(golden, guidance=True):
    cond = {"text": golden["in/text"], "pooled": golden["in/pooled"]}
    return {**cond, "guidance": golden["in/guidance"]} if guidance else cond


@pytest.mark.parametrize("name", ["dev", "schnell"])
def test_outputs_of_flux(name, golden):
    """Scanned and unrolled, with and without the guidance embedding."""
    guided = name == "dev"
    model, params = weights.load(seeded.weights(golden[f"weights/{name}"]), "flux", scan=guided, **AXES)
    assert model.guidance_embed == guided and (model.depth, model.single_depth) == (2, 3)
    apply = jax.jit(models.bind(model, params))
    inputs = nhwc(golden["in/x"]), jnp.asarray(golden["in/t"])
    out = apply(*inputs, cond_of(golden, guided))
    np.testing.assert_allclose(out, nhwc(golden[f"out/{name}"]), rtol=0, atol=2e-5)
    if guided:
        half = {**cond_of(golden), "guidance": np.full(2, 3.5, np.float32)}
        np.testing.assert_allclose(apply(*inputs, cond_of(golden, False)), apply(*inputs, half), rtol=0, atol=1e-5)
        assert np.abs(apply(*inputs, half) - out)[1].max() > 1e-3


def test_positions_rotate_pairs_and_scores_depend_on_differences():
    """The closed form of complex numbers; q(m) k(n) is a function of m - n alone."""
    rng = np.random.default_rng(0)
    positions = np.array([[0, 0, 0], [0, 2, 1], [0, 5, 3], [0, 7, 4]])
    angles = embeddings.rotary_angles(positions, (4, 6, 6))
    x = jnp.asarray(rng.normal(size=(1, 4, 2, 16)), jnp.float32)
    turned = np.asarray(embeddings.rotate(x, angles), np.float64)
    pairs = np.asarray(x, np.float64).reshape(1, 4, 2, 8, 2)
    rates = np.concatenate([10000.0 ** (-np.arange(0, w, 2) / w) for w in (4, 6, 6)])
    axis = np.repeat(np.arange(3), [2, 3, 3])
    spin = np.exp(1j * positions[:, axis] * rates)[:, None]
    wanted = (pairs[..., 0] + 1j * pairs[..., 1]) * spin
    np.testing.assert_allclose(turned, np.stack([wanted.real, wanted.imag], -1).reshape(turned.shape), atol=1e-6)
    same = jnp.broadcast_to(x[:, :1], x.shape)
    q, k = embeddings.rotate(same, angles), embeddings.rotate(same[:, ::-1], angles)
    scores = np.einsum("bnhd,bmhd->bnm", q, k)[0]
    np.testing.assert_allclose(scores[1, 2], np.einsum("bhd,bhd->b", q[:, 0], embeddings.rotate(same[:, :1], embeddings.rotary_angles(np.array([[0, 3, 2]]), (4, 6, 6)))[:, 0])[0], rtol=1e-5)  # fmt: skip


def test_tokens_have_the_positions_of_their_rows_and_columns():
    positions = flux.token_positions(2, 3, 2)
    assert positions.tolist() == [[0, r, c] for r in range(2) for c in range(3)] + [[0, 0, 0]] * 2


def test_round_trip(arrays):
    model, params = weights.load(arrays, "flux", **AXES)
    fields = {"channels": 4, "depth": 2, "single_depth": 3, "width": 32, "heads": 2, "text_dim": 10, "pooled_dim": 6}
    assert model == Flux(**fields, **AXES)
    back = weights.save(model, params, "flux")
    assert set(back) == set(arrays)
    for name in arrays:
        np.testing.assert_array_equal(back[name], arrays[name], err_msg=name)


def original(arrays):
    """The same arrays as the original release names and joins them."""
    out = {}
    for old, new in OUTER.items():
        for name, array in arrays.items():
            if name.startswith(f"{old}."):
                out[f"{new}{name.removeprefix(old)}".replace("linear_1", "in_layer").replace("linear_2", "out_layer")] = array  # fmt: skip
    for part in ("weight", "bias"):
        scale, shift = np.split(out[f"final_layer.adaLN_modulation.1.{part}"], 2)
        out[f"final_layer.adaLN_modulation.1.{part}"] = np.concatenate([shift, scale])
        for i in range(2):
            old, new = f"transformer_blocks.{i}", f"double_blocks.{i}"
            one = lambda name, part=part, old=old: arrays[f"{old}.{name}.{part}"]  # noqa: E731
            streams = [("img", "attn.to_{}", "norm1", "attn.to_out.0", "ff"),
                       ("txt", "attn.add_{}_proj", "norm1_context", "attn.to_add_out", "ff_context")]  # fmt: skip
            for stream, qkv, norm, proj, mlp in streams:
                out[f"{new}.{stream}_attn.qkv.{part}"] = np.concatenate([one(qkv.format(x)) for x in "qkv"])
                out[f"{new}.{stream}_mod.lin.{part}"] = one(f"{norm}.linear")
                out[f"{new}.{stream}_attn.proj.{part}"] = one(proj)
                out[f"{new}.{stream}_mlp.0.{part}"] = one(f"{mlp}.net.0.proj")
                out[f"{new}.{stream}_mlp.2.{part}"] = one(f"{mlp}.net.2")
        for i in range(3):
            old, new = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
            one = lambda name, part=part, old=old: arrays[f"{old}.{name}.{part}"]  # noqa: E731
            joined = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            out[f"{new}.linear1.{part}"] = np.concatenate([one(name) for name in joined])
            out[f"{new}.linear2.{part}"], out[f"{new}.modulation.lin.{part}"] = one("proj_out"), one("norm.linear")
    for i in range(2):
        for stream, norm in (("img", "norm_"), ("txt", "norm_added_")):
            for letter, word in (("q", "query"), ("k", "key")):
                array = arrays[f"transformer_blocks.{i}.attn.{norm}{letter}.weight"]
                out[f"double_blocks.{i}.{stream}_attn.norm.{word}_norm.scale"] = array
    for i in range(3):
        for letter, word in (("q", "query"), ("k", "key")):
            array = arrays[f"single_transformer_blocks.{i}.attn.norm_{letter}.weight"]
            out[f"single_blocks.{i}.norm.{word}_norm.scale"] = array
    return out


def test_original_names_give_the_same_network(arrays):
    wanted, loaded = (weights.load(named, "flux", **AXES) for named in (arrays, original(arrays)))
    assert loaded[0] == wanted[0]
    jax.tree.map(np.testing.assert_array_equal, loaded[1], wanted[1])


def shapes_of(model, channels):
    x = jnp.zeros((1, 4, 4, channels))
    cond = {"text": jnp.zeros((1, 1, 4096)), "pooled": jnp.zeros((1, model.pooled_dim))}
    return jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.zeros(1), cond))["params"]


def check_published(kind, model, channels, parameters, arrays, checksum):
    """The numbers that tests/golden/make_flux.py prints."""
    shapes = shapes_of(model.clone(scan=True), channels)
    constant = math.prod(shapes["positions"].shape) if "positions" in shapes else 0  # a buffer there
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) - constant == parameters
    names = [name for entry in weights.KINDS[kind].entries(model, {}) for name in entry.public]
    assert (len(names), zlib.crc32("\n".join(sorted(names)).encode())) == (arrays, checksum)


def test_sizes_and_names_of_the_published_networks():
    check_published("flux", Flux(), 16, 11_901_408_320, 1160, 470298248)
    check_published("flux", Flux(**flux.SIZES["schnell"]), 16, 11_891_178_560, 1156, 2598759218)
    fields = {"channels": 16, "depth": 24, "dual": 13, "width": 1536, "heads": 24, "text_dim": 4096}
    check_published("sd3", MMDiT(**fields, position_table=2), 16, 2_243_171_520, 909, 456889956)


@pytest.mark.parametrize("scan", [False, True])
def test_outputs_of_sd35_medium(scan):
    golden = dict(np.load(GOLDEN / "sd35.npz"))
    arrays = {**seeded.weights(golden["weights"]), "pos_embed.pos_embed": golden["positions"]}
    model, params = weights.load(arrays, "sd3", scan=scan)
    assert (model.depth, model.dual, model.heads) == (4, 2, 3)
    cond = {"text": golden["in/text"], "pooled": golden["in/pooled"]}
    out = jax.jit(models.bind(model, params))(nhwc(golden["in/x"]), jnp.asarray(golden["in/t"]), cond)
    np.testing.assert_allclose(out, nhwc(golden["out/y"]), rtol=0, atol=2e-5)
    back = weights.save(model, params, "sd3")
    assert set(back) == set(arrays)
    for name in arrays:
        np.testing.assert_array_equal(back[name], arrays[name], err_msg=name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: weights.load(a, "flux"), r"axes=\.\.\."),
        (lambda a: weights.load(a, "flux", axes=(4, 4, 4)), r"16.*\(4, 4, 4\)"),
        (lambda a: weights.load({**a, "single_transformer_blocks.0.x.weight": np.zeros(3)}, "flux", **AXES), r"1 unexpected.*single_transformer_blocks.0.x.weight"),
        (lambda a: weights.load({k: v for k, v in a.items() if "1.attn.to_v" not in k}, "flux", **AXES), r"4 missing.*transformer_blocks.1.attn.to_v"),
        (lambda a: weights.load({"a": np.zeros(1)}, "flux"), r"'flux'.*'x_embedder.weight'"),
        (lambda a: weights.load({"pos_embed.proj.weight": np.zeros((24, 4, 2, 2)), "transformer_blocks.3.attn2.to_q.weight": np.zeros(1)}, "sd3"), r"'sd3'|first ones"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message, arrays):
    with pytest.raises(ValueError, match=message):
        call(arrays)
