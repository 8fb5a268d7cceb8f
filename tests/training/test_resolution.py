"""Larger images: noise levels and ddpm schedules rescaled, positions resampled (Berrada et al. 2024)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import IMAGES, config_of

from jaxdiff import schedules
from jaxdiff.models import embeddings
from jaxdiff.training.components import convention_of, grid_of, sigmas_of

ABAR = schedules.linear_alpha_bar()


def snr(table):
    return table / (1 - table)


# ------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("ratio", [2.0, 0.5, 3.7])
def test_a_rescaled_schedule_divides_the_signal_to_noise_ratio(ratio):
    np.testing.assert_allclose(snr(ABAR) / snr(schedules.rescaled_alpha_bar(ABAR, ratio)), ratio**2, rtol=1e-10)
    table = schedules.sigma_table(schedules.rescaled_alpha_bar(ABAR, ratio))
    np.testing.assert_allclose(table, ratio * schedules.sigma_table(ABAR), rtol=1e-10)


def test_rescaling_is_a_group():
    np.testing.assert_array_equal(schedules.rescaled_alpha_bar(ABAR, 1.0), ABAR)
    twice = schedules.rescaled_alpha_bar(schedules.rescaled_alpha_bar(ABAR, 2), 2)
    np.testing.assert_allclose(twice, schedules.rescaled_alpha_bar(ABAR, 4), rtol=0, atol=1e-14)
    back = schedules.rescaled_alpha_bar(schedules.rescaled_alpha_bar(ABAR, 2), 0.5)
    np.testing.assert_allclose(back, ABAR, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="ratio must be positive, got 0"):
        schedules.rescaled_alpha_bar(ABAR, 0)


@pytest.mark.parametrize(
    ("table", "after"),
    [
        (schedules.linear_alpha_bar(), (1.01e-5, 0.2141, 0.0207, 0.0008)),
        (schedules.sqrt_linear_alpha_bar(), (1.17e-3, 0.3405, 0.0871, 0.0147)),
        (schedules.sqrt_linear_alpha_bar(1000, 0.0015, 0.0195), (3.56e-5, 0.2054, 0.0314, 0.0021)),
    ],
)
def test_public_schedules_at_twice_the_size(table, after):
    found = schedules.rescaled_alpha_bar(table, 2)
    np.testing.assert_allclose(found[-1], after[0], rtol=5e-3)
    np.testing.assert_allclose(found[[250, 500, 750]], after[1:], atol=6e-5)
    betas = 1 - found / np.concatenate([[1.0], found[:-1]])
    assert (betas > 0).all() and (betas < 1).all()


def test_an_average_over_pixels_sees_the_small_images_noise():
    """Upsample x0 by 2, add noise by the rescaled schedule, pool 2x2: the SNR of the small image; 4 times it without."""
    rng, share = np.random.default_rng(0), 0.3
    x0 = rng.normal(size=(500, 16, 16))

    def pooled_snr(table):
        large = np.sqrt(table) * x0.repeat(2, 1).repeat(2, 2) + np.sqrt(1 - table) * rng.normal(size=(500, 32, 32))
        small = large.reshape(500, 16, 2, 16, 2).mean((2, 4))
        signal = (small * x0).mean() / (x0**2).mean()
        return signal**2 * (x0**2).mean() / ((small - signal * x0) ** 2).mean()

    assert pooled_snr(schedules.rescaled_alpha_bar([share], 2)) == pytest.approx(snr(share), rel=0.02)
    assert pooled_snr(share) == pytest.approx(4 * snr(share), rel=0.02)


def test_flow_time_moves_as_the_schedule_does():
    t = np.linspace(0.01, 0.99, 50)
    moved = 2 * t / (1 + t)  # r t / (1 + (r - 1) t)
    np.testing.assert_allclose(((1 - t) / t) ** 2 / ((1 - moved) / moved) ** 2, 4, rtol=1e-10)


# ------------------------------------------------------------------------------------------ configs


def test_one_field_moves_training_sampling_and_the_schedule():
    kinds = {
        "denoiser.kind": "ddpm",
        "noise.sigma_sampler": "discrete",
        "sample.grid": "discrete",
        "sample.sigma_max": 50.0,
    }
    for changes in (
        kinds,
        {"noise.sigma_sampler": "lognormal"},
        {"noise.sigma_sampler": "uniform", "sample.grid": "flow"},
    ):
        base, large = config_of(IMAGES, changes), config_of(IMAGES, {**changes, "noise.shift": 2.0})
        drawn = [sigmas_of(c, convention_of(c))(jax.random.key(0), 200) for c in (base, large)]
        np.testing.assert_allclose(drawn[1], 2 * drawn[0], rtol=1e-5)
        grids = [np.asarray(grid_of(c, convention_of(c))(6)) for c in (base, large)]
        if changes.get("sample.grid") != "flow":
            np.testing.assert_allclose(grids[1], 2 * grids[0], rtol=1e-5)
        np.testing.assert_allclose(grids[1][[0, -1]], 2 * grids[0][[0, -1]], rtol=1e-5)


def test_a_ddpm_network_is_given_the_timestep_of_the_small_image():
    labels = []

    def network(x, label, cond):
        labels.append(np.asarray(label))
        return x

    for shift in (1.0, 2.0):
        config = config_of(IMAGES, {"denoiser.kind": "ddpm", "noise.shift": shift})
        sigma = convention_of(config).sigmas[[10, 500, 900]]
        convention_of(config)(network)(jnp.zeros((3, 8, 8, 1)), jnp.asarray(sigma, jnp.float32))
    np.testing.assert_allclose(labels[0], [10, 500, 900], atol=0.02)
    np.testing.assert_allclose(labels[1], labels[0], atol=0.02)


# ------------------------------------------------------------------------------------------ positions


def test_ways_to_resample_positions():
    """PE'[2i, 2j] = PE[i, j] exactly when interpolated; counting on keeps the corner and nothing else."""
    small, fine = embeddings.sincos_positions(16, 16, 32), embeddings.sincos_positions(32, 32, 32, 16)
    np.testing.assert_array_equal(fine[::2, ::2], small)
    counted = embeddings.sincos_positions(32, 32, 32, 16, "extrapolate")
    np.testing.assert_array_equal(counted, embeddings.sincos_positions(32, 32, 32))
    np.testing.assert_array_equal(counted[:16, :16], small)
    assert np.abs(counted[::2, ::2] - small).max() > 1.9
    smooth = embeddings.sincos_positions(32, 32, 32, 16, "bicubic")
    np.testing.assert_allclose(smooth, jax.image.resize(small, (32, 32, 32), "bicubic"), atol=1e-5)
    coarse = embeddings.sincos_positions(8, 8, 32, 16, "bicubic")
    np.testing.assert_allclose(coarse, jax.image.resize(small, (8, 8, 32), "bicubic"), atol=1e-5)
    same = embeddings.sincos_positions(16, 16, 32, 16, "bicubic")
    np.testing.assert_allclose(same, small, atol=1e-6)
    with pytest.raises(ValueError, match=r"'cubic'.*bicubic"):
        embeddings.sincos_positions(32, 32, 32, 16, "cubic")


def test_the_column_comes_first():
    """As in DiT's public table: channels of the first half change along columns alone."""
    table = embeddings.sincos_positions(4, 6, 16)
    assert (table[:, :, :8] == table[:1, :, :8]).all() and (table[:, :, 8:] == table[:, :1, 8:]).all()
    assert np.ptp(table[0, :, :8], axis=0).max() > 0 and np.ptp(table[:, 0, 8:], axis=0).max() > 0


def test_networks_take_the_ways(monkeypatch):
    """In DiT, PixArt and MMDiT; in a traced program too."""
    from jaxdiff import models

    size = {"patch": 2, "depth": 2, "width": 16, "heads": 2, "channels": 1, "grid": 2}
    text = {"text": jnp.ones((1, 2, 4))}
    cases = {"dit": ({"num_classes": 0}, None), "pixart": ({"text_dim": 4}, text)}
    cases["mmdit"] = ({"text_dim": 4, "pooled_dim": 0}, text)
    asked = []
    plain = embeddings.sincos_positions
    monkeypatch.setattr(embeddings, "sincos_positions", lambda *a: asked.append(a) or plain(*a))
    for name, (fields, cond) in cases.items():
        model = models.build(name, **size, **fields, positions="bicubic")
        jax.eval_shape(lambda m=model, c=cond: m.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), 1.0, c))
    assert {a for a in asked if a[:2] == (4, 4)} == {(4, 4, 16, 2, "bicubic")} and len(asked) == 6
