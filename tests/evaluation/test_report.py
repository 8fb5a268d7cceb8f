"""Records carry their protocol, metrics carry their right name, lines are appended whole, rounding is as stated."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff.evaluation import (
    Moments,
    Protocol,
    digest,
    evaluate_features,
    frechet_distance,
    from_uint8,
    inception_score,
    kid,
    metric_name,
    prdc,
    to_uint8,
    write,
)
from jaxdiff.evaluation.frechet import moments_of

RNG = np.random.default_rng(0)
FAKE, REAL = RNG.normal(size=(40, 6)), RNG.normal(size=(50, 6)) + 0.2


def protocol(**changes):
    fields = {
        "feature_net": "digits", "feature_sha256": "ab", "resize": "none", "samples": 40, "uint8": True,
        "reference": "digits/train", "reference_sha256": "cd", "reference_samples": 50, "solver": "heun", "steps": 18,
        "nfe": 35, "guidance": None, "seed": 0, "ema": 0.999,
    }  # fmt: skip
    return Protocol(**(fields | changes))


def test_a_record_holds_every_metric_and_the_protocol():
    p = np.eye(10)[np.arange(40) % 10]
    record = evaluate_features(FAKE, REAL, protocol(), probabilities=p, k=3, splits=4)
    stated = record.pop("protocol")
    assert stated == dataclasses.asdict(protocol())
    mean, std = inception_score(p, 4)
    score = {"classifier_score_digits": mean, "classifier_score_digits_std": std, "score_splits": 4}
    kernel = {"kernel_digits": kid(FAKE, REAL)[0], "kernel_digits_std": 0.0}
    distance = {"frechet_digits": frechet_distance(FAKE, REAL)}
    assert record == {**distance, **prdc(REAL, FAKE, 3), "prdc_k": 3, **kernel, **score}


def test_spatial_moments_make_an_sfid_and_names_are_those_of_the_papers():
    spatial = moments_of(FAKE[:, :2]), moments_of(REAL[:, :2])
    record = evaluate_features(FAKE, REAL, protocol(feature_net="inception"), spatial=spatial)
    assert record["sfid"] == frechet_distance(*spatial)
    assert {"fid", "kid", "kid_std"} < set(record)
    assert "inception_score" not in record  # without probabilities


def test_moments_give_the_distance_alone():
    record = evaluate_features(FAKE, moments_of(REAL), protocol())
    assert set(record) == {"frechet_digits", "protocol"}
    assert record["frechet_digits"] == pytest.approx(frechet_distance(FAKE, REAL))
    assert isinstance(moments_of(REAL), Moments)


def test_only_the_fid_network_makes_an_fid():
    assert metric_name("inception") == "fid"
    assert metric_name("efficientnet_lite0") == "frechet_efficientnet_lite0"
    p = np.full((40, 4), 0.25)
    record = evaluate_features(FAKE, REAL, protocol(feature_net="inception"), probabilities=p)
    assert "fid" in record
    assert record["inception_score"] == pytest.approx(1)


def test_a_protocol_must_be_complete_and_true():
    with pytest.raises(TypeError, match="guidance"):
        Protocol(**{k: v for k, v in dataclasses.asdict(protocol()).items() if k != "guidance"})
    with pytest.raises(ValueError, match=r"samples=50000.*40"):
        evaluate_features(FAKE, REAL, protocol(samples=50000))
    with pytest.raises(ValueError, match=r"reference_samples=7.*50"):
        evaluate_features(FAKE, REAL, protocol(reference_samples=7))
    with pytest.raises(ValueError, match=r"samples=40.*3"):
        evaluate_features(FAKE, REAL, protocol(), probabilities=np.eye(3))


def test_lines_are_appended_whole(tmp_path):
    path = tmp_path / "new" / "evaluations.jsonl"
    record = evaluate_features(FAKE, REAL, protocol())
    write(path, record)
    write(path, {"x": np.float32(0.5), "n": np.int64(3), "a": jnp.arange(2)})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [record, {"x": 0.5, "n": 3, "a": [0, 1]}]


def test_a_cut_off_line_harms_no_later_one(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    path.write_text('{"x": 1}\n{"x": 2, "y"')
    write(path, {"x": 3})
    assert path.read_text() == '{"x": 1}\n{"x": 2, "y"\n{"x": 3}\n'


def test_what_cannot_be_read_back_is_not_written(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(path, {"fid": float("nan")})
    with pytest.raises(TypeError, match="got object"):
        write(path, {"fid": object()})
    assert not path.exists()


@pytest.mark.parametrize("xp", [np, jnp])
def test_rounding(xp):
    x = xp.asarray([-3, -1, -1 + 1.01 / 127.5, 0, 0.25, 1, 7], dtype=xp.float32)
    np.testing.assert_array_equal(to_uint8(x), [0, 0, 1, 128, 159, 255, 255])
    levels = xp.arange(256).astype(xp.uint8)
    np.testing.assert_array_equal(to_uint8(from_uint8(levels)), levels)
    assert from_uint8(levels).dtype == np.float32
    assert (from_uint8(levels)[0], from_uint8(levels)[255]) == (-1, 1)


def test_digest(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert digest(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    x = np.arange(6.0).reshape(2, 3)
    assert digest(x) == digest(np.asfortranarray(x))
    assert len({digest(x), digest(x.T), digest(x.astype(np.float32)), digest(x + 1)}) == 4
