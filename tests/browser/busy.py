"""A server as an operator meets it: traffic, lag, a paused group, parked transactions, dead letters by cause."""

from __future__ import annotations

import json
from typing import Any

from notify.server.database import open_database
from notify.server.jobs.records import JobRecords
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.groups import Caller, subscribe
from tests.support.http import admin, post
from tests.support.transactions import half_request, new_id

ENVIRONMENT = {
    "NOTIFY_ALARM_EVERY_SECONDS": "0.2",
    "NOTIFY_ALARM_NO_CONSUMER_SECONDS": "1",
    "NOTIFY_CHECK_ATTEMPTS": "2",
    "NOTIFY_CHECK_BACKOFF_SECONDS": "0.1",
    "NOTIFY_WEBHOOK_HOSTS": "127.0.0.1:9",
    "NOTIFY_WEBHOOK_SECRET": "a secret of the tests",
    "NOTIFY_NAME": "shop, production",
}
CAUSES = (
    ("ValueError: no customer 4711 (at shop.points.account_of:41)", 9),
    ("sqlalchemy.exc.OperationalError: connection refused (at shop.points.add:57)", 4),
    ("the body does not fit OrderPlaced: `item` is missing (at $)", 2),
    ("no such customer", 1),
)
"""Reasons of dead letters, and how many there are of each."""


TRACE = """Traceback (most recent call last):
  File "/srv/shop/points.py", line 41, in account_of
    raise ValueError(f"no customer {number}")
"""


class Busy:
    """A shop's server: its topics, groups, transactions and records."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.url = server.url
        self._topics()
        self._groups()
        self._messages(300)
        self._deliveries()
        self.parked = self._parked()
        self.doubtful = [self._half("orders", n) for n in range(3)]
        self._records()
        self.letter = self._open_letters()[0]

    def _topics(self) -> None:
        for topic, fields in {
            "order.placed": {"queues": 4},
            "order.paid": {"queues": 2, "retention": 86_400},
            "order.shipped": {},
            "invoice.created": {"ttl": 3_600, "backlog": 50_000, "backlog_policy": "refuse"},
            "mail.requested": {"flush": "async"},
            "stock.reserved": {},
        }.items():
            admin(self.url, "PUT", f"topics/{topic}", fields)

    def _groups(self) -> None:
        subscribe(self.url, "points", "order.placed", max_attempts=1)
        subscribe(self.url, "points", "order.paid", tags=["vip", "new"], retry_min=2, retry_max=60)
        subscribe(self.url, "mail", "mail.requested")
        subscribe(self.url, "stock", "order.placed", mode="ordered")
        subscribe(self.url, "accounting-of-the-northern-region", "invoice.created", mode="exclusive")
        subscribe(self.url, "reports", "order.*", mode="shared", start="earliest")

    def _messages(self, count: int) -> None:
        for topic, every in (("order.placed", 1), ("order.paid", 2), ("mail.requested", 2), ("invoice.created", 6)):
            messages = [
                {
                    "topic": topic,
                    "key": f"order-{n % 40}",
                    "tag": ("vip", "new", "bulk")[n % 3],
                    "headers": {"traceparent": f"00-{n:032x}-{n:016x}-01"},
                    "body": json.dumps({"order": n, "item": ("tea", "coffee", "chocolate")[n % 3], "price": n * 7}),
                }
                for n in range(0, count, every)
            ]
            post(self.url, "/v1/messages", {"messages": messages})

    def _deliveries(self) -> None:
        points = Caller(self.url, "points", "points-7d9f-1")
        for reason, count in CAUSES:
            got = points.receive("order.placed", wait=30, max=count)
            points.settle(got, "dead_letter", reason=reason, trace=TRACE + reason.partition(" (at ")[0])
        points.settle(points.receive("order.placed", wait=30, max=150))
        points.receive("order.placed", wait=30, max=12, lease=3600)  # it works on these
        Caller(self.url, "points", "points-7d9f-2").receive("order.paid", wait=30, max=3, lease=3600)
        mail = Caller(self.url, "mail", "mail-1")
        mail.settle(mail.receive("mail.requested", wait=30, max=100))
        mail.settle(mail.receive("mail.requested", wait=30, max=5), "retry", delay=3600, reason="the relay is busy")
        letters = Caller(self.url, "mail", "mail-2")
        letters.settle(letters.receive("mail.requested", wait=30, max=3), "dead_letter", reason=CAUSES[1][0])
        admin(self.url, "POST", "groups/stock/pause", {})

    def _half(self, group: str, number: int) -> str:
        name = new_id()
        body = json.dumps({"order": number, "item": "tea"})
        post(
            self.url,
            "/v1/transactions",
            half_request(group, name, topic="order.placed", key=f"order-{number}", body=body),
        )
        return name

    def _parked(self) -> list[str]:
        """Transactions whose producer answered every check with UNKNOWN."""
        names = [self._half("billing", n) for n in range(2)]

        def answered() -> bool:
            asked = {"producer_group": "billing", "instance": "billing-1", "wait": 1, "max": 100}
            for check in post(self.url, "/v1/checks/poll", asked)["checks"]:
                outcome = {
                    "id": check["id"],
                    "outcome": "UNKNOWN",
                    "check": check["token"],
                    "reason": "no row of it yet",
                }
                post(self.url, "/v1/transactions/outcomes", {"producer_group": "billing", "outcomes": [outcome]})
            return all(admin(self.url, "GET", f"transactions/{name}")["state"] == "PARKED" for name in names)

        eventually(answered, "the transactions to be parked")
        return names

    def _open_letters(self) -> list[str]:
        letters = admin(self.url, "GET", "groups/points/dead-letters")["messages"]
        return [m["id"] for m in letters if not (m["redriven"] or m["dropped"])]

    def _records(self) -> None:
        """Jobs, audits, credentials, revisions, rates, a webhook that fails and a silenced alarm."""
        hook = {"url": "http://127.0.0.1:9/hook", "batch": 10}
        self._write("PUT", "groups/reports/push", hook, "reports go to a service")
        daily = {"topic": "mail.requested", "body": '{"kind": "daily"}', "cron": "0 7 * * 1-5", "zone": "Europe/Berlin"}
        self._write("PUT", "schedules/daily-report", daily, "a report each working day")
        self._write("PUT", "limits", {"topics": {"mail.requested": 200.0}}, "the relay takes no more")
        self._write("PUT", "settings", {"values": {"check_attempts": 8}}, "fewer questions")
        self._write("PUT", "settings", {"values": {"check_attempts": 12}}, "producers are slow at night")
        shop = {"name": "shop", "rights": ["publish:order.*", "check:orders"]}
        self._write("POST", "credentials", shop, "the shop")
        watch = {"name": "night-watch", "rights": ["view"], "expires_in": 86_400}
        self._write("POST", "credentials", watch, "on call this week")
        self._write("POST", "alarms/parked/silence", {"target": "", "seconds": 7200}, "billing looks at them")
        redrive = "groups/points/dead-letters/redrive"
        cause = admin(self.url, "GET", "groups/points/dead-letters/failures")["failures"][-1]["fingerprint"]
        every = {"all": True, "wanted": {"failure": cause}}
        self.job = self._write("POST", redrive, every, "customers are there now")["result"]["job"]
        self._write("POST", redrive, {"ids": self._open_letters()[:2]}, "tried by hand")
        for verdict, counts in (("PASS", {}), ("FINDINGS", {"LOST": 2, "GHOST": 1}), ("INCONCLUSIVE", {})):
            reasons = ["the log was not readable from 10:00 to 10:05"] if verdict == "INCONCLUSIVE" else []
            admin(self.url, "POST", "audits", {
                "verdict": verdict, "counts": counts, "reasons": reasons, "since": "2026-11-01T00:00:00Z",
                "until": "2026-11-02T00:00:00Z", "report": "<h1>A report</h1>"})  # fmt: skip
        database = open_database(str(self.server.data_dir))
        try:
            JobRecords(database).add_job("redrive", "mail", {"from": 0, "until": 0}, 0, 0)
        finally:
            database.dispose()

    def _write(self, method: str, path: str, body: dict[str, Any], reason: str) -> Any:
        return admin(self.url, method, path, body | {"reason": reason})

    def pages(self) -> dict[str, str]:
        """Every page and some forms, by a name for its picture."""
        return {
            "overview": "/",
            "transactions": "/transactions",
            "transaction": f"/transactions/{self.parked[0]}",
            "messages": "/messages?topic=order.placed",
            "message": f"/messages/{self.letter}",
            "topics": "/topics",
            "topic": "/topics/order.placed",
            "groups": "/groups",
            "group": "/groups/points",
            "push": "/groups/reports",
            "dead-letters": "/groups/points/dead-letters",
            "dead-letter-groups": "/dead-letters",
            "schedules": "/schedules",
            "schedule": "/schedules/daily-report",
            "change-schedule": "/do/schedule.put?schedule=daily-report",
            "nodes": "/nodes",
            "audits": "/audits",
            "jobs": "/jobs",
            "job": f"/jobs/{self.job}",
            "settings": "/settings",
            "access": "/access",
            "actions": "/actions",
            "send": f"/do/message.send?topic=order.placed&like={self.letter}",
            "edit": f"/do/dead-letters.edit?group=points&id={self.letter}",
            "login": "/login",
            "error": "/groups/nobody",
            "subscribe": "/do/subscription.put?group=points&topic=order.paid&mode=ordered",
            "priorities": "/do/priorities.put?group=points",
            "decide": "/do/transactions.rollback?all=1&producer_group=orders",
        }  # fmt: skip
