"""Stop strings: found wherever the text is cut, and never let out in part."""

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxserve.text import StopScanner

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.text("abc", max_size=5), max_size=12)


def scan(stops: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    scanner = StopScanner(stops, include_stop=include)
    text, hit = "", None
    for piece in pieces:
        emitted, hit = scanner.push(piece)
        text += emitted
    return text + scanner.flush(), hit


def read_by_character(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The definition: the stop that completes first, the longest of several that complete at once."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            hit = max(ending, key=len)
            return text[: end - len(hit)], hit
    return text, None


@hypothesis.given(STOPS, PIECES)
def test_any_cutting_gives_the_same(stops: tuple[str, ...], pieces: list[str]):
    text, hit = read_by_character(stops, "".join(pieces))
    assert scan(stops, pieces) == (text, hit)
    assert scan(stops, ["".join(pieces)]) == (text, hit)
    assert scan(stops, pieces, include=True) == (text + (hit or ""), hit)


@hypothesis.given(STOPS, PIECES)
def test_nothing_of_a_stop_leaks_before_it_is_complete(stops: tuple[str, ...], pieces: list[str]):
    final, _ = read_by_character(stops, "".join(pieces))
    scanner, sent = StopScanner(stops), ""
    for piece in pieces:
        sent += scanner.push(piece)[0]
        assert final.startswith(sent)


@hypothesis.given(STOPS, PIECES)
def test_only_what_may_become_a_stop_is_held(stops: tuple[str, ...], pieces: list[str]):
    scanner, sent, seen = StopScanner(stops), "", ""
    for piece in pieces:
        emitted, hit = scanner.push(piece)
        sent, seen = sent + emitted, seen + piece
        if hit is not None:
            break
        held = seen[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_last_characters_arrive():
    scanner = StopScanner(("<end>",))
    assert scanner.push("all <en") == ("all ", None)
    assert scanner.flush() == "<en"
    assert scanner.flush() == ""


def test_nothing_follows_a_hit():
    scanner = StopScanner(("!",))
    assert scanner.push("a!b") == ("a", "!")
    assert scanner.push("c") == ("", "!")
    assert scanner.flush() == ""


def test_not_armed_passes_everything_even_what_was_held():
    scanner = StopScanner(("stop",))
    assert scanner.push("st") == ("", None)
    assert scanner.push("op and stop", armed=False) == ("stop and stop", None)
    assert scanner.push(" stop") == (" ", "stop")


def test_without_stops_text_passes():
    scanner = StopScanner(())
    assert scanner.push("abc") == ("abc", None)
    assert scanner.flush() == ""


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopScanner(("a", ""))
