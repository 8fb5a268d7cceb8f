"""Plans: the compiled program's own numbers, counts against closed forms, and meshes that cannot be."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdiff import cli, flops, plan
from jaxdiff.chips import GIB
from jaxdiff.configs import imagenet256_dit, mixture2d
from jaxdiff.plan import gpus, hlo, program
from jaxdiff.training import prepare, state
from jaxdiff.training.sharding import make_mesh

pytestmark = pytest.mark.usefixtures("tpu_compiler")
needs_libtpu = pytest.mark.skipif(
    program.importlib.util.find_spec("libtpu") is None, reason="the TPU's compiler is not installed on this platform"
)


def small(**changes):
    config = mixture2d.get_config()
    with config.unlocked():
        config.model.fields.update(width=128, depth=1)
        config.data.batch_size = 64
        for name, value in changes.items():
            config.mesh[name] = value
    return config


@pytest.fixture(scope="module")
def compiled(tpu_compiler):
    """The plan of a small run split over four chips, and the program it was read from."""
    seen = []
    original = program.hlo.Program.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hlo.Program, "__init__", lambda self, text, n: (seen.append(text), original(self, text, n))[1])
        analysed = []
        patch.setattr(jax.stages.Compiled, "memory_analysis", _recorded(jax.stages.Compiled.memory_analysis, analysed))
        machine = plan.topology("v5e:2x2")
        record = plan.make(small(data=1, fsdp=4), machine)
    return record, seen[0], analysed[0]


def _recorded(function, results):
    def call(self):
        results.append(function(self))
        return results[-1]

    return call


@needs_libtpu
def test_memory_is_what_the_compiler_says_and_a_quarter_of_the_state(compiled):
    record, _, memory = compiled
    assert record["hbm"]["arguments"] == memory.argument_size_in_bytes
    assert record["hbm"]["temporaries"] == memory.temp_size_in_bytes
    assert record["hbm"]["peak"] == memory.peak_memory_in_bytes > 0
    assert record["fits"] and record["hbm"]["limit"] == int(15.75 * GIB)
    devices = program.devices_of(plan.topology("v5e:2x2"))
    params = state.declare(*prepare(small(data=1, fsdp=4), devices)).params["student"]
    large = [leaf for leaf in jax.tree.leaves(params) if leaf.size >= 2**14]
    assert large and all(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size for leaf in large)
    rest = sum(4 * leaf.size for leaf in jax.tree.leaves(params) if leaf.size < 2**14)
    assert record["state"]["params/student"] == sum(leaf.size for leaf in large) + rest
    assert record["hbm"]["arguments"] >= sum(record["state"].values())


@needs_libtpu
def test_the_state_is_known_without_compiling(compiled, tmp_path, capsys, monkeypatch):
    whole, *_ = compiled
    machine = plan.topology("v5e:2x2")
    with monkeypatch.context() as patch:
        patch.setattr(program, "_compile", None)
        found = plan.make(small(data=1, fsdp=4), machine, compiled=False)
    assert {name: found[name] for name in ("state", "flops", "trained")} == {
        name: whole[name] for name in ("state", "flops", "trained")
    }
    assert found["hbm"]["peak"] is None and 0 < found["seconds"] <= whole["seconds"]
    assert abs(found["hbm"]["arguments"] - whole["hbm"]["arguments"]) < 0.1 * whole["hbm"]["arguments"]
    assert "activations unknown" in plan.text(found, "v5e") and plan.text(found, "v5e").endswith("not compiled")
    words = ["plan", "--config=mixture2d:tiny", "--topology=v5e:2x2", "--state_only", f"--out={tmp_path / 'plan.json'}"]
    assert cli.main([*words, "--largest_batch"]) == 2 and "--state_only" in capsys.readouterr().err


@needs_libtpu
def test_collectives_are_those_of_the_text(compiled):
    record, text, _ = compiled
    found = re.findall(
        r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(.*?channel_id=(\d+)", text
    )
    counts: dict[str, int] = {}
    for kind, _ in set(found):
        counts[kind] = counts.get(kind, 0) + 1
    assert {kind: row["in_text"] for kind, row in record["collectives"].items()} == counts
    assert counts["all-gather"] and all(row["sent"] > 0 for row in record["collectives"].values())


@needs_libtpu
def test_the_state_is_updated_in_place(compiled):
    """Every array of the state is donated and reused, and none is copied in main memory."""
    record, text, _ = compiled
    assert sum(record["state"].values()) <= record["hbm"]["aliased"] <= record["hbm"]["outputs"]
    lines = hlo.Program(text, 4).computations[hlo.Program(text, 4).entry]
    given = {line.name: hlo._bytes(line.type) for line in lines if line.op == "parameter"}
    assert max(given.values()) >= 2**14
    copied = [line for line in lines if line.op == "copy" and given.get(line.operands[0], 0) >= 2**14]
    assert not copied


@needs_libtpu
def test_the_estimate_follows_from_the_record(compiled):
    record, _, _ = compiled
    assert record["seconds"] == max(record["times"].values()) and 0 < record["mfu"] < 1
    assert record["times"]["compute"] == record["flops"]["executed"] / 4 / 197e12
    assert record["traffic"] > record["hbm"]["arguments"] / 2
    assert "fits" in plan.text(record, "x") and "all-gather" in plan.text(record, "x")


@needs_libtpu
def test_parameters_are_gathered_inside_a_slice():
    """Two slices of four chips, data across them and fsdp inside: a slice holds all parameters, a chip a quarter."""
    machine = plan.topology("2*v5e:2x2")
    assert (machine.chips, machine.slices) == (8, 2)
    devices = program.devices_of(machine)
    assert sorted({device.slice_index for device in devices}) == [0, 1]
    run, mesh = prepare(small(data=2, fsdp=4), devices)
    assert {device.slice_index for device in mesh.devices[0].flat} == {0}
    params = state.declare(run, mesh).params["student"]
    large = [leaf for leaf in jax.tree.leaves(params) if leaf.size >= 2**14]
    assert large and all(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size for leaf in large)
    record = plan.make(small(data=2, fsdp=4), machine, devices=devices)
    assert record["fits"] and record["mesh"] == {"data": 2, "fsdp": 4, "context": 1, "tensor": 1}
    with pytest.raises(ValueError, match="2 slices"):
        plan.make(small(data=1, fsdp=8), machine, devices=devices)


LOOP = """HloModule m
%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %g = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %r = f32[8,16]{1,0} all-reduce(%g), channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  %d = f32[4,8,16]{2,1,0:S(1)} all-gather(%r), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %r)
}
%condition (p: (s32[], f32[8,16])) -> pred[] {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %c = s32[] constant(28)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %l = pred[] compare(%i, %c), direction=LT
}
%sliced (p0: f32[28,16], p1: s32[]) -> f32[1,16] {
  %p0 = f32[28,16]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %s = f32[1,16]{1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,16}
}
ENTRY %main (a: f32[28,16]) -> f32[1,16] {
  %a = f32[28,16]{1,0} parameter(0)
  %z = s32[] constant(0)
  %w = (s32[], f32[8,16]{1,0}) while(%t0), condition=%condition, body=%body
  %q = (bf16[8]{0}, bf16[8]{0}, u32[]) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1}}
  ROOT %f = f32[1,16]{1,0} fusion(%a, %z), kind=kLoop, calls=%sliced
}
"""


def test_loops_count_as_often_as_they_run():
    text = hlo.Program(LOOP, 8)
    reduce, gather, permute = text.collectives()
    assert reduce == ("all-reduce", 512, 4, 28) and reduce.sent == 28 * 512 * 2 * 3 / 4
    assert gather == ("all-gather", 2048, 4, 28) and gather.sent == 28 * 2048 * 3 / 4
    assert permute == ("collective-permute", 16, 8, 1) and permute.sent == 16
    # in the loop: all-reduce reads and writes 512, all-gather reads 512 (its result is in another memory), and the
    # condition's flag; then the permutation, and of the fused slice one row in, one out, and its index
    assert text.traffic() == 28 * (512 + 512 + 512 + 1 + 4 + 4) + 16 + 64 + 64 + 4


def test_kernels_and_transpositions_are_counted():
    """In the loop 28 times each; transpositions inside a fusion of another kind are not kernels of their own."""
    lines = """  %k = f32[8,16]{1,0} custom-call(%g), custom_call_target="__attend", backend_config={"x":"y"}
  %b = f32[8,16]{1,0} custom-call(%g), custom_call_target="AllocateBuffer"
  %m = f32[16,8]{1,0} transpose(%g), dimensions={1,0}
  %input_transpose_fusion = f32[16,8]{1,0} fusion(%g), kind=kInput, calls=%sliced
"""
    text = hlo.Program(LOOP.replace("  ROOT %t = (s32[]", lines + "  ROOT %t = (s32[]", 1), 8)
    assert text.kernels() == {"__attend": 28} and text.transposes() == {"per_step": 56, "bytes": 56 * 512}
    assert hlo.Program(LOOP, 8).kernels() == {} and hlo.Program(LOOP, 8).transposes()["per_step"] == 0


def test_a_loop_that_tells_its_count_is_believed():
    """Compilers for GPUs hide the comparison in a fusion and write the count beside the loop."""
    loop = "while(%t0), condition=%condition, body=%body"
    told = LOOP.replace("constant(28)", "parameter(1)").replace(
        loop, loop + ', backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}'
    )
    assert told.count("12") and [one.times for one in hlo.Program(told, 8).collectives()] == [12, 12, 1]


BRANCHES = """
%one (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
}

%two (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} parameter(0)
}

ENTRY %main (c: pred[], x: f32[8]) -> f32[8] {
  %c = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %r = f32[8]{0} conditional(%c, %x, %x), BOTH
}
"""


@pytest.mark.parametrize(
    "both",
    ["true_computation=%one, false_computation=%two", "branch_computations={%two, %one}"],
    ids=["two", "several"],
)
def test_what_branches_do_is_counted(both):
    program = hlo.Program(BRANCHES.replace("BOTH", both), 8)
    assert program.times == {"main": 1, "one": 1, "two": 1} and [one.kind for one in program.collectives()] == [
        "all-reduce"
    ]


def test_operations_are_counted_exactly():
    x, w, k = jnp.zeros((4, 8, 8, 3)), jnp.zeros((5, 16, 16)), jnp.zeros((3, 3, 3, 6))

    def products(h):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)[0].sum()

    def strided(x, k):
        return lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).sum()

    matrix = 2 * 7 * 16 * 16
    assert flops.total(jax.make_jaxpr(products)(jnp.zeros((7, 16))).jaxpr) == 5 * matrix
    remat = jax.grad(lambda h: jax.checkpoint(products)(h))
    assert flops.total(jax.make_jaxpr(jax.grad(products))(jnp.zeros((7, 16))).jaxpr) == 2 * 5 * matrix
    assert flops.total(jax.make_jaxpr(remat)(jnp.zeros((7, 16))).jaxpr) == 3 * 5 * matrix
    once = 2 * 4 * 4 * 4 * 6 * 3 * 3 * 3
    assert flops.total(jax.make_jaxpr(strided)(x, k).jaxpr) == once
    assert flops.total(jax.make_jaxpr(jax.grad(strided, (0, 1)))(x, k).jaxpr) == 3 * once


def test_the_largest_batch_by_bisection():
    for limit in (0, 7, 8, 100, 5000):
        tried: list[int] = []
        found = program.largest(lambda batch, limit=limit, tried=tried: tried.append(batch) or batch <= limit, 64, 8)
        assert found % 8 == 0 and found <= limit < found + max(8, found // 16 + 8)
        assert len(tried) < 20


def test_meshes_that_cannot_be_are_refused_with_the_nearest(monkeypatch):
    monkeypatch.setattr(program, "_compile", pytest.fail)
    machine, devices = plan.topology("v5e:2x4"), jax.devices()
    with pytest.raises(ValueError, match=r"8.*'data': 4, 'fsdp': 2, 'context': 1, 'tensor': 1"):
        plan.make(small(data=3, fsdp=2), machine, devices=devices)
    config = small(data=8)
    with config.unlocked():
        config.data.batch_size, config.optim.accum_steps = 70, 3
    with pytest.raises(ValueError, match=r"70.*72"):
        plan.make(config, machine, devices=devices)
    config = imagenet256_dit.get_config("tiny")  # two heads
    config.model.dtype = "float32"  # promotion is strict here
    with pytest.raises(ValueError, match=r"2 heads.*mesh.tensor=4.*2"):
        plan.make(plan.meshed(config, "1x2x4", 8), machine, devices=devices)
    with pytest.raises(ValueError, match="DATAxFSDPxTENSOR"):
        plan.meshed(config, "4x4", 8)


def test_a_comparison_lists_what_cannot_be_and_passes_other_errors_on(monkeypatch):
    monkeypatch.setattr(plan, "devices_of", lambda machine: jax.devices())
    machine = plan.topology("v5e:2x4")
    found = plan.compare(small(), machine, ["3x2x1"])
    assert "'data': 4, 'fsdp': 2" in found["plans"]["3x2x1"]["refused"] and found["best"] is None

    def unreadable(*_):
        raise ValueError("a line that nobody knows")

    monkeypatch.setattr(program, "_compile", unreadable)
    with pytest.raises(ValueError, match="nobody knows"):
        plan.compare(small(), machine, ["data"])


@pytest.mark.parametrize(
    ("given", "nearest"), [((15, 1, 1), (16, 1, 1, 1)), ((2, 5, 2), (2, 4, 1, 2)), ((-1, 3, 1), (4, 4, 1, 1))]
)
def test_the_nearest_mesh(given, nearest):
    wanted = str(dict(zip(("data", "fsdp", "context", "tensor"), nearest, strict=True)))
    with pytest.raises(ValueError, match=wanted):
        make_mesh(*given, range(16))


def test_a_refusal_of_the_compiler_says_what_to_change():
    message = "RESOURCE_EXHAUSTED: E1000: Ran out of memory on HBM, the total memory required for HLO temporaries (27.14G) exceeds available HBM (15.75G). HLO module: jit_run.\nmore"
    machine = plan.topology("v5e:4x4")
    record = program._too_large(RuntimeError(message), machine)
    assert record["hbm"] == {"peak": int(27.14 * GIB), "limit": int(15.75 * GIB)} and not record["fits"]
    record |= {
        "mesh": {"data": 16, "fsdp": 1, "context": 1, "tensor": 1},
        "batch": 256,
        "state": {"params/student": 9 * GIB},
    }
    config = imagenet256_dit.get_config()
    with config.unlocked():
        config.model.remat = ""
    lines = " ".join(plan.advice(record, config, machine))
    for needed in ("mesh.fsdp=-1", "model.remat=full", "accum_steps=2", "batch_size=128"):
        assert needed in lines
    assert "teacher.offload" not in lines
    record["state"]["frozen/teacher"] = GIB
    assert "teacher.offload=True" in " ".join(plan.advice(record, config, machine))
    with pytest.raises(RuntimeError, match="INTERNAL"):
        program._too_large(RuntimeError("INTERNAL: no"), machine)
    with pytest.raises(RuntimeError, match="Vmem"):  # of a kernel, which a smaller batch would not mend
        program._too_large(RuntimeError("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom"), machine)


def test_what_the_compiler_is_told_of_a_gpu():
    text = gpus.target(plan.topology("h100:8"))
    assert text.count("{") == text.count("}") and "cuda_compute_capability { major: 9 }" in text
    assert "device_memory_size: 80000000000 " in text and 'device_description_str: "h100"' in text


@pytest.mark.slow
@pytest.mark.skipif(not gpus.installed(), reason="JAX's CUDA plugin is not installed")
def test_gpus_are_planned_by_their_compiler_where_it_is(tmp_path):
    arguments = ["--config=mixture2d", "--config.model.fields.width=16", "--config.data.batch_size=64"]
    assert cli.main(["plan", *arguments, "--topology=h100:2x4", f"--out={tmp_path / 'plan.json'}"]) == 0
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["hbm"]["peak"] >= sum(record["state"].values()) and record["collectives"]["all-reduce"]["in_text"]
    assert record["mesh"] == {"data": 8, "fsdp": 1, "context": 1, "tensor": 1}


def test_gpus_are_planned_by_lowering(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpus, "installed", lambda: False)
    arguments = ["--config=mixture2d", "--config.model.fields.width=16", "--config.data.batch_size=64"]
    assert cli.main(["plan", *arguments, "--topology=h100:8", f"--out={tmp_path / 'plan.json'}"]) == 0
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["compiler"] == {"lowered_for": ["cuda"]} and record["hbm"]["peak"] is None
    assert (
        record["mesh"] == {"data": 8, "fsdp": 1, "context": 1, "tensor": 1}
        and "activations unknown" in capsys.readouterr().out
    )


def test_command_lines_that_cannot_be(capsys, monkeypatch):
    for arguments, message in [
        (["--config=mixture2d"], "--topology=CHIP:SHAPE"),
        (["--config=mixture2d", "--topology=v5:2x2"], "v5e"),
        (["--config=mixture2d", "--topology=v5e"], "CHIP:SHAPE"),
        (["--config=mixture2d", "--topology=2*h100:8"], "SLICES*CHIP:SHAPE"),
        (["--config=imagenet256_dit", "--topology=h100:8"], "--shape=64,64,3"),
    ]:
        assert cli.main(["plan", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install libtpu"):
        program.devices_of(plan.topology("v5e:2x2"))
