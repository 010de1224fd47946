"""The short form of `make crash-proxy`."""

from __future__ import annotations

from pathlib import Path

import pytest

from notify.testing.reachable import NotAvailable
from tests.crash.proxy import run


@pytest.mark.crash
def test_a_shop_behind_nginx_goes_on_while_its_server_is_killed(tmp_path: Path) -> None:
    try:
        seen, wrong = run(tmp_path, 3, 0.5)
    except NotAvailable as reason:
        pytest.skip(str(reason))
    assert not wrong and seen.kills == 3
