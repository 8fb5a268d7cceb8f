"""`jaxdiff features catalog | extract | score | show`: their flags; `activations` implements them."""

from __future__ import annotations

from collections.abc import Callable

from jaxdiff.cli import configs
from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError, check_count, check_local, check_out

WORKDIR = Flag("workdir", "", "folder of a run; or --config=NAME with --config.train.init_from=FILE of public weights")
IMAGES = Flag("images", "", "FILE.npz with `images`, or a folder of image files, instead of the data of the run")
SELECT = Flag("select", "", 'names by pattern, "**/out !**/mlp/*"; @FILE, a saved selection; or a published one, @sd1')
EVERY = Flag("select", "**", SELECT.help)
SIGMA = Flag("sigma", 0.2, "noise level of the images")
TIMESTEP = Flag("timestep", -1, "noise level as a timestep of the network's schedule; -1: --sigma")
SIGMAS = Flag("sigmas", "0.05,0.1,0.2,0.4,0.8", "noise levels")
TIMESTEPS = Flag("timesteps", "", "noise levels as timesteps, such as 1,50,200, instead of --sigmas")
PROMPT = Flag("prompt", "", "condition all images on this prompt, or FILE.npz with its embeddings; empty: on none")
MASSIVE = Flag("drop_massive", 0.0, "drop channels this many times the median from **/norm0 of a DiT; 0: keep all")
SEED = Flag("seed", 0, "seed of the noise")


def _run(action: str) -> Callable[[Arguments], int]:
    def run(given: Arguments) -> int:
        if given.config is not None and given.workdir:
            raise UsageError("give --workdir=FOLDER of a run or --config=NAME, not both")
        check_local("images", str(given.values.get("images", "")))
        _check_level(given)
        _check_output(action, given)
        config = configs.resolve(COMMANDS[f"features {action}"], given)
        from jaxdiff.cli.activations import ACTIONS

        flags = {name: value for name, value in given.values.items() if name != "workdir"}
        ACTIONS[action](config, given.workdir, **flags)
        return 0

    return run


def _check_level(given: Arguments) -> None:
    """A noise level is given as sigma or as a timestep."""
    for sigma, timestep in ((SIGMA, TIMESTEP), (SIGMAS, TIMESTEPS)):
        values = [given.values.get(flag.name, flag.default) != flag.default for flag in (sigma, timestep)]
        if all(values):
            raise UsageError(f"give --{sigma.name} or --{timestep.name}, not both")


def _check_output(action: str, given: Arguments) -> None:
    """Check that the output can be written, before anything is computed."""
    if action == "extract":
        check_local("out", given.out)
        check_count(given.count, 0)
        return
    if given.out or action != "catalog":
        check_out(given.out, ".png" if action == "show" else ".csv")
    if action != "catalog":
        check_count(given.count)


COMMANDS = {
    "features catalog": Command(
        "List the activations of a network, with the FLOPs to reach each for one image.",
        _run("catalog"),
        (WORKDIR, EVERY, Flag("out", "", "FILE.csv for the table")),
        config="either",
        examples=('jaxdiff features catalog --config=creatures:dit --select="**/q !blocks_0/**" --out=table.csv',),
    ),
    "features extract": Command(
        "Write features of images, in stored order, as shards.",
        _run("extract"),
        (
            WORKDIR,
            IMAGES,
            SELECT,
            SIGMA,
            TIMESTEP,
            PROMPT,
            MASSIVE,
            Flag("out", "", "a new or empty folder for the shards"),
            Flag("count", 0, "number of images; 0: all"),
            SEED,
            Flag("draws", 1, "noise draws to average features over"),
            Flag("side", 0, "pool feature grids to this side; 0: do not pool"),
            Flag("dtype", "float32", "dtype of the stored features", ("float32", "bfloat16", "float16")),
            Flag("shard", 1024, "images per file"),
        ),
        config="either",
        examples=(
            'jaxdiff features extract --workdir=runs/a --select="dec_*/out" --sigma=0.2 --out=features',
            'jaxdiff features extract --workdir=runs/t2i --select="**/out" --prompt="a red circle" --out=f',
        ),
    ),
    "features score": Command(
        "Score activations at each noise level: a table and a heat map.",
        _run("score"),
        (
            WORKDIR,
            IMAGES,
            EVERY,
            Flag("metric", "probe", "probe (accuracy of a linear probe), nsr or leak", ("probe", "nsr", "leak")),
            SIGMAS,
            TIMESTEPS,
            PROMPT,
            MASSIVE,
            Flag("out", "scores.csv", "FILE.csv for the table; the heat map is FILE.png"),
            Flag("count", 512, "number of images"),
            SEED,
            Flag("side", 2, "pool feature grids to this side; 0: do not pool"),
        ),
        config="either",
        examples=("jaxdiff features score --workdir=runs/a --metric=probe --sigmas=0.05,0.2,0.8 --out=scores.csv",),
    ),
    "features show": Command(
        "Draw activations by their principal components, one image per row.",
        _run("show"),
        (
            WORKDIR,
            IMAGES,
            SELECT,
            SIGMA,
            TIMESTEP,
            PROMPT,
            MASSIVE,
            Flag("out", "features.png", "FILE.png for the grid"),
            Flag("count", 8, "number of images"),
            SEED,
        ),
        config="either",
        examples=('jaxdiff features show --workdir=runs/a --select="dec_*/out" --sigma=0.2 --out=features.png',),
    ),
}
