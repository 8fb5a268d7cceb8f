"""Small runs for the tests of the trainer: configs, processes, their checkpoints and their logs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdiff.configs import default
from jaxdiff.training import prepare
from jaxdiff.training.checkpoint import Checkpoints
from jaxdiff.training.state import declare

POINTS = {
    "data.source": "mixture",
    "data.options.count": 1000,
    "data.batch_size": 8,
    "model.name": "mlp",
    "model.fields.width": 16,
    "model.fields.depth": 1,
    "diffusion.cond_dropout": 0.1,
    "optim.warmup_images": 32,
    "optim.clip": 1.0,
    "eval.net": "",
    "train.steps": 12,
    "train.save_every": 3,
    "train.log_every": 1,
    "sample.timestamps": 3,
    "sample.batch_size": 16,
    "compile_cache": "",
}
IMAGES = {
    **POINTS,
    "data.source": "digits",
    "data.batch_size": 16,
    "model.name": "dit",
    "model.fields": {"patch": 2, "depth": 1, "width": 32, "heads": 4, "learn_variance": False},
    "train.steps": 4,
    "mesh.min_size": 64,
    "sample.count": 6,
    "sample.sigma_max": 5.0,
}
del IMAGES["data.options.count"], IMAGES["model.fields.width"], IMAGES["model.fields.depth"]

SFD = {
    "method.name": "sfd",
    # L1's gradient is a sum of signs. Where they cancel, the order of summation decides between zero and rounding, and
    # Adam makes a whole step of the latter: runs on one and on eight devices would part.
    "sfd.loss": "l2",
    "model.fields.step_embed": "zero",
    "sfd.nfe": (1, 2),
    "sfd.substeps": 2,
    "sample.solver": "euler",
    "sample.final_denoise": False,
    "sample.afs": True,
    "sample.sigma_min": 0.006,
    "sample.timestamps": 4,
}
EMD = {
    "method.name": "emd",
    "emd.steps": 2,
    "emd.step_z": 0.01,
    "emd.score_updates": 2,
    "sample.solver": "euler",
    "sample.timestamps": 1,
    "sample.sigma_max": 2.0,
}
ONE_STEP = {"sample.solver": "euler", "sample.timestamps": 1, "sample.sigma_max": 2.0}
TWO_STEPS = {"sample.solver": "renoise", "sample.timestamps": 2, "sample.sigma_min": 0.5, "sample.sigma_max": 2.0}
SCORE = {  # the rules beside EMD's; f_distill has a head, running means and two steps
    "diff_instruct": {**ONE_STEP, "diff_instruct.weight": "dmd"},
    # the gradient of an embedding that few examples read is near rounding, of which Adam makes a whole step
    "sid": {**ONE_STEP, "sid.alpha": 1.0, "optim.options": {"eps": 1e-4}},
    "dmd2": {**ONE_STEP, "dmd2.gan": 0.1, "dmd2.score_updates": 2, "dmd2.head_width": 16},
    "f_distill": {**TWO_STEPS, "f_distill.gan": 0.1, "f_distill.head_width": 16},
    "uni_instruct": {**ONE_STEP, "uni_instruct.gan": 0.1, "uni_instruct.alpha": 1.0, "uni_instruct.head_width": 16},
}
CONSISTENCY = {
    "method.name": "consistency",
    "consistency.last": 20,
    "sample.solver": "renoise",
    "sample.timestamps": 2,
    "sample.sigma_min": 0.8,
}
JUMPS = {"model.fields.scalars": ("tau",), "sample.solver": "euler", "sample.final_denoise": False}
MEANFLOW = {"method.name": "meanflow", **JUMPS}
SHORTCUT = {"method.name": "shortcut", **JUMPS}
TRAJECTORY = {"method.name": "trajectory", **JUMPS}
SCM = {"method.name": "scm", "scm.warmup": 3, "sample.solver": "renoise", "sample.sigma_min": 0.8}
FACM = {"method.name": "facm", **JUMPS, "sample.solver": "renoise", "sample.final_denoise": True}
FACM |= {"sample.sigma_min": 0.8}
# Every training algorithm: how it changes the runs on points and those on images. The tests that every method must
# pass (stopped and resumed, spread over devices) go through all of them.
METHODS = {
    "consistency": {
        "points": {**CONSISTENCY, "consistency.distil": True, "teacher.kind": "analytic"},
        "images": {**CONSISTENCY, "noise.assignment": "hungarian"},
    },
    "diffusion": {"points": {}, "images": {}},
    "emd": {"points": {**EMD, "teacher.kind": "analytic"}, "images": {**EMD, "teacher.kind": "fresh"}},
    "facm": {"points": FACM, "images": {**FACM, "facm.distil": True, "teacher.kind": "fresh"}},
    "meanflow": {
        "points": {**MEANFLOW, "meanflow.guidance": 2.0, "meanflow.cond_dropout": 0.1},
        "images": {**MEANFLOW, "meanflow.distil": True, "teacher.kind": "fresh"},
    },
    "scm": {"points": {**SCM, "scm.distil": True, "teacher.kind": "analytic"}, "images": SCM},
    "shortcut": {"points": {**SHORTCUT, "shortcut.target_decay": 0.9}, "images": SHORTCUT},
    "trajectory": {
        "points": {**TRAJECTORY, "teacher.kind": "analytic"},
        "images": {**TRAJECTORY, "teacher.kind": "fresh"},
    },
    "sfd": {"points": {**SFD, "teacher.kind": "analytic"}, "images": {**SFD, "teacher.kind": "fresh"}},
    **{
        name: {
            kind: {**changes, "method.name": name, "teacher.kind": teacher}
            for kind, teacher in (("points", "analytic"), ("images", "fresh"))
        }
        for name, changes in SCORE.items()
    },
}


FLOW_MAPS = ("facm", "meanflow", "scm", "shortcut", "trajectory")  # methods of one frame


def methods(*slow: str, score: str = "", flow_map: str = "") -> Any:
    """A parameter `method` over all of them, some only with -m slow: of SCORE and FLOW_MAPS, all but the one given."""
    slow = (*slow, *(name for name in (*SCORE, *FLOW_MAPS) if name not in (score, flow_map)))
    marks = {name: [pytest.mark.slow] * (name in slow) for name in METHODS}
    return pytest.mark.parametrize("method", [pytest.param(name, marks=marks[name]) for name in METHODS])


def points_of(method: str) -> dict[str, Any]:
    """POINTS by a method."""
    return {**POINTS, **METHODS[method]["points"]}


def images_of(method: str) -> dict[str, Any]:
    """IMAGES by a method."""
    return {**IMAGES, **METHODS[method]["images"]}


def config_of(base: Mapping[str, Any] = POINTS, changes: Mapping[str, Any] | None = None) -> Any:
    """The default config with the changes of both, named by their path."""
    config = default.get_config()
    for path, value in {**base, **(changes or {})}.items():
        *parents, last = path.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    return config


def saved_state(workdir: Path, step: int, config: Any = None, devices: Any = None) -> Any:
    """The state in a checkpoint, restored here on one device (or those given)."""
    declared = declare(*prepare(config or config_of(), devices or jax.devices()[:1]))
    checkpoints = Checkpoints(workdir / "checkpoints")
    try:
        return checkpoints.restore(step, declared)
    finally:
        checkpoints.close()


def saved_steps(workdir: Path) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


def lines(workdir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def losses(workdir: Path) -> dict[int, float]:
    """The loss of every step; a step that was taken twice must have had the same loss twice."""
    found: dict[int, float] = {}
    for line in lines(workdir):
        if "loss" in line:
            assert found.setdefault(line["step"], line["loss"]) == line["loss"]
    return found


def assert_same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), 0, tolerance, err_msg=jax.tree_util.keystr(path))


# ------------------------------------------------------------------------------------ processes


def start(workdir, environment=None, **order):
    """The driver as a process, in the surroundings a user would have: without the settings of the tests."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION")}
    environment = {**kept, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **(environment or {})}
    command = [
        sys.executable,
        str(Path(__file__).with_name("training_driver.py")),
        json.dumps({"workdir": str(workdir), **order}),
    ]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, timeout=120):
    """Exit code, and what the process said (from now on) on stdout and on stderr."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def run(workdir, **order):
    return finish(start(workdir, **order))


def wait_for(process, text):
    """Read stdout up to the line that starts with the text."""
    for line in process.stdout:
        if line.startswith(text):
            return
    raise AssertionError(f"the process ended without saying {text!r}: {process.stderr.read()}")
