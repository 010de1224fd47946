"""The hashes of a digest, computed in the same way by numpy, Python, Spark and each database.

A message's hash is half the MD5 of its id as text, `{transaction}.{n}`, and with the digest of its contents that of
`{transaction}.{n}:{digest}`. The hashes of a slot are combined by XOR: in any order, part by part.

The digest of contents is that of the body (notify.protocol.message), combined by XOR with the hash of `t{tag} k{key}`
if the message has one of the two, because a local row has these as text.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import Column
from pyspark.sql import functions as F

from notify.spark.digest.md5 import first_half

_ID_CHARACTERS = 36
_PARTS = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
"""Where the digits of each part of an id begin and end."""
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)


def of_text(text: str) -> int:
    """The first 8 bytes of the MD5 of a text, as a signed number."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def of_contents(body: int, key: str | None, tag: str | None) -> int:
    """The digest of a message's contents, from the digest of its body."""
    if key is None and tag is None:
        return body
    return body ^ of_text(f"{'' if tag is None else 't' + tag} {'' if key is None else 'k' + key}")


# --- numpy --------------------------------------------------------------------------------------------------------


def of_messages(high: NDArray[np.uint64], low: NDArray[np.uint64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The hashes of messages: `high` and `low` are the halves of their transactions' ids."""
    return _of(_texts(high, low), _tails(numbers))


def of_bodies(
    high: NDArray[np.uint64], low: NDArray[np.uint64], numbers: NDArray[np.int64], digests: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The hashes of messages with the digests of their bodies."""
    tails = np.char.add(np.char.add(_tails(numbers), b":"), digests.astype("S20"))
    return _of(_texts(high, low), tails)


def _tails(numbers: NDArray[np.int64]) -> NDArray[np.bytes_]:
    values, of_row = np.unique(numbers, return_inverse=True)
    return np.array([b".%d" % value for value in values.tolist()], np.bytes_)[of_row]


def _texts(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The characters of ids, a row for each."""
    data = np.empty((len(high), 2), ">u8")
    data[:, 0], data[:, 1] = high, low
    digits = _HEX[data.view(np.uint8)].view(np.uint8)
    texts = np.full((len(high), _ID_CHARACTERS), ord("-"), np.uint8)
    for number, (start, end) in enumerate(_PARTS):
        texts[:, start + number : end + number] = digits[:, start:end]
    return texts


def _of(texts: NDArray[np.uint8], tails: NDArray[np.bytes_]) -> NDArray[np.int64]:
    if not len(texts):
        return np.empty(0, np.int64)
    tails = np.ascontiguousarray(tails)
    ends = tails.view(np.uint8).reshape(len(tails), tails.itemsize)
    lengths = _ID_CHARACTERS + np.char.str_len(tails).astype(np.int64)
    return first_half(np.concatenate([texts, ends], axis=1), lengths)


# --- Spark --------------------------------------------------------------------------------------------------------


def of_local_contents() -> Column:
    """The digest of the contents of each local row, from the columns digest, key and tag; null without a digest."""
    key, tag = F.col("key"), F.col("tag")
    text = F.concat(_marked("t", tag), F.lit(" "), _marked("k", key))
    return F.when(key.isNull() & tag.isNull(), F.col("digest")).otherwise(F.col("digest").bitwiseXOR(_of_column(text)))


def _marked(mark: str, column: Column) -> Column:
    return F.coalesce(F.concat(F.lit(mark), column), F.lit(""))


def _of_column(text: Column) -> Column:
    return F.conv(F.substring(F.md5(text), 1, 16), 16, -10).cast("bigint")


# --- databases ----------------------------------------------------------------------------------------------------

SQLITE_HASH, SQLITE_XOR, SQLITE_CONTENTS = "notify_hash", "notify_xor", "notify_contents"
"""Functions that SQLite lacks, and connections are given."""


def of_sql(kind: str, text: str) -> str:
    """The hash of a text as an expression of SQL; `kind`: postgresql, mysql or sqlite. MySQL's is unsigned."""
    return {
        "postgresql": f"('x' || substr(md5({text}), 1, 16))::bit(64)::bigint",
        "mysql": f"CAST(CONV(LEFT(MD5({text}), 16), 16, 10) AS UNSIGNED)",
        "sqlite": f"{SQLITE_HASH}({text})",
    }[kind]


def xor_of_sql(kind: str, hashes: str) -> str:
    """The XOR of hashes as an aggregate of SQL, signed."""
    return {
        "postgresql": f"bit_xor({hashes})",
        "mysql": f"CAST(BIT_XOR({hashes}) AS SIGNED)",
        "sqlite": f"{SQLITE_XOR}({hashes})",
    }[kind]


def joined_by_sql(kind: str, *texts: str) -> str:
    """Joined texts as an expression of SQL; NULL if one of them is."""
    return f"CONCAT({', '.join(texts)})" if kind == "mysql" else f"({' || '.join(texts)})"


def contents_of_sql(kind: str) -> str:
    """The digest of the contents of a row of half_message as an expression of SQL; NULL without a digest."""
    key = quoted_key(kind)
    if kind == "sqlite":
        return f"{SQLITE_CONTENTS}(digest, {key}, tag)"
    marked = [f"COALESCE({joined_by_sql(kind, mark, name)}, '')" for mark, name in (("'t'", "tag"), ("'k'", key))]
    text = joined_by_sql(kind, marked[0], "' '", marked[1])
    if kind == "mysql":
        combined = f"CAST(digest ^ {of_sql(kind, text)} AS SIGNED)"
    else:
        combined = f"digest # {of_sql(kind, text)}"
    return f"CASE WHEN {key} IS NULL AND tag IS NULL THEN digest ELSE {combined} END"


def quoted_key(kind: str) -> str:
    """The name of the column `key`, which is a word of MySQL's own."""
    return "`key`" if kind == "mysql" else '"key"'
