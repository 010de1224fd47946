"""The documentation's links, its commands, and the site.

tests/unit/test_documented.py looks for what is documented nowhere.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from notify.cli import main as cli
from notify.errors import InvalidRequest
from notify.server.settings import environment_name, load

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference.md"


def test_the_settings_of_kafka_that_are_refused_are_documented() -> None:
    pytest.importorskip("confluent_kafka")
    from notify.kafka.cluster import OWN_SETTINGS

    text = (ROOT / "docs" / "kafka-rights.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    missing = [n for n, why in OWN_SETTINGS.items() if not any(f"`{n}`" in row and f"| {why} |" in row for row in rows)]
    assert not missing


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_compose_file_starts_what_exists() -> None:
    """Each command and flag in docker-compose.yml exists. The test needs no Docker engine."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    assert {"mysql", "server-1", "server-2", "server-3", "queue", "bridge", "kafka-3"} <= services.keys()
    command = cli.command()
    for name, service in services.items():
        if service.get("image") != "notify:local":
            continue
        words = service["command"]
        if "entrypoint" in service:
            words = shlex.split(words[0].partition("notify ")[2])
        subcommand: Any = command
        while words and words[0] in getattr(subcommand, "commands", {}):
            subcommand = subcommand.commands[words[0]]
            words = words[1:]
        assert subcommand is not command, name
        options = {option for parameter in subcommand.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, name
    assert "--binlog-row-metadata=FULL" in services["mysql"]["command"]


def _documented_commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every `notify …` and `make …` in the README's and the docs' blocks and code spans."""
    documented = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`((?:notify|make) [^`\n]+)`", text)
        for line in lines:
            command = re.match(r"\$? ?(?:[A-Z_]+=\S+ )*((?:notify|make) .+)", line.strip())
            if command is not None:
                words = re.split(r" (?:#|&&|\||>|&$)", command[1].replace("…", ""))[0]
                documented.append((page.name, shlex.split(words)))
    return documented


def test_documented_commands_exist() -> None:
    """Each command, subcommand and flag that a reader may copy exists. Placeholders in capitals stand for arguments."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    documented = _documented_commands()
    assert len(documented) > 100
    wrong = []
    notify: Any = cli.command()
    for page, words in documented:
        if words[0] == "make":
            if words[1] not in targets:
                wrong.append((page, words))
            continue
        command = notify
        rest = words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest[0]]
            rest = rest[1:]
        if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            wrong.append((page, words))
            continue
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        if not given <= options:
            wrong.append((page, [*words, f"has no {given - options}"]))
    assert wrong == []


def test_flag_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "notify.toml"
    file.write_text('port = 1\nshard = "file"\nhost = "::1"\n')
    environ = {"NOTIFY_PORT": "2", "NOTIFY_SHARD": "environment"}
    settings = load({"port": 3, "shard": None}, file, environ)
    assert (settings.port, settings.shard, settings.host) == (3, "environment", "::1")


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        ({"NOTIFY_PORT": "x"}, "not an integer"),
        ({"NOTIFY_PORT": "70000"}, "from 0 to 65,535"),
        ({"NOTIFY_CREATE_TOPICS": "2"}, "true or false"),
    ],
)
def test_settings_that_cannot_be(environ: dict[str, str], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        load({}, None, environ)


def test_a_file_with_an_unknown_setting(tmp_path: Path) -> None:
    file = tmp_path / "notify.toml"
    file.write_text("nope = 1\n")
    with pytest.raises(InvalidRequest, match="no setting 'nope'"):
        load({}, file, {})


def test_every_setting_has_an_environment_name() -> None:
    assert environment_name("data_dir") == "NOTIFY_DATA_DIR"


def test_the_site_has_every_page_that_its_menu_names() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"^ +- .*: ([\w/-]+\.md)$", text, re.MULTILINE))
    made = {"index.md", "changelog.md", "format.md"}  # by docs/site.py, of files elsewhere
    assert len(named) > 40 and {name for name in named - made if not (ROOT / "docs" / name).exists()} == set()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert not {page for page in pages - named - {"progress.md"} if not page.startswith("adr/")}


@pytest.mark.long
def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    # Not --quiet: it hides warnings also from --strict, which then builds a site with broken links.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.name for path in (tmp_path / "site").glob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} - {"progress.html"} <= pages


def test_the_examples_of_the_document_are_requests() -> None:
    from notify.server.data.openapi import EXAMPLES, ROUTES

    for path, _, request, _ in ROUTES:
        assert msgspec.convert(EXAMPLES[path], request)


def test_the_files_that_the_architecture_names_are_there() -> None:
    """The page names a file from the tree's root, or from its room."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = ["", "notify", "notify/client", "notify/server", "notify/server/delivery", "storage/log"]
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py|\.md|\.toml))`", text))
    assert len(named) > 80
    assert not [name for name in sorted(named) if not any((ROOT / room / name).exists() for room in rooms)]


def test_the_options_of_the_spark_source_are_documented() -> None:
    pytest.importorskip("pyspark")
    from notify.spark.messages.columns import TYPES
    from notify.spark.messages.options import NAMES

    rows = [line.split("|")[1] for line in REFERENCE.read_text().splitlines() if line.startswith("| `")]
    assert [name for name in NAMES if not any(f"`{name}`" in row for row in rows)] == []
    guide = (ROOT / "docs" / "lakehouse.md").read_text()
    columns = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]
    assert [name for name in TYPES if not any(f"`{name}`" in row for row in columns)] == []
