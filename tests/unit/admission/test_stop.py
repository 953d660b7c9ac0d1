from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.admission.stop import StopMatcher


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for piece in pieces:
        step = matcher.push(piece)
        shown += step.text
        if step.matched:
            return shown, True
    return shown + matcher.flush(), False


def test_case_13_a_stop_may_end_inside_a_token() -> None:
    pieces = [" equals", " four", "."]
    assert run(["fou"], pieces) == (" equals ", True)
    assert run(["fou"], pieces, include=True) == (" equals fou", True)


def test_no_stops_pass_everything_through() -> None:
    matcher = StopMatcher([])
    step = matcher.push("anything")
    assert (step.text, step.matched, matcher.flush()) == ("anything", False, "")


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser"])
    assert matcher.push("hello\n").text == "hello"
    assert matcher.push("\nU").text == ""
    assert matcher.push("nder").text == "\n\nUnder"
    assert matcher.flush() == ""


def test_held_text_appears_at_the_end() -> None:
    assert run(["stop"], ["full s", "to"]) == ("full sto", False)


def test_a_stop_may_span_several_pieces_and_overlap_itself() -> None:
    assert run(["aab"], ["a", "a", "a", "b", "c"]) == ("a", True)


def test_the_first_to_end_wins_and_then_the_longest() -> None:
    assert run(["later", "now"], ["do it now or later"]) == ("do it ", True)
    assert run(["b", "ab"], ["xab"]) == ("x", True)
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", True)


@st.composite
def _cut_texts(draw: st.DrawFn) -> tuple[list[str], str, list[str]]:
    text = draw(st.text("ab\n", max_size=40))
    stops = draw(st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    return stops, text, [text[a:b] for a, b in pairwise(edges)]


def _oracle(stops: list[str], text: str, *, include: bool) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


@given(_cut_texts(), st.booleans())
def test_the_answer_does_not_depend_on_the_pieces(
    case: tuple[list[str], str, list[str]], include: bool
) -> None:
    stops, text, pieces = case
    assert run(stops, pieces, include=include) == _oracle(stops, text, include=include)
