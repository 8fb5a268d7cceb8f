"""The five networks of configs/t2i_small.py: one config with one field changed trains, resumes, spreads and lowers."""

import jax
import numpy as np
import pytest
from jax import export
from training_runs import assert_close, assert_same_bits, losses

from jaxdiff.configs import t2i_small
from jaxdiff.training import prepare, train
from jaxdiff.training.state import declare
from jaxdiff.trees import by_name

ONE = jax.devices()[:1]
RUN = {"train.steps": 3, "train.save_every": 1, "train.log_every": 1, "sample.count": 0, "optim.warmup_images": 32}
MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.min_size": 64}


def config_with(name, **changes):
    config = t2i_small.get_config(f"tiny,{name}")
    with config.unlocked():
        config.update_from_flattened_dict({**RUN, "compile_cache": "", **changes})
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", t2i_small.NETWORKS)
def test_a_run_goes_on_to_the_same_bits_and_eight_devices_agree(name, tmp_path):
    state = train(config_with(name), tmp_path / "straight", quiet=True, devices=ONE).state
    for steps in (2, 3):
        config = config_with(name, **{"train.steps": steps})
        again = train(config, tmp_path / "resumed", quiet=True, devices=ONE).state
    assert_same_bits(again, state)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")
    spread = train(config_with(name, **MESH), tmp_path / "spread", quiet=True).state
    found, wanted = losses(tmp_path / "spread"), losses(tmp_path / "straight")
    assert list(found) == list(wanted) == [1, 2, 3]
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)
    assert_close(spread.params, state.params, 2e-5)
    heads = [leaf for path, leaf in by_name(spread.params).items() if path.endswith(("qkv/kernel", "/q/kernel"))]
    assert heads and all("tensor" in leaf.sharding.spec for leaf in heads)


@pytest.mark.parametrize(
    "name", [name if name == "dit" else pytest.param(name, marks=pytest.mark.slow) for name in t2i_small.NETWORKS]
)
def test_a_training_step_lowers_for_tpu(name):
    run, mesh = prepare(config_with(name), ONE)
    state = declare(run, mesh)
    whole = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
    given = jax.tree.map(whole, (state, run.select(run.data.batch(0, 8))))
    made = export.export(jax.jit(run.method.step), platforms=["tpu"])(*given, jax.random.key(0))
    assert made.platforms == ("tpu",) and "stablehlo.dot_general" in made.mlir_module()
