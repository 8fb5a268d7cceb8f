"""MDT in the trainer: a DiT's config with its name changed trains every parameter, resumes, and spreads over a mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from training_runs import IMAGES, assert_close, assert_same_bits, config_of, losses, saved_state

from jaxdiff.training import prepare, train
from jaxdiff.training.state import declare

FIELDS = {"patch": 4, "depth": 6, "width": 16, "heads": 2, "learn_variance": False}
BASE = {**IMAGES, "model.fields": FIELDS, "train.steps": 3, "train.save_every": 1, "sample.count": 0}
SMALL = {**BASE, "model.name": "mdt", "model.fields": {**FIELDS, "depth": 3, "decoder": 1, "mask_buckets": 2}}
MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


def test_a_config_needs_only_another_name():
    models = {name: prepare(config_of(BASE, {"model.name": name}))[0].model for name in ("dit", "mdt")}
    assert type(models["mdt"]).__name__ == "MDT" and models["mdt"].mask_ratio == (0.3, 0.5)
    assert all(getattr(models["mdt"], name) == getattr(models["dit"], name) for name in FIELDS)
    declared = declare(*prepare(config_of(SMALL, MESH)))
    assert declared.params["student"]["encode_in_0"]["position_bias"].sharding.spec == PartitionSpec(None, "tensor")


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits_and_a_mesh_agrees(tmp_path):
    one = jax.devices()[:1]
    state = train(config_of(SMALL), tmp_path / "straight", quiet=True, devices=one).state
    early = saved_state(tmp_path / "straight", 1, config_of(SMALL)).params
    # the first step moves the last layer alone, which starts at zero; then all learn, also what only hidden tokens use
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(early), jax.tree.leaves(state.params), strict=True
    ):
        assert np.abs(np.asarray(before) - np.asarray(after)).max() > 0, jax.tree_util.keystr(path)
    for steps in (2, 3):
        again = train(config_of(SMALL, {"train.steps": steps}), tmp_path / "resumed", quiet=True, devices=one).state
    assert_same_bits(again, state)
    spread = train(config_of(SMALL, MESH), tmp_path / "spread", quiet=True).state
    found, wanted = losses(tmp_path / "spread"), losses(tmp_path / "straight")
    assert list(found) == list(wanted) == [1, 2, 3]
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)
    assert_close(spread.params, state.params, 2e-5)
    bias = spread.params["student"]["encode_in_0"]["position_bias"]
    assert {shard.data.shape for shard in bias.addressable_shards} == {(3 * 3 + 3, 1)}
