"""Writes the parts of the documentation that the code gives: docs/commands.md, and tables of other pages.

`make reference` writes it; a test compares. A table is found in its page by its first line.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from notify.kafka import rights
from notify.runtime.measures import MEASURES
from notify.server.app import App
from notify.server.latency import KINDS
from notify.server.management import Management
from notify.server.metrics import COUNTERS, HELP
from notify.server.settings import Settings
from notify.spark.judge.findings import FINDINGS
from notify.storage.memory import MemoryStore
from tests.support import command_page

DOCS = Path(__file__).parents[2] / "docs"


def pages() -> dict[Path, str]:
    """Each page with generated parts, as it should be."""
    reference = DOCS / "reference.md"
    tables = {
        reference: [_settings(), _admin_routes(), _metrics(), _histograms(), _measures()],
        DOCS / "audit-findings.md": [_findings()],
        DOCS / "kafka-rights.md": [_rights_at_kafka()],
    }
    return {command_page.PAGE: command_page.page()} | {
        path: _with_tables(path.read_text(), of_page) for path, of_page in tables.items()
    }


def _with_tables(text: str, tables: list[list[str]]) -> str:
    """The text of a page with these tables in place of those that begin alike. Raises AssertionError."""
    for table in tables:
        parts = re.split(rf"^{re.escape(table[0])}\n(?:\|.*\n)+", text, flags=re.MULTILINE)
        assert len(parts) == 2, f"a page has {len(parts) - 1} tables that begin with {table[0]}"
        text = f"{parts[0]}{chr(10).join(table)}\n{parts[1]}"
    return text


def _settings() -> list[str]:
    rows = ["| setting | default | bound | |", "|---|---|---|---|"]
    for f in dataclasses.fields(Settings):
        low, high = f.metadata["low"], f.metadata["high"]
        bound = f"{low:,.10g} to {high:,.10g}" if low is not None else ""
        rows.append(f"| `{f.name}` | `{f.default}` | {bound} | {f.metadata['doc']} |")
    return rows


def _admin_routes() -> list[str]:
    """Every admin route, with the first sentence of what it does."""
    rows = ["| route under `/v1/admin` | |", "|---|---|"]
    for path, operations in sorted(Management(App(Settings(), MemoryStore)).fastapi.openapi()["paths"].items()):
        if path.startswith("/v1/admin/"):
            for method, operation in sorted(operations.items()):
                text = re.split(r"(?<=[.])\s", operation["description"].replace("\n", " "))[0]
                rows.append(f"| `{method.upper()} {path.removeprefix('/v1/admin/')}` | {text} |")
    return rows


def _metrics() -> list[str]:
    rows = ["| metric | |", "|---|---|"]
    return rows + [f"| `notify_{name}_total` | {HELP[name]} |" for name in COUNTERS]


def _histograms() -> list[str]:
    rows = ["| histogram | |", "|---|---|"]
    return rows + [f"| `notify_{kind.name}_seconds{{{kind.label}}}` | {kind.text} |" for kind in KINDS]


def _measures() -> list[str]:
    rows = ["| metric of OpenTelemetry | unit | |", "|---|---|---|"]
    for name, unit, attributes, text in MEASURES:
        rows.append(f"| `{name}{{{', '.join(attributes)}}}` | {unit.strip('{}')} | {text} |".replace("{}`", "`"))
    return rows


def _findings() -> list[str]:
    rows = ["| class | what it means for the business | what to do |", "|---|---|---|"]
    return rows + [f"| {f.name} | {f.meaning} | {f.action} |" for f in FINDINGS]


def _rights_at_kafka() -> list[str]:
    rows = ["| role | resource | name | operations | for |", "|---|---|---|---|---|"]
    for needs in (
        rights.of_bridge(), rights.of_consumer(), rights.of_server(), rights.of_decider(), rights.of_sweep(),
        rights.of_audit(),
    ):  # fmt: skip
        for need in needs.needs:
            rows.append(f"| {needs.role} | {need.kind} | `{need.name}` | {', '.join(need.operations)} | {need.why} |")
    return rows


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
