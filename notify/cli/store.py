"""`notify store`: large bodies in an object store, and which of them no message names any more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
import sqlalchemy as sa
import typer

from notify.admin_api.words import count, size
from notify.cli.api import AS_JSON, DRY_RUN, show_rows
from notify.cli.database import SCHEMAS, opened
from notify.cli.printed import say, say_json
from notify.client.transport.foreign_answers import foreign_content
from notify.client.transport.http import HttpClient, read_answer, until_closed
from notify.client.transport.servers import decode_members
from notify.errors import HiddenRows, InvalidRequest, NotFound, NotifyError, Unavailable
from notify.kafka.records import SCHEME
from notify.movers.outbox import OUTBOXES
from notify.object_store.store import NEXT, Entry, Store
from notify.protocol import ids
from notify.protocol.large_bodies import FOLDER, NAME, PLACE, mentioned
from notify.protocol.wire import JSON
from notify.runtime import measures
from notify.runtime.databases import is_table_missing, within_schema
from notify.runtime.guarantees import SELECT, Need, verify
from notify.runtime.schemas import check_choice, hidden_with_table, with_table
from notify.runtime.urls import without_secrets

LEAST_AGE_SECONDS = 3600.0
"""Far more than the time between the upload of a body and the COMMIT of its message, which the producer bounds."""
CALL_SECONDS = 60.0
LOOK = f"{FOLDER}/.sweep-"
"""The beginning of the name of the object by which a sweep learns the store's time."""
SHOWN = 20
IN_ROWS = ("auto", "outbox")
"""The modes whose messages may stand in a database and nowhere else."""
AT_SERVERS = ("half", "auto")
"""The modes whose messages are at a server while they are undecided."""

group = typer.Typer(no_args_is_help=True)


@group.command("sweep")
def sweep_store(
    store: str = typer.Argument(..., metavar="STORE", help="The store's URL, as the producers have it in store=."),
    url: list[str] = typer.Option(
        ["http://127.0.0.1:7400"],
        "--url",
        envvar="NOTIFY_URL",
        show_default="http://127.0.0.1:7400",
        help="A server (repeatable: those that are not in the registry of another), or Kafka (kafka://host:9092), for "
        "messages that a relay or bridge moves there. [env: NOTIFY_URL]",
    ),
    dsn: list[str] = typer.Option(
        [],
        "--dsn",
        envvar="NOTIFY_DSN",
        help="A service's database (repeatable), for messages that wait in it; all of those of producers in mode "
        "outbox or auto. [env: NOTIFY_DSN]",
    ),
    schema: str | None = typer.Option(
        None,
        "--schema",
        envvar="NOTIFY_SCHEMA",
        help="The only schema (MySQL: database) to read; default: all that have the tables. [env: NOTIFY_SCHEMA]",
    ),
    schemas: str | None = SCHEMAS,
    group_name: list[str] = typer.Option(
        [], "--group", help="A producer group whose bodies to sweep (repeatable). Without it, --dry-run shows all."
    ),
    min_age: float = typer.Option(
        86_400.0,
        "--min-age",
        min=LEAST_AGE_SECONDS,
        max=3_200_000_000,
        help="Never delete a body younger than this, in seconds. Choose at least the age of the oldest backup that you "
        "would restore.",
    ),
    gone: bool = typer.Option(False, "--gone", help="Also delete the bodies of a group of which no message is left."),
    logs: int | None = typer.Option(
        None,
        "--logs",
        min=0,
        help="How many servers with queues there should be in all. If the registries list fewer, nothing is deleted.",
    ),
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Delete the bodies that no message names: of transactions that rolled back, and of messages that are gone.

    It first reads all rows of the databases, all messages of the servers and all records of Kafka.

    If one of them does not answer, it deletes nothing.
    """
    check_choice(schema, schemas)
    sweep = Sweep(Store(store), group_name, min_age, gone=gone, logs=logs)
    with contextlib.nullcontext() if dry_run else _counted():
        swept = sweep.run(url, dsn, schema, schemas, dry_run=dry_run)
        if not dry_run:
            _count(swept)
    if as_json:
        say_json(swept)
        return
    done = "would be deleted" if dry_run else "deleted"
    say(
        f"{count(swept['objects'])} bodies, {count(swept['young'])} of them younger than {min_age:g} s, "
        f"{count(swept['named'])} named by messages or rows; {count(swept['swept'])} ({size(swept['bytes'])}) {done}"
    )
    show_rows(swept, as_json, "groups", {name: itemgetter(name) for name in COLUMNS})
    for name in swept["names"][:SHOWN] if dry_run else ():
        say(name)


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count a sweep, and export the count."""
    with measures.exported():
        outcome = "failed"
        try:
            yield
            outcome = "done"
        finally:
            measures.add(measures.SWEEPS, 1, outcome=outcome)


def _count(swept: Mapping[str, Any]) -> None:
    for outcome, name in (("deleted", "swept"), ("named", "named"), ("young", "young")):
        measures.add(measures.SWEPT, swept[name], outcome=outcome)
    measures.add(measures.FREED, swept["bytes"])


COLUMNS = ("group", "mode", "objects", "swept", "bytes")


class Sweep:
    """One sweep of one store."""

    def __init__(
        self, store: Store, groups: Sequence[str], min_age: float, *, gone: bool = False, logs: int | None = None
    ) -> None:
        """`gone`: also for groups none of whose bodies is named. `logs`: how many servers with queues the registries
        have in all; None: there is no registry."""
        self._store = store
        self._groups = groups
        self._min_age = min_age
        self._gone = gone
        self._logs = logs

    def run(
        self,
        urls: Sequence[str],
        dsns: Sequence[str] = (),
        schema: str | None = None,
        schemas: str | None = None,
        *,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Delete what no message names; the counts. Raises NotifyError before anything is deleted if a server or
        database cannot be read, and where it is not clear that all of them were named."""
        if not (self._groups or dry_run):
            raise InvalidRequest(
                "name the producer groups whose bodies to sweep with --group, all of whose servers and databases you "
                "name: --dry-run lists the groups"
            )
        now = time.time() if dry_run else self._store.now(LOOK + ids.to_text(ids.new_id()))
        entries = self._store.entries(FOLDER)
        bodies = {name: entry for name, entry in entries.items() if NAME.match(name) and self._is_meant(name)}
        old = {name for name, entry in bodies.items() if now - entry.written_at >= self._min_age}
        kafkas = [url for url in urls if url.startswith(SCHEME)]
        if not dsns and not dry_run:
            _refuse_without_rows(old)
        if len(kafkas) == len(urls) and not dry_run:
            _refuse_without_halves(old)
        unnamed = set(bodies)
        # In the order in which a message moves: from a row to the server's half, and from there to a queue or to Kafka.
        for dsn in dsns:
            _leave_out(unnamed, named_in_database(dsn, schema, schemas))
        servers = servers_of([url for url in urls if url not in kafkas])
        if not dry_run:
            self._refuse_without_servers(servers)
        _leave_out(unnamed, named_on_servers(servers))
        for url in kafkas:
            _leave_out(unnamed, _named_in_kafka(url))
        if not (dry_run or self._gone):
            _refuse_strangers(old, set(bodies) - unnamed)
        unnamed &= old
        if not dry_run:
            rest = {name for name, e in entries.items() if now - e.written_at >= self._min_age and is_rest(name)}
            needed = old - unnamed
            for name in (*sorted(unnamed), *sorted(name for name in rest if name.removesuffix(NEXT) not in needed)):
                self._store.delete(name)
        return {
            "dry_run": dry_run,
            "objects": len(bodies),
            "young": len(bodies) - len(old),
            "named": len(old) - len(unnamed),
            "swept": len(unnamed),
            "bytes": sum(bodies[name].size for name in unnamed),
            "groups": _rows(bodies, unnamed),
            "names": sorted(unnamed)[:1000],
        }

    def _is_meant(self, name: str) -> bool:
        return not self._groups or group_of(name) in self._groups

    def _refuse_without_servers(self, servers: Iterable[Server]) -> None:
        """Raises InvalidRequest or Unavailable if there may be a server with queues that does not run now."""
        listed = [server for server in servers if server.may_have_others]
        if not listed:
            return
        if self._logs is None:
            raise InvalidRequest(
                "a registry lists only the servers that run: say with --logs how many with queues there are in "
                "all (0: all have a database)"
            )
        there = sum(server.has_queues for server in listed)
        if there < self._logs:
            raise Unavailable(f"{there} of {self._logs} servers with queues are there: start the others first")


def _groups_in(modes: Container[str], names: Iterable[str]) -> str:
    """The groups of the bodies of these names whose producers have one of the modes; "" if there are none."""
    return ", ".join(sorted({group_of(name) for name in names if mode_of(name) in modes}))


def _refuse_without_rows(names: Iterable[str]) -> None:
    """Raises InvalidRequest if messages with these bodies may wait in a database, and none was named."""
    if waiting := _groups_in(IN_ROWS, names):
        raise InvalidRequest(
            f"producers of {waiting} keep messages in their databases (mode outbox or auto): name all "
            "of these with --dsn"
        )


def _refuse_without_halves(names: Iterable[str]) -> None:
    """Raises InvalidRequest if messages with these bodies may be undecided at a server, and only Kafka was named."""
    if undecided := _groups_in(AT_SERVERS, names):
        raise InvalidRequest(
            f"producers of {undecided} keep undecided messages at servers (mode half or auto): name these "
            "with --url, in addition to Kafka"
        )


def _refuse_strangers(old: set[str], named: set[str]) -> None:
    """Raises InvalidRequest for groups none of whose bodies is named: these may be the servers of other producers."""
    strangers = sorted({group_of(name) for name in old} - {group_of(name) for name in named})
    if strangers:
        raise InvalidRequest(
            f"nothing names any body of {', '.join(strangers)}: are these the servers and databases of these "
            "producers? If their messages are all gone, add --gone"
        )


def is_rest(name: str) -> bool:
    """Whether an object was left by a sweep, or by an upload to a store that renames, which was killed."""
    return name.startswith(LOOK) or (name.endswith(NEXT) and NAME.match(name.removesuffix(NEXT)) is not None)


def group_of(name: str) -> str:
    """The producer group of a body."""
    return name.split("/")[1]


def mode_of(name: str) -> str:
    """The mode of the producer of a body."""
    return name.split("/")[2]


def _leave_out(names: set[str], named: Iterable[set[str]]) -> None:
    for some in named:
        names -= some


def _rows(bodies: Mapping[str, Entry], swept: set[str]) -> list[dict[str, Any]]:
    """For each producer group and mode: how many bodies, and of those that are swept number and bytes."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name, entry in sorted(bodies.items()):
        key = group_of(name), mode_of(name)
        row = rows.setdefault(key, {"group": key[0], "mode": key[1], "objects": 0, "swept": 0, "bytes": 0})
        row["objects"] += 1
        if name in swept:
            row["swept"] += 1
            row["bytes"] += entry.size
    return list(rows.values())


# --- what names bodies --------------------------------------------------------------------------------------------


def named_in_database(dsn: str, schema: str | None, schemas: str | None) -> Iterator[set[str]]:
    """The bodies that rows of a database name: a service's, and a server's if it stores its transactions there.

    Raises InvalidRequest for a database without such tables, HiddenRows if this role may not see all of their rows.
    """
    with opened(dsn) as engine:
        found = False
        for outbox in OUTBOXES:
            table = outbox.table
            with engine.connect() as connection:
                places = [schema] if schema else with_table(connection, table.name, schemas or "*")
                hidden = [] if schema else hidden_with_table(connection, table.name, schemas or "*")
            if hidden:
                raise HiddenRows(
                    f"{', '.join(hidden[:SHOWN])} in {without_secrets(dsn)} have {table.name}, and this role may not "
                    "use these schemas: grant it USAGE on them and SELECT on the table, or leave them out with "
                    "--schemas if their producers have another store"
                )
            for place in places:
                try:
                    with within_schema(engine, place).connect() as connection:
                        if not verify(connection, [Need(table, sees=(SELECT,), keeps=False)], place):
                            continue
                        yield from _named_in_table(connection, table)
                        found = True
                except sa.exc.DBAPIError as error:
                    if not is_table_missing(error.orig):  # else the tenant was dropped meanwhile
                        raise
        if not found:
            raise InvalidRequest(f"{without_secrets(dsn)} has neither half_message nor server_half_message")


def _named_in_table(connection: sa.Connection, table: sa.Table) -> Iterator[set[str]]:
    naming = sa.select(table.c.body).where(table.c.headers.contains(PLACE, autoescape=True))
    for some in connection.execution_options(yield_per=100).scalars(naming).partitions():
        yield {name for body in some for name in mentioned(bytes(body or b""))}


def _named_in_kafka(url: str) -> Iterator[set[str]]:
    from notify.kafka.stored_bodies import named_in_kafka  # needs the extra kafka

    return named_in_kafka(url)


class Server(NamedTuple):
    """A server to ask."""

    address: str
    has_queues: bool
    may_have_others: bool
    """Whether the list that it is from has only the servers that run now."""


def servers_of(urls: Sequence[str]) -> list[Server]:
    """These servers, and all others in their registries. Raises NotifyError."""
    return asyncio.run(_servers_of(urls))


async def _servers_of(urls: Sequence[str]) -> list[Server]:
    servers: dict[str, Server] = {}
    for url in urls:
        for server in await _members(url):
            servers.setdefault(server.address, server)
    return list(servers.values())


async def _members(url: str) -> list[Server]:
    """The servers of the registry that one of these addresses knows."""
    failed: NotifyError | None = None
    for seed in [part.strip() for part in url.split(",") if part.strip()]:
        async with _client(seed) as http:
            try:
                members = read_answer(decode_members, await http.call("GET", "/v1/members", b"", CALL_SECONDS))
            except NotifyError as error:
                failed = error
                continue
        if not members.version:
            return [Server(seed, has_queues=True, may_have_others=False)]
        # Workers list all of them, also those that do not run.
        return [Server(m.url, "queue" in m.roles, not members.keys) for m in members.servers()]
    raise failed or InvalidRequest("give the address of a server, such as http://127.0.0.1:7400")


def named_on_servers(servers: Iterable[Server]) -> list[set[str]]:
    """The bodies that messages of these servers name. Raises NotifyError."""
    return asyncio.run(_named_on(servers))


async def _named_on(servers: Iterable[Server]) -> list[set[str]]:
    named: list[set[str]] = []
    for server in sorted(servers, key=lambda each: each.has_queues):  # queues at last: there messages end
        named += await _named_by(server.address)
    return named


class _Part(msgspec.Struct):
    names: list[str]
    next: str


_decode_part = msgspec.json.Decoder(_Part).decode


async def _named_by(address: str) -> list[set[str]]:
    """The bodies that one server's messages name."""
    parts: list[set[str]] = []
    after = ""
    async with _client(address) as http:
        while True:
            path = f"/v1/admin/stored-bodies?{urlencode({'after': after})}"
            try:
                part = read_answer(_decode_part, await http.call("GET", path, b"", CALL_SECONDS, JSON))
            except NotFound:
                raise InvalidRequest(
                    f"the server at {address} does not know which bodies it names: upgrade it first"
                ) from None
            parts.append(set(part.names))
            if not part.next:
                return parts
            if part.next == after:
                raise foreign_content("its list continues where it began")
            after = part.next


@contextlib.asynccontextmanager
async def _client(address: str) -> AsyncIterator[HttpClient]:
    http = HttpClient(address)
    try:
        yield http
    finally:
        http.close()
        await until_closed([http])
