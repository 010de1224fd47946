"""The mark `notify_crashes` among what other tests have: fixtures of a conftest, parameters, classes, workers; and what
cannot be explored is refused in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import pytest
import sqlalchemy as sa

@pytest.fixture
def items():
    return ["book", "pen"]

@pytest.fixture
def shop_database(tmp_path):
    return sa.make_url(f"sqlite:///{tmp_path}/shop.db")

@pytest.fixture
def engine(shop_database):
    made = sa.create_engine(shop_database)
    yield made
    made.dispose()
"""
SHOP = """
import unittest

import pytest
import sqlalchemy as sa

ROWS = {"causes": "SELECT item FROM orders", "effects": "SELECT item FROM points"}
explored = pytest.mark.notify_crashes(**ROWS)

def tables(engine):
    with engine.begin() as connection:
        for table in ("orders", "points"):
            connection.exec_driver_sql(f"CREATE TABLE IF NOT EXISTS {table} (item TEXT)")

def place(engine, items, into=("orders", "points")):
    with engine.begin() as connection:
        for item in items:
            for table in into:
                connection.exec_driver_sql(f"INSERT INTO {table} VALUES ('{item}')")

def shop(process, items):
    tables(process.engine)
    process.act(place, process.engine, items)
"""
EXPLORED = """
@explored
@pytest.mark.parametrize("count", [1, 2])
def test_parametrized(count, items, notify_process, monkeypatch):
    monkeypatch.setenv("SHOP", notify_process.url)
    shop(notify_process, items[:count])

@pytest.mark.notify_crashes(**ROWS, database="shop_database")
class TestShop:
    def test_in_a_class_with_the_database_of_a_fixture(self, notify_process):
        assert notify_process.database.endswith("shop.db")
        shop(notify_process, ["book"])

    @pytest.mark.notify_crashes(**ROWS, real=True)
    def test_of_real_processes(self, notify_process, items):
        shop(notify_process, items)
"""
REFUSED = """
@explored
async def test_async(notify_process):
    shop(notify_process, ["book"])

@explored
@pytest.mark.anyio
async def test_of_a_plug_in_for_coroutines(notify_process):
    shop(notify_process, ["book"])

@explored
class Case(unittest.TestCase):
    def test_of_unittest(self):
        raise AssertionError("it was called")

@pytest.mark.notify_crashes("SELECT item FROM orders", "SELECT item FROM points")
def test_with_options_without_names(notify_process):
    raise AssertionError("it was called")

@explored
class TestOfAClass:
    @pytest.mark.notify_crashes(seconds=60)
    def test_with_queries_of_its_class(self, notify_process):
        tables(notify_process.engine)
        notify_process.act(place, notify_process.engine, ["book"], ["orders"])

@explored
def test_with_an_engine_of_a_fixture(notify_process, engine):
    tables(engine)
    notify_process.act(place, engine, ["book"])

@pytest.mark.notify_crashes(**ROWS, database="sqlite://")
def test_in_memory(notify_process):
    shop(notify_process, ["book"])

@pytest.mark.notify_crashes(**ROWS, database="no_database")
def test_without_the_fixture(notify_process):
    shop(notify_process, ["book"])

@pytest.mark.notify_crashes(**ROWS, database=sa.create_engine("sqlite:///shop.db"))
def test_an_engine_for_a_url(notify_process):
    shop(notify_process, ["book"])
"""


def run(directory: Path, tests: str, *words: str) -> tuple[int, str]:
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_shop.py").write_text(SHOP + tests)
    # -rN: no summary, which repeats each error, cut to the terminal's width or, where CI is set, whole
    given = ["-m", "pytest", "-q", "-rN", "-p", "no:cacheprovider", "-p", "no:schemathesis", *words, "test_shop.py"]
    done = subprocess.run([sys.executable, *given], cwd=directory, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


VARYING = """
turns = iter(range(1000))

@pytest.mark.notify_crashes
def test_varying(notify_process):
    tables(notify_process.engine)
    notify_process.act(place, notify_process.engine, ["pen", "book"] if next(turns) == 1 else ["book"])
"""


def test_faults_that_were_not_tried_are_a_warning(tmp_path: Path) -> None:
    """The test passed, and nothing was said about them."""
    code, said = run(tmp_path, VARYING)
    assert code == 0 and "faults whose step did not come again: the act varies. Not tried, for example: killed" in said


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_explored_tests_are_like_others(tmp_path: Path, words: tuple[str, ...]) -> None:
    code, said = run(tmp_path, EXPLORED, *words)
    assert code == 0 and "4 passed" in said, said


def test_a_test_that_cannot_be_explored_is_refused(tmp_path: Path) -> None:
    code, said = run(tmp_path, REFUSED)
    assert code == 1 and "6 failed, 3 errors" in said, said
    assert "the options of the mark notify_crashes have names, such as causes= and effects=" in said
    assert "ACKED_NO_EFFECT: causes without an effect" in said, "the options of a class count for its tests"
    assert said.count("is a plain function, without async: notify_process.act also takes coroutine functions") == 2
    assert "this one is unittest's: call notify.testing.explore in it" in said and "it was called" not in said
    assert "this engine belongs to a process that was killed" in said
    assert "is in memory, where the processes of a service cannot meet" in said
    assert "fixture 'no_database' not found" in said
    assert "database is a Engine: give the SQLAlchemy URL of a database" in said
