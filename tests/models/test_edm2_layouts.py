"""EDM2 checkpoints of other widths, depths, resolutions and conditions than the recorded one, against plain NumPy."""

import edm2_plain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import weights

BALANCES = {"label_balance": 0.4, "concat_balance": 0.6, "res_balance": 0.25, "attn_balance": 0.35}


def test_the_plain_form_is_the_published_one():
    arrays = {}
    for suffix in ("_0", "_1", "_2", ""):
        with np.load(GOLDEN / f"edm2_tiny{suffix}.npz") as z:
            arrays |= dict(z)
    params = {name.removeprefix("param/"): a for name, a in arrays.items() if name.startswith("param/")}
    x, sigma = (arrays[f"in/{name}"].astype(np.float64) for name in ("x", "sigma"))
    denoised, u = edm2_plain.denoise(params, x, sigma, arrays["in/labels"], head_width=16)
    np.testing.assert_allclose(denoised, arrays["out/denoised"], atol=2e-6)
    np.testing.assert_allclose(u, arrays["out/logvar"].ravel(), atol=2e-6)


@pytest.mark.parametrize(
    ("sizes", "head_width", "balances"),
    [
        ({"resolution": 12, "widths": (16, 48), "blocks": 0, "attended": (6,)}, 16, {}),  # unconditional
        (
            {
                "resolution": 8,
                "widths": (48, 16),  # the deeper level is narrower
                "blocks": 1,
                "attended": (8,),
                "classes": 5,
                "channels": 4,
                "noise": 24,
                "embed": 40,
            },
            24,
            BALANCES,
        ),
        ({"resolution": 8, "widths": (64, 32), "blocks": 1, "attended": (8, 4), "classes": 1}, 64, {}),  # 4x4: no head
    ],
)
def test_other_layouts(sizes, head_width, balances):
    arrays = edm2_plain.draw(0, **sizes, head_width=head_width)
    rng, classes = np.random.default_rng(1), sizes.get("classes", 0)
    x = rng.normal(size=(3, sizes.get("channels", 3), sizes["resolution"], sizes["resolution"]))
    sigma, label = np.array([0.05, 0.7, 20.0]), np.array([0, classes, max(classes - 1, 0)])
    how = {name.removesuffix("_balance") if name[0] in "ra" else name: value for name, value in balances.items()}
    denoised, u = edm2_plain.denoise(arrays, x, sigma, label, head_width, **how)
    model, params = weights.load(arrays, "edm2", channels_per_head=head_width, **balances)
    assert model.num_classes == classes and model.resolution == sizes["resolution"]
    denoise = weights.load_denoiser(arrays, "edm2", channels_per_head=head_width, **balances)
    cond = {"label": jnp.asarray(label)} if classes else None
    inputs = jnp.asarray(x.transpose(0, 2, 3, 1), jnp.float32), jnp.asarray(sigma, jnp.float32)
    found = jax.jit(lambda d, *a: d(*a))(denoise, *inputs, cond)
    np.testing.assert_allclose(found, denoised.transpose(0, 2, 3, 1), atol=2e-5)
    found = model.apply({"params": params}, inputs[1], method="log_variance")
    np.testing.assert_allclose(found, u, atol=2e-5)
    written = weights.save(model, params, "edm2")
    assert set(written) == set(arrays)
    assert all((written[name] == array).all() for name, array in arrays.items())
