"""`jaxdiff check`."""

from __future__ import annotations

from pathlib import Path

from jaxdiff.cli.flags import TEACHER, Arguments, Command, Flag, UsageError, check_local, check_out


def run(given: Arguments) -> int:
    if not given.teacher:
        raise UsageError("check needs --teacher=FILE.py:load, a workdir, or a weights file with --kind")
    check_local("golden", given.golden)
    if given.out:
        check_out(given.out, ".png", ".npz")
    from jaxdiff.cli import runs, teachers
    from jaxdiff.training import own_checks

    saved = teachers.opened(given.teacher, given.kind, given.overrides)
    found = own_checks.check(saved, given.golden, given.tolerance)
    for finding in found:
        print(f"{'ok ' if finding.fine else 'BAD'} {finding.name:12s} {finding.text}")
    saved = saved.with_nfe(given.nfe) if given.nfe else saved
    if given.out and (given.out.endswith(".npz") or runs.makes_images(saved)):
        runs.write_samples(Path(given.out), runs.sample(saved, given.count, 0, "cycle", ()))
        print(f"wrote {given.count} samples with {saved.run.nfe} evaluations each to {given.out}: look at them")
    return 0 if all(finding.fine for finding in found) else 1


COMMAND = Command(
    "Check a teacher: shapes, convention, classes, golden outputs, a grid of samples.",
    run,
    (
        *TEACHER,
        Flag("golden", "", "FILE.npz with x, sigma, x0 (and label) from the program the teacher was trained with"),
        Flag("tolerance", 1e-3, "largest error against golden outputs, relative to their largest value"),
        Flag("count", 64, "number of samples"),
        Flag("nfe", 0, "network evaluations per sample; 0: as in the teacher's config"),
        Flag("out", "check.png", "file for samples: FILE.png or FILE.npz; empty: none"),
    ),
    config="run",
    examples=("jaxdiff check --teacher=my_teacher.py:load --golden=golden.npz",),
)
