"""Encoders of CLIP and T5: outputs of the public implementations, exact sizes, round trips, strictness."""

import math
import runpy
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import data, weights
from jaxdiff.evaluation import clip as clip_module
from jaxdiff.evaluation.clip import positive_cosine, scorer
from jaxdiff.models import CLIPText, CLIPVision, T5Encoder, clip, t5
from jaxdiff.models.clip import preprocess

seeded = runpy.run_path(str(GOLDEN / "seeded.py"))
TOLD = {  # what these tiny networks have unlike any published one
    "clip_text": {"heads": 2, "activation": "quick_gelu"},
    "clip_projected": {"heads": 2, "activation": "gelu"},
    "t5": {},
}
KIND = {"clip_text": "clip_text", "clip_projected": "clip_text", "t5": "t5"}


def read(name):
    """(weights, inputs and outputs)."""
    arrays = dict(np.load(GOLDEN / f"{name}.npz"))
    return seeded["weights"](arrays["lines"]), arrays


@pytest.fixture(scope="module")
def golden():
    return {name: read(name) for name in [*TOLD, "clip"]}


@pytest.fixture(scope="module")
def loaded(golden):
    """name -> (model, parameters)."""
    return {name: weights.load(golden[name][0], KIND[name], **TOLD[name]) for name in TOLD}


def near(ours, public):
    assert 0.2 < public.std() < 5
    np.testing.assert_allclose(ours, public, rtol=0, atol=2e-5)


def run(loaded, *inputs):
    model, params = loaded
    out = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs))(params, *inputs)
    return jax.tree.map(np.asarray, out)


def with_and_without(arrays):
    """Ids twice, first with a mask that hides nothing."""
    ids, mask = arrays["in/ids"], arrays["in/mask"]
    return np.concatenate([ids, ids]), np.concatenate([np.ones_like(mask), mask])


# ------------------------------------------------------------------------------------ the public implementations


def test_clip_text_normed_and_pooled_at_its_end(golden, loaded):
    arrays = golden["clip_text"][1]
    both = run(loaded["clip_text"], *with_and_without(arrays))
    near(both["text"][:3], arrays["out/last"])
    near(both["text"][3:], arrays["out/masked"])
    near(both["pooled"][:3], arrays["out/pooled"])
    assert np.abs(arrays["out/last"] - arrays["out/masked"]).max() > 0.1


def test_clip_text_before_the_last_block_and_projected(golden, loaded):
    arrays, (model, params) = golden["clip_projected"][1], loaded["clip_projected"]
    out = run((model.clone(penultimate=True), params), arrays["in/ids"])
    near(out["text"], arrays["out/penultimate"])
    near(out["pooled"], arrays["out/pooled"])


def test_t5_with_and_without_hidden_tokens(golden, loaded):
    arrays = golden["t5"][1]
    both = run(loaded["t5"], *with_and_without(arrays))["text"]
    near(both[:2], arrays["out/last"])
    near(both[2:], arrays["out/masked"])
    assert np.abs(arrays["out/last"] - arrays["out/masked"]).max() > 0.1


@pytest.mark.parametrize("name", ["clip_text", "t5"])
def test_half_precision_is_of_the_network_only(name, golden, loaded):
    (model, params), ids = loaded[name], golden[name][1]["in/ids"]
    half = model.clone(dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # flax's norms and jax.nn's attention promote by themselves
        program = jax.make_jaxpr(lambda p, ids: half.apply({"params": p}, ids, jnp.ones_like(ids)))(params, ids)
    assert {aval.dtype for aval in program.out_avals} == {np.dtype("float32")}
    products = [line for line in str(program).splitlines() if "= dot_general" in line]
    logits = [line for line in products if "bf16[" not in line]
    assert (len(products), len(logits)) == (6 * model.depth, model.depth)  # qkv, logits, values, out, mlp in and out


def test_distances_fall_into_the_public_buckets(golden):
    arrays = golden["t5"][1]
    buckets = t5.buckets_of(np.asarray(arrays["in/offsets"]), buckets=32, distance=128)
    np.testing.assert_array_equal(buckets, arrays["out/buckets"])
    assert set(buckets.tolist()) == set(range(32)) - {16}  # none is both later and at distance 0


def test_both_halves_of_a_clip_checkpoint_and_their_score(golden):
    (arrays, given), told = golden["clip"], {"heads": 2, "activation": "quick_gelu"}
    (see, eyes), (read, head) = (weights.load(arrays, kind, **told) for kind in ("clip_vision", "clip_text"))

    @jax.jit
    def measure(eyes, head, x, ids):
        image, text = see.apply({"params": eyes}, x), read.apply({"params": head}, ids)["pooled"]
        return image / jnp.linalg.norm(image, axis=-1, keepdims=True), positive_cosine(image, text)

    image, score = measure(eyes, head, np.moveaxis(given["in/x"], 1, -1), given["in/ids"])
    cosine = np.diag(given["out/cosine"])
    assert cosine.min() < -0.1 and cosine.max() > 0.1
    near(image, given["out/image"])
    np.testing.assert_allclose(score, np.maximum(cosine, 0), rtol=0, atol=2e-5)


def test_a_scorer_tokenizes_and_averages_over_batches(golden, monkeypatch):
    (arrays, given), told = golden["clip"], {"heads": 2, "activation": "quick_gelu"}
    ids = given["in/ids"]
    monkeypatch.setattr(
        data, "tokenizer", lambda path, length: lambda texts: (ids[[int(text) for text in texts]], None)
    )
    monkeypatch.setattr(clip_module, "preprocess", lambda images, side: images)
    score = scorer(arrays, "tokenizer.json", batch_size=2, **told)
    count = len(ids)
    wanted = 100 * np.maximum(np.diag(given["out/cosine"][::-1]), 0).mean()
    images = np.moveaxis(given["in/x"], 1, -1)
    assert score(images, [str(count - 1 - i) for i in range(count)]) == pytest.approx(wanted, abs=2e-3)
    with pytest.raises(ValueError, match=rf"got {count} images and 1 captions"):
        score(images, ["0"])
    read = lambda texts: (ids[[int(text.removeprefix("A photo depicts ")) for text in texts]], None)  # noqa: E731
    monkeypatch.setattr(data, "tokenizer", lambda path, length: read)
    hessel = scorer(arrays, "tokenizer.json", "hessel", **told)(images, [str(count - 1 - i) for i in range(count)])
    assert hessel == pytest.approx(wanted / 40, abs=1e-4)
    with pytest.raises(ValueError, match=r"unknown CLIP score 'cos'"):
        scorer(arrays, "tokenizer.json", "cos", **told)


def test_images_reach_clip_as_in_its_training():
    grey = jax.jit(lambda images: preprocess(images, side=4))(np.full((1, 2, 2, 1), 255, np.uint8))
    white = (1 - np.array([0.4815, 0.4578, 0.4082])) / np.array([0.2686, 0.2613, 0.2758])
    np.testing.assert_allclose(grey, np.broadcast_to(white, (1, 4, 4, 3)), rtol=1e-3)


# ------------------------------------------------------------------------------------ sizes and names


def public_names(model, kind):
    """(parameters, names)"""
    rules = weights.KINDS[kind]
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *rules.example(model)))["params"]
    names = [name for entry in rules.entries(model, shapes) for name in entry.public]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)), names


@pytest.mark.parametrize(
    ("model", "kind", "parameters", "arrays", "checksum"),
    [
        (CLIPText(), "clip_text", 123_060_480, 196, 1470530221),
        (CLIPText(**clip.SIZES["bigg"]), "clip_text", 694_659_840, 517, 652086560),
        (T5Encoder(), "t5", 4_762_310_656, 219, 2628679575),
    ],
)
def test_sizes_and_public_names_of_the_published_networks(model, kind, parameters, arrays, checksum):
    """The numbers that tests/golden/make_text_encoders.py prints; a text encoder alone has no prefix there."""
    count, names = public_names(model, kind)
    assert (count, len(names)) == (parameters, arrays)
    if kind == "clip_text" and not model.projection:
        names = [name.removeprefix("text_model.") for name in names]
    assert zlib.crc32("\n".join(sorted(names)).encode()) == checksum


@pytest.mark.parametrize("name", TOLD)
def test_public_arrays_round_trip(name, golden, loaded):
    arrays, (model, params) = golden[name][0], loaded[name]
    prefix = "text_model." if name == "clip_text" else ""  # files have it, the module alone does not
    back = weights.save(model, params, KIND[name])
    assert set(back) == {prefix + key for key in arrays}
    for key in arrays:
        np.testing.assert_array_equal(back[prefix + key], arrays[key], err_msg=key)
    again, params_again = weights.load(back, KIND[name], **TOLD[name])
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


def test_the_architecture_is_inferred(golden, loaded):
    shared = {"vocabulary": 20, "length": 7, "width": 8, "depth": 3, "mlp_width": 12, "eos": 19}
    assert loaded["clip_text"][0] == CLIPText(**shared, **TOLD["clip_text"])
    assert loaded["clip_projected"][0] == CLIPText(**shared, **TOLD["clip_projected"], projection=6)
    assert loaded["t5"][0] == T5Encoder(
        vocabulary=20, width=12, depth=2, heads=2, head_width=4, mlp_width=10, buckets=8
    )
    vision = {"side": 6, "patch": 3, "width": 8, "depth": 2, "mlp_width": 12, "projection": 5}
    fields = weights.KINDS["clip_vision"].infer(golden["clip"][0])
    assert fields == {**vision, "heads": None, "activation": None}


@pytest.mark.parametrize(
    ("width", "heads", "activation"), [(768, 12, "quick_gelu"), (1024, 16, "gelu"), (1280, 20, "gelu")]
)
def test_heads_and_activation_of_published_widths(width, heads, activation, golden):
    arrays = {**golden["clip_projected"][0], "text_model.embeddings.token_embedding.weight": np.zeros((9, width))}
    fields = weights.KINDS["clip_text"].infer(arrays)
    assert (fields["heads"], fields["activation"], fields["eos"]) == (heads, activation, 8)


def test_what_belongs_to_a_decoder_is_left_alone(golden, loaded):
    more = ("encoder.embed_tokens.weight", "decoder.block.0.layer.0.layer_norm.weight", "lm_head.weight")
    arrays = {**golden["t5"][0], **{name: np.zeros(1) for name in more}}
    jax.tree.map(np.testing.assert_array_equal, weights.load(arrays, "t5")[1], loaded["t5"][1])


# ------------------------------------------------------------------------------------ messages


def test_every_misfit_is_counted_and_named(golden):
    arrays = {**golden["clip_projected"][0], "text_projection.weight": np.zeros((6, 9)), "extra": np.zeros(1)}
    del arrays["text_model.encoder.layers.1.self_attn.v_proj.bias"]
    with pytest.raises(weights.WeightsError) as error:
        weights.load(arrays, "clip_text", **TOLD["clip_projected"])
    message = str(error.value)
    assert "1 missing (text_model.encoder.layers.1.self_attn.v_proj.bias)" in message
    assert "1 unexpected (extra)" in message
    assert "1 mis-shaped (text_projection.weight is (6, 9), expected (6, 8))" in message


FIRST = {"encoder.block.0.layer.1.DenseReluDense.wi.weight": np.zeros(1)}
SMALL = CLIPText(vocabulary=20, length=7, width=8, depth=1, heads=2, mlp_width=8)


def shapes(model, *inputs):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda arrays: weights.load(arrays, "clip_text"), r"heads, activation.*heads=\.\.\."),
        (lambda arrays: weights.load(arrays, "clip_text", heads=2, activation="gleu"), r"'gleu'.*did you mean 'gelu'"),
        (lambda arrays: weights.load(arrays, "clip_vision"), r"'vision_model.embeddings.patch_embedding.weight'"),
        (lambda arrays: weights.load(arrays, "t5"), r"'t5'.*'shared.weight'"),
        (lambda arrays: weights.load(FIRST, "t5"), r"'t5'.*1\.1"),
        (lambda _: shapes(SMALL, jnp.zeros((1, 9), int)), r"7 tokens.*9.*length=7"),
        (lambda _: shapes(SMALL, jnp.zeros((1, 3), int), jnp.ones((1, 4))), r"\(1, 3\), got \(1, 4\)"),
        (lambda _: shapes(SMALL.clone(heads=3), jnp.zeros((1, 3), int)), r"width=8.*heads=3"),
        (lambda _: shapes(CLIPVision(), jnp.zeros((1, 64, 64, 3))), r"\[b, 224, 224, 3\], got \(1, 64, 64, 3\).*preprocess"),
        (lambda _: positive_cosine(jnp.zeros((2, 5)), jnp.zeros((2, 6))), r"\(2, 5\) and \(2, 6\)"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message, golden):
    with pytest.raises(ValueError, match=message):
        call(golden["clip_projected"][0])
