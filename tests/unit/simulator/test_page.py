"""The page carries everything it shows and loads nothing."""

from __future__ import annotations

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from services.simulator.capacity.presets import FIVE_REQUESTS, FRONTIER
from services.simulator.capacity.report import as_json, as_table
from services.simulator.capacity.scenario import Row, compare
from services.simulator.page.data import collect
from services.simulator.page.render import render

LOADING = {"src", "href", "data", "action", "srcset", "poster", "formaction"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.loaded += [(tag, name) for name, _ in attrs if name in LOADING]
        self.ids += [value or "" for name, value in attrs if name == "id"]


def _rows() -> list[Row]:
    setup = FIVE_REQUESTS.setup
    variants = FIVE_REQUESTS.variants(setup.engine)
    return list(compare(variants, setup.workload.requests(), FIVE_REQUESTS.extra))


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """The whole page's data; the frontier's sweep is the report's own, made small here."""
    report = as_json(FIVE_REQUESTS, FIVE_REQUESTS.setup, _rows())
    swept = {
        f"seqs-{seqs}": {
            "max_num_seqs": seqs,
            "max_num_batched_tokens": 512,
            "output_tokens_per_s": 100.0 * seqs,
            "steps": 10,
            "preemptions": 0,
            "ttft_ms": {"p50": 5.0, "p99": 900.0 / seqs},
            "itl_ms": {"p99": 10.0},
        }
        for seqs in (8, 16)
    }
    title = "</script><b>"
    report |= {"preset": FRONTIER.name, "policies": swept, "title": title}
    report["verdict"] = {"frontier": ["seqs-16"], "frontier_with_itl": ["seqs-16"]}
    return collect(report, lambda fraction, text: None)


def test_the_page_loads_nothing(data: dict[str, Any]) -> None:
    page = render(data)
    reader = _Reader()
    reader.feed(page)
    assert reader.loaded == []
    # A namespace is a name, not an address that is fetched.
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(", page)


def test_data_cannot_leave_its_element(data: dict[str, Any]) -> None:
    page = render(data)
    reader = _Reader()
    reader.feed(page)
    assert reader.scripts == 2
    found = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert found and json.loads(found.group(1))["report"]["title"] == "</script><b>"


def test_every_picture_has_its_place_and_its_data(data: dict[str, Any]) -> None:
    reader = _Reader()
    reader.feed(render(data))
    assert {"report", "gantt", "padding", "knee", "spike", "frontier"} <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))
    steps = {run["name"]: run["steps"] for run in data["gantt"]["together"]}
    assert steps == {"static": 12, "dynamic": 12, "continuous": 8}
    assert data["knee"]["ridge"] == pytest.approx(295.2, abs=0.1)
    assert [panel["worst"] for panel in data["spike"]["panels"]] == [
        pytest.approx(400, rel=0.01),
        pytest.approx(29.8, abs=0.5),
        pytest.approx(42.8, abs=0.1),
    ]
    assert [point["best"] for point in data["frontier"]["points"]] == [False, True]


def test_padding_grows_with_the_spread_and_is_nothing_without(data: dict[str, Any]) -> None:
    sweep = data["padding"]["sweep"]
    assert sweep[0]["waste"] == 0
    assert [p["waste"] for p in sweep] == sorted(p["waste"] for p in sweep)
    assert sweep[-1]["continuous"] > 2 * sweep[-1]["static"]


def test_the_cache_pulls_the_knee_down(data: dict[str, Any]) -> None:
    doubled = [curve["doubled"] for curve in data["knee"]["curves"]]
    assert doubled[0] == pytest.approx(591, abs=1)
    assert doubled == sorted(doubled, reverse=True)


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra (report)"
)
def test_png_files_are_written(data: dict[str, Any], tmp_path: Path) -> None:
    from services.simulator.page.png import draw

    written = draw(data, tmp_path / "pictures")
    assert [path.stem for path in written] == ["gantt", "padding", "knee", "spike", "frontier"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_the_table_names_every_row_and_hides_empty_columns() -> None:
    table = as_table(as_json(FIVE_REQUESTS, FIVE_REQUESTS.setup, _rows()))
    lines = table.splitlines()
    assert lines[0] == FIVE_REQUESTS.title
    assert [line.split()[0] for line in lines[-3:]] == ["static", "dynamic", "continuous"]
    assert "padding" not in table and "preempt" not in table
    assert {len(line) for line in lines[-3:]} == {len(lines[-4])}
