"""The studies of conditioning run from end to end at tiny size, and fill their tables."""

import numpy as np
import pytest

from experiments.conditioning import emoji
from jaxdiff import data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "variants"),
    [
        ("transfer", ["--study", "transfer"], ["scratch", "transfer"]),
        ("transfer", ["--study", "positions"], ["interpolate", "extrapolate", "bicubic"]),
        ("transfer", ["--study", "schedule"], ["rescaled", "as it was"]),
        ("transfer", ["--study", "crops"], ["global", "local", "mixed"]),
        ("control", ["--only", "constant", "alpha 8"], ["constant", "alpha 8"]),
        ("architectures", [], ["mmdit", "pixart", "latent_unet", "dit", "mdt"]),
        ("flips", [], ["recorded", "not recorded", "no flips", "recorded, flips requested"]),
        ("padding", [], ["mask", "zero", "replicate", "noisy"]),
    ],
)
def test_a_study(run, name, flags, variants):
    found, text = run(f"conditioning.{name}", *flags)
    assert list(found["scores"]) == variants
    assert all(set(marks[-1]) >= {"caption", "left_right"} for seeds in found["scores"].values() for marks in seeds)
    assert "the paper:" in text


def test_emoji_files(monkeypatch, tmp_path):
    """Images of test captions are left out, the others keep their caption and its tokens."""
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)
    known = {"captions": np.array(["a", "b", "c"]), "is_test": np.array([False, True, False])}
    np.savez(tmp_path / "emoji32.npz", images=images, caption_id=np.array([2, 1, 0, 2, 1], np.int16), **known)
    hidden = np.arange(12, dtype=np.float16).reshape(6, 2)
    np.savez(tmp_path / "emoji_text_minilm_tokens.npz", hidden=hidden, token_offsets=np.array([0, 1, 3, 6]))
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["emoji", f"--data={tmp_path}", f"--out={out}"])
    emoji.main()
    made = data.load("arrays", images=out / "emoji32.npz", caption_text=str(out / "emoji_text"), shuffle=False)
    batch = made.take(0, 3)
    np.testing.assert_array_equal(np.rint((batch["image"] + 1) * 127.5), images[[0, 2, 3]])
    assert [made.captions[i] for i in batch["caption_id"]] == ["c", "a", "c"]
    np.testing.assert_array_equal(batch["text"][0], hidden[3:6])
    np.testing.assert_array_equal(batch["text_mask"], [[True] * 3, [True, False, False], [True] * 3])
