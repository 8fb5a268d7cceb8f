"""Runs for others: hf:// is read, `jaxdiff push` uploads what loading needs, and the card has every number's protocol."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from hub_server import hub
from training_runs import config_of

import jaxdiff
from jaxdiff import conditions, data, training
from jaxdiff.cli import main
from jaxdiff.training import publish

ROOT = Path(__file__).resolve().parents[2]

LOAD = """
import sys, json, numpy as np, jaxdiff
from jaxdiff import remote
from jaxdiff.weights import files
run = jaxdiff.load("hf://me/points")
assert set(files.read("hf://me/points@v1/export.safetensors")) == set(files.read("hf://me/points/export.safetensors"))
np.save(sys.argv[1], run.sample(0, 4))
for url in ("hf://me/none/a.npz", "hf://me/points/none.npz", "hf://alone", "hf://me/points/code/net.py"):
    try:
        remote.local(url)
    except (OSError, ValueError) as error:
        print(error)
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A short run, evaluated twice."""
    root = tmp_path_factory.mktemp("publish") / "run"
    config = config_of(changes={"train.steps": 2, "teacher.path": "/home/me/teacher"})
    training.train(config, root, quiet=True, devices=jax.devices()[:1])
    for repeats in (1, 2):
        assert main(["evaluate", f"--workdir={root}", "--config.eval.samples=64", f"--repeats={repeats}"]) == 0
    with open(root / "evaluations.jsonl", "a") as file:
        file.write('{"truncated')
    return root


def test_a_run_is_uploaded_and_loaded_from_the_hub(workdir, tmp_path):
    """In a process of its own, because huggingface_hub reads the address of the server when it is imported."""
    with hub() as server:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": "hf_secret",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        order = [sys.executable, "-m", "jaxdiff.cli", "push", f"--workdir={workdir}", "--repo=me/points", "--private"]
        pushed = subprocess.run(order, env=environment, capture_output=True, text=True, check=False)
        assert pushed.returncode == 0, pushed.stderr
        assert "teacher.path=/home/me/teacher" in pushed.stdout and 'jaxdiff.load("hf://me/points")' in pushed.stdout
        asked = server.created["me/points"]
        assert asked.get("visibility") == "private" or asked["private"] is True  # of newer and older clients
        assert server.tokens == {"Bearer hf_secret"}
        stored = server.repos["me/points"]
        wanted = {"README.md", "config.json", "data.json", "export.safetensors", "evaluations.jsonl"}
        assert wanted <= set(stored) <= wanted | {"data.npz"}
        assert stored["export.safetensors"] == (workdir / "export.safetensors").read_bytes()
        stored["code/net.py"] = b"raise SystemExit('code of the hub was run')"
        made = tmp_path / "samples.npy"
        loaded = subprocess.run(
            [sys.executable, "-c", LOAD, made], env=environment, capture_output=True, text=True, check=False
        )
        assert loaded.returncode == 0, loaded.stderr
        assert not [path for _, path in server.seen if path.endswith(".py")]
    np.testing.assert_array_equal(np.load(made), jaxdiff.load(workdir, devices=jax.devices()[:1]).sample(0, 4))
    said = loaded.stdout.splitlines()
    assert "hf://me/none/a.npz: RepositoryNotFound" in said[0] and "hf://me/points/none.npz" in said[1]
    assert "hf://owner/repo" in said[2] and "is not run" in said[3]


def test_the_card_has_the_numbers_and_their_protocol(workdir, tmp_path):
    assert main(["push", f"--workdir={workdir}", "--repo=me/points", f"--out={tmp_path}", "--license=apache-2.0"]) == 0
    _, header, text = (tmp_path / "README.md").read_text().split("---\n", 2)
    about = yaml.safe_load(header)
    assert (about["library_name"], about["license"]) == ("jaxdiff", "apache-2.0") and "diffusion" in about["tags"]
    assert "# points\n" in text and 'jaxdiff.load("hf://me/points")' in text
    records = publish.records(workdir)
    rows = [line for line in text.splitlines() if line.startswith("| 2 |")]
    assert len(records) == len(rows) == 2
    for record, row in zip(records, rows, strict=True):
        protocol = record["protocol"]
        for name in ("solver", "nfe", "samples", "reference", "feature_net", "seed"):
            assert f" {protocol[name]} " in row
        for name, value in record.items():
            if isinstance(value, float):
                assert f"{name} {value:.4g}" in row
        for name, value in record.get("spread", {}).items():
            assert f"{record[name]:.4g} ± {value:.4g}" in row
        assert protocol["reference_sha256"][:16] in text
    assert "spread" in records[1]
    size = sum(leaf.size for leaf in jax.tree.leaves(jaxdiff.load(workdir).params))
    assert f"{size:,} parameters" in text and "2 steps of 8 examples" in text


def test_tables_and_metadata_are_escaped():
    assert publish._cell("a|b\nc\\") == "a\\|b c\\\\"
    assert publish._cell(None) == "-"
    images = data.DataSpec("digits", (8, 8, 1), 9, "f")
    points = data.DataSpec("mixture", (2,), 9, "f", signals={"text": conditions.Signal((None, 3))})
    header = yaml.safe_load(publish._metadata(config_of(), 'x"\ny: z', images).strip("-"))
    assert header["license"] == 'x"\ny: z' and header["pipeline_tag"] == "unconditional-image-generation"
    assert "pipeline_tag" not in publish._metadata(config_of(), "", points)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repo=me/a"], "--workdir=FOLDER"),
        (["--workdir=x"], "--repo=OWNER/NAME"),
        (["--workdir=x", "--repo=a", "--out=gs://b/x"], "local path"),
    ],
)
def test_orders_that_cannot_be_carried_out(arguments, message, capsys):
    assert main(["push", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_unfinished_run_is_not_uploaded(tmp_path, workdir, capsys):
    with pytest.raises(ValueError, match="OWNER/NAME"):
        publish.write(workdir, tmp_path / "card", "points")
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    (unfinished / "config.json").write_text(json.dumps({"a": 1}))
    assert main(["push", f"--workdir={unfinished}", "--repo=me/a", f"--out={tmp_path}"]) == 2
    assert "no data.json, export.safetensors" in capsys.readouterr().err
