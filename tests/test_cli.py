"""The command line end to end at tiny size, and what it says when something is wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxdiff import quickstart
from jaxdiff.cli import main
from jaxdiff.configs import digits, digits_emd, digits_sfd

TINY = ["--config=digits:tiny", "--config.compile_cache=", "--config.mesh.data=1", "--config.mesh.fsdp=8"]


def size_of(path):
    with Image.open(path) as image:
        return image.size


# digits:tiny with a network that compiles fast
SMALL = """
from jaxdiff.configs import digits

def get_config(arg=""):
    c = digits.get_config("tiny")
    with c.unlocked():
        c.model.name = "dit"
        c.model.fields = {"patch": 2, "depth": 1, "width": 32, "heads": 4, "learn_variance": False}
    return c
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished tiny run, by a config of the user's own."""
    workdir = tmp_path_factory.mktemp("run")
    (workdir / "mine.py").write_text(SMALL)
    assert train(workdir, "--config.train.eval_every=2") == 0
    return workdir


def train(workdir, *extra):
    return main(["train", f"--config={workdir}/mine.py", *TINY[1:], f"--workdir={workdir}", *extra])


def test_training_leaves_what_it_promises(run, capsys):
    assert train(run) == 0  # already finished: nothing to do, nothing lost
    assert "resuming from the checkpoint of step 4" in capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [2, 4]
    record = json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    assert record["protocol"]["solver"] == "heun" and record["protocol"]["samples"] == 64
    assert {"config.json", "export.safetensors", "checkpoints", "samples", "tensorboard"} <= {
        p.name for p in run.iterdir()
    }
    assert size_of(run / "samples" / "samples_00000004.png") == (76, 76)  # 2 x 2 digits of 8, enlarged 4 times


def test_samples_depend_on_the_seed_and_their_index_only(run, tmp_path, capsys):
    for name, count, extra in [("a", 6, []), ("b", 3, ["--config.sample.batch_size=8"]), ("c", 3, ["--seed=9"])]:
        assert main(["sample", f"--workdir={run}", f"--count={count}", f"--out={tmp_path}/{name}.npz", *extra]) == 0
    said = capsys.readouterr().out
    assert said.startswith("compiling") and "heun, 7 evaluations each" in said
    a, b, c = (np.load(tmp_path / f"{name}.npz") for name in "abc")
    assert a["images"].shape == (6, 8, 8, 1)
    np.testing.assert_array_equal(a["labels"], np.arange(6))
    np.testing.assert_allclose(a["images"][:3], b["images"], atol=1e-4)
    assert np.abs(b["images"] - c["images"]).max() > 0.01


def test_samples_as_an_image_with_another_solver(run, tmp_path, capsys):
    out = tmp_path / "grid.png"
    arguments = [
        "--count=4",
        "--labels=7",
        "--config.sample.solver=euler",
        "--config.sample.guidance=2.0",
        f"--out={out}",
    ]
    assert main(["sample", f"--workdir={run}", *arguments]) == 0
    assert "euler, 8 evaluations each" in capsys.readouterr().out
    assert size_of(out) == (76, 76)


def test_evaluating_a_run_prints_and_stores_the_protocol(run, capsys):
    before = len((run / "evaluations.jsonl").read_text().splitlines())
    assert main(["evaluate", f"--workdir={run}"]) == 0
    printed = capsys.readouterr().out
    assert "frechet_digits: " in printed and "recall: " in printed and "'feature_sha256'" in printed
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == before + 1


def test_stored_statistics_stand_in_for_the_data(run, tmp_path, capsys):
    """The moments of the data give the distance that the data give."""
    stats, copy = tmp_path / "digits.npz", tmp_path / "copy"
    shutil.copytree(run, copy)
    tiny = ["--config.eval.reference=64", f"--save_reference_stats={stats}"]
    assert main(["evaluate", "--config=digits:tiny", *tiny]) == 0
    assert "64 images" in capsys.readouterr().out
    with np.load(stats) as stored:
        assert stored["sigma"].shape == (len(stored["mu"]),) * 2
    assert main(["evaluate", f"--workdir={copy}"]) == 0
    assert main(["evaluate", f"--workdir={copy}", f"--reference_stats={stats}"]) == 0
    by_data, by_stats = (json.loads(line) for line in (copy / "evaluations.jsonl").read_text().splitlines()[-2:])
    assert by_stats["frechet_digits"] == pytest.approx(by_data["frechet_digits"], rel=1e-3)
    assert "recall" in by_data and "recall" not in by_stats  # which needs the features themselves
    protocol = by_stats["protocol"]
    assert (protocol["reference"], protocol["reference_samples"]) == ("digits.npz", 64)
    assert protocol["reference_sha256"] != by_data["protocol"]["reference_sha256"]


def test_mistakes_with_stored_statistics(run, tmp_path, capsys):
    for extra, message in [
        ([f"--reference_stats={tmp_path}/none.npz"], "none.npz"),
        ([f"--reference_stats={tmp_path}/x.npz", "--config.eval.net="], "eval.net"),
        ([f"--save_reference_stats={tmp_path}/x.npz", "--config.eval.net="], "eval.net"),
        ([f"--save_reference_stats={tmp_path}/x.txt"], ".npz"),
    ]:
        assert main(["evaluate", f"--workdir={run}", *extra]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_images_are_gone_is_sampled_and_evaluated_by_statistics(tmp_path, capsys):
    """config.json, data.json and the exported weights are all it takes."""
    photos, workdir = tmp_path / "photos", tmp_path / "run"
    for i in range(8):
        target = photos / "ab"[i % 2] / f"{i}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (8, 8), np.uint8)).save(target)
    (tmp_path / "mine.py").write_text(SMALL)
    options = f'{{"path": "{photos}", "channels": 1}}'
    flags = [f"--config={tmp_path}/mine.py", "--config.data.source=folder", f"--config.data.options={options}"]
    flags += ["--config.data.batch_size=8", "--config.train.steps=1", "--config.compile_cache="]
    assert main(["train", *flags, f"--workdir={workdir}"]) == 0
    stats = tmp_path / "stats.npz"
    assert main(["evaluate", f"--workdir={workdir}", f"--save_reference_stats={stats}"]) == 0
    shutil.rmtree(photos)
    capsys.readouterr()
    assert main(["sample", f"--workdir={workdir}", "--count=3", f"--out={tmp_path}/a.npz"]) == 0
    with np.load(tmp_path / "a.npz") as made:
        assert made["images"].shape == (3, 8, 8, 1) and list(made["labels"]) == [0, 1, 0]
    assert main(["evaluate", f"--workdir={workdir}"]) == 2
    said = capsys.readouterr().err
    assert str(photos) in said and "--reference_stats=" in said
    assert main(["evaluate", f"--workdir={workdir}", f"--reference_stats={stats}"]) == 0
    assert "frechet_digits: " in capsys.readouterr().out


def test_data_against_themselves_is_the_floor(capsys):
    assert main(["evaluate", "--config=digits", "--reference=train"]) == 0
    printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert 0 < float(printed["frechet_digits"]) < 1 and float(printed["recall"]) > 0.85


def test_dry_run_prints_config_and_shapes_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "--config.train.steps=77", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "steps: 77" in printed and "out_conv/kernel" in printed and "48,073 parameters" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "--config=digitz"], "did you mean 'digits'"),
        (["train", "--config=digits:tiny"], "--workdir=FOLDER"),
        (["train", "--workdir=x"], "--config=NAME[:ARGUMENT]"),
        (["train", "--config=digits:huge", "--workdir=x"], "'huge'"),
        (["train", "--config=digits:tiny", "--config.trian.steps=3"], "did you mean train.steps"),
        (["train", "--config=digits:tiny", "--config.optim.lr=3"], "did you mean optim.learning_rate"),
        (["train", "--config=digits:tiny", "--config.train.steps=x"], "--config.train.steps=x"),
        (["train", "--config=digits:tiny", "--stepz=3"], "--stepz"),
        (["train", "--config=digits:tiny", "extra"], "'extra'"),
        (["train", *TINY, "--workdir=/proc/none/x"], "/proc/none/x"),
        (["train", *TINY, "--workdir=x", "--config.data.batch_size=15"], "16"),
        (["train", *TINY, "--workdir=x", "--config.sample.solver=hein"], "did you mean 'heun'"),
        (["sample", "--count=3"], "--workdir=FOLDER"),
        (["sample", "--workdir=/none/here"], "config.json"),
        (["evaluate", "--config=digits", "--reference=test"], "--reference is 'train'"),
        (["train", *TINY, "--workdir=nosuch://bucket/x"], "gs://, s3://"),
        (["train", "--workdir=nosuch://bucket/x"], "gs://, s3://"),
        (["ema", "--workdir=gs://bucket/x"], "local path"),
        (["compare", "--teacher=x", "--workdir=gs://bucket/x"], "local path"),
        (["quickstart", "--workdir=s3://bucket/x"], "local path"),
        (["sample", "--workdir=x", "--out=gs://bucket/x.png"], "local path"),
        (["sample", "--workdir=x", "--out=no/such/x.png"], "no/such does not exist"),
        (["sample", "--workdir=x", "--count=0"], "--count"),
        (["sample", "--config=digits", "--workdir=x"], "--config.KEY=VALUE"),
        (["plan", "--config=digits", "--topology=v5e:2x2", "--out=no/such/plan.json"], "no/such does not exist"),
        (["train", "--config=folder:tiny", "--workdir=x"], "tiny"),
        (["train", "--workdir=x", "--config.train.steps=3"], "no run in x"),
        (["train", *TINY, "--workdir=x", "--config.sample.solver=ddim"], "did you mean 'euler'"),
        (["train", *TINY, "--workdir=x", "--config.sample.grid=karras"], "did you mean 'polynomial'"),
        (["train", "--config=digits_sfd:tiny", "--workdir=x", "--config.teacher.kind=sd15"], "did you mean 'sd_unet'"),
    ],
)
def test_mistakes_get_one_readable_line_and_nothing_is_written(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith(f"jaxdiff {arguments[0]}: ") and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_resumed_by_its_workdir_alone(run, tmp_path, capsys):
    """By the stored config, which the overrides change."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["train", "--workdir", str(copy), "--config.train.steps", "6"]) == 0
    assert "resuming from the checkpoint of step 4" in capsys.readouterr().out
    stored = json.loads((copy / "config.json").read_text())
    assert stored["train"]["steps"] == 6 and stored["model"]["name"] == "dit"
    assert (copy / "checkpoints" / "6").is_dir()


def test_points_are_not_written_as_images(tmp_path, capsys):
    workdir, out = tmp_path / "run", tmp_path / "points"
    arguments = ["--config=mixture2d:tiny", "--config.compile_cache=", "--config.train.eval_every=0"]
    assert main(["train", *arguments, f"--workdir={workdir}"]) == 0
    capsys.readouterr()
    assert main(["sample", f"--workdir={workdir}", f"--out={out}.png"]) == 2
    assert "--out=FILE.npz" in capsys.readouterr().err and not Path(f"{out}.png").exists()
    assert main(["sample", f"--workdir={workdir}", "--count=5", f"--out={out}.npz"]) == 0
    assert np.load(f"{out}.npz")["images"].shape == (5, 2)


def test_sampling_mistakes(run, capsys, tmp_path):
    for extra, message in [
        ("--out=x.jpg", ".png or .npz"),
        ("--labels=12", "0..9 (or 10 for none), got 12"),
        ("--labels=odd", "cycle, random"),
        ("--config.model.fields.width=16", "model.fields"),
    ]:
        assert main(["sample", f"--workdir={run}", f"--out={tmp_path}/x.png", extra]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_is_printed(capsys):
    assert main([]) == 2 and main(["--help"]) == 0
    assert "jaxdiff quickstart" in capsys.readouterr().out


def small(arg=""):
    """The quickstart's runs with a network that compiles fast; "second" as digits_sfd takes it."""
    config = {"teacher": digits, "emd": digits_emd}.get(arg, digits_sfd).get_config("tiny")
    with config.unlocked():
        config.model.name = "dit"
        config.model.fields = {"patch": 2, "depth": 1, "width": 32, "heads": 4, "learn_variance": False}
        config.teacher.kind = "run"
        if arg in ("", "second"):
            config.model.fields.step_embed = "zero"
            config.sfd.nfe = (2, 5)
        if arg == "second":
            config.sfd.nfe, config.sample.timestamps, config.sfd.substeps = (1,), 3, 3
            config.sfd.solver, config.sfd.teacher_afs, config.sfd.teacher_step = "euler", True, 7
        config.compile_cache, config.mesh.fsdp, config.mesh.data, config.sample.batch_size = "", 8, 1, 64
    return config


def test_the_quickstart_at_tiny_size(tmp_path, monkeypatch, capsys):
    teacher, student, one, generator = (small(arg) for arg in ("teacher", "", "second", "emd"))
    monkeypatch.setattr(quickstart.digits, "get_config", lambda: teacher)
    monkeypatch.setattr(quickstart.digits_sfd, "get_config", lambda arg="": one if arg else student)
    monkeypatch.setattr(quickstart.digits_emd, "get_config", lambda: generator)
    monkeypatch.setattr(quickstart, "ROWS", quickstart.ROWS[-1:])
    assert main(["quickstart", f"--workdir={tmp_path}", "--steps=2", "--samples=64"]) == 0
    printed = capsys.readouterr().out
    assert "DDIM" in printed and "Fréchet distance" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    found = [(row["sampler"], row["NFE"]) for row in results["rows"]]
    assert found == [("DDIM", 5), ("SFD-v", 5), ("SFD-v", 2), ("SFD, second stage", 1), ("EMD", 1)]
    assert all(row["protocol"]["samples"] == 64 for row in results["rows"])
    assert set(results["training_seconds"]) == {"teacher", "sfd", "sfd_one", "emd"}
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 * 5 and "http" not in page  # a strip and a grid per row
    assert page.count('class="strip"') == 5 and page.count("<svg") == 1 and page.count("training: ") == 4
    assert results["measuring_seconds"] > 0 and all(f"[{part}/5] " in printed for part in range(1, 6))
    assert all(size_of(tmp_path / name)[0] > 100 for name in ("euler_5.png", "sfd_2.png", "sfd_1.png", "emd_1.png"))

    # its generator, corrected by its teacher: before on the left, after on the right
    out = tmp_path / "pair.npz"
    arguments = [f"--workdir={tmp_path / 'emd'}", "--mcmc_steps=3", "--count=8"]
    assert main(["sample", *arguments, f"--out={out}"]) == 0
    assert "after 3 Langevin steps" in capsys.readouterr().out
    pair = np.load(out)
    assert main(["sample", arguments[0], "--count=8", f"--out={tmp_path / 'plain.npz'}"]) == 0
    np.testing.assert_allclose(pair["before"], np.load(tmp_path / "plain.npz")["images"], atol=1e-5)
    assert pair["after"].shape == pair["before"].shape and np.abs(pair["after"] - pair["before"]).max() > 1e-3
    assert main(["sample", *arguments, f"--out={tmp_path / 'pair.png'}"]) == 0
    assert size_of(tmp_path / "pair.png")[0] == 2 * size_of(tmp_path / "pair.png")[1]
    assert main(["sample", f"--workdir={tmp_path / 'sfd'}", "--mcmc_steps=3", f"--out={out}"]) == 2
    assert "'sfd'" in capsys.readouterr().err
