"""Public weights: outputs of the public implementations, round trips, strictness."""

import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import models, solvers, weights
from jaxdiff.weights import files

seeded = runpy.run_path(str(GOLDEN / "seeded.py"))
TINY_UNET = {"resolution": 8, "width": 16, "channel_mult": (1, 2), "blocks": 1, "attention": (4,)}


def load_arrays(path):
    """(weights, everything else) of a file that holds both."""
    arrays = dict(np.load(path))
    return {k.removeprefix("param/"): v for k, v in arrays.items() if k.startswith("param/")}, arrays


def edm_case(name):
    """As `load_arrays`: seeded weights under EDM's names, with inputs and outputs of EDM's networks in PyTorch."""
    golden = np.load(GOLDEN / ("edm_ncsnpp.npz" if "ncsnpp" in name else "edm.npz"))
    case = {key.removeprefix(f"{name}/"): golden[key] for key in golden.files if key.startswith(f"{name}/")}
    return seeded["weights"](case["weights"]), case


def nhwc(x):
    return jnp.asarray(np.moveaxis(x, 1, -1))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("edm_ddpmpp_tiny", {"style": "ddpmpp", "resolution": 16, "width": 16, "channel_mult": (1, 2), "blocks": 2, "attention": (8,), "num_classes": 0, "augment_dim": 9}),
        ("edm_ddpmpp_cond_tiny", {"style": "ddpmpp", "channel_mult": (1, 2, 2), "blocks": 1, "attention": (8, 4), "num_classes": 10}),
        ("edm_ncsnpp_tiny", {"style": "ncsnpp", "resolution": 16, "width": 16, "channel_mult": (1, 2), "blocks": 1, "attention": (8,), "num_classes": 0}),
        ("edm_adm_cond_tiny", {"style": "adm", "resolution": 16, "width": 32, "channel_mult": (1, 2), "blocks": 1, "attention": (8,), "num_classes": 10}),
    ],
)  # fmt: skip
def test_edm_outputs_and_inferred_architecture(name, fields):
    arrays, fixture = edm_case(name)
    model, _ = weights.load(arrays, "edm")
    assert {field: getattr(model, field) for field in fields} == fields
    cond = {"label": jnp.asarray(fixture["in/labels"].argmax(1))} if "in/labels" in fixture else None
    out = jax.jit(weights.load_denoiser(arrays, "edm"))(nhwc(fixture["in/x"]), jnp.asarray(fixture["in/sigma"]), cond)
    np.testing.assert_allclose(out, nhwc(fixture["out/denoised"]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_dit_outputs(scan):
    arrays, fixture = load_arrays(GOLDEN / "dit_tiny.npz")
    model, params = weights.load(arrays, "dit", heads=4, scan=scan)
    label = {"label": jnp.asarray(fixture["in/y"], jnp.int32)}
    out = jax.jit(models.bind(model, params))(nhwc(fixture["in/x"]), jnp.asarray(fixture["in/t"]), label)
    np.testing.assert_allclose(out, nhwc(fixture["out/y"]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["sd3", "sd3_qk_norm"])
@pytest.mark.parametrize("scan", [False, True])
def test_sd3_outputs(name, scan):
    arrays, golden = load_arrays(GOLDEN / f"{name}.npz")
    model, params = weights.load(arrays, "sd3", scan=scan, **({} if "qk" in name else {"heads": 3}))
    assert model.qk_norm == ("qk" in name)
    cond = {"text": jnp.asarray(golden["in/text"]), "pooled": jnp.asarray(golden["in/pooled"])}
    out = jax.jit(models.bind(model, params))(nhwc(golden["in/x"]), jnp.asarray(golden["in/t"]), cond)
    np.testing.assert_allclose(out, nhwc(golden["out/y"]), rtol=0, atol=2e-5)


# Models of our own, every parameter distinct, saved under public names and read back.
COND = {"sd3": {"text": jnp.zeros((1, 1, 6)), "pooled": jnp.zeros((1, 5))}}  # the kinds that cannot do without
OWN = {
    "edm": [
        models.UNet(**TINY_UNET, augment_dim=3),
        models.UNet(**TINY_UNET, num_classes=4, style="ncsnpp"),
        models.UNet(**{**TINY_UNET, "width": 64}, num_classes=4, style="adm"),
    ],
    "dit": [models.DiT(depth=2, width=32, heads=2, num_classes=4, grid=4), models.DiT(depth=2, width=32, heads=2, patch=4, learn_variance=False, scan=True)],
    "sd3": [models.MMDiT(depth=3, width=32, heads=2, text_dim=6, pooled_dim=5, scan=True), models.MMDiT(depth=2, width=64, heads=1, text_dim=6, pooled_dim=5, qk_norm=False, position_table=4)],
}  # fmt: skip


def random_params(model, cond):
    x = jnp.zeros((1, 8, 8, model.channels))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.zeros(1), cond))["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


@pytest.mark.parametrize(("kind", "i"), [(kind, i) for kind, own in OWN.items() for i in range(len(own))])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_round_trip_through_files_gives_back_every_array_and_the_same_model(kind, i, suffix, tmp_path):
    model = OWN[kind][i]
    params = random_params(model, COND.get(kind))
    path = tmp_path / f"w{suffix}"
    public = weights.save(model, params, kind, path)
    told = {"heads": model.heads} if hasattr(model, "heads") else {}
    again, loaded = weights.load(path, kind, **told, **({"scan": True} if getattr(model, "scan", False) else {}))
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    back = weights.save(again, loaded, kind)
    assert set(back) == set(public)
    for name in public:
        np.testing.assert_array_equal(back[name], public[name], err_msg=name)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("edm_ddpmpp_tiny", "edm"),
        ("edm_ddpmpp_cond_tiny", "edm"),
        ("edm_ncsnpp_tiny", "edm"),
        ("edm_adm_cond_tiny", "edm"),
        ("dit_tiny", "dit"),
    ],
)
def test_public_files_round_trip(name, kind):
    arrays, _ = edm_case(name) if kind == "edm" else load_arrays(GOLDEN / f"{name}.npz")
    model, params = weights.load(arrays, kind, **({"heads": 4} if kind == "dit" else {}))
    back = weights.save(model, params, kind)
    assert set(back) == set(arrays)
    for key in arrays:
        np.testing.assert_array_equal(back[key], arrays[key], err_msg=key)


@pytest.fixture
def edm_arrays():
    model = OWN["edm"][0]
    return weights.save(model, random_params(model, None), "edm")


def test_a_loaded_denoiser_is_a_pytree_that_solves_under_jit(edm_arrays):
    denoise = weights.load_denoiser(edm_arrays, "edm")
    x = 10 * jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    program = jax.jit(lambda denoise, x: solvers.solve(denoise, x, [10.0, 1.0, 0.1], "euler"))
    np.testing.assert_allclose(
        program(denoise, x), solvers.solve(denoise, x, [10.0, 1.0, 0.1], "euler"), rtol=1e-3, atol=1e-3
    )
    text = program.lower(denoise, x).as_text()
    held = re.findall(r"stablehlo.constant dense<\"0x(\w+)\">", text)  # arrays written out in the program
    assert max(map(len, held), default=0) < 20_000  # weights are arguments, not constants
    assert len(jax.tree.leaves(denoise)) == len(edm_arrays)


def test_half_precision_files_become_float32_parameters(edm_arrays):
    _, params = weights.load({k: v.astype(np.float16) for k, v in edm_arrays.items()}, "edm")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_bfloat16_files_are_read(edm_arrays, suffix, tmp_path):
    files.write(tmp_path / f"w{suffix}", {k: v.astype(jnp.bfloat16) for k, v in edm_arrays.items()})
    _, params = weights.load(tmp_path / f"w{suffix}", "edm")
    expected = edm_arrays["model.map_layer0.bias"].astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(params["map_layer0"]["bias"], expected)


def test_scalars_keep_their_shape_in_files(tmp_path):
    for suffix in (".npz", ".safetensors"):
        files.write(tmp_path / f"s{suffix}", {"step": np.int32(7), "transposed": np.arange(6.0).reshape(2, 3).T})
        back = files.read(tmp_path / f"s{suffix}")
        assert back["step"].shape == () and back["step"] == 7
        np.testing.assert_array_equal(back["transposed"], np.arange(6.0).reshape(2, 3).T)


def test_resampling_filters_of_public_files_are_let_pass(edm_arrays):
    _, params = weights.load({**edm_arrays, "model.enc.4x4_down.conv0.resample_filter": np.ones((1, 1, 2, 2))}, "edm")
    jax.tree.map(np.testing.assert_array_equal, params, weights.load(edm_arrays, "edm")[1])
    assert len(jax.tree.leaves(params)) == len(edm_arrays)


def test_every_misfit_is_counted_and_the_first_five_named(edm_arrays):
    broken = {k: v for k, v in edm_arrays.items() if not k.startswith("model.dec.8x8_block")}
    broken["model.extra.weight"] = np.zeros(3)
    broken["model.map_layer1.bias"] = np.zeros(7)
    with pytest.raises(weights.WeightsError) as error:
        weights.load(broken, "edm")
    message = str(error.value)
    missing = len(edm_arrays) - len(broken) + 1
    assert f"{missing} missing (" in message and ", ...)" in message
    assert "1 unexpected (model.extra.weight)" in message
    assert "1 mis-shaped (model.map_layer1.bias is (7,), expected (64,))" in message
    assert message.count("model.dec.8x8_block") == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, p: weights.load(a, "edn"), r"'edn'.*did you mean 'edm'"),
        (lambda a, p: weights.load(a, "dit"), r"'dit'.*'x_embedder.proj.weight'.*\(model\."),
        (lambda a, p: weights.load({"a": np.zeros(1)}, "edm"), r"'edm'.*1 names"),
        (lambda a, p: weights.load({"joint_blocks.0.x": np.zeros(1)}, "sd3"), r"SD3.*diffusers"),
        (lambda a, p: weights.load(a, "edm", head=3), r"UNet.*'head'"),
        (lambda a, p: weights.load(p / "none.npz", "edm"), r"none.npz.*tried /"),
        (lambda a, p: weights.load("w.pkl", "edm"), r"'w.pkl'.*docs/weights.md"),
        (lambda a, p: weights.save(OWN["dit"][0], {}, "edm"), r"'edm'.*UNet.*DiT"),
        (lambda a, p: weights.save(OWN["edm"][0], random_params(OWN["edm"][0], None), "edm", p / "w.pt"), r"\.npz or \.safetensors"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message, edm_arrays, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(edm_arrays, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_heads_that_shapes_cannot_tell_are_asked_for():
    model = OWN["dit"][0]
    arrays = weights.save(model, random_params(model, None), "dit")
    with pytest.raises(weights.WeightsError, match=r"heads=\.\.\."):
        weights.load(arrays, "dit")


def test_foreign_position_tables_are_refused():
    model = OWN["dit"][0]
    arrays = weights.save(model, random_params(model, None), "dit")
    arrays["pos_embed"] = arrays["pos_embed"] + 1
    with pytest.raises(weights.WeightsError, match=r"constants.*\(pos_embed\)"):
        weights.load(arrays, "dit", heads=2)
