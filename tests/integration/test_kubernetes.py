"""The manifests for Kubernetes are consistent, and set variables that dist2 reads. No cluster is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from support.programs import ROOT

from dist2.runtime.config import VARIABLES, Config

FOLDER = ROOT / "examples" / "kubernetes"
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
