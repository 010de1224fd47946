"""Errors of a PostgreSQL are understood in its own language (`lc_messages`), as far as no SQLSTATE comes with them."""

from __future__ import annotations

import psycopg
import pytest

from notify.binlog_bridge.errors import Purged, Unfit
from notify.binlog_bridge.postgresql.replication import ending, refusal


@pytest.mark.parametrize(
    "text",
    [
        'publication "notify_shop" does not exist',
        "Publikation »notify_shop« existiert nicht",
        "la publication « notify_shop » n'existe pas",
        'パブリケーション"notify_shop"は存在しません',
    ],
)
def test_a_missing_publication(text: str) -> None:
    """Taken for a damaged file, it was tried five times, and the remedy was not said."""
    found = ending(psycopg.errors.UndefinedObject(text))
    assert isinstance(found, Unfit) and "publication was dropped" in str(found) and "--backfill" in str(found)


@pytest.mark.parametrize("kind", [psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState])
@pytest.mark.parametrize(
    "text",
    [
        'replication slot "notify_shop" does not exist',
        "Replikations-Slot »notify_shop« existiert nicht",
        "le slot de réplication « notify_shop » n'existe pas",
    ],
)
def test_a_missing_slot(text: str, kind: type[psycopg.Error]) -> None:
    assert isinstance(refusal(kind(text)), Purged)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("FATAL:  kein pg_hba.conf-Eintrag für Replikationsverbindung von Host »::1«", "a line for its database"),
        ("ВАЖНО:  в pg_hba.conf нет записи, разрешающей подключение для репликации", "a line for its database"),
        (
            "FATAL:  Anzahl angeforderter Standby-Verbindungen überschreitet max_wal_senders (aktuell 0)",
            "raise max_replic",
        ),
    ],
)
def test_a_refused_connection(text: str, remedy: str) -> None:
    """Such an error has a text only. It was tried again for ever."""
    found = refusal(psycopg.OperationalError(text))
    assert isinstance(found, Unfit) and remedy in str(found)
