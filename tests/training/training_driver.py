"""A training run in a process of its own, which can be made to meet its end at a chosen moment.

    python training_driver.py '{"workdir": ..., "changes": {...}, "moment": ..., "signal": ..., "step": ...}'

`method` and `images` choose the run, `changes` change it.

Moments at which it signals itself: `step` (the batch of that step has arrived), `save_begun` (the folder of that step's
checkpoint was made) and `save_written` (all is written, the folder is about to get its final name). At `compile` and
`evaluate` it says so and dawdles, for the parent to act; with `slow` every step waits a little, and `pause` from step 15 on. `full_disk`: the files of that step's checkpoint do not fit. `stuck`: the process of that number waits
for the batch of that step for ever.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

ORDER = json.loads(sys.argv[1])
from jaxdiff.training import distributed  # noqa: E402

if "process" in ORDER:
    distributed.connect(f"127.0.0.1:{ORDER['port']}", 2, ORDER["process"], timeout=300, silence=ORDER["silence"])

from training_runs import config_of, images_of, points_of  # noqa: E402

from jaxdiff.training import trainer  # noqa: E402

WORKDIR, MOMENT = Path(ORDER["workdir"]), ORDER.get("moment", "")


def say(text):
    print(text, flush=True)


class Recorded:
    """The trainer's batches, each noted with its step when it is handed out."""

    def __init__(self, dataset, start_step, *args, **kwargs):
        self.inner, self.step = prefetch(dataset, start_step, *args, **kwargs), start_step

    def __enter__(self):
        self.inner.__enter__()
        return self

    def __exit__(self, *error):
        return self.inner.__exit__(*error)

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.inner)
        digest = hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()
        with open(WORKDIR / "batches.jsonl", "a") as file:
            file.write(json.dumps({"step": self.step, "sha256": digest}) + "\n")
        if MOMENT == "step" and self.step == ORDER["step"]:
            os.kill(os.getpid(), signal.Signals[ORDER["signal"]])
        if MOMENT == "stuck" and self.step == ORDER["step"] and ORDER["process"] == ORDER["stuck"]:
            time.sleep(600)
        if MOMENT == "slow":
            time.sleep(0.05 if self.step < 15 else ORDER.get("pause", 0.05))
        self.step += 1
        return batch


def watch(event, arguments):
    """Python tells of every folder that is about to be made or renamed, whoever does it."""
    if event not in ("os.mkdir", "os.rename") or not MOMENT:
        return
    folder = Path(os.fspath(arguments[0]))
    begun = event == "os.mkdir" and folder.parent.name == f"{ORDER.get('step')}.orbax-checkpoint-tmp"
    written = event == "os.rename" and folder.name == f"{ORDER.get('step')}.orbax-checkpoint-tmp"
    if (MOMENT == "save_begun" and begun) or (MOMENT == "save_written" and written):
        os.kill(os.getpid(), signal.Signals[ORDER["signal"]])
    if MOMENT == "full_disk" and begun:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))


def slow_evaluate(run, params, mesh, *, sampler, **options):
    class Slow(type(sampler)):
        def __call__(self, *arguments):
            time.sleep(0.2)
            return super().__call__(*arguments)

    say("EVALUATING")
    return evaluate(run, params, mesh, sampler=Slow(run, mesh, sampler.labels), **options)


def slow_compile(run, *arguments):
    class Slow:
        def lower(self, *_):
            say("COMPILING")
            time.sleep(60)

    return compile_step(Slow(), *arguments)


prefetch, evaluate, compile_step = trainer.prefetch, trainer.evaluate, trainer.compile_step
trainer.prefetch = Recorded
if MOMENT == "evaluate":
    trainer.evaluate = slow_evaluate
if MOMENT == "compile":
    trainer.compile_step = slow_compile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails, as on a full disk, instead of killing
sys.addaudithook(watch)
base = (images_of if ORDER.get("images") else points_of)(ORDER.get("method", "diffusion"))
with distributed.ending_together():
    config = config_of(base, ORDER.get("changes"))
    result = trainer.train(config, WORKDIR, stall_timeout=ORDER.get("stall_timeout", 0.0))
say(f"RETURNED step {result.step}, stopped {result.stopped}")
say(f"FOREIGN {sorted({'torch', 'tensorflow', 'keras'} & set(sys.modules))}")
sys.exit(distributed.RETRY if result.stopped else 0)
