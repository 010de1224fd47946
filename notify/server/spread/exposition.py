"""Metrics of several workers in one text: each sample with the worker's name as a label, each metric in one place."""

from __future__ import annotations

from collections.abc import Mapping


def joined(texts: Mapping[str, str]) -> str:
    """One text of metrics; `texts`: each worker's answer at `/metrics`, by its name."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                _, kind, family, *_ = line.split(" ", 3)
                family_heads = heads.setdefault(family, [])
                if not any(head.startswith(f"# {kind} ") for head in family_heads):
                    family_heads.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, worker))
    return "".join("\n".join([*heads[family], *samples.get(family, ())]) + "\n" for family in heads)


def _labelled(line: str, worker: str) -> str:
    brace, space = line.find("{"), line.find(" ")
    if 0 <= brace < space:
        return f'{line[: brace + 1]}worker="{worker}",{line[brace + 1 :]}'
    return f'{line[:space]}{{worker="{worker}"}}{line[space:]}'
