"""UNets of Stable Diffusion: outputs and gradients of the public implementation, round trips, strictness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import models, weights
from jaxdiff.models import LatentUNet, latent_unet

TOLD = {  # what these tiny networks have unlike any published one
    "sd_unet": {"heads": 2, "groups": 4},
    "sdxl_unet": {"head_width": 4, "groups": 4, "pooled_dim": 12, "sizes": 6, "size_width": 6},
}


def nhwc(x):
    return jnp.asarray(np.moveaxis(x, 1, -1))


def read(kind):
    """(weights, inputs and outputs)."""
    arrays = dict(np.load(GOLDEN / f"{kind}.npz"))
    return {k.removeprefix("param/"): v for k, v in arrays.items() if k.startswith("param/")}, arrays


@pytest.fixture(scope="module")
def sd():
    return read("sd_unet")


@pytest.fixture(scope="module")
def sdxl():
    return read("sdxl_unet")


@pytest.fixture(scope="module")
def loaded(sd, sdxl):
    """kind -> (model, parameters)."""
    return {kind: weights.load(read[0], kind, **TOLD[kind]) for kind, read in [("sd_unet", sd), ("sdxl_unet", sdxl)]}


# ------------------------------------------------------------------------------------ the public implementation


def test_sd_outputs_and_gradients_in_the_form_for_loops(sd, loaded):
    golden, (model, params) = sd[1], loaded["sd_unet"]
    text, weight = jnp.asarray(golden["in/text"]), nhwc(golden["in/weight"])

    def loss(x, params):
        out = models.bind(model.clone(loop=True), params)(x, jnp.asarray(golden["in/t"]), {"text": text})
        return (out * weight).sum(), out

    (_, out), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(nhwc(golden["in/x"]), params)
    assert 1 < jnp.abs(out).max() < 10 and 1 < jnp.abs(slope).max() < 10
    np.testing.assert_allclose(out, nhwc(golden["out/y"]), rtol=0, atol=2e-5)
    np.testing.assert_allclose(slope, nhwc(golden["out/slope"]), rtol=0, atol=2e-5)


def test_sdxl_outputs_with_and_without_hidden_text(sdxl, loaded):
    golden, apply = sdxl[1], jax.jit(models.bind(*loaded["sdxl_unet"]))
    cond = {"text": golden["in/text"], "pooled": golden["in/text_embeds"], "sizes": golden["in/time_ids"]}
    for mask, expected in [(np.ones_like(golden["in/mask"]), "out/y"), (golden["in/mask"], "out/masked")]:
        out = apply(nhwc(golden["in/x"]), jnp.asarray(golden["in/t"]), {**cond, "text_mask": mask})
        np.testing.assert_allclose(out, nhwc(golden[expected]), rtol=0, atol=2e-5)
    assert np.abs(golden["out/masked"] - golden["out/y"]).max() > 0.1


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("timestep", [0, 500, 999])
def test_denoisers_predict_noise_over_the_sqrt_linear_table(kind, timestep):
    """D = x - sigma F(x / sqrt(1 + sigma^2), t), for a network that returns a known mix of its input and timestep."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    alpha_bar = np.prod(1 - betas[: timestep + 1])
    sigma = float(np.sqrt((1 - alpha_bar) / alpha_bar))
    x = jnp.full((1, 2, 2, 4), 3.0)
    out = weights.KINDS[kind].conventions[0](lambda x, t, cond: x + t[:, None, None, None] / 1000)(x, sigma)
    expected = 3 - sigma * (3 * np.sqrt(alpha_bar) + timestep / 1000)
    np.testing.assert_allclose(out, np.full(x.shape, expected), rtol=1e-4)


def test_a_denoiser_is_loaded_with_its_network(sd):
    denoise = weights.load_denoiser(sd[0], "sd_unet", **TOLD["sd_unet"])
    assert len(jax.tree.leaves(denoise)) == len(sd[0]) - 3 * 4  # q, k, v are one array, and k, v of the text
    cond = {"text": jnp.zeros((3, 5, 10))}
    out = jax.eval_shape(lambda denoise, x: denoise(x, 2.0, cond), denoise, jnp.zeros((3, 4, 8, 4)))
    assert out.shape == (3, 4, 8, 4) and out.dtype == jnp.float32


# ------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("kind", TOLD)
def test_public_arrays_round_trip(kind, loaded):
    arrays, (model, params) = read(kind)[0], loaded[kind]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    back = weights.save(model, params, kind)
    assert set(back) == set(arrays)
    for name in arrays:
        np.testing.assert_array_equal(back[name], arrays[name], err_msg=name)


def test_the_architecture_is_inferred(loaded):
    shared = {"width": 8, "channel_mult": (1, 2), "blocks": 1, "text_dim": 10}
    assert loaded["sd_unet"][0] == LatentUNet(**shared, depths=(1, 0), **TOLD["sd_unet"])
    assert loaded["sdxl_unet"][0] == LatentUNet(
        **shared, depths=(0, 2), mid_depth=2, heads=0, linear=True, **TOLD["sdxl_unet"]
    )


def test_blocks_are_counted(sd):
    more = {name.replace("resnets.0", "resnets.1"): value for name, value in sd[0].items()}
    assert weights.KINDS["sd_unet"].infer({**sd[0], **more})["blocks"] == 2


def test_heads_are_guessed_as_published(sd, sdxl):
    for kind, (arrays, _), heads in [("sd_unet", sd, (8, 0)), ("sdxl_unet", sdxl, (0, 64))]:
        fields = weights.KINDS[kind].infer(arrays)
        assert (fields["heads"], fields["head_width"]) == heads
    second = {k: v for k, v in sdxl[0].items() if not k.startswith("add_embedding")}  # SD 2: Dense, nothing added
    fields = weights.KINDS["sd_unet"].infer(second)
    assert {**latent_unet.SIZES["sd2"], "text_dim": 10}.items() <= fields.items()


@pytest.mark.parametrize(("total", "sizes"), [(2816, 6), (2560, 5)])
def test_published_widths_of_what_sdxl_adds_are_split(sdxl, total, sizes):
    """The base model and the refiner."""
    arrays = {**sdxl[0], "add_embedding.linear_1.weight": np.zeros((32, total))}
    fields = weights.KINDS["sdxl_unet"].infer(arrays)
    assert (fields["pooled_dim"], fields["sizes"], fields["size_width"]) == (1280, sizes, 256)


def change(arrays, **changes):
    """The arrays with some replaced or, where None, left out; '__' stands for '.'."""
    changed = {**arrays, **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in changed.items() if value is not None}


def test_every_misfit_is_counted_and_named(sd):
    broken = change(
        sd[0],
        up_blocks__1__attentions__1__transformer_blocks__0__attn2__to_v__weight=None,
        mid_block__attentions__0__proj_out__weight=np.zeros((16, 16)),
        conv_extra__weight=np.zeros(3),
    )
    with pytest.raises(weights.WeightsError) as error:
        weights.load(broken, "sd_unet", **TOLD["sd_unet"])
    message = str(error.value)
    assert "1 missing (up_blocks.1.attentions.1.transformer_blocks.0.attn2.to_v.weight)" in message
    assert "1 unexpected (conv_extra.weight)" in message
    assert "1 mis-shaped (mid_block.attentions.0.proj_out.weight is (16, 16), expected (16, 16, 1, 1))" in message


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda sd, sdxl: weights.load(sdxl, "sd_unet"), r"add_embedding.*'sdxl_unet'"),
        (lambda sd, sdxl: weights.load(sd, "sdxl_unet"), r"'sdxl_unet'.*'add_embedding.linear_1.weight'"),
        (lambda sd, sdxl: weights.load(sdxl, "sdxl_unet"), r"pooled_dim, sizes, size_width.*pooled_dim=\.\.\."),
        (lambda sd, sdxl: weights.load({"model.diffusion_model.input_blocks.0.0.weight": np.zeros(1)}, "sd_unet"), r"Stable Diffusion.*diffusers"),
        (lambda sd, sdxl: weights.load({"a": np.zeros(1)}, "sd_unet"), r"'sd_unet'.*'conv_in.weight'"),
        (lambda sd, sdxl: weights.load(sd, "sd_unet", heads=3, groups=4), r"8.*heads=3"),
        (lambda sd, sdxl: weights.save(models.MLP(), {}, "sd_unet"), r"'sd_unet'.*LatentUNet.*MLP"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(load, message, sd, sdxl):
    with pytest.raises(ValueError, match=message):
        load(sd[0], sdxl[0])
