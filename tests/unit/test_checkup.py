"""The answers of a database about itself, as doctor understands them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from notify.storage.sql import checkup


class Said:
    """A connection to a node of Galera, by its variables and its state."""

    dialect = SimpleNamespace(name="mysql")

    def __init__(self, **variables: str) -> None:
        self._variables = variables

    def exec_driver_sql(self, statement: str) -> Any:
        return self._variables.items() if "VARIABLES" in statement else {"wsrep_cluster_size": "3"}.items()


@pytest.mark.parametrize(
    ("read_only", "takes_writes"), [("OFF", True), ("ON", False), ("NO_LOCK", False), ("NO_LOCK_NO_ADMIN", False)]
)
def test_a_node_that_is_read_only_in_any_way_takes_no_writes(read_only: str, takes_writes: bool) -> None:
    node = checkup.node(Said(wsrep_on="ON", read_only=read_only), "here")  # type: ignore[arg-type]
    assert node is not None and (node.size, node.takes_writes) == (3, takes_writes)
