"""Attacks on running processes, a few of each kind: whatever ends a run, the rerun ends like one that nothing befell.

`python tests/attack/attacks.py` repeats them by the hundred; see there.
"""

import os
import subprocess

import attacks
import pytest

pytestmark = pytest.mark.slow
KINDS = [kind for kind in attacks.COUNTS if kind != "full"]


def assert_none_lost(rows, capsys):
    with capsys.disabled():
        print("\n" + attacks.table(rows))
    notes = "\n".join(note for row in rows for note in row["notes"])
    assert all(row["lost"] == row["wrong"] == row["unclear"] == 0 for row in rows), notes
    assert all(sum(row["attacks"] for row in rows if row["kind"] == kind) for kind in {row["kind"] for row in rows})


def test_attacks(tmp_path, capsys):
    rows = attacks.attack(tmp_path / "results.jsonl", tmp_path, dict.fromkeys(KINDS, 2))
    assert {row["kind"] for row in rows} == set(KINDS)
    assert_none_lost(rows, capsys)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_is_full(tmp_path, capsys):
    try:
        rows = attacks.attack(tmp_path / "results.jsonl", tmp_path, {"full": 2})
    except subprocess.CalledProcessError:
        pytest.skip("mount is not allowed here")
    assert_none_lost(rows, capsys)


def test_a_campaign_is_resumed(tmp_path):
    """A chain that is in the file is not repeated; one that was cut is."""
    results = tmp_path / "results.jsonl"
    first = attacks.attack(results, tmp_path, {"kill": 2})
    results.write_text(results.read_text() + '{"kind": "ki')
    again = attacks.attack(results, tmp_path, {"kill": 3})
    assert again[: len(first)] == first and sum(row["attacks"] for row in again) == 3
