"""`notify audit`: compares what databases committed with what was delivered and took effect, on Spark."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from notify.cli.api import DRY_RUN, URL, call
from notify.cli.audit_inputs import InputFlags, Schemas, is_small, session
from notify.cli.audit_repair import FORCE, PLAN, REASON, REPAIR, carry_out, check_files, write_plan
from notify.cli.audit_repair import show as show_repairs
from notify.cli.audit_text import published, show, show_explained
from notify.cli.printed import OutputLost, say, say_json
from notify.errors import Conflict, InvalidRequest, NotifyError, Unavailable
from notify.runtime.extras import remedy
from notify.runtime.log_output import discard
from notify.runtime.signals import heeding_signals
from notify.runtime.urls import without_secrets

if TYPE_CHECKING:
    from notify.spark.causes.commands import Commands
    from notify.spark.judge.continue_from import Proved
    from notify.spark.result import Inputs, Plan, Result

DATABASE = typer.Option(
    [], "--database", envvar="NOTIFY_AUDIT_DATABASE", help="A service's database as `NAME=URL` or URL (repeatable): "
    "half_message holds its commits, notify_inbox its effects.",
)  # fmt: skip
LOG = typer.Option(
    [],
    "--log",
    envvar="NOTIFY_AUDIT_LOG",
    help="A server's data directory, running or not, or a copy, or the URL of a store that it ships to "
    "(s3://bucket/prefix), as `NAME=DIRECTORY` or alone (repeatable).",
)
KAFKA = typer.Option([], "--kafka", envvar="NOTIFY_AUDIT_KAFKA", help="kafka://host:port,… if the queue is Kafka.")
STORAGE = typer.Option(
    [],
    "--storage",
    envvar="NOTIFY_AUDIT_STORAGE",
    help="A server's SQL storage, with halves and outcomes (repeatable).",
)
RECORDS = typer.Option(
    [], "--records", envvar="NOTIFY_AUDIT_RECORDS", help="The data directory of a server, or the URL of a registry's "
    "database, whose records name who made each change (repeatable). Records next to a --log and in a --storage "
    "are read anyway.",
)  # fmt: skip
SCHEMA = typer.Option(
    [], "--schema", envvar="NOTIFY_AUDIT_SCHEMA", help="The schema of a service's tables, as `NAME=SCHEMA` with a "
    "database's name, or alone for each database (repeatable: each schema is a source); default: where the URL's user "
    "finds them.",
)  # fmt: skip
SCHEMAS = typer.Option(
    [], "--schemas", envvar="NOTIFY_AUDIT_SCHEMAS", help="Each schema with a service's tables whose name matches "
    "(`t_*,public`) is a source, as `NAME=PATTERNS` or alone (repeatable).",
)  # fmt: skip
MASTER = typer.Option("", "--master", help="Spark's master, or sc://host:port of Spark Connect; default: this machine.")
MEMORY = typer.Option("3g", "--memory", help="Memory of Spark's driver and of each executor.")
LONGEST = typer.Option(
    600.0, "--max-transaction-seconds", min=0, help="How long a transaction may take; younger ones may be PENDING."
)
DELIVER = typer.Option(
    600.0, "--deliver-seconds", min=0, help="The time within which a queued message must be settled."
)
BUCKET = typer.Option(60.0, "--bucket-seconds", min=0.1, help="The width of a bar in the report's charts, in seconds.")
EFFECTS = typer.Option(
    [], "--effects", help="A query for the message_id (and consumer_group) of business effects, as `NAME:SQL` with "
    "a database's name; `{schema}` in it is the database's schema. What it finds took effect, even if the "
    "inbox has no row; what it finds twice is doubled.",
)  # fmt: skip
OBJECTIVE = typer.Option(
    99.99, "--objective", min=0, max=100,
    help="The share of committed messages, in percent, that should be delivered and take effect within "
    "--deliver-seconds; missing it alone is not a finding.",
)  # fmt: skip
FAIL_ON = typer.Option([], "--fail-on", help="A further class that fails the audit, such as DEAD (repeatable).")
FULL = typer.Option(False, "--full", help="Read everything row by row, without a digest first.")
REPORT = typer.Option(
    Path("notify-audit"), "--report", help="Directory for the report, and for copies of the log's segments."
)
SCRATCH = typer.Option(
    "", "--scratch", help="Directory that all workers share, or URL of a store, for copies of the log's segments; "
    "default: below --report, or --state.",
)  # fmt: skip
SINCE = typer.Option("", "--from", help="The start: an instant, or `2h` for two hours ago; default: all data.")
LAG = typer.Option(
    0.0, "--most-lag-seconds", min=0, help="Wait while a copy of a database is further behind its primary; 0: never."
)
PUBLISH = typer.Option(False, "--publish", help="Send verdict and report to the server, for its console.")
CONTINUE = typer.Option(
    False, "--continue", help="Begin where the last conclusive audit with this --report ended; the first reads all."
)
RESULTS = typer.Option(
    "", "--results", envvar="NOTIFY_AUDIT_RESULTS",
    help="Merge findings, buckets and state into tables at this URL (a directory, s3://bucket/prefix and so on).",
)  # fmt: skip
AS_JSON = typer.Option(
    False, "--json", envvar="NOTIFY_JSON",
    help="Print one JSON object on stdout, and nothing else; if the audit fails, the field failed says why.",
)  # fmt: skip
"""Like `--json` of other commands, except that a failure is a kind of verdict here."""
group = typer.Typer(no_args_is_help=True)


def instant_us(option: str, text: str) -> int:
    """An instant in microseconds since 1970, from RFC 3339 or from a time ago (`2h`, `30m`, `7d`); 0 without a text.

    An earlier one is the first after 1970: nothing is older, so that nothing can be missing there."""
    if not text:
        return 0
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    if text[-1] in units and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", text[:-1]):
        return max(1, int((datetime.now(UTC).timestamp() - float(text[:-1]) * units[text[-1]]) * 1e6))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{option} {text!r} is not an instant: write 2026-11-21T08:00:00Z, or 2h for two hours ago"
        ) from None
    return max(1, int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6))


def effect_queries(given: list[str], inputs: Inputs) -> tuple[tuple[str, str], ...]:
    """The (name, query) of each `NAME:SQL`; the name "" means the first database."""
    names = {name for database in inputs.databases for name in (database.name, database.given)}
    pairs = []
    for text in given:
        name, colon, query = text.partition(":")
        pairs.append((name, query.strip()) if colon and name in names else ("", text.strip()))
    return tuple((name, query.rstrip(";")) for name, query in pairs)


def told(quiet: bool) -> Any:
    return (lambda text: None) if quiet else (lambda text: say(f"… {text}", err=True))


@group.command("run")
def run(
    context: typer.Context,
    database: list[str] = DATABASE,
    log: list[str] = LOG,
    kafka: list[str] = KAFKA,
    storage: list[str] = STORAGE,
    records: list[str] = RECORDS,
    schema: list[str] = SCHEMA,
    schemas: list[str] = SCHEMAS,
    since: str = SINCE,
    to: str = typer.Option("", "--to", help="The end; default: now."),
    max_transaction_seconds: float = LONGEST,
    deliver_seconds: float = DELIVER,
    bucket_seconds: float = BUCKET,
    effects: list[str] = EFFECTS,
    objective: float = OBJECTIVE,
    report: Path = REPORT,
    scratch: str = SCRATCH,
    most_lag_seconds: float = LAG,
    master: str = MASTER,
    memory: str = MEMORY,
    plan_file: Path | None = PLAN,
    repair: Path | None = REPAIR,
    force: bool = FORCE,
    dry_run: bool = DRY_RUN,
    fail_on: list[str] = FAIL_ON,
    full: bool = FULL,
    goes_on: bool = CONTINUE,
    results: str = RESULTS,
    publish: bool = PUBLISH,
    reason: str = REASON,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Audit once. Exit code 0: nothing is wrong; 1: something is wrong; 2: inconclusive, or the audit failed."""
    with never_one(as_json):
        check_files(plan_file, repair)
        flags = InputFlags(database, log, kafka, storage, records, Schemas(schema, schemas), most_lag_seconds)
        copies = scratch or str(report / "segments")
        if repair is not None:
            with spark_errors(), flags.checked().opened() as inputs:
                queries = effect_queries(effects, inputs)
                rows = carry_out(inputs, repair, url, reason, queries, scratch=copies, force=force, dry_run=dry_run)
            raise typer.Exit(show_repairs(rows, as_json=as_json, dry_run=dry_run))
        with spark_errors(), alone_in(report), flags.checked().opened() as inputs:
            from notify.spark.audit import Audit
            from notify.spark.causes.grouping import tell_causes
            from notify.spark.judge import continue_from
            from notify.spark.result import Plan

            queries = effect_queries(effects, inputs)
            bounds = (instant_us("--from", since), instant_us("--to", to), max_transaction_seconds, deliver_seconds)
            plan = Plan(*bounds, bucket_seconds, queries, tuple(fail_on), objective, "full" if full else "")
            plan, before = continue_from.begun(plan, report, inputs, goes_on=goes_on)
            with session(master, memory, small=is_small(inputs, plan.from_us), say=told(as_json)) as spark:
                result = Audit(spark, plan, inputs, copies, told(as_json)).run()
                tell_causes(spark, plan, inputs, result, commands_of(context, inputs))
                if plan_file is not None:
                    say(write_plan(result, inputs, plan_file, queries, force=force), err=True)
                keep(result, results, told(as_json))
                page = concluded(report, plan, inputs, result, before)
            if publish:
                call(url, "POST", "audits", body=published(result, page))
        show(result, page, as_json=as_json)
        raise typer.Exit(result.exit_code)


@group.command("explain")
def explain(
    transaction: str = typer.Argument(help="A transaction or message id."),
    database: list[str] = DATABASE,
    log: list[str] = LOG,
    kafka: list[str] = KAFKA,
    storage: list[str] = STORAGE,
    records: list[str] = RECORDS,
    schema: list[str] = SCHEMA,
    schemas: list[str] = SCHEMAS,
    plan_file: list[Path] = typer.Option(
        [], "--plan", help="A plan that was carried out, whose journal says by whom and why (repeatable)."
    ),
    max_transaction_seconds: float = LONGEST,
    deliver_seconds: float = DELIVER,
    effects: list[str] = EFFECTS,
    report: Path = REPORT,
    scratch: str = SCRATCH,
    as_json: bool = AS_JSON,
) -> None:
    """Show one transaction's verdict, its history from every source, and its repairs.

    Exit code 0: nothing is wrong with it, or it is repaired; 1: something is wrong, or no source knows it; 2: failed.
    """
    with never_one(as_json):
        flags = InputFlags(database, log, kafka, storage, records, Schemas(schema, schemas))
        with spark_errors(), flags.checked().opened() as inputs:
            from notify.spark.explain.explained import explain as explained

            times = (max_transaction_seconds, deliver_seconds)
            queries = effect_queries(effects, inputs)
            copies = scratch or str(report / "segments")
            explanation = explained(inputs, transaction, copies, times, plan_file, queries)
        if as_json:
            say_json(explanation.plain(transaction))
        else:
            show_explained(explanation)
        raise typer.Exit(explanation.exit_code)


@group.command("watch")
def watch(
    database: list[str] = DATABASE,
    log: list[str] = LOG,
    kafka: list[str] = KAFKA,
    storage: list[str] = STORAGE,
    records: list[str] = RECORDS,
    schema: list[str] = SCHEMA,
    schemas: list[str] = SCHEMAS,
    window_seconds: float = typer.Option(60.0, "--window-seconds", min=1, help="The length of a window."),
    since: str = typer.Option("", "--from", help="The start of the first window; default: now, before Spark starts."),
    windows: int = typer.Option(0, "--windows", min=0, help="Stop after this number of windows; 0: never."),
    max_transaction_seconds: float = typer.Option(
        60.0, "--max-transaction-seconds", min=0, help="The least time between a window's end and its audit."
    ),
    deliver_seconds: float = typer.Option(
        60.0, "--deliver-seconds", min=0, help="The time within which a message must be settled."
    ),
    effects: list[str] = EFFECTS,
    fail_on: list[str] = FAIL_ON,
    state: Path = typer.Option(
        Path("notify-audit-watch"), "--state", help="The directory of the watch's state, for restarts."
    ),
    alarm_url: str = typer.Option(
        "", "--alarm-url", envvar="NOTIFY_AUDIT_ALARM_URL", help="POST each finding to this URL."
    ),
    metrics_port: int = typer.Option(0, "--metrics-port", min=0, max=65535, help="Serve Prometheus metrics; 0: none."),
    scratch: str = SCRATCH,
    results: str = RESULTS,
    master: str = MASTER,
    memory: str = MEMORY,
    as_json: bool = AS_JSON,
) -> None:
    """Audit continuously, each window once its transactions must be over. After a restart the watch continues."""
    import threading

    stop = threading.Event()
    flags = InputFlags(database, log, kafka, storage, records, Schemas(schema, schemas)).checked()
    with heeding_signals(stop.set), never_one(as_json), alarmed(state, alarm_url), flags.opened() as inputs:
        from notify.spark.result import Plan
        from notify.spark.watch.watching import Auditing, Watch

        bounds = (instant_us("--from", since or "0s"), 0, max_transaction_seconds, deliver_seconds)
        plan = Plan(*bounds, effects=effect_queries(effects, inputs), fail_on=tuple(fail_on))
        if metrics_port:
            from prometheus_client import start_http_server

            start_http_server(metrics_port, "127.0.0.1")
        # Once more within the session: Spark has put its own handler of SIGINT in place of the first, which ends the
        # window in its middle.
        with session(master, memory) as spark, heeding_signals(stop.set):
            watching = Watch(
                Auditing(spark, flags.opened, scratch or str(state / "segments"), results),
                plan,
                state,
                window_seconds=window_seconds,
                emit=lambda line: say_json(line) if as_json else say(_line_of(line)),
                alarm_url=alarm_url,
            )
            with closing(watching):
                watching.run(stop, windows)


@contextmanager
def alarmed(state: Path, alarm_url: str) -> Iterator[None]:
    """Like `spark_errors`, but also raise an alarm if a watch that ran before cannot continue, for example because an
    input is gone when it starts."""
    try:
        with spark_errors():
            yield
    except (InvalidRequest, Unavailable) as error:
        if (state / "watch.db").exists():
            from notify.spark.watch.watching import tell_failure

            tell_failure(state, alarm_url, error)
        raise


def _line_of(line: dict[str, Any]) -> str:
    """A watch's result as a line of text for people."""
    moment = datetime.fromtimestamp(line["window_us"] / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if line["kind"] == "window":
        counts = ", ".join(f"{count} {name}" for name, count in line["counts"].items()) or "no finding"
        return f"{moment} {line['verdict']}: {line['committed']:,} committed, {counts} ({line['seconds']:.1f} s)"
    if line["kind"] == "finding":
        return f"{moment} {line['finding']} {line['message_id']}: {line['detail']}"
    if line["kind"] == "revision":
        return f"{moment} {line['finding']} no longer applies: {line['key']}"
    return f"{moment} {line['kind']}: {line['detail']}"


# --- commands for the report, and where its results go -----------------------------------------------------------

_INPUTS = ("database", "log", "kafka", "storage", "report", "scratch", "schema", "schemas", "records")
_PATHS = ("log", "report", "scratch", "records")


def commands_of(context: typer.Context, inputs: Inputs) -> Commands:
    """The flags that commands about this audit need. Flags from the environment are left out, because they stay set."""
    from notify.spark.causes.commands import Commands

    flags = context.params
    return Commands(
        tuple(_words(context, _INPUTS)),
        tuple(_words(context, ("max_transaction_seconds", "deliver_seconds", "effects"))),
        tuple(_words(context, ("since", "to"))),
        tuple(_words(context, ("url",))),
        tuple((each.source_id(), each.shown_url, each.named_schema) for each in inputs.databases),
        without_secrets(flags["kafka"][0]) if flags["kafka"] and not flags["log"] else "",
    )


def _words(context: typer.Context, names: Iterable[str]) -> Iterable[str]:
    """Those of the flags that were given, with their values."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value: Any = context.params[name]
        for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            is_path = name in _PATHS and "://" not in str(each)
            text = str(Path(each).absolute()) if is_path else without_secrets(str(each))
            yield from ("--from" if name == "since" else f"--{name.replace('_', '-')}", text)


def keep(result: Result, url: str, tell: Callable[[str], object]) -> None:
    """Merge the results into the tables at a URL, if there is one. Raises InvalidRequest, ObjectStoreFailed."""
    if not url:
        return
    from notify.spark.report.results import merge

    tell(f"merging the results into {url}")
    counts = merge(result, url)
    tell("; ".join(f"{name}: {count:,} rows" for name, count in counts.items()))


@contextmanager
def alone_in(report: Path) -> Iterator[None]:
    """Keep other audits from this directory: each would remove copies of segments that the other one reads.

    Raises Conflict (`audit_runs`).
    """
    is_new = not report.exists()
    report.mkdir(parents=True, exist_ok=True)
    lock = os.open(report, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another audit writes to {report}: wait until it ends, or give each audit a --report of its own",
                "audit_runs",
            ) from None
        yield
    finally:
        os.close(lock)
        if is_new:
            with suppress(OSError):  # it stays empty where the audit could not begin
                report.rmdir()


def concluded(report: Path, plan: Plan, inputs: Inputs, result: Result, before: Proved | None) -> Path:
    """Note what is proved, write the report, and return the path of its page. Call this only once the results are
    merged, because the next audit does not read proved data again."""
    from notify.spark.judge import continue_from
    from notify.spark.report.files import write

    continue_from.conclude(report, plan, inputs, result, before)
    return write(result, report)


@contextmanager
def spark_errors() -> Iterator[None]:
    """Turn errors of Spark, files and databases, and a missing extra, into Unavailable with one line."""
    try:
        yield
    except (NotifyError, OutputLost):
        raise
    except OSError as error:
        raise Unavailable(f"the audit could not be finished: {error}") from error
    except ImportError as error:
        sentence = remedy(error)
        if sentence is None:
            raise
        raise Unavailable(sentence) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j", "sqlalchemy"):
            raise
        from notify.spark.session import cause_of

        raise Unavailable(f"the audit could not be finished: {cause_of(error)}") from error


@contextmanager
def never_one(as_json: bool) -> Iterator[None]:
    """Exit with code 2 if the audit cannot run, fails, or cannot print its result, because 1 means findings.

    With `as_json` the reason is in the JSON. Put the whole command inside this context.
    """
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except NotifyError as error:
        _say_failed(as_json, str(error))
        raise
    except KeyboardInterrupt:
        _say_failed(as_json, "interrupted")
        raise typer.Exit(2) from None
    except OutputLost as error:
        discard(sys.stdout)
        with suppress(OSError):
            say(f"notify: the result could not be printed: {error}", err=True)
        raise typer.Exit(2) from None
    except Exception as error:
        with suppress(OSError):
            traceback.print_exc()
        _say_failed(as_json, f"a fault of the audit itself: {error!r}")
        raise typer.Exit(2) from None


def _say_failed(as_json: bool, why: str) -> None:
    if as_json:
        try:
            say_json({"verdict": "", "failed": why, "exit_code": 2})
        except OutputLost:
            discard(sys.stdout)
