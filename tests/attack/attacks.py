"""Attacks on running processes, seeded, counted, and resumed where an earlier call ended.

    python tests/attack/attacks.py --results=FILE.jsonl                      # all kinds, as many as COUNTS says
    python tests/attack/attacks.py --results=FILE.jsonl kill=20 peers=4      # these kinds
    python tests/attack/attacks.py --results=FILE.jsonl --table              # what FILE holds

A chain of attacks strikes one run, which is started again each time; in the end it is left alone and compared with one
that nothing befell, to the bit. A chain is a line of FILE. The kinds of faults.py strike at an operation on files,
`timed-kill`, `timed-term`, `timed-int` and `timed-hup` after a share of the work, `peers` kills one of two processes.
`full` needs the right to mount a file system.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "training", HERE.parents[1]):
    sys.path.insert(0, str(folder))

from attacked import STEPS, Server, cpu_seconds, is_clear, newest, same, strike_after  # noqa: E402
from faults import FILLER, SIGNALS  # noqa: E402

PER_CHAIN = 8
COUNTS = {
    **{"kill": 130, "timed-kill": 80, "peers": 24, "term": 10, "timed-term": 20, "int": 6, "timed-int": 14},
    **{"hup": 4, "timed-hup": 6, "limit": 16, "full": 16, "broken": 24, "readonly": 12, "deleted": 8},
}
MEANING = {
    "kill": "kill -9 at a file operation",
    "timed-kill": "kill -9 at any time",
    "peers": "kill -9 of one of two processes, at any time",
    "term": "SIGTERM at a file operation",
    "timed-term": "SIGTERM at any time",
    "int": "SIGINT at a file operation",
    "timed-int": "SIGINT at any time",
    "hup": "SIGHUP at a file operation",
    "timed-hup": "SIGHUP at any time",
    "limit": "no file can grow, from a file operation on",
    "full": "disk filled to the last byte at a file operation",
    "broken": "a file operation fails with EIO",
    "readonly": "workdir read-only from a file operation on",
    "deleted": "workdir deleted at a file operation",
}


class Campaign:
    """The server, and the runs that nothing befell: made when first needed."""

    def __init__(self, folder, seed):
        self.server, self.folder, self.seed = Server(folder), Path(folder), seed
        self.known = {}

    def straight(self, kind):
        """A run that nothing befell, its operations on files, and the CPU seconds it took."""
        name = "pair" if kind == "peers" else "single"
        if name not in self.known:
            workdir = self.folder / f"straight-{name}"
            children = self.server.pair(workdir) if kind == "peers" else [self.server.start(workdir)]
            seconds = [0.0] * len(children)
            while any(cpu_seconds(child) < float("inf") for child, _ in children):
                for i, (child, _) in enumerate(children):
                    now = cpu_seconds(child)
                    seconds[i] = now if now < float("inf") else seconds[i]
                time.sleep(0.01)
            ended = [self.server.wait(*child) for child in children]
            assert all(code == 0 for code, _ in ended), ended
            self.known[name] = workdir, int(ended[0][1].rpartition("OPERATIONS ")[2].split()[0]), seconds
        return self.known[name]

    def chain(self, kind, index, count):
        """A row: at most `count` attacks on one run, and how it ends when it is left alone."""
        draw = random.Random(f"{kind} {self.seed} {index}")
        place = self.folder / f"{kind}-{index}"
        place.mkdir()
        workdir = place / "run"
        row = {"kind": kind, "seed": self.seed, "chain": index, "attacks": 0, "survived": 0, "codes": Counter()}
        row |= {"lost": 0, "wrong": 0, "unclear": 0, "notes": []}
        strike = self.kill_a_peer if kind == "peers" else self.strike
        with disk(place, kind == "full"):
            for _ in range(count):
                before = newest(workdir)
                if before == STEPS:
                    break
                strike(kind, workdir, draw, row)
                if newest(workdir) < before and kind != "deleted":
                    row["lost"] += 1
                    row["notes"].append(f"step {before} -> {newest(workdir)}")
                (place / FILLER).unlink(missing_ok=True)
            self.leave_alone(kind, workdir, row)
        shutil.rmtree(place)
        return row

    def strike(self, kind, workdir, draw, row):
        """Start the run, and let the attack befall it."""
        _, operations, seconds = self.straight(kind)
        share = 1 - max(newest(workdir), 0) / STEPS  # of what is still to be done
        if kind.startswith("timed-"):
            child, log = self.server.start(workdir)
            number = SIGNALS[kind.removeprefix("timed-")]
            at = draw.uniform(0, 0.4 + 0.6 * share) * seconds[0]
            struck = strike_after(child, at, number)
            code, said = self.server.wait(child, log)
        else:
            at = draw.randrange(1, max(3, int(0.9 * share * operations)))
            code, said = self.server.run(workdir, [kind, at])
            struck = "STRUCK" in said
        row["attacks"] += struck
        row["survived"] += struck and code == 0
        self.judge(kind.removeprefix("timed-"), at, code, said, row)

    def kill_a_peer(self, kind, workdir, draw, row):
        """Kill one of two processes; the other must end by itself."""
        seconds = self.straight(kind)[2]
        victim = draw.randrange(2)
        children = self.server.pair(workdir)
        at = draw.uniform(0, seconds[victim])
        row["attacks"] += strike_after(children[victim][0], at, signal.SIGKILL)
        ended = [self.server.wait(*child) for child in children]
        code, said = ended[1 - victim]
        self.judge("peer", f"{victim} after {at:.1f} s of its work", code, said, row)

    def judge(self, kind, at, code, said, row):
        row["codes"][str(code)] += 1
        if not is_clear(kind, code, said):
            row["unclear"] += 1
            row["notes"].append(f"{kind} at {at}: code {code}\n{said[-3000:]}")

    def leave_alone(self, kind, workdir, row):
        """Let a run end by itself, and compare it."""
        children = self.server.pair(workdir) if kind == "peers" else [self.server.start(workdir)]
        for code, said in [self.server.wait(*child) for child in children]:
            if code:
                row["lost"] += 1
                row["notes"].append(f"the rerun ended with {code}\n{said[-3000:]}")
        if not row["lost"] and not same(workdir, self.straight(kind)[0], kind != "deleted"):
            row["wrong"] += 1
            row["notes"].append("ends otherwise than the run that nothing befell")


class disk:
    """A file system of its own, to be filled."""

    def __init__(self, place, wanted):
        self.place, self.wanted = place, wanted

    def __enter__(self):
        if self.wanted:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(self.place)], check=True)

    def __exit__(self, *_):
        if self.wanted:
            subprocess.run(["umount", str(self.place)], check=True)


def read(path):
    """The rows of a file; a last line that was cut is removed."""
    path = Path(path)
    text = path.read_text() if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def attack(results, folder, counts, seed=0, say=print, seconds=float("inf")):
    """Add chains to the file of results until each kind has as many attacks as asked, or some seconds have passed."""
    campaign, end = Campaign(folder, seed), time.monotonic() + seconds
    try:
        for kind, wanted in counts.items():
            rows = [row for row in read(results) if row["kind"] == kind and row["seed"] == seed]
            struck, index = sum(row["attacks"] for row in rows), len(rows)
            while struck < wanted and time.monotonic() < end:
                row = campaign.chain(kind, index, min(PER_CHAIN, wanted - struck))
                struck, index = struck + row["attacks"], index + 1
                with open(results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                say(f"{kind} {struck} of {wanted}: {summary(row)}")
    finally:
        campaign.server.close()
    return [row for row in read(results) if row["kind"] in counts and row["seed"] == seed]


def summary(row):
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(row["codes"].items()))
    return f"codes {codes}; lost {row['lost']}, wrong {row['wrong']}, unclear {row['unclear']}"


def table(rows):
    """One line per kind, and a last one for all."""
    lines = ["| attack | cases | went on | exit codes | lost | silently wrong | without a clear message |"]
    lines += ["|---|---|---|---|---|---|---|"]
    kinds = [kind for kind in MEANING if any(row["kind"] == kind for row in rows)]
    for name, chosen in [(kind, [row for row in rows if row["kind"] == kind]) for kind in kinds] + [("all", rows)]:
        codes = sum((Counter(row["codes"]) for row in chosen), Counter())
        shown = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items())) if name != "all" else ""
        sums = [sum(row[field] for row in chosen) for field in ("attacks", "survived", "lost", "wrong", "unclear")]
        cells = [MEANING.get(name, name), *map(str, sums[:2]), shown, *map(str, sums[2:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the runs meanwhile")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no chain after this time")
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("counts", nargs="*", metavar="KIND=COUNT")
    given = parser.parse_args()
    if not given.table:
        named = dict(word.split("=") for word in given.counts)
        counts = {kind: int(count) for kind, count in named.items()} or COUNTS
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            attack(given.results, folder, counts, given.seed, lambda text: print(text, flush=True), given.seconds)
    print(table(read(given.results)))
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
