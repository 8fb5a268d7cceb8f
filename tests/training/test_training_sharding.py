"""One device, eight, and meshes of them: the same losses, parameters and images; checkpoints that move between them."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from training_runs import (
    FLOW_MAPS,
    IMAGES,
    METHODS,
    POINTS,
    SCORE,
    assert_close,
    assert_same_bits,
    config_of,
    images_of,
    losses,
    methods,
    points_of,
    saved_state,
)

from jaxdiff import models
from jaxdiff.conventions import DDPM
from jaxdiff.methods import exported
from jaxdiff.models.conditioning import Control
from jaxdiff.plan.program import arguments, step_of
from jaxdiff.training import Sampler, prepare, train
from jaxdiff.training.sharding import bytes_per_device, global_batch, make_mesh, spec_of, state_shardings
from jaxdiff.training.state import Guard, declare, example_batch, shardings_of
from jaxdiff.trees import path_name

MESHES = {
    "data": {"mesh.data": 8},
    "fsdp": {"mesh.data": 1, "mesh.fsdp": 8},
    "data_fsdp_tensor": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "fsdp_context": {"mesh.data": 1, "mesh.fsdp": 4, "mesh.context": 2},
}


@dataclass(frozen=True)
class Chip:
    id: int
    slice_index: int = 0


COUNT = 6  # images, a number that no mesh divides


def images(config, state, devices=None):
    return Sampler(*prepare(config, devices)).sample(exported(state), COUNT, 7)


@pytest.fixture(scope="module")
def single(request, tmp_path_factory):
    """The run of a method on one device: its name, folder, state and images."""
    workdir, one = tmp_path_factory.mktemp("single"), jax.devices()[:1]
    config = config_of(images_of(request.param), {"sample.count": 0})
    state = train(config, workdir, quiet=True, devices=one).state
    return request.param, workdir, state, images(config, state, one)


# the last mesh has all three axes: what holds there and, for one method, on the others holds for the rest
CASES = [("diffusion", "data"), ("diffusion", "fsdp_context"), *((method, "data_fsdp_tensor") for method in METHODS)]
SLOW = {*SCORE, *FLOW_MAPS} - {"f_distill", "meanflow"}  # which have all that they have
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in SLOW)) for case in CASES]


@pytest.mark.parametrize(("single", "name"), CASES, indirect=["single"])
def test_meshes_agree_with_one_device(single, tmp_path, name):
    method, workdir, state, (samples, labels) = single
    config = config_of(images_of(method), {"sample.count": 0, **MESHES[name]})
    result = train(config, tmp_path, quiet=True)
    found, wanted = losses(tmp_path), losses(workdir)
    assert list(found) == list(wanted) == [1, 2, 3, 4]
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)
    assert_close(result.state.params, state.params, 2e-5)
    assert_close(result.state.averages, state.averages, 2e-5)
    others, other_labels = images(config, result.state)
    np.testing.assert_allclose(others, samples, atol=1e-4)
    assert (other_labels == labels).all()
    assert_split(result.state, name)
    if name == "data_fsdp_tensor":
        restore_on_fewer(tmp_path, result.state, method)


def assert_split(state, name):
    """What each device really holds, of a parameter, its moments, its average and its teacher."""
    parts = {"data": (1, 1), "fsdp": (8, 1), "data_fsdp_tensor": (2, 2), "fsdp_context": (8, 1)}[name]
    fsdp, tensor = parts
    others = [*(tree for name, tree in state.averages.items() if name != "ratio"), *state.frozen.values()]
    for tree in (state.params["student"], state.opt_state["student"][1][0].mu, *(tree for tree in others if tree)):
        kernel = tree["blocks_0"]["attention"]["qkv"]["kernel"]
        assert kernel.shape == (32, 3, 4, 8)
        assert {s.data.shape for s in kernel.addressable_shards} == {(32 // fsdp, 3, 4 // tensor, 8)}
        wide = tree["blocks_0"]["mlp"]["in"]["kernel"]
        assert wide.shape == (32, 128)
        held = {"data": (32, 128), "fsdp": (32, 16), "data_fsdp_tensor": (16, 64), "fsdp_context": (32, 16)}[name]
        assert {s.data.shape for s in wide.addressable_shards} == {held}
    assert len({s.device for s in kernel.addressable_shards}) == 8
    assert {s.data.shape for s in tree["final"]["out"]["bias"].addressable_shards} == {(4,)}


def restore_on_fewer(workdir, state, method):
    """The checkpoint of eight devices on two and on one, to the bit."""
    for devices, mesh in ((jax.devices()[:2], {"mesh.data": 1, "mesh.fsdp": 2}), (jax.devices()[:1], {})):
        restored = saved_state(workdir, 4, config_of(images_of(method), mesh), devices)
        assert_same_bits(restored, state)
        kernel = restored.params["student"]["blocks_0"]["mlp"]["in"]["kernel"]
        assert len(kernel.addressable_shards) == len(devices)
        assert kernel.addressable_shards[0].data.shape == (32, 128 // len(devices))


def test_a_run_goes_on_with_another_number_of_devices(tmp_path):
    """Three steps on eight devices, three on two, three on one: the losses of a run on one."""
    for steps, devices, mesh in ((3, 8, {"mesh.data": 2, "mesh.fsdp": 4}), (6, 2, {"mesh.fsdp": 2}), (9, 1, {})):
        config = config_of(POINTS, {"train.steps": steps, "mesh.min_size": 64, **mesh})
        result = train(config, tmp_path / "moved", quiet=True, devices=jax.devices()[:devices])
    straight = config_of(POINTS, {"train.steps": 9})
    wanted = train(straight, tmp_path / "straight", quiet=True, devices=jax.devices()[:1])
    found = losses(tmp_path / "moved"), losses(tmp_path / "straight")
    assert list(found[0]) == list(found[1]) == list(range(1, 10))
    np.testing.assert_allclose(list(found[0].values()), list(found[1].values()), rtol=1e-5)
    assert_close(result.state.params, wanted.state.params, 1e-5)


def test_images_do_not_depend_on_the_batch_or_the_devices():
    """Image i is a function of (seed, i): labels, noise and solver noise, also of a stochastic solver."""
    changes = {"sample.solver": "ancestral"}
    base = config_of(POINTS, {**changes, "sample.batch_size": 4})
    run, _ = prepare(base, jax.devices()[:1])
    state = jax.jit(run.method.init)(jax.random.key(0), run.select(run.data.batch(0, 4)))
    params = jax.tree.map(lambda a: a + 0.1, exported(state))  # the network starts as zero
    results = []
    for size, devices in ((4, 1), (8, 1), (8, 8), (16, 8)):
        config = config_of(POINTS, {**changes, "sample.batch_size": size})
        there, mesh = prepare(config, jax.devices()[:devices])
        placed = jax.device_put(params, shardings_of(exported(declare(there, mesh))))
        parts = list(Sampler(there, mesh).batches(placed, 10, 3))
        assert {len(p) for p, _ in parts[:-1]} <= {size} and sum(len(p) for p, _ in parts) == 10
        results.append([np.concatenate(column) for column in zip(*parts, strict=True)])
    for points, labels in results[1:]:
        np.testing.assert_allclose(points, results[0][0], atol=2e-5)
        np.testing.assert_array_equal(labels, results[0][1])
    assert len(np.unique(results[0][0], axis=0)) == 10


# ------------------------------------------------------------------------------------------ the rules


def test_rules_place_heads_and_widths_over_tensor_and_the_largest_axis_over_fsdp():
    mesh, both = make_mesh(1, 4, 2), ("fsdp", "fsdp_minor")  # 2 x 2
    spec = lambda name, shape, size=1: tuple(spec_of(name, shape, mesh, size))  # noqa: E731
    assert spec("params/blocks_0/attention/qkv/kernel", (32, 3, 4, 8)) == (both, None, "tensor", None)
    assert spec("params/blocks/attention/qkv/kernel", (6, 32, 3, 4, 8)) == (None, both, None, "tensor", None)
    assert spec("params/blocks_0/attention/qkv/bias", (3, 4, 8)) == (None, "tensor", both)
    assert spec("params/blocks_0/attention/out/kernel", (4, 8, 32)) == ("tensor", None, both)
    assert spec("opt_state/0/mu/blocks_0/image_mlp/in/kernel", (32, 128)) == (both, "tensor")
    assert spec("ema/blocks_0/mlp/out/kernel", (128, 32)) == ("tensor", both)
    assert spec("params/final/out/kernel", (6, 10)) == ("fsdp", "fsdp_minor")  # 4 divides neither
    assert spec("params/final/out/kernel", (6, 9)) == ("fsdp_minor", None)
    assert spec("params/final/out/kernel", (7, 9)) == (None, None)
    assert spec("params/final/out/kernel", (8, 8)) == (None, both)
    assert spec("params/final/out/kernel", (8, 8), 65) == (None, None)  # too small to be worth it
    assert spec("step", ()) == ()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("dit", (1, 256, 1)), ("dit", (2, 128, 1)), ("dit", (1, 64, 4)), ("mmdit", (1, 256, 1)), ("unet", (1, 256, 1))],
)
def test_the_state_per_chip_is_its_share(name, sizes):
    """DiT-XL has width 1,152, which 256 does not divide, and the UNet for ImageNet 192: two axes are split."""
    model = {
        "dit": models.DiT(depth=28, width=1152, heads=16, num_classes=1000, scan=True),
        "mmdit": models.MMDiT(depth=28, width=1152, heads=16, text_dim=768, pooled_dim=0, scan=True),
        "unet": models.UNet(width=192, channel_mult=(1, 2, 3, 4), channels=3, num_classes=1000),
    }[name]
    x = jax.ShapeDtypeStruct((1, 64, 64, model.channels), np.float32)
    cond = {"text": jax.ShapeDtypeStruct((1, 5, 768), np.float32)} if name == "mmdit" else None
    params = jax.eval_shape(lambda x, cond: model.init(jax.random.key(0), x, np.ones(1), cond), x, cond)["params"]
    data, fsdp, context = sizes
    mesh = make_mesh(data, fsdp, 1, [Chip(i) for i in range(256)], context)
    share = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        axes = [axis for axis in spec_of("params/" + path_name(path), leaf.shape, mesh) if axis]
        names = [name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis)]
        share += leaf.size / np.prod([mesh.shape[name] for name in names])
    whole = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert share < 1.3 * whole / (256 // data)


def test_data_is_split_over_slices_and_the_rest_inside_one():
    devices = [Chip(i, i % 2) for i in range(8)]  # in the order of hosts, not of slices
    mesh = make_mesh(2, -1, 1, devices)
    found = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert mesh.devices.shape == (2, 2, 2, 1, 1) and (found[0] == 0).all() and (found[1] == 1).all()
    with pytest.raises(ValueError, match=r"mesh.data=1 .* 2 slices"):
        make_mesh(1, 8, 1, devices)


def test_a_context_axis_needs_tokens_and_heads():
    with pytest.raises(ValueError, match=r"mesh.context=2 .*'mlp'"):
        prepare(config_of(POINTS, {"mesh.context": 2}))
    config = config_of(images_of("diffusion"), {"mesh.context": 8, "mesh.data": 1})
    run, mesh = prepare(config)
    given = arguments(run, mesh)
    with pytest.raises(ValueError, match=r"4 heads do not divide over mesh.context x mesh.tensor = 8"):
        step_of(run, mesh, given).trace(*given)


TEXT = {"text": jax.ShapeDtypeStruct((1, 5, 10), np.float32)}
SPLIT = {  # models of 2 heads and 24 channels (MLPs of 96), with a condition to initialise them
    "dit": (models.DiT(depth=1, width=24, heads=2), None),
    "dit_cross": (models.DiT(depth=1, width=24, heads=2, label_conditioning="cross", control=Control(DDPM())), None),
    "mdt": (models.MDT(depth=4, width=24, heads=2, decoder=2), None),
    "pixart": (models.PixArt(depth=1, width=24, heads=2, text_dim=10), TEXT),
    "mmdit": (models.MMDiT(depth=2, width=24, heads=2, text_dim=10, pooled_dim=0), TEXT),
    "latent_unet": (
        models.LatentUNet(width=24, channel_mult=(1,), blocks=1, depths=(1,), heads=2, groups=4, text_dim=10), TEXT,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "scan"), [(name, scan) for name in SPLIT for scan in (False, True) if not scan or name != "latent_unet"]
)
def test_every_attention_and_mlp_is_split_over_heads_or_width(name, scan):
    """By the axis's size: 2 heads, 96 channels of an MLP or, in what reads text, 24; biases added after are whole."""
    model, cond = SPLIT[name]
    model = model.clone(scan=True) if scan else model
    x = jax.ShapeDtypeStruct((1, 8, 8, 4), np.float32)
    shapes = jax.eval_shape(lambda x, cond: model.init(jax.random.key(0), x, 1.0, cond), x, cond)
    mesh, split = make_mesh(4, 1, 2), set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes["params"]):
        where = path_name(path)
        spec = tuple(spec_of(where, leaf.shape, mesh))
        parts = where.split("/")
        inside = any(part.endswith(("attention", "mlp", "qkv")) or part in ("image_out", "text_out") for part in parts)
        summed = parts[-1] == "bias" and parts[-2].endswith("out")  # added once, after the parts were summed
        if (inside and not summed and "norm" not in where) or parts[-1] == "position_bias":
            assert spec.count("tensor") == 1, where
            wide = 24 if "text_mlp" in parts and name == "pixart" else 96
            assert leaf.shape[spec.index("tensor")] == (wide if any("mlp" in part for part in parts) else 2), where
            split.add(parts[-2])
        else:
            assert "tensor" not in spec, where
    assert split >= {"in", "out"} or name == "mmdit"


def test_heads_that_the_tensor_axis_does_not_divide():
    with pytest.raises(
        ValueError,
        match=r"blocks_0/attention/qkv/kernel has 3 heads .*mesh.tensor=2.* divisors of 3",
    ):
        spec_of("params/blocks_0/attention/qkv/kernel", (32, 3, 3, 8), make_mesh(4, 1, 2))


def test_factored_moments_fit_every_mesh():
    """Adafactor's moments have other shapes than their parameters."""
    config = config_of(IMAGES, {**MESHES["data_fsdp_tensor"], "optim.name": "adafactor"})
    run, mesh = prepare(config)
    abstract = jax.eval_shape(run.method.init, jax.random.key(0), example_batch(run, mesh))
    shardings = state_shardings(abstract, mesh, 1)
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(abstract), jax.tree.leaves(shardings), strict=True
    ):
        assert len(sharding.shard_shape(leaf.shape)) == leaf.ndim, path_name(path)


def test_bytes_per_device_count_what_one_device_holds():
    declared = declare(*prepare(config_of(IMAGES, MESHES["fsdp"])))
    state = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), declared)
    on_first = [s.data for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.device.id == 0]
    assert bytes_per_device(declared) == sum(a.nbytes for a in on_first)
    assert bytes_per_device(declared) < 0.4 * sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@methods("consistency", "emd")
def test_devices_share_the_work(method):
    """Also where a method draws its own examples: the program of one of eight devices computes far less than of one."""

    def flops(devices):
        config = config_of(points_of(method), {"data.batch_size": 256, "data.options.count": 256})
        run, mesh = prepare(config, devices)
        given = declare(run, mesh), Guard(np.int32(0), np.int32(-1))
        batch = global_batch(run.select(run.data.batch(0, 256)), mesh)
        program = step_of(run, mesh, given).lower(*given, batch, jax.random.key(0), np.int32(0))
        return program.compile().cost_analysis()["flops"]

    assert flops(jax.devices()) < 0.25 * flops(jax.devices()[:1])


@pytest.mark.parametrize(("count", "scan"), [(1, False), (8, False), (8, True)])
def test_tokens_stay_split_along_the_batch(count, scan):
    """With sharded parameters every block constrains its tokens to the batch sharding; on one device there are none."""
    config = config_of(IMAGES, {"mesh.data": 1, "mesh.fsdp": count, "data.batch_size": 16})
    config.model.fields.scan, config.model.fields.depth = scan, 3
    run, mesh = prepare(config, jax.devices()[:count])
    given = arguments(run, mesh)
    text = str(step_of(run, mesh, given).trace(*given).jaxpr)
    constraints = text.count("spec=P(('data', 'fsdp', 'fsdp_minor'),)")
    assert constraints == 0 if count == 1 else constraints >= (1 if scan else 3), constraints
