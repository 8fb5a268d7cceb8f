"""Knobs that spare memory or time change neither what is learnt nor what a run can be continued with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from method_parts import build_method
from training_runs import assert_close, assert_same_bits, config_of, images_of, losses, points_of

from jaxdiff import models, plan
from jaxdiff.methods import emd
from jaxdiff.methods.averaging import constant
from jaxdiff.plan.program import devices_of
from jaxdiff.training import prepare, train
from jaxdiff.training.sharding import HOST, check_host_memory
from jaxdiff.training.state import declare

OFFLOAD = {"teacher.offload": True}


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def test_what_is_frozen_is_declared_on_the_host():
    state = declare(*prepare(config_of(points_of("sfd"), {"teacher.kind": "fresh", **OFFLOAD})))
    assert kinds(state.frozen) == {HOST} and HOST not in kinds((state.params, state.opt_state))


@pytest.mark.slow
def test_an_offloaded_teacher_stays_on_the_host_and_changes_no_bit(tmp_path):
    """Two steps with the teacher on the host, the third without: the losses and the end of a run without."""
    changes = {"teacher.kind": "fresh", "train.steps": 3, "train.save_every": 2, "mesh.data": 1, "mesh.fsdp": 2}
    base, two = points_of("emd"), jax.devices()[:2]

    def run(name, **more):
        return train(config_of(base, {**changes, **more}), tmp_path / name, quiet=True, devices=two).state

    straight = run("straight")
    first = run("offloaded", **OFFLOAD, **{"train.steps": 2})
    assert kinds(first.frozen) == {HOST} and HOST not in kinds(first.params)
    assert_same_bits(jax.device_get(run("offloaded")), jax.device_get(straight))
    assert losses(tmp_path / "offloaded") == losses(tmp_path / "straight")


def test_a_device_that_cannot_read_the_host_is_refused():
    class Device:
        device_kind = "toaster"

        def memory(self, kind):
            raise jax.errors.JaxRuntimeError(f"no {kind} here")

    check_host_memory(jax.devices()[0])
    with pytest.raises(ValueError, match=r"pinned_host memory, which toaster .*set it to False"):
        check_host_memory(Device())


@pytest.mark.slow
def test_offloading_takes_the_teacher_out_of_the_argument_memory(tpu_compiler):
    """By the TPU's own compiler: arguments shrink by the bytes of the teacher, which it counts on the host."""
    pytest.importorskip("libtpu")
    machine = plan.topology("v5e:2x2")
    devices = devices_of(machine)
    changes = {"mesh.data": 1, "mesh.fsdp": 4, "mesh.min_size": 64}
    near, far = (
        plan.make(config_of(images_of("emd"), {**changes, **more}), machine, devices=devices) for more in ({}, OFFLOAD)
    )
    teacher = near["state"]["frozen/teacher"]
    assert far["host"] == {"frozen/teacher": teacher} and "frozen/teacher" not in far["state"]
    assert near["hbm"]["host"] == 0 and far["hbm"]["host"] >= teacher
    # small arrays are padded to tiles
    assert near["hbm"]["arguments"] - far["hbm"]["arguments"] >= teacher
    assert "in the host's memory" in plan.text(far, "x")


@pytest.mark.slow
def test_chains_in_half_precision_leave_the_rest_alone():
    model = models.MLP(channels=2, width=16, depth=1)
    batch = {"image": jnp.zeros((16, 2))}
    teacher = model.init(jax.random.key(3), batch["image"], jnp.ones(16))["params"]
    found = {}
    with jax.numpy_dtype_promotion("standard"):
        for dtype in ("", "float32", "bfloat16"):
            options = {"sigma_max": 2.0, "steps": 3, "step_z": 0.01, "average": constant(0.5), "chain_dtype": dtype}
            method = build_method(emd, model, optax.sgd(0.1), **options)
            state = method.init(jax.random.key(0), batch, {"teacher": teacher})
            found[dtype] = (state, *jax.jit(method.step)(state, batch, jax.random.key(1)))
    start, plain, metrics = found[""]
    assert_close(plain, found["float32"][1], 1e-6)
    _, half, close = found["bfloat16"]
    assert_close(half.params["score"], plain.params["score"], 1e-6)  # matched to the generator itself, not to its copy
    assert_same_bits(half.frozen, start.frozen)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((half.params, half.averages, half.frozen)))
    apart, moved = (
        optax.tree.norm(jax.tree.map(jnp.subtract, half.params["student"], other.params["student"]))
        for other in (plain, start)
    )
    assert 0 < apart < 0.05 * moved
    np.testing.assert_allclose(close["score_gap"], metrics["score_gap"], rtol=0.05)


def test_wrong_knobs_are_refused_when_a_run_is_built():
    with pytest.raises(ValueError, match=r"model\.remat.*'dot'.*dots"):
        prepare(config_of(images_of("diffusion"), {"model.remat": "dot"}))
    with pytest.raises(ValueError, match=r"'mlp' has no blocks to rematerialise; set model\.remat=''"):
        prepare(config_of(changes={"model.remat": "full"}))
    with pytest.raises(ValueError, match=r"emd\.chain_dtype.*bfloat16"):
        prepare(config_of(points_of("emd"), {"emd.chain_dtype": "float16"}))
