"""The manifests for servers on Kubernetes, checked without a cluster.

They fit the schemas of their objects, and the flags, settings, ports, probes and metrics of the code. KEDA's object has
no schema in a package: its fields are checked here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from notify.cli import main
from notify.cli.audit import group as audits
from notify.runtime import alive
from notify.server import exposition
from notify.server.data.request import PROBES
from notify.server.settings import Settings, environment_name

FOLDER = Path(__file__).parents[2] / "docs" / "kubernetes"
VERSION = "1.33"
OURS = ("log.yaml", "servers.yaml", "relay.yaml", "bridge.yaml", "consumer.yaml", "network.yaml", "monitoring.yaml")
FOREIGN = ("keda.sh/v1alpha1", "monitoring.coreos.com/v1")
"""Kinds of which no package has the schemas."""
SDK = {"NOTIFY_URL", "NOTIFY_TOKEN_FILE", "NOTIFY_CA", "NOTIFY_DSN", "NOTIFY_STORAGE", alive.FILE}
"""Variables that the SDK and commands read beside a server's settings."""


def objects(*files: str) -> list[dict[str, Any]]:
    return [each for file in files for each in yaml.safe_load_all((FOLDER / file).read_text())]


def pods(*files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods' specifications by the names of what makes them."""
    for each in objects(*files):
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def containers(*files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in pods(*files):
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            yield f"{name}/{container['name']}", container


@pytest.mark.parametrize("file", OURS)
def test_objects_fit_the_schemas(file: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for each in objects(file):
        if each["apiVersion"] not in FOREIGN:
            kubernetes_validate.validate(each, VERSION, strict=True)


def test_applied_manifests_exist_and_name_one_image() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert kustomization["resources"] == ["log.yaml", "servers.yaml", "relay.yaml", "network.yaml"]
    assert [image["name"] for image in kustomization["images"]] == ["notify"]
    assert {container["image"] for _, container in containers(*OURS[:4])} == {"notify"}


def test_commands_take_the_flags_and_variables() -> None:
    settings = {environment_name(name) for name in Settings.__dataclass_fields__}
    seen = set()
    for name, container in containers(*OURS):
        words = container.get("command", [])
        if words[:1] == ["notify"]:
            command: Any = main.command()
            for word in words[1:]:
                command = command.commands[word]
            known = {option for parameter in command.params for option in parameter.opts}
            assert {argument.partition("=")[0] for argument in container.get("args", [])} <= known, name
            seen.add(" ".join(words))
        own = {entry["name"] for entry in container.get("env", []) if entry["name"].startswith("NOTIFY_")}
        assert own <= settings | SDK, name
    assert seen == {"notify serve", "notify storage upgrade", "notify relay", "notify bridge"}


def test_probes_ask_what_servers_answer() -> None:
    probed = 0
    for name, container in containers(*OURS):
        if container.get("command") != ["notify", "serve"]:
            continue
        (port,) = container["ports"]
        assert f"--port={port['containerPort']}" in container["args"], name
        paths = {}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            get = container[kind]["httpGet"]
            assert (get["port"], get["scheme"]) == (port["name"], "HTTPS"), name
            paths[kind] = get["path"]
        assert paths == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
        assert set(paths.values()) <= set(PROBES)
        probed += 1
    assert probed == 2


def test_services_lead_to_pods_and_ports() -> None:
    pods_by_label = {
        tuple(each["spec"]["template"]["metadata"]["labels"].items()): each
        for each in objects(*OURS)
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    announced = {
        entry["value"]
        for _, container in containers(*OURS)
        for entry in container.get("env", [])
        if entry["name"] == "NOTIFY_URL"
    }
    addresses = set()
    for service in [each for each in objects(*OURS) if each["kind"] == "Service"]:
        (made,) = [
            pod for labels, pod in pods_by_label.items() if set(service["spec"]["selector"].items()) <= set(labels)
        ]
        ports = {port["name"] for c in made["spec"]["template"]["spec"]["containers"] for port in c["ports"]}
        (port,) = service["spec"]["ports"]
        assert port["targetPort"] in ports
        addresses.add(f"https://{service['metadata']['name']}:{port['port']}")
    assert announced == addresses
    for _, container in containers(*OURS):
        for argument in [*container.get("args", []), *container.get("command", [])]:
            assert set(re.findall(r"https://notify-\w+:\d+", argument)) <= addresses


def test_volumes_and_secrets_are_there_and_documented() -> None:
    page = (FOLDER.parent / "kubernetes.md").read_text()
    for each in objects(*OURS):
        if each["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = each["spec"]["template"]["spec"]
        made = {volume["name"] for volume in pod.get("volumes", ())}
        made |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())}
        mounted = set()
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            mounted |= {mount["name"] for mount in container.get("volumeMounts", ())}
            for entry in container.get("env", ()):
                if "valueFrom" in entry:
                    reference = entry["valueFrom"]["secretKeyRef"]
                    row = next(line for line in page.splitlines() if line.startswith(f"| `{reference['name']}`"))
                    assert f"`{reference['key']}`" in row
        assert mounted == made, each["metadata"]["name"]


def test_pods_are_unprivileged_and_see_no_variables_of_services() -> None:
    """A Service named `notify` sets NOTIFY_PORT to an address."""
    for name, pod in pods(*OURS):
        assert pod["enableServiceLinks"] is False, name
        if name != "points":
            assert pod["securityContext"]["runAsNonRoot"] is True, name
            for container in [*pod.get("initContainers", ()), *pod["containers"]]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", name


def test_one_server_in_a_container() -> None:
    """docker-compose.one.yml: its command, its probe and what its comment says."""
    text = (FOLDER.parents[1] / "docker-compose.one.yml").read_text()
    (service,) = yaml.safe_load(text)["services"].values()
    word, *flags = service["command"]
    root: Any = main.command()
    assert {flag for flag in flags if flag.startswith("--")} <= {o for p in root.commands[word].params for o in p.opts}
    assert set(service["environment"]) <= {environment_name(name) for name in Settings.__dataclass_fields__} | SDK
    assert any(path in service["healthcheck"]["test"][-1] for path in PROBES)
    assert service["ports"] == ["127.0.0.1:7400:7400"], "its tokens come in the clear: this machine only"
    assert flags[flags.index("--data-dir") + 1] in re.findall(r"cat (\S+)/admin\.token", text)


def test_consumers_are_scaled_by_a_metric_that_exists() -> None:
    (scaled,) = [each for each in objects("consumer.yaml") if each["kind"] == "ScaledObject"]
    assert scaled["spec"]["scaleTargetRef"]["name"] in dict(pods("consumer.yaml"))
    assert scaled["spec"]["minReplicaCount"] < scaled["spec"]["maxReplicaCount"]
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["type"] == "prometheus" and set(trigger["metadata"]) == {
        "serverAddress", "query", "threshold", "activationThreshold",
    }  # fmt: skip
    (metric,) = re.findall(r"notify_\w+", trigger["metadata"]["query"])
    assert f'"{metric}"' in Path(exposition.__file__).read_text()


def test_a_mover_that_hangs_is_restarted(tmp_path: Path) -> None:
    """Relays and bridges had no probe. The probe is run here, with a file of its own."""
    for name, container in containers("relay.yaml", "bridge.yaml"):
        file = next(entry["value"] for entry in container["env"] if entry["name"] == alive.FILE)
        python, *words = container["livenessProbe"]["exec"]["command"]
        assert python == "python" and file.startswith("/tmp/"), name
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        command = [sys.executable, *(word.replace(file, str(tmp_path / "alive")) for word in words)]

        def is_alive(command: list[str] = command) -> bool:
            return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0

        (tmp_path / "alive").unlink(missing_ok=True)
        assert not is_alive()
        (tmp_path / "alive").touch()
        assert is_alive()
        os.utime(tmp_path / "alive", (time.time() - 90, time.time() - 90))
        assert not is_alive()
        assert alive.BEAT_SECONDS * 4 < 60


def labels_of(*files: str) -> list[dict[str, str]]:
    made = [each for each in objects(*files) if each["kind"] in ("Deployment", "StatefulSet")]
    return [each["spec"]["template"]["metadata"]["labels"] for each in made]


def test_policies_budgets_and_monitors_select_pods_that_exist() -> None:
    labels = labels_of(*OURS)
    ports = {c["ports"][0]["name"]: c["ports"][0]["containerPort"] for _, c in containers(*OURS) if "ports" in c}
    kinds = []
    for each in objects(*OURS):
        kind, spec = each["kind"], each["spec"]
        if kind not in ("NetworkPolicy", "PodDisruptionBudget", "PodMonitor"):
            continue
        kinds.append(kind)
        selector = spec["podSelector"] if kind == "NetworkPolicy" else spec["selector"]
        if "matchLabels" in selector:
            assert [pod for pod in labels if selector["matchLabels"].items() <= pod.items()], each["metadata"]["name"]
        for expression in selector.get("matchExpressions", ()):
            assert set(expression["values"]) <= {pod["app"] for pod in labels}
        for rule in spec.get("ingress", ()):
            assert {port["port"] for port in rule["ports"]} <= {7400, 7401} >= set(ports.values())
        for endpoint in spec.get("podMetricsEndpoints", ()):
            assert endpoint["port"] in ports and endpoint["scheme"] == "https" and endpoint["path"] == "/metrics"
            assert endpoint["authorization"]["credentials"]["name"] == "notify-tokens", "/metrics asks for a token"
            assert all(spec["jobLabel"] in pod for pod in labels if pod["app"] == selector["matchLabels"]["app"])
    assert sorted(kinds) == ["NetworkPolicy"] * 3 + ["PodDisruptionBudget"] * 3 + ["PodMonitor"] * 2


# --- the manifest of an audit, by the names in Spark's own library, too; no pod has been started with it -------------

MANIFEST = Path("docs/kubernetes/audit.yaml")


def audit_objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def container() -> dict[str, Any]:
    (job,) = [each for each in audit_objects() if each["kind"] == "CronJob"]
    (only,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_the_objects_fit_the_schemas() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kinds = []
    for each in audit_objects():
        kubernetes_validate.validate(each, VERSION, strict=True)
        kinds.append(each["kind"])
    assert kinds == ["ServiceAccount", "Role", "RoleBinding", "ConfigMap", "PersistentVolumeClaim", "CronJob"]
    wrong = audit_objects()[-1]
    wrong["spec"]["jobTemplate"]["spec"]["backoffLimits"] = 0
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_names_that_objects_use_are_those_of_others() -> None:
    named = {(each["kind"], each["metadata"]["name"]) for each in audit_objects()}
    pod = audit_objects()[-1]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
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
    (settings,) = [each["data"]["spark-defaults.conf"] for each in audit_objects() if each["kind"] == "ConfigMap"]
    keys = [line.split()[0] for line in settings.splitlines()]
    prefixes = ("spark.kubernetes.executor.secretKeyRef.",)
    assert len(keys) == 8
    for key in keys:
        name = next((prefix for prefix in prefixes if key.startswith(prefix)), key)
        assert name.encode() in names, f"Spark has no setting {key}"
