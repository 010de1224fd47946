"""`make profile`: its table, and what it reads of py-spy's samples."""

from __future__ import annotations

from tools.bench.profile.__main__ import Profile, by_function, table


def test_a_table_has_both_sides_and_sums_what_is_small() -> None:
    before = Profile("1" * 40, "message", 1000.0, {"server": {"a f": 6.0, "b g": 3.96, "c tiny": 0.04}})
    after = Profile("2" * 40, "message", 2000.0, {"server": {"a f": 2.0, "d new": 3.0}})
    assert table("server", before, after).splitlines() == [
        "| server, µs of CPU a message | 1111111 | 2222222 |",
        "|---|---|---|",
        "| all | 10.00 | 5.00 |",
        "| `a f` | 6.00 | 2.00 |",
        "| `b g` | 3.96 |  |",
        "| `d new` |  | 3.00 |",
        "| functions below 1% | 0.04 |  |",
    ]


def test_samples_count_for_the_innermost_function() -> None:
    raw = (
        "main (/n/cli.py:3);run (/n/loop.py:9);read (/n/http.py:44) 7\n"
        "main (/n/cli.py);read (/n/http.py) 2\n"
        "<module> (/n/x (1).py);<lambda> (/n/loop.py) 1\n"
    )
    assert by_function(raw) == {"/n/http.py:read": 9, "/n/loop.py:<lambda>": 1}
