"""Ids as text: a batch is read as its ids are one by one."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from notify.errors import InvalidId
from notify.protocol import ids

IDS = [ids.to_text(ids.new_id()) for _ in range(ids.FEW_IDS + 3)]


def one_by_one(texts: list[str]) -> list[bytes | str]:
    """For each text its bytes, or why it is refused."""
    results: list[bytes | str] = []
    for text in texts:
        try:
            results.append(ids.from_text.__wrapped__(text))
        except InvalidId as error:
            results.append(str(error))
    return results


def together(texts: list[str]) -> list[bytes | str]:
    return [found if isinstance(found, bytes) else str(found) for found in ids.from_texts(texts)]


@st.composite
def damaged(draw: st.DrawFn) -> list[str]:
    """Ids, some characters of which were replaced, added, removed, or moved to the neighbour."""
    texts = list(IDS)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(texts) - 1))
        at = draw(st.integers(0, len(texts[number])))
        replaced = draw(st.integers(0, 2))
        text = draw(st.text("0123456789abcdefABCDEF-\n \t\x00_g\u0663", max_size=2))
        taken = texts[number][at : at + replaced]
        texts[number] = texts[number][:at] + text + texts[number][at + replaced :]
        if draw(st.booleans()):
            texts[number - 1] += taken
    return texts


@settings(deadline=None)  # a loaded machine may take long for one example
@given(damaged())
@example([*IDS[:-1], IDS[-1].upper()])
@example([*IDS[:-1], IDS[-1][:-2] + "  "])
@example([*IDS[:-1], IDS[-1] + "\n"])
@example([*IDS[:-2], IDS[-2] + "\n" + IDS[-1], ""])
def test_a_batch_is_read_as_its_ids_one_by_one(texts: list[str]) -> None:
    assert together(texts) == one_by_one(texts)


def test_batches_of_each_size() -> None:
    for count in range(len(IDS) + 1):
        for texts in (IDS[:count], [*IDS[:count], "no id"]):
            assert together(texts) == one_by_one(texts)
