"""The step condition: nothing at the start, something after; its size; what it asks for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxdiff import models, weights
from jaxdiff.conditions import METHOD
from jaxdiff.configs import imagenet64
from jaxdiff.models import EDM2, MDT, MLP, DiT, Flux, LatentUNet, MMDiT, PixArt, UNet, embeddings, stacks, unet
from jaxdiff.training import transfer
from jaxdiff.trees import by_name

SMALL_UNET = {"resolution": 8, "width": 8, "channel_mult": (1,), "blocks": 1, "attention": (), "num_classes": 3}
SMALL_VIT = {"depth": 2, "width": 16, "heads": 2}
SMALL = {
    "ddpmpp": UNet(**SMALL_UNET),
    "ncsnpp": UNet(**SMALL_UNET, style="ncsnpp"),
    "adm": UNet(**{**SMALL_UNET, "width": 64}, style="adm"),
    "dit": DiT(**SMALL_VIT, num_classes=3, learn_variance=False),
    "mmdit": MMDiT(**SMALL_VIT, text_dim=6, pooled_dim=5),
    "mlp": MLP(width=8, depth=1, num_classes=3),
}
STEPS = (0.0, 3.0, 7.0, -1.3)  # numbers of timestamps, none, and a log of a noise level


def inputs(name):
    shape = (2, SMALL[name].channels) if name == "mlp" else (2, 8, 8, SMALL[name].channels)
    x = jax.random.normal(jax.random.key(1), shape)
    text = {"text": jax.random.normal(jax.random.key(7), (2, 3, 6)), "pooled": jnp.ones((2, 5))}
    return x, text if name == "mmdit" else {"label": jnp.array([0, 2])}


def shapes_of(model, name):
    x, cond = inputs(name)
    cond = {**cond, "step": 4.0} if model.step_embed else cond
    return jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(2), cond))["params"]


def last_of_step(path):
    """The layers through which the step enters: those that "zero" makes zero."""
    names = [key.key for key in path]
    return "affine_step" in names or names[:2] == ["step", "out"]


def draw(model, name, zero):
    """Parameters that are a function of their name alone, so that two models share what both have."""

    def leaf(path, shape):
        if zero and last_of_step(path):
            return jnp.zeros(shape.shape)
        rng = np.random.default_rng([ord(letter) for letter in jax.tree_util.keystr(path)])
        spread = 0.7 / np.sqrt(max(1, math.prod(shape.shape[:-1])))
        return jnp.asarray(rng.normal(size=shape.shape) * spread + (len(shape.shape) == 1), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes_of(model, name))


@pytest.mark.parametrize("name", ["ddpmpp", "dit", "mlp"])
def test_a_zero_start_is_the_network_without_the_condition(name):
    x, cond = inputs(name)
    plain, model = SMALL[name], SMALL[name].clone(step_embed="zero")
    wanted = jax.jit(lambda p: models.bind(plain, p)(x, jnp.ones(2), cond))(draw(plain, name, True))
    params = draw(model, name, True)
    apply = jax.jit(lambda params, step: models.bind(model, params)(x, jnp.ones(2), {**cond, "step": step}))
    assert sum(last_of_step(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)) >= 2
    for step in STEPS:  # two programs, whose sums are fused, and so rounded, differently
        np.testing.assert_allclose(apply(params, jnp.float32(step)), wanted, rtol=0, atol=1e-6 * jnp.abs(wanted).max())
    with jax.disable_jit():  # operation by operation nothing is fused: equal to the bit
        conditioned = models.bind(model, params)(x, jnp.ones(2), {**cond, "step": jnp.float32(STEPS[-1])})
        np.testing.assert_array_equal(conditioned, models.bind(plain, draw(plain, name, True))(x, jnp.ones(2), cond))
    # the values of "reference" in the same layers: each step value gives another output, and each example its own
    moved = draw(model, name, False)
    outs = [apply(moved, jnp.float32(step)) for step in STEPS]
    assert all(jnp.abs(out - wanted).max() > 1e-3 for out in outs)
    for i, one in enumerate(outs):
        assert all(jnp.abs(one - other).max() > 1e-4 for other in outs[:i])
    both = models.bind(model, moved)(x, jnp.ones(2), {**cond, "step": jnp.array(STEPS[1:3])})
    wanted = np.stack([outs[1][0], outs[2][1]])
    np.testing.assert_allclose(both, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("start", ["zero", "reference"])
@pytest.mark.parametrize("style", unet.STYLES)
def test_unet_blocks_start_as_configured(start, style):
    """Kernel and bias; at "reference" they are drawn like the noise label's affine layer."""
    block = unet.Block(8, unet.STYLES[style], step_init=start)
    made = jax.jit(block.init)(jax.random.key(0), jnp.ones((1, 2, 2, 8)), jnp.ones((1, 4)), jnp.ones((1, 4)))["params"]
    kernel, twin = made["affine_step"]["kernel"], made["affine"]["kernel"]
    assert jnp.abs(made["affine_step"]["bias"]).max() == 0 or (start, style) == ("reference", "adm")
    if start == "zero":
        assert jnp.abs(kernel).max() == 0 and jnp.abs(twin).max() > 0
    else:
        assert kernel.shape == twin.shape and 0.5 < jnp.std(kernel) / jnp.std(twin) < 2


@pytest.mark.parametrize("start", ["zero", "reference"])
def test_step_embeddings_start_as_configured(start):
    made = jax.jit(embeddings.StepEmbed(8, start).init)(jax.random.key(0), jnp.ones((2, 3)), {"step": 4})["params"]
    assert jnp.std(made["in"]["kernel"]) > 0
    assert (jnp.abs(made["out"]["kernel"]).max() == 0) == (start == "zero")
    assert jnp.abs(made["out"]["bias"]).max() == 0


@pytest.mark.parametrize("start", ["zero", "reference"])
@pytest.mark.parametrize("name", SMALL)
def test_models_hand_their_start_to_the_layers(name, start):
    """Of the layers that an initialisation meets, all the last ones have the initialiser of the start."""
    met, (x, cond) = [], inputs(name)

    def look(call, args, kwargs, context):
        module = context.module
        if module.name == "affine_step" or (module.name == "out" and isinstance(module.parent, embeddings.StepEmbed)):
            met.append(module)
        return call(*args, **kwargs)

    model = SMALL[name].clone(step_embed=start)
    with nn.intercept_methods(look):
        jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(2), {**cond, "step": 4.0}))
    blocks = 2 * model.blocks + 3 if isinstance(model, UNet) else 1  # UNet: in0, in1 and one more block in the decoder
    assert len({module.path for module in met}) == blocks
    drawn = [np.abs(module.kernel_init(jax.random.key(0), (4, 4))).max() for module in met]
    assert (max(drawn) == 0) if start == "zero" else (min(drawn) > 0.1)


def test_sizes_of_the_published_students():
    """With the condition: CIFAR-10's DDPM++ of 55,732,739 parameters and ImageNet-64's ADM of 295,899,267."""
    adm = imagenet64.get_config().model.fields.to_dict()
    cases = [(UNet(), 32, 55_732_739 + 4_662_528), (UNet(**adm, num_classes=1000), 64, 295_899_267 + 28_201_344)]
    for model, side, expected in cases:
        init, x = model.clone(step_embed="zero").init, jnp.zeros((1, side, side, 3))
        shapes = jax.eval_shape(lambda init=init, x=x: init(jax.random.key(0), x, jnp.ones(1), {"step": 4.0}))
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == expected


def test_scanned_and_rematerialised_blocks_take_the_step():
    x, cond = inputs("dit")
    model, cond = SMALL["dit"].clone(step_embed="zero"), {**cond, "step": jnp.array([3.0, 5.0])}
    params = draw(model, "dit", False)

    def slopes(model, params):
        def loss(step):
            return jnp.square(models.bind(model, {**params, "step": step})(x, jnp.ones(2), cond)).mean()

        return jax.jit(jax.value_and_grad(loss))(params["step"])

    value, wanted = slopes(model, params)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    assert scale > 1e-4
    for remat in (False, True):
        again, found = slopes(model.clone(scan=True, remat=remat), stacks.stack_blocks(params, model.depth))
        np.testing.assert_allclose(again, value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * scale), found, wanted)


@pytest.mark.parametrize("name", SMALL)
def test_what_the_condition_asks_for(name):
    x, cond = inputs(name)

    def call(start, **more):
        model = SMALL[name].clone(step_embed=start)
        jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(2), {**cond, **more}))

    with pytest.raises(ValueError, match=r"step_embed='zero'.*cond\['step'\]"):
        call("zero")
    with pytest.raises(ValueError, match=r"step_embed.*'', 'zero', 'reference', got 'zeros'"):
        call("zeros", step=4)
    with pytest.raises(ValueError, match=rf"^{type(SMALL[name]).__name__} .*'step'"):
        call("", step=4)
    call("zero", step=4)  # one integer for all examples is fine


# ------------------------------------------------------------------------------------------ further scalars

EVERY = {
    **SMALL,
    "edm2": EDM2(resolution=8, width=8, channel_mult=(1,), blocks=1, attention=(), num_classes=3),
    "latent_unet": LatentUNet(width=8, channel_mult=(1, 1), depths=(1, 0), blocks=1, heads=2, groups=2, text_dim=6),
    "mdt": MDT(**{**SMALL_VIT, "depth": 4}, decoder=2, num_classes=3, learn_variance=False),
    "pixart": PixArt(**SMALL_VIT, text_dim=6),
    "flux": Flux(**SMALL_VIT, single_depth=1, text_dim=6, pooled_dim=5, axes=(2, 2, 4)),
}
NUMERIC = ("edm2", "mlp")  # one of each form


def example_of(model):
    shape = (2, model.channels) if isinstance(model, MLP) else (2, 8, 8, model.channels)
    cond = {name: jnp.ones(s.batch_shape(2), s.dtype) for name, s in model.signals().items() if s.required}
    return jnp.ones(shape), jnp.ones(2), cond


@pytest.mark.parametrize("name", EVERY)
def test_every_network_takes_scalars_and_keeps_its_other_parameters(name):
    """Their layers are added; those of the network without have the same names and shapes."""
    plain, model = EVERY[name], EVERY[name].clone(scalars=("tau", "other"))
    x, label, cond = example_of(plain)
    assert set(model.signals()) - set(plain.signals()) == {"tau", "other"}
    assert all(model.signals()[key].group == METHOD for key in ("tau", "other"))

    def shapes(model, **more):
        made = jax.eval_shape(lambda: model.init(jax.random.key(0), x, label, {**cond, **more}))["params"]
        return {path: leaf.shape for path, leaf in by_name(made).items()}

    before, after = shapes(plain), shapes(model, tau=jnp.zeros(2), other=3.0)
    assert before == {path: shape for path, shape in after.items() if path in before}
    added = set(after) - set(before)
    assert added and all(path.startswith(("scalar_tau", "scalar_other")) for path in added)
    assert all(transfer.INPUTS.search(path) for path in added)  # a run may start from weights without them
    with pytest.raises(ValueError, match=r"cond\['other'\]"):
        shapes(model, tau=0.0)
    with pytest.raises(ValueError, match="'tau'"):
        shapes(plain, tau=0.0)


@pytest.mark.parametrize("name", NUMERIC)
def test_scalars_start_as_nothing(name):
    plain, model = EVERY[name], EVERY[name].clone(scalars=("tau",))
    x, label, cond = example_of(plain)
    params = jax.jit(model.init)(jax.random.key(0), x, label, {**cond, "tau": jnp.zeros(2)})["params"]
    rng = np.random.default_rng(0)
    params = {
        key: value if key.startswith("scalar_") else jax.tree.map(lambda a: a + 0.1 * rng.normal(size=a.shape), value)
        for key, value in params.items()
    }
    params = jax.tree.map(jnp.float32, params)
    own = {key: value for key, value in params.items() if not key.startswith("scalar_")}
    apply = jax.jit(lambda params, tau: models.bind(model, params)(x, label, {**cond, "tau": tau}))
    wanted = jax.jit(lambda: models.bind(plain, own)(x, label, cond))()
    for tau in (0.0, 700.0):
        np.testing.assert_allclose(apply(params, jnp.float32(tau)), wanted, atol=1e-6 * jnp.abs(wanted).max())
    last = "scalar_tau_gain" if name == "edm2" else "scalar_tau"
    params[last] = jax.tree.map(lambda a: a + 0.3, params[last])
    both = apply(params, jnp.array([0.0, 700.0]))
    assert jnp.abs(both[0] - both[1]).max() > 1e-4  # the examples are the same but for tau
    if name == "edm2":
        forced = model.force(params)
        np.testing.assert_array_equal(forced["scalar_tau_gain"], params["scalar_tau_gain"])


def test_names_of_scalars_that_cannot_be():
    for name in ("label", "a b"):
        with pytest.raises(ValueError, match="no other condition"):
            SMALL["mlp"].clone(scalars=(name,)).signals()


def test_public_weights_have_no_scalars():
    with pytest.raises(ValueError, match=r"no embedding of scalars=\('tau',\)"):
        weights.save(SMALL["dit"].clone(scalars=("tau",)), {}, "dit")
