"""What an evaluation measures, against what, and what its record says."""

import importlib
import json

import jax
import numpy as np
import pytest
from training_runs import EMD, IMAGES, POINTS, config_of

import jaxdiff
from jaxdiff import evaluation, training
from jaxdiff.cli import main
from jaxdiff.training import subset

module = importlib.import_module("jaxdiff.training.evaluate")  # the package has a function of that name
ONE = jax.devices()[:1]
QUICK = {"train.steps": 6, "train.eval_every": 2, "train.save_every": 2, "checkpoint.keep": 1, "eval.samples": 32}


def by_class(classes=5, each=40, depth=np.uint8):
    """Images sorted by class, their brightness that of the class, and a config over them."""
    labels = np.repeat(np.arange(classes), each)
    images = np.broadcast_to((40 * labels)[:, None, None, None], (classes * each, 8, 8, 1)).astype(depth)
    options = {"images": images, "labels": labels, "num_classes": classes}
    return config_of(IMAGES, {"data.source": "arrays", "data.options": options, "eval.net": "digits"})


def classes_in(images, classes=5):
    return np.bincount(np.round((np.asarray(images)[:, 0, 0, 0] + 1) * 127.5 / 40).astype(int), minlength=classes)


def references(run, monkeypatch):
    """The images whose features are taken."""
    seen, extract = [], evaluation.extract
    watch = lambda net, batches, *more, **how: extract(  # noqa: E731
        net, [seen.append(b) or b for b in batches], *more, **how
    )
    monkeypatch.setattr(evaluation, "extract", watch)
    module.reference_features(run, evaluation.feature_net("digits"))
    return np.concatenate(seen)


# ------------------------------------------------------------------------------------------ the reference


def test_part_of_a_sorted_dataset_has_all_its_classes(monkeypatch):
    """80 of 5 classes x 40 images in order: the first 80 would be two classes."""
    config = by_class()
    config.eval.reference = 80
    run, _ = training.prepare(config, ONE)
    shares = classes_in(evaluation.from_uint8(references(run, monkeypatch)))
    assert shares.sum() == 80 and shares.min() >= 10
    np.testing.assert_array_equal(np.sort(subset.permuted(200)), np.arange(200))
    np.testing.assert_array_equal(subset.permuted(7), [6, 5, 3, 0, 2, 1, 4])  # in every version


def test_pixels_and_halves_are_drawn_from_all_classes(monkeypatch):
    config = by_class()
    config.eval.net, config.eval.samples = "", 100
    run, mesh = training.prepare(config, ONE)
    seen = []
    monkeypatch.setattr(module, "_pixel_distance", lambda a, b: seen.append((a, b)) or {"sliced_wasserstein": 0.0})
    module.evaluate(run, None, mesh, samples=(np.zeros((50, 8, 8, 1), np.float32), None))
    module.compare_halves(run)
    assert classes_in(seen[0][1]).min() >= 5
    for half in seen[1]:
        assert len(half) == 100 and classes_in(half).min() >= 12


def test_references_are_rounded_to_eight_bits_like_samples(monkeypatch):
    """Float images between two levels: both sides of a comparison are the same bytes."""
    config = by_class()
    images = np.random.default_rng(0).uniform(-1, 1, (40, 8, 8, 1)).astype(np.float32)
    config.data.options = {"images": images}
    run, _ = training.prepare(config, ONE)
    np.testing.assert_array_equal(references(run, monkeypatch), evaluation.to_uint8(images))


def test_the_network_is_loaded_before_samples_are_drawn():
    config = by_class()
    config.eval.net, config.eval.weights = "inception", "missing.npz"
    run, mesh = training.prepare(config, ONE)
    with pytest.raises(FileNotFoundError, match=r"missing\.npz"):
        module.evaluate(run, None, mesh)  # without parameters, sampling would fail otherwise


# ------------------------------------------------------------------------------------------ records


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run on points that is evaluated three times, by made-up distances of which the second is the least."""
    folder = tmp_path_factory.mktemp("run")
    distances = iter([3.0, 1.0, 2.0])
    measured = lambda *a: {"sliced_wasserstein": next(distances), "first": -1.0}  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_pixel_distance", measured)
        training.train(config_of(POINTS, QUICK), folder, quiet=True, devices=ONE)
    return folder


def records(folder):
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def test_every_record_says_what_it_is(workdir):
    for record, step in zip(records(workdir)[:3], (2, 4, 6), strict=True):
        assert record["step"] == step
        protocol = record["protocol"]
        assert (protocol["feature_net"], protocol["samples"], protocol["seed"]) == ("pixels", 32, 1)
        assert (protocol["solver"], protocol["nfe"], protocol["guidance"]) == ("heun", 5, 1.0)
        assert protocol["reference_samples"] == 32 and protocol["reference_sha256"]
        assert "32 of 1000 examples, by a fixed permutation" in protocol["notes"]
    for nfe in (3, 1):
        assert main(["evaluate", f"--workdir={workdir}", f"--nfe={nfe}"]) == 0
    few, one = records(workdir)[-2:]
    assert few["step"] == one["step"] == 6 and (few["protocol"]["nfe"], one["protocol"]["nfe"]) == (3, 1)


def test_kept_checkpoints_are_sampled_and_evaluated(workdir, tmp_path, capsys):
    """The best by its metric, which is not the first number of a record, and the last; nothing else is kept."""
    draw = lambda step, out: ["sample", f"--workdir={workdir}", "--count=5", f"--step={step}", f"--out={out}"]  # noqa: E731
    for step in ("best", "4", "6", ""):
        assert main(draw(step, tmp_path / f"a{step}.npz")) == 0
    said = capsys.readouterr().out
    assert said.count("of step 4") == 2 and said.count("of step 6") == 1
    best, four, six, last = (np.load(tmp_path / f"a{name}.npz")["images"] for name in ("best", "4", "6", ""))
    np.testing.assert_array_equal(best, four)
    np.testing.assert_array_equal(six, last)
    assert np.abs(best - last).max() > 1e-6
    assert main(["evaluate", f"--workdir={workdir}", "--step=best"]) == 0
    assert records(workdir)[-1]["step"] == 4
    saved = jaxdiff.load(workdir, devices=ONE, step="best")
    np.testing.assert_array_equal(saved.sample(0, 5), saved.with_nfe(5).sample(0, 5))
    assert saved.step == 4 and saved.with_nfe(3).step == 4
    for step in ("2", "first"):
        assert main(draw(step, tmp_path / "no.npz")) == 2
        assert f"step {step} of" in (said := capsys.readouterr().err) and "best or one of 4, 6" in said
    assert not (tmp_path / "no.npz").exists()


def test_a_run_that_was_not_evaluated_has_no_best(tmp_path, capsys):
    training.train(config_of(POINTS, {"train.steps": 2}), tmp_path, quiet=True, devices=ONE)
    assert main(["evaluate", f"--workdir={tmp_path}", "--step=best"]) == 2
    assert "sliced_wasserstein" in (said := capsys.readouterr().err) and "train.eval_every" in said


def test_repeats_are_means_and_spreads_over_seeds(workdir, capsys):
    alone = []
    for seed in (1, 2, 3):
        assert main(["evaluate", f"--workdir={workdir}", f"--config.eval.seed={seed}"]) == 0
        alone.append(records(workdir)[-1]["sliced_wasserstein"])
    capsys.readouterr()
    assert main(["evaluate", f"--workdir={workdir}", "--repeats=3"]) == 0
    record = records(workdir)[-1]
    assert record["sliced_wasserstein"] == pytest.approx(np.mean(alone), rel=1e-6)
    assert record["spread"]["sliced_wasserstein"] == pytest.approx(np.std(alone, ddof=1), rel=1e-4)
    assert [each["seed"] for each in record["repeats"]] == [1, 2, 3]
    assert len(set(alone)) == 3 and f" ± {record['spread']['sliced_wasserstein']:.4f}" in capsys.readouterr().out
    assert main(["evaluate", f"--workdir={workdir}", "--repeats=0"]) == 2
    assert "--repeats" in capsys.readouterr().err


def test_the_guidance_a_student_has_learnt_is_recorded():
    learnt = {**EMD, "emd.guidance": 1.75, "teacher.kind": "fresh"}
    run, mesh = training.prepare(config_of(POINTS, learnt), ONE)
    points = np.zeros((4, 2), np.float32)
    record = module.evaluate(run, None, mesh, samples=(points, None))
    assert record["protocol"]["guidance"] == 1.75 and "teacher's" in record["protocol"]["notes"]


def test_fewer_images_than_features_are_told():
    """The digit classifier has 64 features."""
    config = by_class(each=30)
    notes = {}
    for count in (40, 120):
        run, mesh = training.prepare(config, ONE)
        images = np.random.default_rng(0).uniform(-1, 1, (count, 8, 8, 1)).astype(np.float32)
        notes[count] = module.evaluate(run, None, mesh, samples=(images, None))["protocol"]["notes"]
    assert "40 images for" in notes[40] and "features" in notes[40] and notes[120] == ""
