"""PixArt transformers: outputs of the public implementation, both namings, round trips, strictness."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import models, weights
from jaxdiff.models import PixArt

TOLD = {"heads": 2, "grid": 2}  # what the arrays of the tiny network do not tell
# names of the official release that are not built from the parts below
RENAMED = {
    "pos_embed.proj": "x_embedder.proj", "adaln_single.linear": "t_block.1", "proj_out": "final_layer.linear",
    "scale_shift_table": "final_layer.scale_shift_table",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1", "caption_projection.linear_2": "y_embedder.y_proj.fc2",
}  # fmt: skip
EMBEDDERS = {"timestep_embedder": "t_embedder", "resolution_embedder": "csize_embedder", "aspect_ratio_embedder": "ar_embedder"}  # fmt: skip


def nhwc(x):
    return jnp.asarray(np.moveaxis(x, 1, -1))


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "pixart.npz"))


@pytest.fixture(scope="module")
def arrays(golden):
    return {k.removeprefix("param/"): v for k, v in golden.items() if k.startswith("param/")}


def official(arrays):
    """The same arrays as the official release names and fuses them."""
    out = {"pos_embed": np.zeros((1, 16, 24))}
    for old, new in RENAMED.items():
        out |= {new + name.removeprefix(old): a for name, a in arrays.items() if name.startswith(old)}
    for old, new in EMBEDDERS.items():
        for i, place in ((1, 0), (2, 2)):
            for part in ("weight", "bias"):
                out[f"{new}.mlp.{place}.{part}"] = arrays[f"adaln_single.emb.{old}.linear_{i}.{part}"]
    for i in range(2):
        old, new = f"transformer_blocks.{i}", f"blocks.{i}"
        out[f"{new}.scale_shift_table"] = arrays[f"{old}.scale_shift_table"]
        for part in ("weight", "bias"):
            one = lambda name, part=part, old=old: arrays[f"{old}.{name}.{part}"]  # noqa: E731
            out[f"{new}.attn.qkv.{part}"] = np.concatenate([one(f"attn1.to_{letter}") for letter in "qkv"])
            out[f"{new}.cross_attn.kv_linear.{part}"] = np.concatenate([one(f"attn2.to_{letter}") for letter in "kv"])
            out[f"{new}.cross_attn.q_linear.{part}"] = one("attn2.to_q")
            out[f"{new}.attn.proj.{part}"], out[f"{new}.cross_attn.proj.{part}"] = (
                one(f"attn{j}.to_out.0") for j in (1, 2)
            )
            out[f"{new}.mlp.fc1.{part}"], out[f"{new}.mlp.fc2.{part}"] = one("ff.net.0.proj"), one("ff.net.2")
    return out


def test_outputs_with_sizes_and_scanned_blocks(golden, arrays):
    apply = jax.jit(models.bind(*weights.load(arrays, "pixart", scan=True, **TOLD)))
    sizes = {"original_size": golden["in/resolution"], "aspect_ratio": golden["in/aspect_ratio"]}
    for mask, expected in [(np.ones_like(golden["in/mask"]), "out/y"), (golden["in/mask"], "out/masked")]:
        cond = {"text": golden["in/text"], "text_mask": mask, **sizes}
        out = apply(nhwc(golden["in/x"]), jnp.asarray(golden["in/t"]), cond)
        assert jnp.abs(out).max() > 1
        np.testing.assert_allclose(out, nhwc(golden[expected]), rtol=0, atol=2e-5)
    assert np.abs(golden["out/masked"] - golden["out/y"]).max() > 0.05


def test_outputs_without_sizes(golden, arrays):
    plain = {name: a for name, a in arrays.items() if "resolution_embedder" not in name and "aspect" not in name}
    model, params = weights.load(plain, "pixart", heads=2, grid=4)
    assert not model.size_embed and weights.KINDS["pixart"].infer(plain)["grid"] == 0
    cond = {"text": golden["in/text"], "text_mask": golden["in/mask"]}
    out = jax.jit(models.bind(model, params))(nhwc(golden["in/x"]), jnp.asarray(golden["in/t"]), cond)
    np.testing.assert_allclose(out, nhwc(golden["out/plain"]), rtol=0, atol=2e-5)


def test_public_arrays_round_trip(arrays):
    model, params = weights.load(arrays, "pixart", **TOLD)
    assert model == PixArt(depth=2, width=24, text_dim=10, size_embed=True, **TOLD)
    back = weights.save(model, params, "pixart")
    assert set(back) == set(arrays)
    for name in arrays:
        np.testing.assert_array_equal(back[name], arrays[name], err_msg=name)


def test_official_names_give_the_same_network(arrays):
    wanted, loaded = (weights.load(named, "pixart", **TOLD) for named in (arrays, official(arrays)))
    assert loaded[0] == wanted[0]
    jax.tree.map(np.testing.assert_array_equal, loaded[1], wanted[1])


@pytest.mark.parametrize(("naming", "name"), [(dict, "caption_projection"), (official, "y_embedder")])
def test_a_stored_null_text_is_kept(arrays, naming, name):
    null = np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32)
    model, params = weights.load({**naming(arrays), f"{name}.y_embedding": null}, "pixart", **TOLD)
    assert model.null_tokens == 7
    np.testing.assert_array_equal(params["null_text"], null)
    np.testing.assert_array_equal(weights.save(model, params, "pixart")["caption_projection.y_embedding"], null)


def test_sizes_and_public_names_of_the_published_networks():
    """The numbers that tests/golden/make_pixart.py prints."""
    x = jnp.zeros((1, 32, 32, 4))
    for sizes, parameters in [(False, 610_856_096), (True, 611_349_152)]:
        model = PixArt(size_embed=sizes, scan=not sizes)
        cond = {"text": jnp.zeros((1, 1, 4096))}
        if sizes:
            cond |= {"original_size": jnp.zeros((1, 2)), "aspect_ratio": jnp.zeros((1, 1))}
        init = model.init
        shapes = jax.eval_shape(lambda init=init, cond=cond: init(jax.random.key(0), x, jnp.zeros(1), cond))["params"]
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == parameters
    names = [name for entry in weights.KINDS["pixart"].entries(model, shapes) for name in entry.public]
    assert len(names) == 611
    assert zlib.crc32("\n".join(sorted(names)).encode()) == 2974843383
    assert sum("resolution_embedder" not in name and "aspect_ratio" not in name for name in names) == 603


def test_published_fields_are_inferred():
    """Of the 1024-pixel network: 16 heads for its width, and the grid that its positions were stretched over."""
    shapes = {
        "pos_embed.proj.weight": (1152, 4, 2, 2), "transformer_blocks.0.ff.net.0.proj.weight": (4608, 1152),
        "caption_projection.linear_1.weight": (1152, 4096), "caption_projection.y_embedding": (120, 4096),
        "adaln_single.emb.aspect_ratio_embedder.linear_1.weight": (384, 256), "proj_out.weight": (32, 1152),
    }  # fmt: skip
    fields = weights.KINDS["pixart"].infer({name: np.broadcast_to(0.0, shape) for name, shape in shapes.items()})
    wanted = PixArt(depth=1, null_tokens=120, size_embed=True, grid=32)
    assert PixArt(**fields) == wanted


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: weights.load(a, "pixart"), r"heads=\.\.\."),
        (lambda a: weights.load(a, "pixart", width=48, **TOLD), r"64 mis-shaped.*transformer_blocks.0.attn1.to_out.0.bias.*\(24,\).*\(48,\)"),
        (lambda a: weights.load({**a, "transformer_blocks.0.attn2.norm_k.weight": np.zeros(3)}, "pixart", **TOLD), r"1 unexpected.*transformer_blocks.0.attn2.norm_k.weight"),
        (lambda a: weights.load({k: v for k, v in a.items() if "1.attn2.to_v" not in k}, "pixart", **TOLD), r"2 missing.*transformer_blocks.1.attn2.to_v"),
        (lambda a: weights.load({"a": np.zeros(1)}, "pixart"), r"'pixart'.*'pos_embed.proj.weight'"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message, arrays):
    with pytest.raises(ValueError, match=message):
        call(arrays)
