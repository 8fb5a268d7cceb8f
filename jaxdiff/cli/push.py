"""`jaxdiff push`."""

from __future__ import annotations

from pathlib import Path

from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError, check_local


def run(given: Arguments) -> int:
    if not given.workdir or not given.repo:
        raise UsageError("push needs --workdir=FOLDER of a run and --repo=OWNER/NAME")
    check_local("out", given.out)
    from jaxdiff.training import publish

    for key, value in publish.local_paths(given.workdir).items():
        print(f"note: config.json, which is uploaded, has {key}={value}")
    if given.out:
        names = publish.write(given.workdir, Path(given.out), given.repo, given.license)
        print(f"wrote {', '.join(names)} to {given.out}; nothing was uploaded")
        return 0
    url = publish.push(given.workdir, given.repo, private=given.private, license=given.license)
    print(f'uploaded to {url}; load it with jaxdiff.load("hf://{given.repo}")')
    return 0


COMMAND = Command(
    "Upload a run to the Hugging Face hub, with a model card that has the protocol of its numbers.",
    run,
    (
        Flag("workdir", "", "folder of the run"),
        Flag("repo", "", "OWNER/NAME of the model repository, created if need be"),
        Flag("private", False, "create the repository as a private one"),
        Flag("license", "", "licence of the weights in the card's metadata, for example apache-2.0"),
        Flag("out", "", "write the files and the card to this folder instead of uploading them"),
    ),
    examples=(
        "jaxdiff push --workdir=runs/few --repo=me/few-step-digits --out=card",
        "jaxdiff push --workdir=runs/few --repo=me/few-step-digits --private",
    ),
)
