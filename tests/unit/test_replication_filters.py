"""Which tables a replica leaves out by the filters of MySQL and MariaDB."""

from __future__ import annotations

from typing import Any

import pytest

from notify.storage.sql.replication_filters import left_out

TABLES = ("half_message", "notify_inbox")


@pytest.mark.parametrize(
    ("told", "channels"),
    [
        ("", [{}]),
        ("", [{"Replicate_Do_DB": "bank,Shop"}]),
        ("Replicate_Do_DB bank", [{"Replicate_Do_DB": "bank"}]),
        ("Replicate_Ignore_DB shop", [{"Replicate_Ignore_DB": "bank, shop"}]),
        ("", [{"Replicate_Do_DB": "shop", "Replicate_Ignore_DB": "shop"}]),
        ("shop.notify_inbox (Replicate_Do_Table", [{"Replicate_Do_Table": "shop.half_message,shop.orders"}]),
        ("", [{"Replicate_Do_Table": "shop.half_message,shop.notify_inbox"}]),
        ("Replicate_Ignore_Table shop.half_message", [{"Replicate_Ignore_Table": "shop.half_message"}]),
        ("", [{"Replicate_Ignore_Table": "shop.orders"}]),
        ("", [{"Replicate_Do_Table": "shop.half_message", "Replicate_Wild_Do_Table": "shop.notify\\_%"}]),
        ("shop.half_message", [{"Replicate_Wild_Do_Table": "shop.notify\\_%"}]),
        ("Replicate_Wild_Ignore_Table shop.%", [{"Replicate_Wild_Ignore_Table": "bank.%,shop.%"}]),
        ("", [{"Replicate_Wild_Ignore_Table": "sho_.orders", "Replicate_Do_DB": ""}]),
        ("", [{"Replicate_Wild_Do_Table": "shop.%", "Replicate_Wild_Ignore_Table": "shop.%"}]),
        ("", [{"Replicate_Do_DB": "bank"}, {"Replicate_Do_DB": "shop"}]),
        ("Replicate_Ignore_Table", [{"Replicate_Ignore_Table": "shop.notify_inbox"}, {}]),
        ("transactions (Replicate_Ignore_Domain_Ids 2)", [{"Replicate_Ignore_Domain_Ids": "2"}]),
    ],
)  # fmt: skip
def test_filters_leave_tables_out(told: str, channels: list[dict[str, Any]]) -> None:
    why = left_out(channels, "shop", TABLES)
    assert told in why and bool(told) == bool(why), why
