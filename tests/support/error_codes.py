"""Every error code of the product, found in its sources: what a class, a call or an item gives as its `code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from notify import errors

ROOT = Path(__file__).parents[2]
OUTSIDE = ("notify/cli/bench/", "notify/cli/demo_shop/", "notify/testing/", "notify/storage/", "notify/spark/")
"""Helpers of tests, and the links to the two folders that are read at the top level."""
POSITION = 1
"""`code` is the second argument of every error, and of `error_of`."""
PASSED_ON = re.compile(r"(\w+\.)?code(\[:64\])?|row\['code'\]|codes\.get\(.*")
"""Expressions that give on a code which was found where it was made."""


def product() -> Iterator[Path]:
    """The files whose errors users meet."""
    for folder in ("notify", "storage", "spark"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not str(path.relative_to(ROOT)).startswith(OUTSIDE):
                yield path


def classes() -> dict[str, int]:
    """The status of each code that a class of notify.errors has."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.NotifyError)]
    return {kind.code: kind.status for kind in kinds}


def codes() -> tuple[set[str], set[str]]:
    """All codes, and the expressions whose codes cannot be read from the source."""
    trees = [ast.parse(text) for path in product() if "code" in (text := path.read_text()) or "error" in text.lower()]
    makers = {name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"error_of", "stale_epoch"}
    makers |= {
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base) for base in node.bases} & makers
        and "__init__" not in {getattr(statement, "name", "") for statement in node.body}
    }
    everywhere = {name: value for tree in trees for name, value in _constants(tree).items()}
    known: set[str] = set()
    unknown: set[str] = set()
    for tree in trees:
        constants = {name: everywhere[name] for name in _imported(tree) & everywhere.keys()} | _constants(tree)
        for expression in _given(tree, makers - {"stale_epoch"}):
            for value in _values(expression):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    known.add(value.value)
                elif isinstance(value, ast.Name) and value.id in constants:
                    known.add(constants[value.id])
                elif isinstance(value, ast.JoinedStr):
                    known.add(re.sub(r"\{.*\}", "NNN", ast.unparse(value).strip("f'\"")))
                elif not isinstance(value, ast.Constant) and not PASSED_ON.fullmatch(ast.unparse(value)):
                    unknown.add(ast.unparse(value))
    return known, unknown


def _constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a module's names stand for."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _imported(tree: ast.Module) -> set[str]:
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def _given(tree: ast.Module, makers: set[str]) -> Iterator[ast.expr]:
    """The expressions that a module gives as codes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "code" and name != "Exit")
            if name in makers and isinstance(node.func, ast.Name) and len(node.args) > POSITION:
                yield node.args[POSITION]
        elif isinstance(node, ast.ClassDef):
            yield from _class_codes(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            if any(isinstance(target, ast.Name) and target.id == "codes" for target in node.targets):
                yield from node.value.values
        elif isinstance(node, ast.Dict):
            yield from (
                value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and key.value == "code"
            )


def _class_codes(node: ast.ClassDef) -> Iterator[ast.expr]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and any(ast.unparse(target) == "code" for target in statement.targets):
            yield statement.value


def _values(expression: ast.expr) -> Iterable[ast.expr]:
    """The values that an expression may have."""
    if isinstance(expression, ast.IfExp):
        return [expression.body, expression.orelse]
    if isinstance(expression, ast.BoolOp):
        return expression.values
    return [expression]
