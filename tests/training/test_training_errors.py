"""What can be wrong before and between steps: a clear message, and nothing lost or half-written."""

import errno
import itertools
import re
import shutil

import jax
import numpy as np
import pytest
from image_files import write_images
from training_runs import IMAGES, POINTS, config_of, images_of, points_of, saved_state, saved_steps

from jaxdiff import solvers
from jaxdiff.training import prepare, trainer
from jaxdiff.training.checkpoint import CheckpointError, Checkpoints
from jaxdiff.training.components import grid_of
from jaxdiff.training.export import read_config, write_config
from jaxdiff.training.sharding import make_mesh, sizes_of

ONE = jax.devices()[:1]
PIXELS = np.zeros((8, 8, 8, 3), np.uint8)


def train(changes, workdir, base=POINTS):
    return trainer.train(config_of(base, changes), workdir, quiet=True, devices=ONE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    train({"train.steps": 6}, workdir)
    return workdir


# ------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method.name": "difusion"}, "unknown method 'difusion' (did you mean 'diffusion'?); choose one of diffusion"),
        ({"optim.name": "adm"}, "unknown optimizer 'adm' (did you mean 'adam'?); choose one of adam, adamw"),
        ({"optim.options": {"b3": 0.9}}, "optimizer 'adam' does not take {'b3': 0.9}"),
        ({"optim.decay": "cosin"}, "unknown learning-rate decay 'cosin' (did you mean 'cosine'?)"),
        ({"optim.decay": "cosine"}, "decay='cosine' needs decay_images > 0, got 0"),
        ({"noise.sigma_sampler": "log_normal"}, "unknown noise levels 'log_normal' (did you mean 'lognormal'?)"),
        ({"noise.shift": -1.0}, "noise.shift must be in (0, inf), got -1.0 (sigma -> shift"),
        ({"noise.assignment": "hungarain"}, "unknown noise assignment 'hungarain' (did you mean 'hungarian'?)"),
        (
            {"noise.assignment": "knn", "noise.assignment_options": {"n": 3}},
            "unknown option in noise.assignment_options 'n'",
        ),
        (
            {"noise.assignment": "hungarian", "noise.assignment_options": {"limit": 4}},
            "more than limit=4",
        ),
        (
            {"noise.assignment": "hungarian", "noise.assignment_options": {"groups": 3}},
            "groups=3 for a batch of 8",
        ),
        (
            {
                "noise.assignment": "hungarian",
                "noise.assignment_options": {"within_class": True},
                "model.fields.num_classes": 0,
            },
            "noise assigned within_class needs",
        ),
        (
            {"noise.assignment": "hungarian", "method.name": "sfd"},
            "noise.assignment='hungarian' assigns noise to data",
        ),
        (
            {"method.name": "consistency"},
            "sample.solver='renoise', sample.final_denoise=True",
        ),
        (
            {"method.name": "consistency", "sample.solver": "renoise", "consistency.sigma_max": 10.0},
            "trained from sigma_min=0.002 to sigma_max=10.0",
        ),
        ({"train.init_kind": "eddm"}, "unknown train.init_kind 'eddm' (did you mean 'edm'?)"),
        ({"diffusion.weight": "minsnr"}, "unknown loss weight 'minsnr' (did you mean 'min_snr'?)"),
        ({"ema.kind": "halflife"}, "unknown EMA kind 'halflife' (did you mean 'half_life'?)"),
        ({"ema.kind": "constant", "ema.options": {"decay": 1.0}}, "an EMA decay must be in [0, 1), got 1.0"),
        ({"denoiser.kind": "vp"}, "unknown denoiser kind 'vp'"),
        ({"denoiser.kind": "ddpm", "denoiser.schedule": "linaer"}, "unknown ddpm schedule 'linaer' (did you mean"),
        ({"model.name": "units"}, "unknown model 'units' (did you mean 'unet'?)"),
        ({"model.fields.widht": 8}, "unknown MLP field 'widht' (did you mean 'width'?)"),
        ({"model.fields.channels": 3}, "the model takes 3 channels, mixture/grid has examples of shape (2,)"),
        ({"model.dtype": "float16"}, "unknown model.dtype 'float16' (did you mean 'bfloat16'?)"),
        ({"sample.solver": "huen"}, "unknown solver 'huen' (did you mean 'heun'?)"),
        ({"sample.grid": "cubic"}, "cubic"),
        ({"train.on_nonfinite": "stp"}, "unknown train.on_nonfinite 'stp' (did you mean 'stop'?); choose one of stop"),
        ({"diffusion.cond_dropout": 1.0}, "diffusion.cond_dropout must be in [0, 1), got 1.0 (probability of dropping"),
        ({"data.source": "digts"}, "unknown data source 'digts' (did you mean 'digits'?)"),
        (
            {"data.batch_size": 9, "optim.accum_steps": 2},
            "a global batch of 9 does not divide over 1 x 1 (data x fsdp)",
        ),
        (
            {"mesh.fsdp": 2},
            "a mesh of {'data': -1, 'fsdp': 2, 'context': 1, 'tensor': 1} does not fit 1 devices: the product must",
        ),
    ],
)
def test_a_config_that_is_wrong_leaves_no_folder(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train(changes, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method.name": "sfdd"}, "unknown method 'sfdd' (did you mean 'sfd'?)"),
        (
            {"teacher.kind": "run"},
            "needs a teacher: --config.teacher.path=WORKDIR",
        ),
        ({"teacher.kind": "edm"}, "needs a teacher: --config.teacher.path="),
        (
            {"teacher.kind": "runs"},
            "unknown teacher kind 'runs' (did you mean 'run'?); choose one of run, python, analytic, fresh, edm, edm2, dit",
        ),
        ({"teacher.kind": "inception"}, "unknown teacher kind 'inception'"),
        ({"sfd.loss": "l1+lpisp"}, "'lpisp' (did you mean 'lpips'?)"),
        ({"sfd.loss": "huber"}, "unknown SFD loss"),
        ({"sfd.condition": "step"}, "unknown SFD condition 'step' (did you mean 'steps'?)"),
        (
            {"sfd.nfe": (1, 1), "sample.timestamps": 3},
            "each at least 1, got (1, 1)",
        ),
        (
            {"sfd.nfe": (0,), "sample.timestamps": 2},
            "sfd.nfe must be in [1, 10000], got 0 in (0,)",
        ),
        ({"sfd.substeps": 0}, "sfd.substeps must be in [1, 1000], got 0 (K: the teacher's steps per student step)"),
        ({"sfd.solver": "dpmp3m"}, "unknown solver 'dpmp3m' (did you mean 'dpmpp3m'?)"),
        ({"sfd.solver": "ancestral"}, "the teacher's solver must be deterministic"),
        (
            {"sample.timestamps": 6},
            "1, 2 evaluations (sfd.nfe), but sample.timestamps=6 takes 4; set it to 4",
        ),
        (
            {"sample.afs": False},
            "1, 2 evaluations (sfd.nfe), but sample.timestamps=4 takes 3; set it to 3",
        ),
        ({"sample.solver": "heun"}, "set sample.solver='euler' and sample.final_denoise=False, got 'heun' and False"),
        (
            {"sample.final_denoise": True},
            "set sample.solver='euler' and sample.final_denoise=False, got 'euler' and True",
        ),
        ({"model.fields.step_embed": "zeros"}, "'', 'zero', 'reference', got 'zeros'"),
        (
            {"teacher.kind": "fresh", "sfd.teacher_step": 4, "sfd.nfe": (2,), "model.fields.step_embed": ""},
            "the model has no step_embed",
        ),
    ],
)
def test_a_distillation_that_is_wrong_leaves_no_folder(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train(changes, tmp_path / "run", points_of("sfd"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"teacher.kind": "analytic"},
            ValueError,
            "teacher.kind='analytic' needs data.source='mixture', got 'digits'",
        ),
        (
            {"sfd.loss": "l1+lpips"},
            ValueError,
            "--config.sfd.lpips.weights=FILE",
        ),
        ({"sfd.loss": "lpips", "sfd.lpips.weights": "no.npz"}, FileNotFoundError, "no weights at no.npz"),
        ({"sfd.loss": "lpips", "sfd.lpips.net": "vg"}, ValueError, "unknown LPIPS net 'vg' (did you mean 'vgg'?)"),
    ],
)
def test_a_distillation_of_images_that_is_wrong_leaves_no_folder(tmp_path, changes, error, message):
    resized = {"sfd.lpips.resize": 64, **changes}
    with pytest.raises(error, match=re.escape(message)):
        train(resized, tmp_path / "run", images_of("sfd"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [kind for kind in solvers.GRIDS if kind != "discrete"])
def test_every_grid_of_the_config_nests(kind):
    """A student can walk any of them: the teacher's finer grid has all its points."""
    config = config_of(points_of("sfd"), {"sample.grid": kind, "sfd.nfe": (1, 2, 7), "sfd.substeps": 5})
    run, _ = prepare(config, ONE)
    grid = grid_of(config, run.convention)
    for steps in (1, 2, 7):
        np.testing.assert_allclose(grid(5 * steps + 1)[::5], grid(steps + 1), rtol=1e-12)


@pytest.mark.parametrize(
    ("size", "parts", "nearest"), [(9, 1, 8), (13, 1, 16), (3, 1, 8), (24, 2, 32), (16, 4, 32), (8, 1, None)]
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_does(size, parts, nearest):
    changes = {"data.batch_size": size, "optim.accum_steps": parts, "mesh.data": 4, "mesh.fsdp": 2}
    if nearest is None:
        assert sizes_of(prepare(config_of(POINTS, changes))[1]) == {"data": 4, "fsdp": 2, "context": 1, "tensor": 1}
        return
    with pytest.raises(ValueError, match=rf"batch of {size} .*4 x 2 .* in {parts} .*nearest .*is {nearest}$"):
        prepare(config_of(POINTS, changes))
    prepare(config_of(POINTS, {**changes, "data.batch_size": nearest}))


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 8, 1), (4, 4, 1), (16, 1, 1)])
def test_a_mesh_that_does_not_fit(sizes):
    with pytest.raises(ValueError, match=r"does not fit 8 devices"):
        make_mesh(*sizes)


# ------------------------------------------------------------------------------------------ data


def test_data_that_are_not_there_or_not_usable(tmp_path):
    empty, small = tmp_path / "empty", tmp_path / "small"
    empty.mkdir()
    write_images(small, [(6, 6)])
    folder = {"data.source": "folder", "data.options": {"path": str(tmp_path / "nowhere")}}

    def fails(changes, error, message):
        with pytest.raises(error, match=message):
            train({**changes, "data.batch_size": 8}, tmp_path / "run", IMAGES)
        assert not (tmp_path / "run").exists()

    fails(folder, FileNotFoundError, "nowhere")
    fails({**folder, "data.options": {"path": str(empty)}}, (ValueError, FileNotFoundError), "empty")
    local = {"path": str(small), "image_size": 8, "crop": "local"}
    fails({**folder, "data.options": local}, ValueError, "6 x 6 pixels .*too small for a local crop of 8")
    labels = {"images": PIXELS, "labels": np.array([0, 1, 2, 3, 4, 5, 6, 9]), "num_classes": 9}
    fails(
        {"data.source": "arrays", "data.options": labels},
        ValueError,
        r"example 7 of arrays .*has label 9, .*lie in \[0, 9\)",
    )
    fails({"data.source": "arrays", "data.options": {"images": PIXELS[:0]}}, ValueError, "'arrays' has no examples")
    fails({"data.source": "arrays", "data.options": {"images": "x.npz"}}, FileNotFoundError, r"no \.npz file at x")
    odd = {"data.source": "arrays", "data.options": {"images": np.zeros((4, 7, 7, 3), np.uint8)}}
    fails(odd, ValueError, "DiT needs height and width divisible by 2, got 7x7; pad or resize")


def test_an_image_of_another_size_in_the_middle_of_a_run(tmp_path):
    """The data thread's error reaches the loop, by name; what was saved stays."""
    write_images(tmp_path / "mixed", [(8, 8)] * 15 + [(9, 8)])
    options = {"path": str(tmp_path / "mixed"), "on_corrupt": "stop", "shuffle": False}
    changes = {"data.source": "folder", "data.options": options, "data.batch_size": 4, "train.save_every": 1}
    with pytest.raises(ValueError, match=r"0015\.png.*9 x 8|9 x 8.*0015\.png|0015\.png.*\(9, 8"):
        train({**changes, "model.fields.depth": 0, "sample.count": 0}, tmp_path / "run", IMAGES)
    assert saved_steps(tmp_path / "run")[-1] <= 3


# ------------------------------------------------------------------------------------------ folders and checkpoints


@pytest.mark.parametrize("where", ["/proc/jaxdiff", "file/run", "file"])
def test_a_workdir_that_cannot_be_written(tmp_path, where):
    (tmp_path / "file").write_text("")
    workdir = tmp_path / where  # an absolute `where` replaces tmp_path
    with pytest.raises(OSError, match=rf"cannot write to workdir {workdir}: .*Choose another --workdir"):
        train({}, workdir)
    assert (tmp_path / "file").read_text() == ""


def test_a_full_disk(finished, tmp_path, monkeypatch):
    """Simulated in the manager's save; `test_training_resume` has one with real writes."""
    workdir = shutil.copytree(finished, tmp_path / "run")
    real = Checkpoints.save

    def save(self, step, *arguments):
        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        if step == 12:
            monkeypatch.setattr(self._manager, "save", full)
        real(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    before = (workdir / "export.safetensors").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        train({"train.steps": 12}, workdir)
    assert f"could not write the checkpoint of step 12 to {workdir / 'checkpoints'}" in str(caught.value)
    assert "No space left on device. the checkpoint of step 9 is complete; free some space" in str(caught.value)
    assert saved_steps(workdir) == [3, 6, 9] and int(saved_state(workdir, 9).step) == 9
    assert (workdir / "export.safetensors").read_bytes() == before


def listed(workdir):
    """The files of a run but its logs."""
    return sorted(p for p in workdir.rglob("*") if p.parent.name != "tensorboard" and p.name != "orbax.log")


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *itertools.product(["arrays", "manifest.ocdbt", "_METADATA"], ["cut", "emptied", "removed"]),
        *[("_sharding", "cut"), ("_sharding", "emptied")],  # a checkpoint without it is whole: the run declares it
    ],
)
def test_a_damaged_checkpoint(finished, tmp_path, kind, damage):
    """The newest is refused by name, and left alone; with it moved away the run resumes from the one before."""
    workdir = shutil.copytree(finished, tmp_path / "run")
    newest = workdir / "checkpoints" / "6" / "default"
    file = max((newest / "d").iterdir(), key=lambda p: p.stat().st_size) if kind == "arrays" else newest / kind
    whole = file.read_bytes()
    file.unlink() if damage == "removed" else file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    files = listed(workdir)
    config = config_of(POINTS, {"train.steps": 9})
    with pytest.raises(CheckpointError) as caught:
        trainer.train(config, workdir, quiet=True, devices=ONE)
    assert f"the checkpoint {workdir}/checkpoints/6 cannot be read" in str(caught.value)
    assert "Move that folder away to resume from step 3" in str(caught.value)
    assert listed(workdir) == files
    shutil.move(workdir / "checkpoints" / "6", tmp_path / "away")
    assert int(saved_state(workdir, 3).step) == 3
    checkpoints = Checkpoints(workdir / "checkpoints")
    assert checkpoints.latest() == 3
    checkpoints.close()


def test_a_checkpoint_of_another_model(finished):
    with pytest.raises(CheckpointError) as caught:
        train({"model.fields.width": 24}, finished)
    message = str(caught.value)
    assert f"the checkpoint {finished}/checkpoints/6 belongs to another model or method" in message
    assert re.search(
        r"\d+ mismatches \(params/student/block_0_in/bias is \(32,\), expected \(48,\); (.*; ){4}\.\.\.\)", message
    )
    with pytest.raises(CheckpointError, match=r"block_1_in/bias is missing"):
        train({"model.fields.depth": 2}, finished)
    with pytest.raises(CheckpointError, match=r"block_0_in/bias is unknown"):
        train({"model.fields.depth": 0}, finished)
    assert int(saved_state(finished, 6).step) == 6


def test_weights_to_start_from(finished, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no exported weights at .*nowhere/export|no exported weights at .*nowhere"
    ):
        train({"train.init_from": str(tmp_path / "nowhere")}, tmp_path / "a")
    with pytest.raises(
        ValueError, match=r"belongs to another model: \d+ mismatches \(block_0_in/bias is.* model.fields"
    ):
        train({"train.init_from": str(finished), "model.fields.width": 24}, tmp_path / "b")
    assert saved_steps(tmp_path / "a") == saved_steps(tmp_path / "b") == []


def test_starting_from_weights_and_which_wins(finished, tmp_path, capsys):
    """The exported average becomes the parameters; a checkpoint of the run itself goes before it, and says so."""
    changes = {"train.init_from": str(finished), "train.steps": 1, "optim.learning_rate": 0.0}
    config = config_of(POINTS, changes)
    state = trainer.train(config, tmp_path, devices=ONE).state
    teacher = saved_state(finished, 6)
    assert f"starting from the parameters of {finished}" in capsys.readouterr().out
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(teacher.averages["ema"]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert int(state.step) == 1
    trainer.train(config, tmp_path, devices=ONE)
    out = capsys.readouterr().out
    assert f"resuming from the checkpoint of step 1 (train.init_from={finished} is ignored)" in out


def test_a_config_with_arrays_describes_them(tmp_path):
    config = config_of(POINTS, {"data.options": {"means": np.zeros((3, 2)), "std": np.float32(0.5)}})
    write_config(tmp_path, config)
    assert read_config(tmp_path).data.options.to_dict() == {"means": "array float64 (3, 2)", "std": 0.5}
