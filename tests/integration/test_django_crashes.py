"""The crash explorer kills a service on Django at each statement and COMMIT of Django's own connections."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, transaction

from notify.client import Consumer, Message
from notify.client.django import DjangoInbox, DjangoProducer
from notify.errors import InvalidRequest
from notify.protocol.message import ReceivedMessage
from notify.testing import Exploration, Finding, Process, explore
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database
from tests.support.django_project import shop as shops

CAUSES = "SELECT item FROM django_project_order"
EFFECTS = "SELECT item FROM django_project_points"
Place = Callable[[str, DjangoProducer], object]


@pytest.fixture(params=["sqlite", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("postgresql", "mysql"))])
def alias(request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    with empty_database(request.param, database_urls, tmp_path) as url:
        with shops.added(f"crashes_{uuid.uuid4().hex[:8]}", shops.database_of(url)) as alias:
            shops.make_tables(alias)
            yield alias


def place(alias: str, producer: DjangoProducer) -> None:
    with transaction.atomic(using=alias):
        shops.add(alias, "book")
        producer.send(Message("order.placed", "book"))


def place_early(alias: str, producer: DjangoProducer) -> None:
    """The planted fault: the message is published before the commit."""
    with transaction.atomic(using=alias):
        shops.add(alias, "book")
        producer.publish(Message("order.placed", "book"))


def place_late(alias: str, producer: DjangoProducer) -> None:
    """The planted fault: the message is published after the commit."""
    with transaction.atomic(using=alias):
        shops.add(alias, "book")
        transaction.on_commit(lambda: producer.publish(Message("order.placed", "book")), using=alias)


def place_whatever_happens(alias: str, producer: DjangoProducer) -> None:
    """The planted fault: an error of the commit is swallowed."""
    try:
        place(alias, producer)
    except DatabaseError:
        return


def explored(alias: str, place: Place, **options: Any) -> Exploration:
    from tests.support.django_project.models import Points

    def shop(process: Process) -> None:
        producer = DjangoProducer(process.url, group="orders", using=alias, half_timeout=PATIENCE_SECONDS)
        consumer = Consumer(process.url, group="points", inbox=DjangoInbox(alias))

        @consumer.subscribe("order.placed", start="earliest")
        def book(message: ReceivedMessage) -> None:
            Points.objects.using(alias).create(item=message.text)

        process.run(producer, consumer)
        process.act(place, alias, producer)

    given = {"causes": CAUSES, "effects": EFFECTS, "database": f"django:{alias}", "seconds": PATIENCE_SECONDS}
    return explore(shop, **(given | options))


def found(explored: Exploration, name: str) -> Finding:
    """The shortest finding, which has this name, as all others."""
    assert {finding.name for finding in explored.findings} == {name}, explored
    assert explored.shortest is not None and explored.shortest.fault is not None
    return explored.shortest


def test_each_step_of_a_careful_shop_is_tried(alias: str) -> None:
    seen = explored(alias, place)
    assert seen.findings == () and seen.missed == (), seen
    whats = [step.what.replace("`", '"') for step in seen.steps]
    for what in (
        'before INSERT INTO "django_project_order"', "before the half of", "after the half of",
        "before COMMIT", "after COMMIT", "before the outcome of", "before the handler of",
        'before INSERT INTO "django_project_points"', "before ack", "after ack",
    ):  # fmt: skip
        assert any(met.startswith(what) for met in whats), (what, whats)
    assert [sum(table in met for met in whats) for table in ("half_message", "notify_inbox")] == [1, 1], whats
    # Two transactions commit: the order's, and the inbox's. Each COMMIT also fails in two ways.
    assert seen.runs == len(seen.steps) + 4
    assert items(alias) == [], "the database is as it was before the exploration"


def items(alias: str) -> list[str]:
    from tests.support.django_project.models import Order

    return list(Order.objects.using(alias).values_list("item", flat=True))


@pytest.mark.long
def test_a_careful_shop_of_real_processes(alias: str) -> None:
    seen = explored(alias, place, real=True)
    assert seen.findings == () and seen.missed == (), seen
    assert any("django_project_order" in step.what for step in seen.steps)


@pytest.mark.long
def test_a_message_that_is_published_before_the_commit_is_a_ghost(alias: str) -> None:
    finding = found(explored(alias, place_early), "GHOST")
    assert finding.fault is not None and finding.fault.step.what == "after publishing order.placed"


@pytest.mark.long
def test_a_message_that_is_published_after_the_commit_is_lost(alias: str) -> None:
    finding = found(explored(alias, place_late), "LOST")
    assert finding.fault is not None and finding.fault.step.what == "after COMMIT"
    assert finding.fault.step.code == "with transaction.atomic(using=alias):"


@pytest.mark.long
def test_an_error_of_the_commit_that_is_swallowed_loses_the_order(alias: str) -> None:
    finding = found(explored(alias, place_whatever_happens), "LOST")
    assert finding.fault is not None and not finding.fault.is_kill
    assert "the act returned as if it had succeeded" in finding.detail


def test_effects_may_be_read_with_the_orm(alias: str) -> None:
    """The explorer reads them in its own thread, whose statements are no steps of the service's."""

    def shop(process: Process) -> None:
        process.act(shops.add, alias, "book")

    seen = explore(shop, causes=lambda _: items(alias), effects=lambda _: items(alias), database=f"django:{alias}")
    assert seen.findings == () and seen.missed == () and seen.runs, seen


def test_a_database_in_memory_is_refused() -> None:
    shops.set_up()
    with pytest.raises(InvalidRequest, match="in memory"):
        explore(lambda process: process.engine, database="django:default")
