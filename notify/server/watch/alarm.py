"""An alarm, and what each kind of alarm means to an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notify.protocol.wire import instant

MEANING = {
    "in_doubt": (
        "A transaction has had no outcome for too long (setting `alarm_doubt_seconds`): its producers are not "
        "running, or answer UNKNOWN. Start a producer of its group, or look at the transaction in the console or with "
        "`notify transaction list`."
    ),
    "parked": (
        "At least `alarm_parked` transactions are parked: their producers did not know the outcome, and an operator "
        "has to decide. Look in the producer's database, then commit, roll back or resume them."
    ),
    "left_behind": (
        "Transactions that producers in mode auto committed without the server have waited for over a minute in their "
        "database. A running producer, `notify relay` or bridge sends them; its log says why the server does not "
        "accept them. If none runs, start one, or run `notify check --dsn … --group …`."
    ),
    "no_consumers": (
        "Messages are waiting for a group, and none of its consumers has polled for a while (setting "
        "`alarm_no_consumer_seconds`). Start its consumers, or pause the group."
    ),
    "unread_topic": (
        "Messages of a topic are waiting for a group, and none of its running consumers has asked for that topic for a "
        "while (setting `alarm_no_consumer_seconds`): perhaps the service has no handler for it any more. Start a "
        "consumer with a handler for the topic, or end the subscription on the group's page in the console."
    ),
    "push": (
        "Calls of a group's webhook have failed for a while (setting `alarm_no_consumer_seconds`), and its messages "
        "are waiting. The alarm gives the reason. Repair the receiver, or give the group another address (`notify "
        "group push set`)."
    ),
    "lag_growing": (
        "A group's lag has grown for a while (setting `alarm_lag_growing_seconds`). Its consumers are too few or too "
        "slow, or one message blocks an ordered queue. Start more consumers, or look at what their handlers wait for."
    ),
    "objective": (
        "A group misses its objective (`notify group objective set`): it acknowledged too few of its messages in "
        "time. `notify group show` shows where the time goes: before a consumer receives them, in the consumer, or in "
        "its handlers. Start more consumers, or look at what their handlers wait for."
    ),
    "dead_letters": (
        "A group has at least `alarm_dead_letters` unresolved dead letters. Look at their causes (`notify dead-letter "
        "failures`) and fix them, then redrive, drop or delete them."
    ),
    "held_keys": (
        "A group holds at least `alarm_held_keys` keys. A message of each key has used up its attempts, and the key's "
        'later messages wait (`on_exhausted="hold"`). Look at the reasons (`notify held-key list`), fix them, then '
        "retry, skip or release the keys."
    ),
    "held_up": (
        "The server has stopped reading a queue for a group, because the queue has 1,000 held keys, or 50,000 "
        "messages wait behind its held keys. Nothing is lost, but other keys of the queue wait, too. Decide about the "
        "held keys (`notify held-key`)."
    ),
    "consumers": (
        "A consumer has been stuck or slow for a while (setting `alarm_consumer_seconds`). Stuck: its leases expire. "
        "Slow: it is far behind the fastest of its group. `notify group show` names it. Look at its log, and at what "
        "its handler waits for."
    ),
    "disk": (
        "The disk of the log is nearly full (setting `alarm_disk_share`). Free space, or delete messages earlier "
        "(setting `retention_seconds`). Once the disk is full, writes are refused with 507; reads continue."
    ),
    "bridge": (
        "A bridge or relay has reported nothing for a while (setting `alarm_bridge_seconds`); a running one reports "
        "at least every 10 s. Check whether its process runs, and look at its log."
    ),
    "retained_log": (
        "PostgreSQL has used more than half of the log that it may keep for a bridge (max_slot_wal_keep_size). When "
        "it has used all of it, it drops the bridge's slot, and the bridge has to start with `--backfill`. Check "
        "whether the bridge runs, and why it lags."
    ),
    "old_slot": (
        "A bridge's replication slot keeps rows of PostgreSQL's catalogue that are 100 million transactions old. "
        "VACUUM cannot remove them, and in the end the database accepts no more writes. Check whether the bridge is "
        "behind, and look for a transaction or prepared transaction that has been open for a long time "
        "(pg_stat_activity, pg_prepared_xacts)."
    ),
    "refused": (
        "Messages of a source wait for a decision, because no queue accepts them. `notify refused list --dsn …` shows "
        "them and the reasons. Let the bridge or relay retry them, or drop them."
    ),
    "kafka": (
        "The Kafka cluster (setting `kafka`) does not answer: its groups are neither shown nor watched. If the alarm "
        "names a group, some of its partitions have no leader: start their brokers. If it names a partition, too, a "
        "transaction of a producer is open there: kafka-transactions.sh find-hanging names it, and abort ends it."
    ),
    "schedule": (
        "A schedule's message is more than 60 s late, instants were left out, or the schedule sends nothing. The alarm "
        "gives the reason, such as a topic that does not exist, a full disk, or a time zone that the server's machine "
        "does not know. `notify schedule show NAME` shows its next instants. What was left out is sent only by hand "
        "(`notify message send`)."
    ),
    "audit": "The newest published audit has findings. Its report explains them, and what to do.",
    "credential": (
        "A credential is in the last fifth of its time, and in its last 14 days. Once it has expired, those that use "
        "it are refused. Create another of the same name with `notify token create`, give it to them, then revoke "
        "this one (`notify token revoke`)."
    ),
    "filter": (
        "A subscription's filter was accepted by an earlier version, but this version refuses it, because evaluating "
        "it may cost too much. The group gets no messages of that topic. Change the subscription's filter."
    ),
    "retention": (
        "Old messages could not be deleted; the server's log gives the reason. The server tries again every 30 s. If "
        "undelivered messages take more space than the setting `retention_bytes` allows, let the consumers catch up, "
        "or raise it."
    ),
    "shipping": (
        "The object store is too far behind the log (settings `alarm_shipping_seconds` and `ship_every`), or refuses "
        "segments. Messages that are not in the store would be lost with this disk, and retention waits for them. The "
        "alarm and the server's log give the reason."
    ),
    "worker": (
        "A worker ended within the last 10 minutes and was restarted (`notify serve --workers`); the alarm gives the "
        "reason. Nothing acknowledged is lost. Look in the server's output for the cause: the stack of a worker that "
        "hung, a disk error, or a kill by the system for lack of memory."
    ),
    "damage": (
        "Bytes of the log on the disk are damaged; the server keeps a copy of them in the file that the alarm names. "
        "`notify audit run` names the missing messages; send them again from the databases, or restore a backup "
        "(`notify restore`)."
    ),
}
"""Each alarm's meaning and remedy; docs/alarms.md has this table."""


CRITICAL = frozenset({"no_consumers", "held_up", "push", "disk", "kafka", "retention", "shipping", "damage"})
"""Alarms about work that has stopped, or will stop soon; the other alarms are warnings."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm: a `name` of MEANING; its `target`, such as a group; `since_us`, when it was first seen."""

    name: str
    target: str
    text: str
    since_us: int

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.target

    def shown(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target,
            "severity": "critical" if self.name in CRITICAL else "warning",
            "text": self.text,
            "meaning": MEANING[self.name],
            "since": instant(self.since_us),
        }
