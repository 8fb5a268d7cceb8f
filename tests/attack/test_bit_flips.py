"""Single bit flips over every file of a workdir: what is then read is what was written, or it is refused by name.

Seeded; prints a table of outcomes. Logs, images and TensorBoard files are flipped too: nothing reads them back.
"""

import json
import shutil
from collections import Counter

import jax
import numpy as np
import pytest
from training_runs import POINTS, config_of

import jaxdiff
from jaxdiff.errors import raised_on_purpose
from jaxdiff.files import read_json
from jaxdiff.training import continuity, prepare, snapshots, state, train
from jaxdiff.trees import by_name

ONE = jax.devices()[:1]
FLIPS, SEED = 240, 0
RUN = {
    "train.steps": 6,
    "train.eval_every": 3,
    "eval.samples": 16,
    "eval.reference": 16,
    "ema.widths": (0.1, 0.2),
    "ema.snapshot_every": 3,
    "sample.count": 0,
}
pytestmark = pytest.mark.slow


def bits(tree):
    return {name: (str(leaf.dtype), np.asarray(leaf).tobytes()) for name, leaf in by_name(tree).items()}


def read_run(workdir):
    saved = jaxdiff.load(workdir, devices=ONE)
    described = {name: repr(value) for name, value in vars(saved.run.data).items()}
    history = read_json(workdir / continuity.FILE, "the history of a run")
    return bits(saved.params), saved.step, json.dumps(saved.config.to_dict(), default=list), described, history


def read_checkpoint(workdir, declared, step):
    return bits(state.at(workdir, declared, step)), state.kept_step(workdir, "best", "sliced_wasserstein")


def read_averages(workdir):
    found = snapshots.combine(workdir, [0.15])
    return {width: bits(arrays) for width, arrays in found.items()}


def positions(workdir, rng):
    """(file, bit) of every flip: two in each file, the others anywhere."""
    files = sorted(p for p in workdir.rglob("*") if p.is_file() and p.stat().st_size)
    sizes = np.array([path.stat().st_size for path in files])
    chosen = [i for i in range(len(files)) for _ in range(2)]
    chosen += list(rng.choice(len(files), max(0, FLIPS - len(chosen)), p=sizes / sizes.sum()))
    return [(files[i], int(rng.integers(8 * sizes[i]))) for i in chosen]


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


def test_bit_flips_over_a_workdir(tmp_path, capsys):
    workdir = tmp_path / "run"
    config = config_of(POINTS, RUN)
    train(config, workdir, quiet=True, devices=ONE)
    declared = state.declare(*prepare(config, ONE))

    def read(path):
        parts = path.relative_to(workdir).parts
        if parts[0] == "checkpoints":
            return read_checkpoint(workdir, declared, int(parts[1])) if parts[1].isdigit() else None
        return read_averages(workdir) if parts[0] == "averages" else read_run(workdir)

    whole, outcomes, bad = {}, Counter(), []
    spare = shutil.copytree(workdir, tmp_path / "spare")
    for path, bit in positions(workdir, np.random.default_rng(SEED)):
        name = path.relative_to(workdir)
        kind = name.parts[0] if path.parent != workdir else name.name
        if path not in whole:
            whole[path] = read(path)
        flip(path, bit)
        try:
            outcome = "same" if read(path) == whole[path] else "wrong"
        except Exception as error:
            clear = raised_on_purpose(error) and "\n" not in str(error) and str(workdir) in str(error)
            outcome = "refused" if clear else "unclear"
            if not clear:
                bad.append(f"{name} bit {bit}: {type(error).__name__}: {error}")
        if outcome == "wrong":
            bad.append(f"{name} bit {bit}: read in silence")
        outcomes[kind, outcome] += 1
        shutil.copyfile(spare / name, path)
    with capsys.disabled():
        print(f"\n{sum(outcomes.values())} bit flips in {len(whole)} files, seed {SEED}")
        for (kind, outcome), count in sorted(outcomes.items()):
            print(f"{kind:24s} {outcome:8s} {count}")
        print("\n".join(bad))
    assert sum(outcomes.values()) >= 200 and not bad
