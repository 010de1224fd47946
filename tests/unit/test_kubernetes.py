"""The manifest of an audit on Kubernetes, checked without a cluster: by the schemas of its objects, by the names of
settings in Spark's own library, and by the flags of the command. No pod has been started with it.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from notify.cli.audit import group as audits

MANIFEST = Path("docs/kubernetes/audit.yaml")
VERSION = "1.33"


def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def container() -> dict[str, Any]:
    (job,) = [each for each in objects() if each["kind"] == "CronJob"]
    (only,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_the_objects_fit_the_schemas() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kinds = []
    for each in objects():
        kubernetes_validate.validate(each, VERSION, strict=True)
        kinds.append(each["kind"])
    assert kinds == ["ServiceAccount", "Role", "RoleBinding", "ConfigMap", "PersistentVolumeClaim", "CronJob"]
    wrong = objects()[-1]
    wrong["spec"]["jobTemplate"]["spec"]["backoffLimits"] = 0
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_names_that_objects_use_are_those_of_others() -> None:
    named = {(each["kind"], each["metadata"]["name"]) for each in objects()}
    pod = objects()[-1]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert ("ServiceAccount", pod["serviceAccountName"]) in named
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in named
        else:
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in named
    mounted = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_command_takes_the_flags() -> None:
    command = get_command(audits).commands["run"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    given = [argument.partition("=")[0] for argument in container()["args"]]
    assert container()["command"] == ["notify", "audit", "run"] and set(given) <= known
    variables = {variable for parameter in command.params for variable in [parameter.envvar] if variable}
    own = {entry["name"] for entry in container()["env"] if entry["name"].startswith("NOTIFY_")}
    assert own <= variables
    # Kubernetes puts in the values of variables that stand before, and leaves others as they are written.
    before: list[str] = []
    for entry in container()["env"]:
        assert set(re.findall(r"\$\((\w+)\)", entry.get("value", ""))) <= set(before), entry
        before.append(entry["name"])


def test_spark_knows_the_settings() -> None:
    pyspark = pytest.importorskip("pyspark")
    jars = Path(pyspark.__file__).parent / "jars"
    names = b"".join(
        zipfile.ZipFile(jar).read(entry)
        for pattern in ("spark-kubernetes_*.jar", "spark-core_*.jar")
        for jar in jars.glob(pattern)
        for entry in zipfile.ZipFile(jar).namelist()
        if entry.endswith(("k8s/Config$.class", "internal/config/package$.class"))
    )
    (settings,) = [each["data"]["spark-defaults.conf"] for each in objects() if each["kind"] == "ConfigMap"]
    keys = [line.split()[0] for line in settings.splitlines()]
    prefixes = ("spark.kubernetes.executor.secretKeyRef.",)
    assert len(keys) == 8
    for key in keys:
        name = next((prefix for prefix in prefixes if key.startswith(prefix)), key)
        assert name.encode() in names, f"Spark has no setting {key}"
