"""`jaxdiff plan`."""

from __future__ import annotations

import json
from pathlib import Path

from jaxdiff.cli import configs
from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError, check_out


def run(given: Arguments) -> int:
    check_out(given.out)
    shape, text = numbers("shape", given.shape), numbers("text", given.text)
    config = configs.resolve(COMMAND, given)
    import jax

    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed
    from jaxdiff import plan

    if not given.topology:
        raise UsageError(f"plan needs --topology=CHIP:SHAPE, for example v5e:4x4; chips are {', '.join(plan.CHIPS)}")
    machine = plan.topology(given.topology)
    if given.state_only and (given.compare or given.largest_batch):
        raise UsageError("--state_only compiles nothing, so --compare and --largest_batch have no use")
    if shape:
        config = plan.blank(config, shape, given.classes, text)
    try:
        if given.compare:
            record = plan.compare(config, machine, given.compare.split(","), say=print)
            print(f"best: {record['best'] or 'none fits'}")
        else:
            record = plan.make(config, machine, given.largest_batch, compiled=not given.state_only)
            print(plan.text(record, machine.name))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}. To plan without the data, pass its shape: --shape=64,64,3 --classes=1000, or "
            "--text=77,768 for text (tokens, width)"
        ) from error
    print(f"sources: {machine.chip.source}; written to {given.out}")
    Path(given.out).write_text(json.dumps({"machine": machine.chip._asdict(), **record}, indent=2) + "\n")
    return 0


def numbers(name: str, given: str) -> tuple[int, ...]:
    """Comma-separated integers."""
    if given and not all(part.isdigit() for part in given.split(",")):
        raise UsageError(f"--{name} is a list of integers such as 32,32,4; got {given!r}")
    return tuple(int(part) for part in given.split(",") if part)


COMMAND = Command(
    "Estimate memory, communication and time of training on hardware that is not present.",
    run,
    (
        Flag("topology", "", "CHIP:SHAPE, for example v5e:16x16 or h100:8"),
        Flag("compare", "", "meshes to compare: data,fsdp,context,tensor or sizes such as 4x4x1"),
        Flag("largest_batch", False, "also search for the largest batch that fits"),
        Flag("state_only", False, "without compiling: memory of the state, FLOPs of the traced step"),
        Flag("shape", "", "shape of one example, used instead of the data, for example 32,32,4"),
        Flag("classes", 0, "with --shape: number of classes"),
        Flag("text", "", "with --shape: tokens and width of the text, for example 77,768"),
        Flag("out", "plan.json", "file for the full record"),
    ),
    config="file",
    examples=("jaxdiff plan --config=imagenet256_dit --topology=v5e:16x16 --shape=32,32,4 --classes=1000",),
)
