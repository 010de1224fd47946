"""A command says who ran it, whatever the system knows of its user."""

from __future__ import annotations

import getpass
import os

import pytest

from notify.admin_api.actor import signed


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 1234"), OSError("No username set")])
def test_a_user_without_a_name_signs_with_a_number(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers often run as a user that their system does not list; each write ended with a traceback there."""

    def fail() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", fail)
    assert signed("looked at") == f"looked at (uid {os.getuid()})"
