"""The launch files: shells accept them, they print the commands they would run, and Kubernetes' fields are there."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxdiff.training.distributed import REFUSED, RETRY, find

LAUNCH = Path(__file__).parents[1] / "experiments" / "launch"
CONFIG = ["--config=imagenet256_dit", "--config.data.options.path=/data/a folder"]


def shell(script, *arguments, **variables):
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(["bash", script, *arguments], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["tpu_pod.sh", "slurm.sbatch"])
def test_shells_accept_them_and_know_the_exit_code(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)
    assert re.search(rf"^RETRY={RETRY}\b", (LAUNCH / name).read_text(), re.M)


def test_a_tpu_pod_runs_the_command_on_all_workers():
    source = "git+https://example.org/jaxdiff@abc"
    done = shell(LAUNCH / "tpu_pod.sh", *CONFIG, TPU="pod", ZONE="z", WORKDIR="/runs/a", DRY_RUN="1", SOURCE=source)
    assert done.returncode == 0, done.stderr
    install, train = done.stdout.splitlines()
    assert f"jaxdiff[tpu] @ {source}" in install.replace("\\", "") and "tpu-vm ssh pod --zone=z --worker=all" in train
    inner = subprocess.run(["bash", "-c", f'set -- {train}; echo "${{@: -1}}"'], capture_output=True, text=True).stdout
    assert inner.strip().endswith(
        "jaxdiff train --distributed --config=imagenet256_dit --config.data.options.path=/data/a\\ folder --workdir=/runs/a"
    )
    assert "name the slice" in shell(LAUNCH / "tpu_pod.sh", ZONE="z", WORKDIR="w").stderr


def test_a_tpu_pod_is_started_again_until_it_is_done(tmp_path):
    """With a gcloud that is preempted twice."""
    fake = tmp_path / "gcloud"
    fake.write_text(
        f'#!/usr/bin/env bash\necho x >> {tmp_path}/calls\n[ "$(wc -l < {tmp_path}/calls)" -gt 2 ] || exit {RETRY}\n'
    )
    fake.chmod(0o755)
    variables = {"TPU": "p", "ZONE": "z", "WORKDIR": "w", "SKIP_INSTALL": "1", "PAUSE": "0"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = shell(LAUNCH / "tpu_pod.sh", **{**variables, "PATH": path})
    assert done.returncode == 0 and (tmp_path / "calls").read_text() == "x\n" * 3
    assert done.stderr.count(f"ended with code {RETRY}") == 2


def test_slurm_starts_a_process_per_gpu_and_queues_again(tmp_path):
    done = shell(LAUNCH / "slurm.sbatch", *CONFIG, DRY_RUN="1")
    assert done.stdout.startswith("srun ") and "jaxdiff train --config=imagenet256_dit" in done.stdout
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", (LAUNCH / "slurm.sbatch").read_text(), re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"] and "requeue" in options
    assert options["signal"].startswith("TERM@")  # without B: it goes to the processes, which save
    for name, code in (("srun", RETRY), ("scontrol", 0)):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\necho {name} $@ >> {tmp_path}/calls\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    done = shell(LAUNCH / "slurm.sbatch", "--config=x", PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="7")
    assert done.returncode == RETRY and (tmp_path / "calls").read_text().endswith("scontrol requeue 7\n")


def test_slurm_installs_a_source_once(tmp_path):
    environment = tmp_path / "env"
    variables = {"SOURCE": "git+https://example.org/jaxdiff@abc", "ENVIRONMENT": str(environment), "DRY_RUN": "1"}
    install, train = shell(LAUNCH / "slurm.sbatch", *CONFIG, **variables).stdout.replace("\\", "").splitlines()
    assert install == f"{environment}/bin/pip install --quiet --upgrade jaxdiff[cuda] @ {variables['SOURCE']} "
    assert f"{environment}/bin/jaxdiff train" in train
    environment.mkdir()
    (environment / "source").write_text(variables["SOURCE"])
    assert len(shell(LAUNCH / "slurm.sbatch", *CONFIG, **variables).stdout.splitlines()) == 1
    (tmp_path / "python3").write_text("#!/usr/bin/env bash\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    failing = {"SOURCE": "git+https://example.org/other", "ENVIRONMENT": str(tmp_path / "new")}
    done = shell(LAUNCH / "slurm.sbatch", *CONFIG, **failing, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == REFUSED and not (tmp_path / "new").exists()


def test_the_jobset_has_what_kubernetes_and_the_processes_need():
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert jobset["apiVersion"].startswith("jobset.x-k8s.io/") and jobset["kind"] == "JobSet"
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    hosts = spec["parallelism"]
    assert spec["completions"] == hosts and spec["completionMode"] == "Indexed" and spec["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never" and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert rows * columns == hosts * int(container["resources"]["limits"]["google.com/tpu"])
    variables = {entry["name"]: entry.get("value", "2") for entry in container["env"]}
    place = find(environment=variables)
    assert place.processes == hosts and place.process == 2
    set_name, job_name = jobset["metadata"]["name"], job["name"]
    assert place.address == (f"{set_name}-{job_name}-0-0.{set_name}", container["ports"][0]["containerPort"])
    assert container["command"][:2] == ["jaxdiff", "train"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_jobset_restarts_on_every_code_but_that_of_a_refusal():
    spec = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    container = job["template"]["spec"]["containers"][0]
    assert rule["action"] == "FailJob" and rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [REFUSED],
    }
    actions = {
        reason: rule["action"] for rule in spec["failurePolicy"]["rules"] for reason in rule["onJobFailureReasons"]
    }
    assert actions == {"PodFailurePolicy": "FailJobSet", "BackoffLimitExceeded": "RestartJobSet"}


def test_the_jobset_mounts_a_bucket_where_the_run_is_written():
    pod = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]
    (volume,) = pod["spec"]["volumes"]
    (container,) = pod["spec"]["containers"]
    assert volume["csi"]["driver"] == "gcsfuse.csi.storage.gke.io" and volume["csi"]["volumeAttributes"]["bucketName"]
    assert pod["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    mounted = container["volumeMounts"][0]["mountPath"]
    assert any(part.startswith(f"--workdir={mounted}/") for part in container["command"])
