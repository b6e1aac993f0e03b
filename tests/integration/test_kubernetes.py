"""The manifests for Kubernetes are consistent, and their pods work as local processes. No cluster is used."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from support import certificates
from support.programs import ROOT, start
from support.stores import unused_port
from support.warm_interpreter import warm_python

from dist2.runtime.config import VARIABLES, Config

FOLDER = ROOT / "examples" / "kubernetes"
WITH_PROMETHEUS = ROOT / "observability" / "monitoring" / "kubernetes.yml"
POD_ADDRESS = "127.0.0.1"
SECRET_MODE = 0o644
"""Mode of a Secret's files where the manifest gives none."""
BY_OPERATOR = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
FILES = {"DIST2_SECRET_FILE", "DIST2_TLS_CERT", "DIST2_TLS_KEY", "DIST2_TLS_CA"}


@attrs.frozen
class Manifest:
    """A job and how it is scraped.

    Attributes:
        pods: Templates of its pods, with the number of each.
        set_by_operator: Variables that the operator sets.
        job: The job.
        monitor: The PodMonitor.
    """

    pods: list[tuple[dict[str, Any], int]]
    set_by_operator: set[str]
    job: dict[str, Any]
    monitor: dict[str, Any]


def jobset() -> Manifest:
    job, monitor = yaml.safe_load_all((FOLDER / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (ranks,) = job["spec"]["replicatedJobs"]
    inner = ranks["template"]["spec"]
    assert inner["parallelism"] == inner["completions"]
    assert inner["completionMode"] == "Indexed"  # which numbers the pods
    return Manifest([(inner["template"], inner["completions"])], set(), job, monitor)


def pytorchjob() -> Manifest:
    job, monitor = yaml.safe_load_all((FOLDER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"]
    assert replicas["Master"]["replicas"] == 1
    pods = [(each["template"], each["replicas"]) for each in replicas.values()]
    return Manifest(pods, BY_OPERATOR, job, monitor)


MANIFESTS = pytest.mark.parametrize("manifest", [jobset(), pytorchjob()], ids=["jobset", "pytorchjob"])


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["spec"]["containers"][0]["env"]}


@MANIFESTS
def test_every_rank_is_told_its_place(manifest: Manifest) -> None:
    for pod, _ in manifest.pods:
        told = environment(pod).keys() | manifest.set_by_operator
        assert told >= {*BY_OPERATOR, "LOCAL_RANK"}
        assert {name for name in told if name.startswith("DIST2_")} == FILES <= VARIABLES


def test_the_jobset_is_as_large_as_it_says() -> None:
    manifest = jobset()
    ((pod, count),) = manifest.pods
    told = environment(pod)
    assert told["WORLD_SIZE"] == str(count)
    name, network = manifest.job["metadata"]["name"], manifest.job["spec"]["network"]
    ranks = manifest.job["spec"]["replicatedJobs"][0]["name"]
    assert network["enableDNSHostnames"]
    assert told["MASTER_ADDR"] == f"{name}-{ranks}-0-0.{network['subdomain']}"
    (rank,) = [each for each in pod["spec"]["containers"][0]["env"] if each["name"] == "RANK"]
    path = rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@MANIFESTS
def test_files_are_mounted_from_secrets(manifest: Manifest) -> None:
    for pod, _ in manifest.pods:
        spec = pod["spec"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in spec["containers"][0]["volumeMounts"]}
        for name in FILES:
            folder = environment(pod)[name].rpartition("/")[0]
            assert mounts[folder]["secret"]["defaultMode"] == 0o400, name
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


@MANIFESTS
def test_every_rank_is_scraped(manifest: Manifest) -> None:
    (endpoint,) = manifest.monitor["spec"]["podMetricsEndpoints"]
    for pod, _ in manifest.pods:
        labels = pod["metadata"]["labels"]
        assert manifest.monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        assert ports[endpoint["port"]] == 9400
    assert (endpoint["path"], endpoint["scheme"]) == ("/metrics", "https")
    assert str(9400) in (FOLDER / "README.md").read_text()


def test_the_settings_are_read_from_such_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o400)
    told = {"DIST2_SECRET_FILE": str(secret)}
    told |= {name: f"/var/run/dist2/tls/{name}" for name in FILES if "TLS" in name}
    config = Config.from_environment(told)
    assert config.secret is not None
    assert config.tls_ca == "/var/run/dist2/tls/DIST2_TLS_CA"


# The pods as local processes


def program_of_the_readme() -> str:
    (program,) = re.findall(r"```py\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    return program.replace("0.0.0.0", POD_ADDRESS)


def program_of_the_comment() -> str:
    (call,) = re.findall(r"# (observability\.start\(.*\))\n", WITH_PROMETHEUS.read_text())
    return (
        "import os\nfrom pathlib import Path\nimport dist2, observability\n"
        f'pg = dist2.new_group("socket")\nserver = {call}\n'
    )


SEES_ALL = """
import json, torch
tensor = torch.ones(2)
pg.all_reduce(tensor)
if pg.rank() == 0:
    while json.loads(observability.fetch(f"{server.url}/job", server.token))["answered"] < 2:
        pass
pg.barrier()
print(tensor.tolist(), server.url)
"""


def pod_with_prometheus() -> dict[str, Any]:
    (job,) = [each for each in yaml.safe_load_all(WITH_PROMETHEUS.read_text()) if each["kind"] == "Job"]
    pod: dict[str, Any] = job["spec"]["template"]
    return pod


def folders_of(pod: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Make the folders that are mounted from Secrets, with the files that the environment names."""
    spec, made = pod["spec"], {}
    volumes = {each["name"]: each for each in spec["volumes"]}
    tls = certificates.make(folder / "issued", name="train").variables
    for mount in spec["containers"][0]["volumeMounts"]:
        path, secret = mount["mountPath"], volumes[mount["name"]].get("secret")
        if secret is None:
            continue
        made[path] = folder / mount["name"]
        made[path].mkdir()
        named = {Path(value).name: name for name, value in environment(pod).items() if value.startswith(path)}
        for file, name in {"token": "", **named}.items():
            target = made[path] / file
            if name in tls:
                shutil.copyfile(tls[name], target)
            else:
                target.write_text("0123456789abcdef0123456789abcdef")
            target.chmod(secret.get("defaultMode", SECRET_MODE))
    return made


@pytest.mark.parametrize(
    ("pod", "program"),
    [
        pytest.param(jobset().pods[0][0], program_of_the_readme(), id="jobset", marks=pytest.mark.exhaustive),
        pytest.param(
            pytorchjob().pods[0][0], program_of_the_readme(), id="pytorchjob", marks=pytest.mark.exhaustive
        ),
        pytest.param(pod_with_prometheus(), program_of_the_comment(), id="with-prometheus"),
    ],
)
def test_two_pods_meet_and_answer_for_each_other(pod: dict[str, Any], program: str, tmp_path: Path) -> None:
    """With the command, the environment and the files that the manifest gives to two of its pods."""
    folders = folders_of(pod, tmp_path)

    def here(text: str) -> str:
        for path, made in folders.items():
            text = text.replace(path, str(made))
        return text

    assert "port=9400" in program
    script = tmp_path / "train.py"
    script.write_text(here(program).replace("port=9400", "port=0") + SEES_ALL)
    assert pod["spec"]["containers"][0]["command"] == ["python", script.name]
    variables = {name: here(value) for name, value in environment(pod).items() if name != "DIST2_DUMP"}
    variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": POD_ADDRESS, "MASTER_PORT": str(unused_port())}
    variables["POD_IP"] = POD_ADDRESS
    of_ranks = [{"RANK": str(rank), "DIST2_HOST_ID": f"pod {rank}"} for rank in range(2)]
    pods = [start([*warm_python(), script], **{**variables, **each}) for each in of_ranks]
    try:
        said = [each.communicate(timeout=40) for each in pods]
    finally:
        for each in pods:
            each.kill()
    for output, errors in said:
        assert output.startswith(f"[2.0, 2.0] https://{POD_ADDRESS}:"), errors
