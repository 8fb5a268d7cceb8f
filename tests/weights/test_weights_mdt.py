"""MDTv2 checkpoints: outputs of the public implementation, round trips, strictness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import models, weights
from jaxdiff.models import MDT
from jaxdiff.weights import mdt

FIXTURE = GOLDEN / "mdtv2_tiny.npz"
OWN = MDT(depth=4, width=8, heads=2, decoder=2, num_classes=2, grid=2)


def random_params(model):
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *mdt.example(model)))["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def arrays():
    return weights.save(OWN, random_params(OWN), "mdt")


def test_outputs_and_round_trip_of_the_public_implementation():
    fixture = dict(np.load(FIXTURE))
    public = {k.removeprefix("param/"): v for k, v in fixture.items() if k.startswith("param/")}
    model, params = weights.load(public, "mdt", scan=True)
    assert model == MDT(depth=6, width=48, heads=4, decoder=2, num_classes=10, grid=4, scan=True)
    x, wanted = (jnp.asarray(np.moveaxis(fixture[name], 1, -1)) for name in ("in/x", "out/y"))
    label = {"label": jnp.asarray(fixture["in/y"], jnp.int32)}
    out = jax.jit(models.bind(model, params))(x, jnp.asarray(fixture["in/t"]), label)
    assert jnp.abs(wanted).max() > 1
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5)
    back = weights.save(model, params, "mdt")
    assert set(back) == set(public)
    for name, array in public.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
        assert back[name].dtype == array.dtype


@pytest.mark.parametrize("changes", [{"scan": True}, {"mask_ratio": ()}, {"decoder": 0, "learn_variance": False}])
def test_models_of_our_own_round_trip(changes):
    model = OWN.clone(**changes)
    params = random_params(model)
    again, loaded = weights.load(weights.save(model, params, "mdt"), "mdt", scan=model.scan)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_the_release_has_394_arrays_of_the_documented_shapes():
    """XL/2 at 256 pixels: blocks' arrays with their indices, 3 tables, embedders and final layer."""
    model = MDT(grid=16)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *mdt.example(model)))["params"]
    found = {name: value.shape for name, value in mdt.constants(model).items()}
    for entry in mdt.entries(model, shapes):
        leaf = shapes
        for key in entry.path:
            leaf = leaf[key]
        found |= dict(zip(entry.public, [a.shape for a in jax.eval_shape(entry.layout.to_public, leaf)], strict=True))
    assert len(found) == 394
    documented = {
        "x_embedder.proj.weight": (1152, 4, 2, 2),
        "decoder_pos_embed": (1, 256, 1152),
        "mask_token": (1, 1, 1152),
        "en_inblocks.11.attn.qkv.weight": (3456, 1152),
        "en_outblocks.11.skip_linear.weight": (1152, 2304),
        "de_blocks.3.attn.rel_pos_bias.relative_position_bias_table": (964, 16),
        "sideblocks.0.adaLN_modulation.1.weight": (6912, 1152),
        "final_layer.linear.weight": (32, 1152),
    }
    assert documented.items() <= found.items()


def test_a_foreign_index_is_refused(arrays):
    name = "en_inblocks.0.attn.rel_pos_bias.relative_position_index"
    with pytest.raises(weights.WeightsError, match=r"constants.*\(en_inblocks.0.attn"):
        weights.load({**arrays, name: arrays[name].T}, "mdt")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: weights.load(a, "mdt", width=16), r"\d+ mis-shaped.*x_embedder.proj.weight.*\(8, 4, 2, 2\).*\(16, 4, 2, 2\).*overrides"),
        (lambda a: weights.load({k: v for k, v in a.items() if "sideblocks" not in k}, "mdt"), r"11 missing.*sideblocks"),
        (lambda a: weights.load(a, "dit", heads=2), r"'dit'.*'blocks.0.mlp.fc1.weight'"),
        (lambda a: weights.load({"a": np.zeros(1)}, "mdt"), r"'mdt'.*'x_embedder.proj.weight'"),
        (lambda a: weights.save(OWN.clone(grid=0), {}, "mdt"), r"grid=\.\.\."),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message, arrays):
    with pytest.raises(ValueError, match=message):
        call(arrays)
