"""Control, class tokens and padded text: the formulas, then every network that takes them.

Properties of the method are tested against closed forms and against implementations of this file's own. Elsewhere:
guidance of control in test_denoisers.py; noise and positions at other resolutions in training/test_resolution.py; zero
outputs, sizes, scanned and permuted in test_models.py, test_mdt.py, test_pixart.py and test_latent_unet.py; converted
weights in weights/.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxdiff import models, schedules
from jaxdiff.conventions import DDPM, EDM, Flow
from jaxdiff.models import (
    MDT,
    DiT,
    LatentUNet,
    MMDiT,
    PixArt,
    UNet,
    attention,
    conditioning,
    dit,
    mmdit,
    stacks,
    transformer,
)
from jaxdiff.models.conditioning import Control, ControlEmbed
from jaxdiff.models.padding import pad_text, padding

CONTROL = {
    "original_size": jnp.array([[51.0, 7.0], [300.0, 64.0]]),
    "crop": jnp.array([[0.0, 3.0], [9.0, 0.0]]),
    "flip": jnp.array([0.0, 1.0]),
    "aspect": jnp.array([1.5, 0.7]),
}
COND = {"label": jnp.array([0, 2]), **CONTROL}


def random_params(shapes, seed=0):
    """Every parameter random, zero-initialised ones too."""
    rng = np.random.default_rng(seed)
    spread = lambda s: 0.3 if len(s.shape) == 1 else 1 / math.sqrt(math.prod(s.shape[:-1]))  # noqa: E731
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * spread(s), jnp.float32), shapes)


# ------------------------------------------------------------------------------------ gamma

TABLE = {  # of power_inside_1mu by alpha, at u = 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1
    1: (1, 0.9755, 0.8536, 0.5, 0.1464, 0.0245, 0),
    2: (1, 0.9135, 0.5975, 0.1464, 0.0096, 0.0002, 0),
    4: (1, 0.7355, 0.2273, 0.0096, 0, 0, 0),
    8: (1, 0.3916, 0.0245, 0, 0, 0, 0),
}


@pytest.mark.parametrize("alpha", TABLE)
@pytest.mark.parametrize("kind", ["power_inside_1mu", "power_outside", "power_inside_u"])
def test_gamma_falls_from_one_at_clean_data_to_zero_at_pure_noise(kind, alpha):
    u = np.array([0, 0.1, 0.25, 0.5, 0.75, 0.9, 1], np.float32)
    gamma = Control(Flow(), gamma=kind, alpha=alpha).weight(jnp.asarray(1000 * u))
    assert gamma.dtype == jnp.float32 and gamma[0] == 1 and gamma[-1] == 0
    assert (np.diff(gamma) <= 0).all()
    if kind == "power_inside_1mu" or alpha == 1:
        np.testing.assert_allclose(gamma, TABLE[alpha], atol=1e-4)
    if kind == "power_inside_1mu":
        half = 1000 * (1 - 2 ** (-1 / alpha))
        np.testing.assert_allclose(Control(Flow(), alpha=alpha).weight(jnp.array([half])), 0.5, atol=1e-5)


def test_progress_is_read_off_the_noise_label_that_each_convention_gives():
    """sigma where the three conventions agree on how far it is, and the ends."""
    seen = {}

    def network(convention):
        return lambda x, label, cond: seen.setdefault(convention, label) * 0 + x

    sigma = jnp.array([0.02, 0.5, 30.0])
    for convention in (EDM(0.5), Flow(), DDPM("linear")):
        convention(network(convention))(jnp.zeros((3,)), sigma)
    found = {
        type(convention).__name__: Control(convention, gamma="power_outside", alpha=1).weight(label)
        for convention, label in seen.items()
    }
    cosine = lambda u: (1 + np.cos(np.pi * u)) / 2  # noqa: E731
    np.testing.assert_allclose(found["EDM"], cosine(2 / np.pi * np.arctan(sigma / 0.5)), atol=1e-6)
    np.testing.assert_allclose(found["Flow"], cosine(sigma / (1 + sigma)), atol=1e-6)
    steps = np.interp(np.log(sigma), np.log(schedules.sigma_table(schedules.linear_alpha_bar())), np.arange(1000))
    np.testing.assert_allclose(found["DDPM"], cosine(steps / 999), atol=1e-5)
    assert Control(DDPM()).weight(jnp.array([999.0])) == 0 and Control(DDPM()).weight(jnp.array([0.0])) == 1
    assert Control(DDPM()).weight(jnp.array([1001.0])) == 0  # not nan


# ------------------------------------------------------------------------------------ the embedding


@functools.cache
def embed(gamma="power_inside_1mu"):
    """A ControlEmbed of 6 features with random parameters: (noise labels, control) -> [2 6], and them."""
    module = ControlEmbed(6, Control(DDPM(), gamma=gamma, alpha=2.0))
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros(2), CONTROL))["params"]
    params = random_params(shapes)
    run = jax.jit(lambda t, control: module.apply({"params": params}, jnp.asarray(t), control))
    return run, params


def by_hand(params, t, control, weight):
    """The equations in float64 NumPy, one example at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def waves(values, unknown):
        if any(v < 0 for v in values):
            return unknown
        f = 10000.0 ** (-np.arange(128) / 128)
        return np.concatenate([w for v in values for w in (np.cos(v * f), np.sin(v * f))])

    def mlp(name, e):
        h = e @ p[f"{name}_in"]["kernel"] + p[f"{name}_in"]["bias"]
        return (h / (1 + np.exp(-h))) @ p[f"{name}_out"]["kernel"] + p[f"{name}_out"]["bias"]

    rows = []
    for i in range(2):
        c = {name: np.asarray(value, np.float64)[i].reshape(-1) for name, value in control.items()}
        flip = p["flip"]["embedding"][2 if c["flip"][0] < 0 else int(c["flip"][0])]
        high = np.concatenate([waves(c["crop"], p["no_crop"]), flip, waves(c["aspect"], p["no_aspect"])])
        low = waves(c["original_size"], p["no_original_size"])
        rows.append(mlp("high", high) + weight(t[i] / 999) * mlp("low", low))
    return np.stack(rows)


def cosine2(u):
    return (1 - np.cos(np.pi * (1 - u) ** 2)) / 2


def test_the_embedding_is_that_of_the_equations():
    run, params = embed()
    t = np.array([100.0, 400.0], np.float32)
    np.testing.assert_allclose(run(t, CONTROL), by_hand(params, t, CONTROL, cosine2), atol=2e-4)  # sines of 300 in f32
    for name in CONTROL:
        free = {**CONTROL, name: jnp.full_like(CONTROL[name], conditioning.UNKNOWN)}
        wanted = by_hand(params, t, free, cosine2)
        np.testing.assert_allclose(run(t, free), wanted, atol=2e-4)
        assert np.abs(wanted - by_hand(params, t, CONTROL, cosine2)).max() > 1e-2
    nothing = jax.tree.map(lambda value: jnp.full_like(value, conditioning.UNKNOWN), CONTROL)
    np.testing.assert_allclose(run(t, {}), run(t, nothing), atol=1e-6)


def test_low_level_control_acts_by_gamma_and_the_constant_form_fully():
    run, params = embed()
    null = {**CONTROL, "original_size": jnp.full((2, 2), -1.0)}
    effect = lambda run, t: run(np.float32([t, t]), CONTROL) - run(np.float32([t, t]), null)  # noqa: E731
    whole = effect(run, 0.0)  # gamma = 1
    for t in (100.0, 500.0, 900.0):
        np.testing.assert_allclose(effect(run, t), cosine2(t / 999) * whole, atol=1e-5)
        np.testing.assert_allclose(effect(embed("constant")[0], t), whole, atol=1e-6)
    assert (effect(run, 999.0) == 0).all() and np.abs(whole).max() > 0.1
    none, fewer = embed("none")
    assert (effect(none, 0.0) == 0).all() and not [name for name in fewer if "low" in name or "size" in name]
    assert set(params) - set(fewer) == {"low_in", "low_out", "no_original_size"}


# ------------------------------------------------------------------------------------ networks

TIMED = Control(DDPM(), alpha=2.0)
VIT = {"channels": 2, "width": 8, "heads": 2, "num_classes": 3, "control": TIMED}
SMALL = {
    "unet": UNet(4, 2, 8, (1,), 1, (), num_classes=3, control=TIMED),
    "latent_unet": LatentUNet(
        2, 8, (1,), 1, (0,), 1, heads=2, groups=2, text_dim=6, num_classes=3, class_tokens=2, control=TIMED
    ),
    "dit": DiT(**VIT, depth=1, learn_variance=False, label_conditioning="token", class_tokens=2),
    "mdt": MDT(**VIT, depth=3, decoder=1, learn_variance=False, label_conditioning="cross", mask_ratio=()),
    "pixart": PixArt(**VIT, depth=1, learn_variance=False, class_tokens=2),
    "mmdit": MMDiT(**VIT, depth=2, qk_norm=False),
}
X = jax.random.normal(jax.random.key(1), (2, 4, 4, 2))
T = jnp.array([0.0, 300.0])


def modulations(module, _):
    """What carries c into the blocks."""
    return isinstance(module, transformer.Modulation) or module.name in ("embed", "affine")


@functools.cache
def network(name):
    """(x, noise labels, cond, params) -> loss, output, modulation vectors, gradient of the control's parameters."""
    model = SMALL[name]
    params = random_params(jax.eval_shape(lambda: model.init(jax.random.key(0), X, T, COND))["params"])

    @jax.jit
    def run(x, t, cond, params):
        def loss(params):
            kwargs = {"mutable": "intermediates", "capture_intermediates": modulations}
            out, seen = model.apply({"params": params}, x, t, cond, **kwargs)
            found = jax.tree_util.tree_leaves_with_path(seen)
            vectors = [leaf for path, leaf in found if "__call__" in jax.tree_util.keystr(path)]
            return jnp.square(out - 1).mean(), (out, vectors)

        (value, aux), slopes = jax.value_and_grad(loss, has_aux=True)(params)
        return value, *aux, slopes["control_embed"]

    return (lambda x, t, cond, params=params: run(x, t, cond, params)), params, run


def cond_with(**changes):
    return {**COND, **changes}


NAMES = [name if name == "dit" else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]


@pytest.mark.parametrize("name", NAMES)
def test_every_network_trains_with_control(name):
    run = network(name)[0]
    loss, out, vectors, slopes = run(X, T, COND)
    assert np.isfinite(loss) and np.isfinite(out).all() and out.shape == X.shape and vectors
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        used = "no_" not in jax.tree_util.keystr(path)  # every control is given
        assert (np.abs(slope).max() > 0) == used, jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_network_lowers_for_tpu(name):
    _, params, program = network(name)
    assert export.export(program, platforms=["tpu"])(X, T, COND, params).platforms == ("tpu",)


@pytest.mark.parametrize("name", NAMES)
def test_every_network_hears_of_size_by_gamma_and_of_the_class_by_attention(name):
    run = network(name)[0]
    _, out, vectors, _ = run(X, T, COND)
    noise = jnp.array([999.0, 999.0])
    pure = run(X, noise, COND)[1]
    changes = {key: value + 1 if key != "flip" else 1 - value for key, value in CONTROL.items()}
    for key, value in changes.items():
        late, early = run(X, T, cond_with(**{key: value}))[1], run(X, noise, cond_with(**{key: value}))[1]
        assert np.abs(late - out).max() > 1e-5, key
        if key == "original_size":
            np.testing.assert_array_equal(early, pure)
        else:
            assert np.abs(early - pure).max() > 1e-5, key
    _, other, same, _ = run(X, T, {**COND, "label": jnp.array([1, 3])})
    assert np.abs(other - out).max() > 1e-5
    if name != "unet":  # whose class is part of the embedding
        jax.tree.map(np.testing.assert_array_equal, same, vectors)
    swapped = run(X[::-1], T[::-1], jax.tree.map(lambda leaf: leaf[::-1], COND))[1]
    np.testing.assert_allclose(swapped[::-1], out, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latent_unet", "pixart", "mmdit"])
def test_text_reaches_a_network_by_attention_alone(name):
    model = SMALL[name].clone(num_classes=0, text_dim=6, **({"pooled_dim": 0} if name == "mmdit" else {}))
    texts = jax.random.normal(jax.random.key(8), (2, 2, 3, 6))
    cond = {"text": texts[0], **CONTROL}
    params = random_params(jax.eval_shape(lambda: model.init(jax.random.key(0), X, T, cond))["params"])

    @jax.jit
    def run(text):
        kwargs = {"mutable": "intermediates", "capture_intermediates": modulations}
        out, seen = model.apply({"params": params}, X, T, {**cond, "text": text}, **kwargs)
        found = jax.tree_util.tree_leaves_with_path(seen)
        return out, [leaf for path, leaf in found if "__call__" in jax.tree_util.keystr(path)]

    (one, vectors), (other, same) = run(texts[0]), run(texts[1])
    assert vectors and np.abs(one - other).max() > 1e-5
    jax.tree.map(np.testing.assert_array_equal, same, vectors)


@pytest.mark.parametrize("name", NAMES)
def test_at_the_start_control_changes_nothing(name):
    run, params, _ = network(name)
    embed = params["control_embed"]
    zeroed = {part: jax.tree.map(jnp.zeros_like, embed[part]) for part in ("high_out", "low_out")}
    start = {**params, "control_embed": {**embed, **zeroed}}
    plain = {key: value for key, value in params.items() if key != "control_embed"}
    bare = jax.jit(models.bind(SMALL[name].clone(control=None), plain))(X, T, {"label": COND["label"]})
    for cond in (COND, cond_with(flip=jnp.ones(2), crop=-CONTROL["crop"])):
        np.testing.assert_allclose(run(X, T, cond, start)[1], bare, atol=1e-5)


def test_the_last_layers_of_control_start_at_zero():
    module = ControlEmbed(6, TIMED)
    out, variables = jax.jit(lambda: module.init_with_output(jax.random.key(0), T, COND))()
    np.testing.assert_array_equal(out, 0)
    for part in ("high_out", "low_out"):
        jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0 * leaf), variables["params"][part])
    assert np.abs(variables["params"]["high_in"]["kernel"]).max() > 0


def test_a_block_with_cross_attention_starts_as_the_identity():
    tokens, c = jax.random.normal(jax.random.key(3), (2, 5, 8)), jnp.ones((2, 8))
    classes = jnp.ones((2, 3, 8))
    out, _ = jax.jit(lambda: dit.Block(2).init_with_output(jax.random.key(0), tokens, (c, classes)))()
    np.testing.assert_array_equal(out, tokens)


def test_scanned_blocks_attend_to_the_class_as_unrolled_ones():
    model = SMALL["dit"].clone(depth=2, label_conditioning="cross")
    params = random_params(jax.eval_shape(lambda: model.init(jax.random.key(0), X, T, COND))["params"])
    out = jax.jit(models.bind(model, params))(X, T, COND)
    scanned = jax.jit(models.bind(model.clone(scan=True, remat=True), stacks.stack_blocks(params, 2)))(X, T, COND)
    np.testing.assert_allclose(scanned, out, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_network_without_control_has_no_more_parameters():
    for name, model in SMALL.items():
        made = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), X, T, COND))["params"]
        bare = model.clone(control=None)
        fewer = jax.eval_shape(lambda bare=bare: bare.init(jax.random.key(0), X, T, {"label": COND["label"]}))["params"]
        assert set(made) - set(fewer) == {"control_embed"} and not set(fewer) - set(made), name
    adaln = jax.eval_shape(lambda: DiT(depth=1, width=8, heads=2).init(jax.random.key(0), jnp.zeros((1, 4, 4, 4)), 1.0))
    assert (
        adaln["params"]["label"]["embedding"].shape == (1001, 8)
        and "cross_attention" not in adaln["params"]["blocks_0"]
    )


LDM = 400_920_579 + 1001 * 512  # LDM-4-G, and its table of classes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "side", "expected"),
    [
        (DiT(label_conditioning="token"), 32, 674_834_720),  # the published table, used in another place
        (LatentUNet(3, 192, (1, 2, 3, 5), 2, (0, 1, 1, 1), heads=1, text_dim=512, num_classes=1000), 64, LDM),
    ],
    ids=["dit", "ldm"],
)
def test_sizes_of_networks_of_classes(model, side, expected):
    x = jnp.zeros((1, side, side, model.channels))
    made = jax.eval_shape(lambda: model.init(jax.random.key(0), x, 1.0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made)) == expected


def test_joint_attention_does_not_know_which_stream_comes_first():
    """The queries, keys and values of a block, attended with the text first in NumPy."""
    block = mmdit.Block(2, last=True)
    streams = {"image": jax.random.normal(jax.random.key(4), (2, 4, 8)), "text": jnp.ones((2, 3, 8)), "mask": None}
    streams["text"] = streams["text"] * jnp.arange(3.0)[:, None]
    params = random_params(jax.eval_shape(lambda: block.init(jax.random.key(0), streams, jnp.ones((2, 8))))["params"])
    _, seen = jax.jit(lambda: block.apply({"params": params}, streams, jnp.ones((2, 8)), mutable="intermediates"))()
    taps = {
        name: np.asarray(value, np.float64) for name, value in seen["intermediates"].items() if name.startswith("tap")
    }
    q, k, v = (
        np.concatenate([taps[f"tap:{stream}/{part}"] for stream in ("text", "image")], 1).reshape(2, 7, 2, 4)
        for part in "qkv"
    )
    weights = np.exp(np.einsum("bnhd,bmhd->bhnm", q, k) / 2)
    gathered = np.einsum("bhnm,bmhd->bnhd", weights / weights.sum(-1, keepdims=True), v)[:, 3:]
    kernel, bias = (np.asarray(params["image_out"][part], np.float64) for part in ("kernel", "bias"))
    wanted = np.einsum("bnhd,hdf->bnf", gathered, kernel) + bias
    np.testing.assert_allclose(taps["tap:image/attention"], wanted, atol=1e-5)


# ------------------------------------------------------------------------------------ text

TEXT = jax.random.normal(jax.random.key(5), (10, 400))


def test_replicated_texts_repeat_and_noisy_ones_only_behind_the_text():
    slots = np.arange(77) % 10
    np.testing.assert_array_equal(pad_text(TEXT, 10, 77, "replicate"), TEXT[slots])
    noisy = pad_text(TEXT, 10, 77, "noisy", 0.02, jax.random.key(0))
    np.testing.assert_array_equal(noisy[:10], TEXT)
    residual = (np.asarray(noisy) - TEXT[slots])[10:] / np.asarray(TEXT).std(0)
    np.testing.assert_allclose(residual.std(), 0.02 * np.sqrt(7), rtol=0.02)  # 8 = ceil(77 / 10) times
    np.testing.assert_array_equal(pad_text(TEXT, 10, 77, "noisy", 0.0, jax.random.key(0)), TEXT[slots])
    np.testing.assert_array_equal(pad_text(TEXT, 10, 10, "noisy", 0.02, jax.random.key(0)), TEXT)
    zero = pad_text(TEXT, 4, 6, "zero")
    np.testing.assert_array_equal(zero, jnp.concatenate([TEXT[:4], jnp.zeros((2, 400))]))


def test_a_batch_of_texts_is_padded_where_its_mask_ends_and_loses_it():
    mask = np.arange(10) < np.array([[3], [10]])
    cond = {"text": jnp.stack([TEXT, TEXT + 1]), "text_mask": mask, "label": jnp.zeros(2)}
    keys = jax.random.split(jax.random.key(0), 2)
    out = jax.jit(padding("noisy", 0.5))(cond, keys)
    assert set(out) == {"text", "label"}
    np.testing.assert_allclose(out["text"][0], pad_text(TEXT, 3, 10, "noisy", 0.5, keys[0]), atol=1e-6)
    np.testing.assert_array_equal(out["text"][1], TEXT + 1)
    assert padding("zero")(None, keys) is None


def test_cross_attention_does_not_count_copies_and_joint_attention_does():
    cross, block = attention.CrossAttention(2), mmdit.Block(2, last=True)
    x, text = jax.random.normal(jax.random.key(4), (2, 5, 8)), jax.random.normal(jax.random.key(6), (2, 3, 8))
    joint = lambda text: ({"image": x, "text": text, "mask": None}, jnp.ones((2, 8)))  # noqa: E731
    of_cross, of_joint = (
        random_params(jax.eval_shape(lambda module=module, inputs=inputs: module.init(jax.random.key(0), *inputs)))
        for module, inputs in ((cross, (x, text, None)), (block, joint(text)))
    )

    @jax.jit
    def run():
        texts = text, jnp.tile(text, (1, 4, 1))
        return [(cross.apply(of_cross, x, t, None), block.apply(of_joint, *joint(t))["image"]) for t in texts]

    once, often = run()
    np.testing.assert_allclose(often[0], once[0], atol=2e-6)
    assert np.abs(often[1] - once[1]).max() > 1e-3


# ------------------------------------------------------------------------------------ defaults and messages


def test_samples_are_conditioned_on_whole_images():
    found = conditioning.default_control(SMALL["dit"].signals(), (6, 9, 3))
    wanted = {"original_size": [6, 9], "crop": [0, 0], "flip": [0], "aspect": [1.5]}
    assert {key: list(value) for key, value in found.items()} == wanted
    fewer = SMALL["dit"].clone(control=Control(EDM(), ("flip", "aspect"))).signals()
    found = conditioning.default_control(fewer, (6, 9, 3), original_size=(8, 4), flip=1)
    assert {key: list(value) for key, value in found.items()} == {"flip": [1], "aspect": [0.5]}
    assert conditioning.default_control(SMALL["dit"].clone(control=None).signals(), (6, 9, 3)) == {}


def test_published_forms_of_control_count_pixels_not_latents():
    pixart = SMALL["pixart"].clone(control=None, size_embed=True).signals()
    found = conditioning.default_control(pixart, (6, 9, 4))
    assert {key: value.tolist() for key, value in found.items()} == {
        "original_size": [48, 72],
        "aspect_ratio": [np.float32(48 / 72)],  # height / width, where aspect is width / height
    }
    sdxl = SMALL["latent_unet"].clone(control=None, sizes=6).signals()
    found = conditioning.default_control(sdxl, (6, 9, 4), original_size=(100, 200), crop=(3, 4))
    assert {key: value.tolist() for key, value in found.items()} == {"sizes": [100, 200, 3, 4, 48, 72]}


def start(name, cond=COND, **changes):
    return jax.eval_shape(lambda: SMALL[name].clone(**changes).init(jax.random.key(0), X, T, cond))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Control(EDM(), gamma="cosine"), r"'cosine'.*power_inside_1mu.*constant, none"),
        (lambda: Control(EDM(), keys=("flop",)), r"'flop'.*did you mean 'flip'"),
        (lambda: Control(EDM(), keys=()), r"keys.*crop, flip, aspect, original_size"),
        (lambda: Control(EDM(), alpha=0.0), r"alpha.*got 0.0"),
        (lambda: models.build("dit", control={"convention": EDM(), "alfa": 2.0}), r"'alfa'.*did you mean 'alpha'"),
        (lambda: start("dit", cond_with(size=jnp.ones((2, 2)))), r"DiT.*'size'.*label, crop, flip, aspect, original_size"),
        (lambda: start("mmdit", cond_with(crop=jnp.ones(2))), r"'crop'.*\[2, 2\], got \(2,\)"),
        (lambda: start("unet", {"control": jnp.ones((2, 2))}), r"UNet.*'control'.*label, .*crop"),
        (lambda: start("unet", augment_dim=9), r"UNet.*augment_dim=9"),
        (lambda: start("pixart", size_embed=True), r"PixArt.*size_embed=True"),
        (lambda: start("latent_unet", sizes=6), r"LatentUNet.*sizes=6"),
        (lambda: start("dit", control=None), r"DiT.*'(original_size|crop|flip|aspect)'.*label\n"),
        (lambda: start("dit", label_conditioning="cros"), r"'cros'.*did you mean 'cross'"),
        (lambda: start("mdt", label_conditioning="token"), r"'adaln'.*'cross', got 'token'"),
        (lambda: start("pixart", {"text": jnp.ones((2, 3, 4096))}), r"PixArt.*'text'.*label, crop"),
        (lambda: start("mmdit", class_tokens=0), r"class_tokens.*got 0"),
        (lambda: conditioning.default_control(SMALL["dit"].signals(), (6, 9), crop=(1,)), r"crop.*2 numbers, got \[1.0\]"),
        (lambda: pad_text(TEXT, 0, 12), r"0 of 10.*12"),
        (lambda: pad_text(TEXT, 11, 12), r"11 of 10.*12"),
        (lambda: pad_text(TEXT, 10, 8), r"10 of 10.*8"),
        (lambda: pad_text(TEXT, 10, 12), r"noisy.*key="),
        (lambda: pad_text(TEXT, 10, 12, "copy"), r"'copy'.*zero, replicate, noisy"),
        (lambda: padding("zero")({"text": TEXT[None]}, jax.random.split(jax.random.key(0), 1)), r"'text_mask'\] \[b, l\]"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()
