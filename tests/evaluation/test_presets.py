"""Presets set what published protocols agree on, and refuse a network they do not use."""

import pytest

from jaxdiff.configs import cifar10, default, imagenet64, imagenet256_dit
from jaxdiff.evaluation.presets import PRESETS, resolved
from jaxdiff.training.evaluate import main_metric


@pytest.mark.parametrize(
    ("name", "resize", "sfid"),
    [("edm", "tensorflow", False), ("adm", "tensorflow", True), ("pytorch_fid", "bilinear", False), ("clean_fid", "clean", False)],
)  # fmt: skip
def test_presets(name, resize, sfid):
    c = default.get_config()
    c.eval.preset = name
    c.lock()
    found = resolved(c.eval)
    assert (found.net, found.resize, found.sfid) == ("inception", resize, sfid)
    assert main_metric(c) == "fid"
    assert c.eval.net == "digits"  # the config itself is left alone


def test_dinov2_is_no_fid():
    c = default.get_config()
    c.eval.preset = "fd_dinov2"
    assert (resolved(c.eval).net, resolved(c.eval).resize, main_metric(c)) == ("dinov2", "clean", "frechet_dinov2")
    assert set(PRESETS) == {"edm", "adm", "pytorch_fid", "clean_fid", "fd_dinov2"}


def test_configs_name_the_protocol_of_the_number_they_cite():
    assert cifar10.get_config().eval.preset == imagenet64.get_config().eval.preset == "edm"
    assert imagenet256_dit.get_config("XL").eval.preset == "adm"
    assert resolved(cifar10.get_config("tiny").eval).net == ""


def test_errors():
    c = default.get_config()
    c.eval.preset = "emd"
    with pytest.raises(ValueError, match="did you mean 'edm'"):
        resolved(c.eval)
    c.eval.preset, c.eval.net = "edm", "efficientnet_lite0"
    with pytest.raises(ValueError, match=r"'inception'.*'efficientnet_lite0'"):
        resolved(c.eval)
