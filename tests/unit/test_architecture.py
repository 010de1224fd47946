"""There is no circle of imports: each module can be read, tested and moved without those that import it.

The directions between the rooms are the contracts of import-linter (pyproject.toml). Here every import counts, also one
that is for types alone.
"""

from __future__ import annotations

import grimp
import pytest


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    components: list[set[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for imported in sorted(imports[module]):
            if imported not in number:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in path:
                lowest[module] = min(lowest[module], number[imported])
        if lowest[module] == number[module]:
            component = set(path[path.index(module) :])
            del path[path.index(module) :]
            if len(component) > 1:
                components.append(component)

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return components


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [{"a", "b", "c"}]),
        ({"a": {"b", "c"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}, [{"a", "b"}, {"c", "d"}]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
    ],
)
def test_a_circle_is_seen(imports: dict[str, set[str]], expected: list[set[str]]) -> None:
    assert sorted(circles(imports), key=min) == expected


def test_no_modules_need_each_other() -> None:
    graph = grimp.build_graph("notify", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200, "the graph holds the whole product"
    assert circles(imports) == []
