"""`jaxdiff stats`: moments of a config's data with their protocol, which a later evaluation must match."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxdiff import training
from jaxdiff.cli import main
from jaxdiff.configs import digits
from jaxdiff.evaluation import Extracted, feature_net, load_stats, moments_of
from jaxdiff.training import load_data, reference
from jaxdiff.training.evaluate import protocol, reference_features
from jaxdiff.training.reference import read_stats, shares, write_stats

TINY = ["--config=digits:tiny", "--config.eval.reference=300"]


@pytest.fixture(scope="module")
def stats(tmp_path_factory):
    path = tmp_path_factory.mktemp("stats") / "digits.npz"
    assert main(["stats", *TINY, f"--out={path}"]) == 0
    return path


def test_it_writes_the_moments_of_the_data_and_how_they_came_about(stats):
    config = digits.get_config("tiny")
    config.eval.reference = 300
    run = training.build(config, load_data(config))
    expected = moments_of(reference_features(run, feature_net("digits")).features)
    moments, spatial, stored = load_stats(stats)
    assert (moments.count, spatial) == (300, None)
    np.testing.assert_allclose(moments.mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(moments.covariance, expected.covariance, rtol=1e-5, atol=1e-7)
    assert moments.covariance.dtype == np.float64
    known = json.loads(stored)
    assert (known["feature_sha256"], known["reference_samples"], known["solver"]) == (
        feature_net("digits").sha256,
        300,
        None,
    )


def config_with(**fields):
    config = digits.get_config("tiny")
    config.eval.reference = 0
    config.eval.update(fields)
    return config


def test_statistics_of_another_network_or_resizing_are_refused(stats, tmp_path):
    assert read_stats(stats, config_with()).moments.count == 300
    for field, value in (("resize", "clean-299"), ("feature_sha256", "0" * 64)):
        arrays = dict(np.load(stats))
        arrays["protocol"] = np.asarray(json.dumps({**json.loads(str(arrays["protocol"])), field: value}))
        np.savez(tmp_path / "other.npz", **arrays)
        with pytest.raises(ValueError, match=f"computed with {field}='{value}', this evaluation has"):
            read_stats(tmp_path / "other.npz", config_with())


def test_public_files_with_and_without_spatial_moments(tmp_path):
    rng = np.random.default_rng(0)
    a, b = moments_of(rng.normal(size=(50, 4))), moments_of(rng.normal(size=(50, 3)))
    images = np.zeros((2, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "adm.npz", arr_0=images, mu=a.mean, sigma=a.covariance, mu_s=b.mean, sigma_s=b.covariance)
    np.savez(tmp_path / "edm.npz", mu=a.mean.astype(np.float32), sigma=a.covariance)
    found = read_stats(tmp_path / "adm.npz", config_with(preset="adm", reference=50))  # no weights are needed for it
    np.testing.assert_allclose(found.moments.scatter, a.scatter)
    np.testing.assert_allclose(found.spatial.scatter, b.scatter)
    assert read_stats(tmp_path / "edm.npz", config_with(preset="edm", reference=50)).spatial is None
    with pytest.raises(ValueError, match="number of images"):
        read_stats(tmp_path / "edm.npz", config_with(preset="edm"))
    with pytest.raises(ValueError, match=r"edm\.npz has no mu_s.*eval\.sfid=False"):
        read_stats(tmp_path / "edm.npz", config_with(preset="adm", reference=50))


def test_spatial_moments_survive_a_file(tmp_path):
    rng = np.random.default_rng(0)
    a, b = moments_of(rng.normal(size=(50, 4))), moments_of(rng.normal(size=(50, 3)))
    config = digits.get_config("tiny")
    how = protocol(training.build(config, load_data(config)), feature_net("digits"), 50, 50, 0)
    write_stats(tmp_path / "s.npz", Extracted(a, spatial=b), how)
    np.testing.assert_allclose(load_stats(tmp_path / "s.npz")[1].scatter, b.scatter)


@pytest.mark.parametrize(("total", "processes"), [(1000, 1), (1000, 3), (257, 2), (256, 1), (7, 4), (50_000, 8)])
def test_processes_share_the_images_evenly(total, processes, monkeypatch):
    monkeypatch.setattr(reference.jax, "process_count", lambda: processes)
    every = []
    for i in range(processes):
        monkeypatch.setattr(reference.jax, "process_index", lambda i=i: i)
        every.append(list(shares(total, Mesh(np.array(jax.devices()[:1]), ("data",)))))
    assert len({len(parts) for parts in every}) == 1  # collective calls must match
    covered = sorted(span for parts in every for span in parts)
    assert [p for start, stop in covered for p in range(start, stop)] == list(range(total))
    assert all(0 < stop - start <= 256 for start, stop in covered)
    assert (
        sum(stop - start for start, stop in shares(total, None)) == total
    )  # without a mesh every process has them all


def test_mistakes(tmp_path, capsys):
    for extra, message in [
        ([], "--out=FILE.npz"),
        ([f"--out={tmp_path}/x.txt"], ".npz"),
        ([f"--out={tmp_path}/none/x.npz"], "does not exist"),
        ([f"--out={tmp_path}/x.npz", "--config.eval.net="], "eval.net"),
        ([f"--out={tmp_path}/x.npz", "--config.eval.sfid=true"], "eval.sfid"),
        ([f"--out={tmp_path}/x.npz", "--config.eval.preset=edm"], "needs its weights"),
        ([f"--out={tmp_path}/x.npz", "--config.eval.preset=edm2"], "did you mean 'edm'"),
    ]:
        assert main(["stats", *TINY, *extra]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
