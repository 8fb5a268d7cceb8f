"""The command line: jaxdiff quickstart | train | sample | evaluate | features | plan.

jaxdiff quickstart [--workdir=quickstart]
jaxdiff train --config=configs/digits.py:tiny --config.train.steps=100 --workdir=runs/a [--dry_run]
jaxdiff train --config=configs/digits.py --init_from=runs/a --workdir=runs/b      what fits of its parameters
jaxdiff train --config=configs/digits_sfd.py --config.teacher.path=runs/a --workdir=runs/few
jaxdiff train ... --coordinator=HOST:PORT --processes=4 --process=0      one of four; clusters are detected
jaxdiff sample --workdir=runs/a --count=64 --out=samples.png [--nfe=10] [--labels=cycle] [--config.sample.solver=unipc]
jaxdiff sample --workdir=runs/t2i --prompts="a red circle left of a blue square|..."      or prompts.txt, one a line
jaxdiff sample --workdir=runs/one --mcmc_steps=300      the samples of an EMD generator beside their correction
jaxdiff evaluate --workdir=runs/few --nfe=2 [--config.eval.samples=5000]
jaxdiff evaluate --config=configs/digits.py --reference=train      the distance between two halves of the data
jaxdiff features catalog --config=configs/creatures.py:dit [--select="**/q !blocks_0/**"] [--out=table.csv]
jaxdiff features extract --workdir=runs/a --select="dec_*/out" --sigma=0.2 --out=features [--side=8] [--dtype=bfloat16]
jaxdiff features score --workdir=runs/a --metric=probe --sigmas=0.05,0.2,0.8 --out=scores.csv
jaxdiff features show --workdir=runs/a --select="dec_*/out" --sigma=0.2 --out=features.png
jaxdiff plan --config=configs/imagenet256_dit.py --topology=v5e:16x16 [--compare=data,fsdp,tensor] [--largest_batch]
    [--shape=32,32,4 --classes=1000]      stand in for data that are not here; [--out=plan.json]
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxdiff.errors import nearest


class UsageError(ValueError):
    """A command line that cannot be understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; expected failures become one readable line and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__)
        return 0 if arguments else 2
    name = arguments[0]
    try:
        if name not in COMMANDS:
            raise UsageError(f"unknown command {name!r}{nearest(name, COMMANDS)}; choose one of {', '.join(COMMANDS)}")
        return COMMANDS[name](arguments[1:])
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"jaxdiff {name}: {error}", file=sys.stderr)
        return 2


# ------------------------------------------------------------------------------------------ commands


def train(arguments: list[str]) -> int:
    options = {"workdir": "", "dry_run": False, "init_from": ""}
    others = {"distributed": False, "coordinator": "", "processes": 0, "process": -1}
    limits = {"connect_timeout": 300, "silence_timeout": 60}
    values = _flags("train", {**options, **others, **limits}, arguments, config="file")
    from jaxdiff import training
    from jaxdiff.training import distributed

    if values.init_from:
        values.config.train.init_from = values.init_from
    if values.dry_run:
        if not values.config.curriculum:
            return _dry_run(values.config)
        for _, stage in training.stages(values.config):
            _dry_run(stage)
        return 0
    if not values.workdir:
        raise UsageError("train needs --workdir=FOLDER, where checkpoints, logs and samples go")
    distributed.connect(
        values.coordinator,
        values.processes,
        values.process,
        detect=values.distributed,
        timeout=values.connect_timeout,
        silence=values.silence_timeout,
    )
    with distributed.together():
        return distributed.RETRY if training.train(values.config, values.workdir).stopped else 0


def sample(arguments: list[str]) -> int:
    options = {
        "workdir": "",
        "count": 64,
        "seed": 0,
        "labels": "cycle",
        "prompts": "",
        "out": "samples.png",
        "nfe": 0,
        "mcmc_steps": 0,
    }
    values = _flags("sample", options, arguments, config="run")
    import numpy as np

    from jaxdiff import training
    from jaxdiff.training.logs import captioned_grid, image_grid, save_png

    out = Path(values.out)
    if out.suffix not in (".png", ".npz"):
        raise UsageError(f"--out must end in .png (a grid) or .npz (the arrays), got {values.out!r}")
    labels = int(values.labels) if values.labels.lstrip("-").isdigit() else values.labels
    if labels not in ("cycle", "random") and not isinstance(labels, int):
        raise UsageError(f"--labels is cycle, random or a class number, got {values.labels!r}")
    if values.mcmc_steps < 0 or (values.mcmc_steps and values.nfe):
        raise UsageError(f"--mcmc_steps is a number of Langevin steps, without --nfe; got {values.mcmc_steps}")
    job, state = _load(_spend(values.config, values.nfe), values.workdir, whole=bool(values.mcmc_steps))
    run = training.corrector(job, values.mcmc_steps, labels) if values.mcmc_steps else None
    prompts = _prompts(values.prompts)
    program = run or training.sampler(job, labels, prompts)
    parts = list(training.sample(job, state, values.count, values.seed, labels, run=program, decode=run is None))
    images = np.concatenate([part for part, _ in parts])
    pictures: dict[str, Any] = {"before": images[:, 0], "after": images[:, 1]} if run else {"images": images}
    shown = [prompts[i % len(prompts)] for i in range(values.count)] if prompts else []
    shown = shown or (training.captions(job, values.count) if job.dataset.encode and not run else [])
    if out.suffix == ".png" and shown:
        save_png(out, captioned_grid(images, shown))
    elif out.suffix == ".png":
        save_png(out, np.concatenate([image_grid(group) for group in pictures.values()], 1))
    else:
        drawn: dict[str, Any] = {} if parts[0][1] is None else {"labels": np.concatenate([part for _, part in parts])}
        drawn |= {"captions": np.asarray(shown)} if shown else {}
        np.savez(out, **pictures, **drawn)
    how = f"left before, right after {values.mcmc_steps} Langevin steps" if run else f"{job.config.sample.solver}"
    print(f"wrote {len(images)} samples to {out}: {how}, {job.nfe} evaluations each")
    return 0


def evaluate(arguments: list[str]) -> int:
    source = "file" if any(a.startswith("--config=") for a in arguments) else "run"
    values = _flags("evaluate", {"workdir": "", "reference": "", "nfe": 0}, arguments, config=source)
    from jaxdiff import evaluation, training

    if values.reference not in ("", "train"):
        raise UsageError(f"--reference is 'train' (the data against themselves) or nothing, got {values.reference!r}")
    record: dict[str, Any] | None
    if values.reference == "train":
        record = training.compare_halves(training.build(values.config))
    else:
        if not values.workdir:
            raise UsageError("evaluate needs --workdir=FOLDER of a run, or --config=... --reference=train")
        record = training.evaluate(*_load(_spend(values.config, values.nfe), values.workdir))
    assert record is not None
    for name, value in record.items():
        print(f"{name}: {value}" if not isinstance(value, float) else f"{name}: {value:.4f}")
    if values.workdir:
        evaluation.write(Path(values.workdir) / "evaluations.jsonl", record)
    return 0


def features(arguments: list[str]) -> int:
    from jaxdiff.features.commands import ACTIONS

    action = arguments[0] if arguments else ""
    if action not in ACTIONS:
        raise UsageError(f"features needs one of {', '.join(ACTIONS)}, got {action!r}{nearest(action, ACTIONS)}")
    parameters = inspect.signature(ACTIONS[action]).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    source = "file" if any(a.startswith("--config=") for a in arguments) else "run"
    values = _flags(f"features {action}", {"workdir": "", **options}, arguments[1:], config=source)
    if source == "file" and values.workdir:
        raise UsageError("give --workdir=FOLDER of a run or --config=FILE, not both")
    ACTIONS[action](values.config, values.workdir, **{name: values[name].value for name in options})
    return 0


def plan(arguments: list[str]) -> int:
    options = {"topology": "", "compare": "", "largest_batch": False, "out": "plan.json"}
    stand_in = {"shape": "", "classes": 0, "text": ""}
    values = _flags("plan", {**options, **stand_in}, arguments, config="file")
    import jax

    jax.config.update("jax_platforms", "cpu")  # a machine without the accelerator is all it takes
    from jaxdiff import plan as plans

    if not values.topology:
        raise UsageError(f"plan needs --topology=CHIP:SHAPE, for example v5e:4x4; chips are {', '.join(plans.CHIPS)}")
    machine = plans.topology(values.topology)
    config = values.config
    if values.shape:
        config = plans.blank(config, _numbers("shape", values.shape), values.classes, _numbers("text", values.text))
    try:
        if values.compare:
            record = plans.compare(config, machine, values.compare.split(","), say=print)
            print(f"best of these: {record['best'] or 'none fits'}")
        else:
            record = plans.make(config, machine, values.largest_batch)
            print(plans.text(record, machine.name))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}. To plan without the data say what they are like: --shape=64,64,3 "
            "--classes=1000, or --text=77,768 for text (tokens, width)"
        ) from error
    print(f"sources: {machine.chip.source}; written to {values.out}")
    Path(values.out).write_text(json.dumps({"machine": machine.chip._asdict(), **record}, indent=2) + "\n")
    return 0


def _numbers(name: str, given: str) -> tuple[int, ...]:
    """Numbers with commas between."""
    if given and not all(part.isdigit() for part in given.split(",")):
        raise UsageError(f"--{name} is numbers with commas between, such as 32,32,4; got {given!r}")
    return tuple(int(part) for part in given.split(",") if part)


def quickstart(arguments: list[str]) -> int:
    values = _flags("quickstart", {"workdir": "quickstart", "steps": 0, "samples": 0}, arguments)
    from jaxdiff import quickstart as demo

    demo.run(Path(values.workdir), values.steps or None, values.samples or None)
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "quickstart": quickstart,
    "train": train,
    "sample": sample,
    "evaluate": evaluate,
    "features": features,
    "plan": plan,
}


# ------------------------------------------------------------------------------------------ flags and configs


def _flags(command: str, options: dict[str, Any], arguments: list[str], config: str = "") -> Any:
    """The command's flags; with config = "file" or "run" also `config`, with its --config.a.b=c overrides applied."""
    values = flags.FlagValues()
    for name, default in options.items():
        kinds: dict[type, Any] = {
            bool: flags.DEFINE_boolean,
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            str: flags.DEFINE_string,
        }
        kinds[type(default)](name, default, f"{command}: {name}", flag_values=values)
    if config:
        base, arguments = _file_config(command, arguments) if config == "file" else _run_config(arguments)
        _check_overrides(arguments, base)
        config_flags.DEFINE_config_dict("config", base, flag_values=values, sys_argv=[command, *arguments])
    try:
        rest = values([command, *arguments])
    except flags.Error as error:
        raise UsageError(str(error)) from None
    if len(rest) > 1:
        raise UsageError(f"{rest[1]!r} is not understood: write options as --name=value")
    return values


def _file_config(command: str, arguments: list[str]) -> tuple[ConfigDict, list[str]]:
    """The config of --config=FILE[:ARGUMENT], and the other arguments; a bare name means an installed config."""
    given = [a for a in arguments if a.startswith("--config=")]
    if not given:
        raise UsageError(f"{command} needs --config=configs/NAME.py[:ARGUMENT], for example --config=configs/digits.py")
    name, _, argument = given[-1].partition("=")[2].partition(":")
    path = Path(name)
    if not path.is_file():
        import jaxdiff.configs

        folder = Path(jaxdiff.configs.__file__).parent
        names = sorted(p.stem for p in folder.glob("[!_]*.py"))
        if path.stem not in names:
            raise UsageError(f"no config {name}{nearest(path.stem, names)}; installed are {', '.join(names)}")
        path = folder / f"{path.stem}.py"
    spec = importlib.util.spec_from_file_location("config", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(argument) if argument else module.get_config()
    config.lock()
    return config, [a for a in arguments if a not in given]


def _run_config(arguments: list[str]) -> tuple[ConfigDict, list[str]]:
    """The config of the run in --workdir, and all arguments."""
    from jaxdiff.training import export

    given = [a.partition("=")[2] for a in arguments if a.startswith("--workdir=")]
    if not given:
        raise UsageError("give --workdir=FOLDER, the folder of a run")
    return export.read_config(Path(given[-1])), arguments


def _check_overrides(arguments: list[str], config: ConfigDict) -> None:
    """Every --config.a.b=c names a key of the config; else the nearest keys are told."""
    known = _keys(config.to_dict())
    for argument in arguments:
        key = argument.lstrip("-").partition("=")[0].removeprefix("config.")
        if not argument.lstrip("-").startswith("config.") or key in known:
            continue
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
        near += [name for name in known if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1] and name not in near]
        hint = f"did you mean {' or '.join(near)}?" if near else "train --dry_run prints all keys"
        raise UsageError(f"the config has no key {key!r}; {hint}")


def _keys(tree: dict[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key, value in tree.items():
        names += _keys(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]
    return names


def _prompts(given: str) -> list[str]:
    """The prompts between bars, or the lines of a file."""
    path = Path(given)
    if path.suffix == ".txt":
        if not path.is_file():
            raise UsageError(f"--prompts names no file: tried {path.absolute()}")
        given = path.read_text(encoding="utf-8").replace("\n", "|")
    return [prompt.strip() for prompt in given.split("|") if prompt.strip()]


def _spend(config: ConfigDict, nfe: int) -> ConfigDict:
    """The config with as many timestamps as --nfe evaluations along a trajectory allow; 0 leaves it."""
    if not nfe:
        return config
    from jaxdiff import solvers

    c = config.sample
    solver = solvers.make(c.solver, **dict(c.options.items()))
    with config.unlocked():
        config.sample.steps = solver.timestamps(nfe, c.afs, c.to_zero)
    return config


def _load(config: ConfigDict, workdir: str, whole: bool = False) -> tuple[Any, Any]:
    """The job of a run and its exported state; with `whole`, the state of its newest checkpoint."""
    import jax

    from jaxdiff import training
    from jaxdiff.training import export, trainer

    training.check_sampling(config, export.read_config(Path(workdir)))
    job = training.build(config)
    declared, _ = trainer.declare(job)
    if whole:
        return job, trainer.newest(Path(workdir), declared)
    return job, export.read(Path(workdir), jax.eval_shape(job.method.export, declared))


def _dry_run(config: ConfigDict) -> int:
    """The resolved config and the shapes, without computing anything."""
    import jax
    import numpy as np

    from jaxdiff import training
    from jaxdiff.training import trainer
    from jaxdiff.trees import path_name

    print(config)
    job = training.build(config)
    if job.frozen is not None:
        job.frozen.load()  # a teacher that is missing or does not fit
    declared, _ = trainer.declare(job)
    leaves = jax.tree_util.tree_leaves_with_path(getattr(declared, "params", declared))
    for path, leaf in leaves:
        print(f"{path_name(path):60s} {leaf.shape!s:24s} {leaf.sharding.spec}")
    print(f"{sum(int(np.prod(leaf.shape)) for _, leaf in leaves):,} parameters, {job.nfe} evaluations per sample")
    return 0


if __name__ == "__main__":
    sys.exit(main())
