"""Low-rank updates under the names of diffusers: as its own library reads them, and as our networks have them."""

import sys

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from paths import GOLDEN

from jaxdiff import models, weights
from jaxdiff.models import DiT, low_rank
from jaxdiff.weights import WeightsError, lora

sys.path.insert(0, str(GOLDEN))
import seeded

AXES = {"axes": (4, 6, 6)}


def adapters_of(params, rank=3, scale=0.5):
    """Drawn factors for every kernel whose layout is that of a matrix in the network's map."""
    low = {}
    for path, kernel in sorted(flatten_dict(params).items()):
        if path[-1] != "kernel":
            continue
        inputs = 2 if path[-2].endswith("_out") and kernel.ndim == 3 else 1
        inner, outer = kernel.shape[:inputs], kernel.shape[inputs:]
        rng = np.random.default_rng(len(low))
        a, b = rng.normal(size=(*inner, rank)) / 4, rng.normal(size=(rank, *outer)) / 4
        low[path] = low_rank.Factors(a.astype(np.float32), b.astype(np.float32))
    return low_rank.Adapters(unflatten_dict(low), {}, scale)


@pytest.fixture(scope="module")
def flux():
    golden = dict(np.load(GOLDEN / "flux.npz"))
    model, params = weights.load(seeded.weights(golden["weights/dev"]), "flux", **AXES)
    return golden, model, jax.device_get(params)


def sd35():
    golden = dict(np.load(GOLDEN / "sd35.npz"))
    arrays = {**seeded.weights(golden["weights"]), "pos_embed.pos_embed": golden["positions"]}
    return weights.load(arrays, "sd3")


@pytest.mark.parametrize("kind", ["flux", "sd3"])
def test_public_factors_are_the_updates_of_public_kernels(flux, kind):
    """B A of each layer, a convolution's included, is what the merged network's public weight has more."""
    model, params = flux[1:] if kind == "flux" else sd35()
    adapters = adapters_of(params)
    arrays = weights.save_lora(model, adapters, kind)
    before, after = (weights.save(model, p, kind) for p in (params, low_rank.merged(params, adapters)))
    layers = {name.removesuffix(".lora_A.weight").removeprefix("transformer.") for name in arrays if "lora_A" in name}
    kernels = {name for name in before if name.endswith("weight") and before[name].ndim in (2, 4)}
    assert {f"{layer}.weight" for layer in layers} == kernels
    for layer in layers:
        a, b = (arrays[f"transformer.{layer}.lora_{x}.weight"] for x in "AB")
        change = after[f"{layer}.weight"] - before[f"{layer}.weight"]
        assert a.shape == (3, *change.shape[1:]) and b.shape == (len(change), 3, *(1 for _ in change.shape[2:]))
        np.testing.assert_allclose(np.tensordot(b.reshape(-1, 3), a, 1), change, atol=1e-6, err_msg=layer)


def test_diffusers_reads_these_names_and_adds_b_times_a(flux):
    """The names are those that its transformer took; it gives what our network gives with W + B A."""
    golden, model, params = flux
    stored = dict(np.load(GOLDEN / "flux_lora.npz"))
    assert sorted(weights.save_lora(model, adapters_of(params), "flux")) == list(stored["names"])
    arrays = weights.save(model, params, "flux")
    for name in stored["names"]:
        layer = name.removeprefix("transformer.").removesuffix(".lora_A.weight")
        if "lora_A" in name:
            out, inner = arrays[f"{layer}.weight"].shape
            update = seeded.draw(f"{layer}.B", (out, 3)) @ seeded.draw(f"{layer}.A", (3, inner))
            arrays[f"{layer}.weight"] = arrays[f"{layer}.weight"] + update
    apply = jax.jit(models.bind(*weights.load(arrays, "flux", **AXES)))
    cond = {name: golden[f"in/{name}"] for name in ("text", "pooled", "guidance")}
    out = np.moveaxis(np.asarray(apply(np.moveaxis(golden["in/x"], 1, -1), golden["in/t"], cond)), -1, 1)
    np.testing.assert_allclose(out, stored["out"], atol=5e-5)
    assert np.abs(out - golden["out/dev"]).max() > 1


def test_scanned_blocks_have_the_same_names(flux):
    _, model, params = flux
    adapters = adapters_of(params)
    low = adapters.low
    for name, depth in (("blocks", 2), ("single", 3)):
        low = models.stacks.stack_blocks(low, depth, name)
    stacked = weights.save_lora(model.clone(scan=True), adapters.replace(low=low), "flux")
    for name, array in weights.save_lora(model, adapters, "flux").items():
        np.testing.assert_array_equal(stacked[name], array)


def test_convolutions_have_a_small_one_after_a_large_one():
    a, b = np.ones((3, 3, 4, 2)), np.ones((2, 8))
    a += np.arange(a.size).reshape(a.shape) / 10
    b += np.arange(b.size).reshape(b.shape) / 10
    ((down, up),) = lora._public(weights.names.conv, a, b)
    assert down.shape == (2, 4, 3, 3) and up.shape == (8, 2, 1, 1)
    (wanted,) = weights.names.conv.to_public(np.tensordot(a, b, 1))
    np.testing.assert_allclose(np.tensordot(up[:, :, 0, 0], down, 1), wanted)


def test_what_diffusers_cannot_name_is_refused(flux):
    _, model, params = flux
    adapters = adapters_of(params)
    with pytest.raises(WeightsError, match="step/out"):
        weights.save_lora(model, adapters.replace(full={"step": {"out": np.zeros(1)}}), "flux")
    with pytest.raises(WeightsError, match="kernels without a public name: other/kernel"):
        weights.save_lora(model, adapters.replace(low={"other": {"kernel": low_rank.Factors(1, 2)}}), "flux")
    with pytest.raises(ValueError, match="kind with the names of diffusers"):
        weights.save_lora(model, adapters, "dit")
    assert weights.lora_kind(DiT()) == "" and weights.lora_kind(model, "run") == "flux"
