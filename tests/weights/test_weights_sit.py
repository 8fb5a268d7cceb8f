"""SiT: DiT's names in a flow whose time runs from noise to data, against a definition of its own in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import denoisers, features, weights
from jaxdiff.conventions import Flow

HEADS = 4


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "dit_tiny.npz"))


@pytest.fixture(scope="module")
def arrays(golden):
    return {name.removeprefix("param/"): a for name, a in golden.items() if name.startswith("param/")}


def velocity(arrays, x, t, label):
    """The published network in float64, x [b c h w], t in [0, 1]: from noise (0) to data (1), x0 - eps."""
    w = {name: a.astype(np.float64) for name, a in arrays.items()}
    linear = lambda name, x: x @ w[f"{name}.weight"].T + w[f"{name}.bias"]  # noqa: E731
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    gelu = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))  # noqa: E731
    norm = lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)  # noqa: E731
    b, c, h, _ = x.shape
    patches = x.reshape(b, c, h // 2, 2, h // 2, 2).transpose(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    kernel = w["x_embedder.proj.weight"].reshape(-1, 4 * c)
    z = patches @ kernel.T + w["x_embedder.proj.bias"] + w["pos_embed"]
    angles = t[:, None] * np.exp(-np.log(10000) * np.arange(128) / 128)
    embedded = linear("t_embedder.mlp.0", np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
    cond = linear("t_embedder.mlp.2", silu(embedded)) + w["y_embedder.embedding_table.weight"][label]
    d = z.shape[-1]
    for i in range(sum(name.endswith("attn.qkv.weight") for name in w)):
        vectors = np.split(linear(f"blocks.{i}.adaLN_modulation.1", silu(cond))[:, None], 6, axis=-1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = vectors
        qkv = linear(f"blocks.{i}.attn.qkv", norm(z) * (1 + scale_a) + shift_a)
        q, k, v = qkv.reshape(b, -1, 3, HEADS, d // HEADS).transpose(2, 0, 3, 1, 4)
        logits = q @ k.swapaxes(-1, -2) / np.sqrt(d // HEADS)
        share = np.exp(logits - logits.max(-1, keepdims=True))
        gathered = (share / share.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(b, -1, d)
        z = z + gate_a * linear(f"blocks.{i}.attn.proj", gathered)
        inner = gelu(linear(f"blocks.{i}.mlp.fc1", norm(z) * (1 + scale_m) + shift_m))
        z = z + gate_m * linear(f"blocks.{i}.mlp.fc2", inner)
    shift, scale = np.split(linear("final_layer.adaLN_modulation.1", silu(cond))[:, None], 2, axis=-1)
    out = linear("final_layer.linear", norm(z) * (1 + scale) + shift)
    side = h // 2
    out = out.reshape(b, side, side, 2, 2, -1).transpose(0, 5, 1, 3, 2, 4).reshape(b, -1, h, h)
    return out[:, :c]  # learn_sigma: the rest is ignored


def test_denoised_images_are_those_of_the_definition(arrays, golden):
    """x_s = s x0 + (1 - s) eps, s = 1 / (1 + sigma), so x0 = x_s + (1 - s) velocity."""
    x, label, sigma = golden["in/x"], golden["in/y"], np.array([0.05, 1.0, 7.0], np.float32)
    s = 1 / (1 + sigma.astype(np.float64))
    where = s[:, None, None, None]
    given = x * where
    expected = given + (1 - where) * velocity(arrays, given, s, label)
    denoise = weights.load_denoiser(arrays, "sit", heads=HEADS)
    out = jax.jit(denoise)(jnp.asarray(np.moveaxis(x, 1, -1)), sigma, {"label": jnp.asarray(label, jnp.int32)})
    np.testing.assert_allclose(out, np.moveaxis(expected, 1, -1), rtol=0, atol=2e-5)
    assert np.abs(expected - given)[1:].max() > 0.1


def test_the_definition_is_dit_as_published(arrays, golden):
    """The same arrays with DiT's timesteps give DiT's golden output."""
    out = velocity(arrays, golden["in/x"], golden["in/t"].astype(np.float64), golden["in/y"])
    np.testing.assert_allclose(out, golden["out/y"][:, :4], rtol=0, atol=2e-5)


def test_both_directions_of_time_are_one_denoiser():
    """A straight field in either direction gives the same x0."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 2, 1)), jnp.float32)
    sigma = jnp.array([0.1, 1.0, 30.0])
    forth = denoisers.flow(lambda x, t, cond: jnp.sin(x) + t[:, None, None, None])
    back = Flow(1.0, to_data=True)(lambda x, t, cond: -jnp.sin(x) - 1000 * (1 - t[:, None, None, None]))
    np.testing.assert_allclose(back(x, sigma), forth(x, sigma), rtol=1e-4)
    assert Flow(1.0, to_data=True).progress(jnp.float32(0.25)) == 0.75 and Flow().progress(jnp.float32(250.0)) == 0.25
    assert features.sigma_of(0.2, Flow(1.0, to_data=True)) == pytest.approx(4.0)
    assert Flow(1.0) != Flow(1.0, to_data=True)


def test_round_trip(arrays):
    model, params = weights.load(arrays, "sit", heads=HEADS)
    back = weights.save(model, params, "sit")
    assert set(back) == set(arrays)
    for name in arrays:
        np.testing.assert_allclose(back[name], arrays[name], atol=1e-6, err_msg=name)
