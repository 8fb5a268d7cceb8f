"""Text to image through the command line: training, prompts to a captioned grid, scores of captions."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from jaxdiff import cli, data, training
from jaxdiff.conditions import SEMANTIC
from jaxdiff.configs import mixture2d, t2i_small
from jaxdiff.data.shapes import CAPTIONS
from jaxdiff.evaluation import clip
from jaxdiff.training import state, subset, transfer
from jaxdiff.training.build import reference_data
from jaxdiff.training.logs import captioned_grid
from jaxdiff.trees import by_name

PROMPTS = ["a red circle left of a blue square", "a green triangle right of a yellow circle"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t2i") / "run"
    flags = [f"--workdir={folder}", "--config.train.steps=2", "--config.sample.count=0", "--config.compile_cache="]
    flags.append("--config.model.fields.depth=1")  # half as long to compile
    assert cli.main(["train", "--config=t2i_small.py:tiny", *flags]) == 0
    return folder


def test_prompts_become_a_captioned_grid(run, tmp_path, capsys):
    out = tmp_path / "grid.png"
    flags = [f"--workdir={run}", "--count=8", "--config.sample.timestamps=2", f"--prompts={'|'.join(PROMPTS)}"]
    assert cli.main(["sample", *flags, f"--out={out}"]) == 0
    assert "wrote 8 samples" in capsys.readouterr().out
    assert np.asarray(Image.open(out)).shape[1] == 3 * (128 + 4)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    flags[-1] = f"--prompts={prompts}"
    assert cli.main(["sample", *flags, f"--out={tmp_path / 'a.npz'}"]) == 0
    with np.load(tmp_path / "a.npz") as stored:
        assert list(stored["captions"]) == PROMPTS * 4 and stored["images"].shape == (8, 8, 8, 3)


def test_evaluation_tells_how_well_captions_are_followed(run, capsys):
    assert cli.main(["evaluate", f"--workdir={run}", "--config.sample.timestamps=2"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name}: 0." in out for name in ("colour", "shape", "left_right")) and "sliced_wasserstein" in out


def test_evaluation_with_a_clip_score(monkeypatch):
    """Of captions where there are texts and of the names of classes elsewhere; told what is missing before sampling."""
    monkeypatch.setattr(clip, "scorer", lambda *files: lambda images, texts: (files, len(images), texts[0]))
    for arg in ("tiny", "tiny,dit"):
        config = t2i_small.get_config(arg)
        config.eval.clip, config.eval.tokenizer = "clip.safetensors", "tokenizer.json"
        made, mesh = training.prepare(config, jax.devices()[:1])
        batch = made.data.take(0, 4)
        labels = batch["label"] if "dit" in arg else None
        scores = training.evaluate(made, None, mesh, samples=(batch["image"], labels))
        named = made.data.class_names[batch["label"][0]] if "dit" in arg else CAPTIONS[batch["caption_id"][0]]
        assert scores["clip_100cos"] == (("clip.safetensors", "tokenizer.json", "100cos"), 4, named)
    # CLIP sees what latents become, distances do not
    decoded = dataclasses.replace(made, decode=lambda z: np.repeat(z, 2, 0)[:3])
    stored = reference_data(config)
    (images,) = subset.images(stored, subset.chosen(stored.size, 4))
    scores = training.evaluate(decoded, None, mesh, samples=(images, batch["label"]))
    assert scores["clip_100cos"][1] == 3 and scores["sliced_wasserstein"] < 1e-6
    config.eval.clip_formula = "cos"
    with pytest.raises(ValueError, match=r"unknown eval.clip_formula 'cos'.*100cos, hessel"):
        training.evaluate(training.build(config, made.data), None, mesh)
    config.eval.clip_formula, config.eval.tokenizer = "hessel", ""
    with pytest.raises(ValueError, match=r"eval.tokenizer.*tokenizer.json"):
        training.evaluate(training.build(config, made.data), None, mesh)
    config = mixture2d.get_config("tiny")
    config.eval.clip = "clip.safetensors"
    with pytest.raises(ValueError, match=r"eval.clip.*mixture"):
        training.evaluate(training.build(config, training.load_data(config)), None, mesh)


def test_the_data_themselves_follow_their_captions():
    """The images of the examples whose captions samples are given score 1, so an index is not one off."""
    for arg in ("tiny", "tiny,dit"):
        made, mesh = training.prepare(t2i_small.get_config(arg), jax.devices()[:1])
        batch = made.data.take(0, 8)
        labels = batch["label"] if "dit" in arg else None
        scores = training.evaluate(made, None, mesh, samples=(batch["image"], labels))
        assert scores["caption"] == scores["left_right"] == 1


@pytest.mark.parametrize("name", t2i_small.NETWORKS)
def test_every_network_trains_under_the_same_config(name):
    made, mesh = training.prepare(t2i_small.get_config(f"tiny,{name}"), jax.devices()[:1])
    texts = name in ("mmdit", "pixart", "latent_unet")
    assert set(made.conditions.null(SEMANTIC)) == ({"text", "text_mask"} if texts else {"label"})
    batch = made.select(made.data.batch(0, 8))
    assert ("text" in batch) == texts and "pooled" not in batch
    _, metrics = jax.eval_shape(made.method.step, state.declare(made, mesh), batch, jax.random.key(0))
    assert metrics["loss"].shape == ()


def test_stages_of_the_curriculum_fit_each_other():
    staged = dict(training.stages(t2i_small.get_config("tiny,curriculum")))
    made = {name: training.prepare(stage, jax.devices()[:1]) for name, stage in staged.items()}
    runs = [run for run, _ in made.values()]
    assert [run.data.shape[0] for run in runs] == [4, 8]
    assert [staged[name].noise.shift for name in made] == [1.0, 2.0] and runs[1].model.grid == 2
    assert [set(run.conditions.null(SEMANTIC)) for run in runs] == [{"label"}, {"text", "text_mask"}]
    small, large = (state.declare(run, mesh).params["student"] for run, mesh in made.values())
    kept = transfer.fit(by_name(small), large, "stage1")
    assert transfer.report(kept, large).endswith(" arrays copied, new: text")


def test_prompts_need_captioned_data():
    with pytest.raises(ValueError, match=r"prompts.*digits"):
        training.from_prompts(data.load("digits"), PROMPTS)


def test_captions_stand_below_their_images():
    grid = captioned_grid(np.ones((3, 8, 8, 3), np.float32), [CAPTIONS[0], CAPTIONS[1], ""], columns=2)
    assert grid.shape[1] == 2 * 132 and grid.shape[0] % 2 == 0
    cells = grid.reshape(2, -1, 2, 132, 3).swapaxes(1, 2)  # all images are white: what is dark is text
    dark = (cells < 128).any((2, 3, 4))
    np.testing.assert_array_equal(dark, [[True, True], [False, False]])


def test_hashed_prompts_may_be_anything():
    made = data.load("shapes", count=4, size=8, caption_text=(12, 8))
    assert made.text(["anything at all"])["text"].shape == (1, 12, 8)


def test_init_from_names_another_run(tmp_path, capsys):
    flags = [f"--init_from={tmp_path / 'nowhere'}", f"--workdir={tmp_path / 'run'}"]
    assert cli.main(["train", "--config=mixture2d.py:tiny", *flags]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err
