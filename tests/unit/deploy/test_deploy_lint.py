"""deploy/ before the checkers of others: hadolint, schemas of compose and Kubernetes, yamllint, systemd-analyze."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.private_swarm import DEPLOY

KUBERNETES = ("1.31", "1.37")
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
EXPOSURE = 2.0
"""systemd's own measure, 0 (shut) to 10 (open)."""


def passes(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=DEPLOY, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dockerfiles_before_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    assert hadolint is not None, "pip install -e '.[dev]' brings it"
    passes(hadolint, *map(str, sorted((DEPLOY / "docker").iterdir())))


def test_compose_before_its_schema() -> None:
    passes(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml")


@pytest.mark.needs_program("yamllint", "yamllint")
def test_every_yaml_file_before_yamllint() -> None:
    passes("yamllint", "--strict", "-c", ".yamllint", "compose.yaml", "kubernetes")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_before_kubernetes_schemas(manifest: Path) -> None:
    if manifest.name == "kustomization.yaml":
        return  # of no Kubernetes schema; the next test reads it
    for document in documents(manifest):
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_kustomization_names_what_is_there() -> None:
    said = documents(DEPLOY / "kubernetes" / "kustomization.yaml")[0]
    named = set(said["resources"])
    assert named | {"kustomization.yaml", "ingress.yaml"} == {path.name for path in MANIFESTS}
    objects = [document for name in named for document in documents(DEPLOY / "kubernetes" / name)]
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment"]
    containers = [container for pod in pods for container in pod["containers"]]
    assert {container["image"] for container in containers} == {image["name"] for image in said["images"]}
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
            assert "memory" in container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in objects if one["kind"] == "Deployment"]
    for one in objects:
        if one["kind"] == "Service":
            assert one["spec"]["selector"] in labels
        elif one["kind"] == "NetworkPolicy":
            assert one["spec"]["podSelector"]["matchLabels"] in labels


@pytest.mark.needs_program("systemd-analyze", "systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_units_before_systemd(tmp_path: Path, unit: Path) -> None:
    text, count = re.subn(r"(?m)^(ExecStart=)\S+", r"\1/bin/true", unit.read_text())
    assert count == 1
    name = unit.name.replace("@.", "@node-1.")
    (tmp_path / name).write_text(text.replace("%i", "node-1"))
    verified = subprocess.run(
        ("systemd-analyze", "verify", "--man=no", str(tmp_path / name)), capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    said = passes("systemd-analyze", "security", "--offline=true", "--no-pager", str(tmp_path / name))
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", said)
    assert exposure is not None, said
    assert float(exposure[1]) <= EXPOSURE
