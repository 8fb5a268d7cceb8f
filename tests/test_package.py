"""The package as a whole: import cost, no device, no foreign frameworks."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import jaxdiff

ROOT = Path(__file__).resolve().parents[1]


NO_DEVICE = {**os.environ, "JAX_PLATFORMS": "absent"}  # asking for a device is an error


def run(code: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=check, cwd=ROOT, env=NO_DEVICE
    )


def test_asking_for_a_device_would_fail_in_these_tests():
    child = run("import jax; jax.devices()", check=False)
    assert child.returncode == 1 and "absent" in child.stderr


def test_import_adds_little_to_jax_and_touches_no_device():
    out = run(
        "import sys, jax; before = set(sys.modules)\n"
        "import jaxdiff; light = set(sys.modules) - before\n"
        "import jaxdiff.denoisers, jaxdiff.solvers\n"
        "heavy = {'flax', 'orbax', 'torch', 'tensorflow', 'matplotlib', 'scipy.stats', 'grain'} & set(sys.modules)\n"
        "print(len(light), sorted(heavy))"
    ).stdout
    assert out == "1 []\n"


def test_importing_everything_brings_no_other_framework_and_no_device():
    out = run(
        "import sys, pkgutil, importlib, jaxdiff\n"
        "for m in pkgutil.walk_packages(jaxdiff.__path__, 'jaxdiff.'): importlib.import_module(m.name)\n"
        "print(sorted({'torch', 'tensorflow'} & set(sys.modules)))"
    ).stdout
    assert out == "[]\n"


def test_commands_on_a_cpu_are_quiet_where_libtpu_is_installed():
    """JAX tries every platform that is installed; what it says about absent hardware would be a user's first lines."""
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    code = "import libtpu, jax, jaxdiff.cli as c; c.main(['configs']); assert jax.devices()[0].platform == 'cpu'"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=kept)
    assert out.stderr == "" and "digits" in out.stdout


def test_unknown_attribute_names_what_exists():
    with pytest.raises(AttributeError, match=r"'sampler'.*load.*denoisers.*solvers"):
        _ = jaxdiff.sampler


def test_ci_installs_the_lower_bounds_of_setup():
    declared = set(re.findall(r"""["']([\w-]+)(?:\[\w+\])?>=([\d.]+)""", (ROOT / "setup.py").read_text()))
    installed = set(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / ".ci" / "lower-bounds.txt").read_text(), re.MULTILINE))
    assert declared == installed and len(dict(installed)) == len(installed) > 20


def test_the_package_uses_no_private_part_of_jax():
    private = [path.name for path in (ROOT / "jaxdiff").rglob("*.py") if "jax._src" in path.read_text()]
    assert private == []


def test_the_workflow_runs_what_the_readme_and_ci_run():
    """Fields as GitHub Actions documents them; every Python of .ci/run; the README's command; files that exist."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}  # YAML reads `on` as true
    jobs = workflow["jobs"]
    for job in jobs.values():
        assert set(job) <= {"runs-on", "timeout-minutes", "strategy", "steps"} and job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step) and set(step) <= {"uses", "with", "name", "run"}
            cached = step.get("with", {}).get("cache-dependency-path", "setup.py")
            assert (ROOT / cached).is_file()
    readme = re.search(r"<!-- test command -->\n```bash\n(.*)\n```", (ROOT / "README.md").read_text())[1].split(" && ")
    scripts = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert scripts["test"][0].splitlines() == readme
    assert "--constraint .ci/lower-bounds.txt" in scripts["lower-bounds"][0] and scripts["check"] == [".ci/check"]
    run = (ROOT / ".ci" / "run").read_text()
    oldest, *others = jobs["test"]["strategy"]["matrix"]["python"]
    assert f"oldest={oldest}\n" in run and f'pythons="$oldest {" ".join(others)}"\n' in run
    for command in set(re.findall(r"\.ci/(\w+)(?= |\n|$)", "\n".join([run, *itertools.chain(*scripts.values())]))):
        assert os.access(ROOT / ".ci" / command, os.X_OK), command
