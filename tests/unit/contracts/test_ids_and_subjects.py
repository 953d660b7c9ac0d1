from __future__ import annotations

import pytest

from services.contracts.errors import InvariantError
from services.contracts.ids import MAX_ID_LENGTH, is_id
from services.contracts.subjects import Subjects

BAD = ["", ".", "a.b", "a b", "*", ">", "a\n", "a\0", "é", "a" * 65, "a/b", "$SRV", "\ta"]


@pytest.mark.parametrize("text", ["a", "A-z_0", "a" * MAX_ID_LENGTH, "-", "_"])
def test_ids(text: str) -> None:
    assert is_id(text)


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_id(text: str) -> None:
    assert not is_id(text)


def test_the_subjects_of_the_design() -> None:
    names = Subjects()
    assert names.generate("m") == "streetcar.v1.generate.m"
    assert names.cancel("r") == "streetcar.v1.cancel.r"
    assert names.submit("e") == "streetcar.v1.engine.e.submit"
    assert names.abort("e") == "streetcar.v1.engine.e.abort"
    assert names.plan("e") == "streetcar.v1.engine.e.plan"
    assert names.result("e") == "streetcar.v1.engine.e.result"
    assert names.attach("e") == "streetcar.v1.engine.e.attach"
    assert names.poll("e") == "streetcar.v1.engine.e.poll"
    assert names.steps("e") == "streetcar.v1.engine.e.steps"
    assert names.updates("a") == "streetcar.v1.admission.a.updates"
    assert names.lookup("e") == "streetcar.v1.kv.e.lookup"
    assert names.lease("e") == "streetcar.v1.kv.e.lease"
    assert names.delta("e") == "streetcar.v1.kv.e.delta"
    assert names.beat("scheduler", "e") == "streetcar.v1.beat.scheduler.e"
    assert names.any_kv == "streetcar.v1.kv.*.*"
    assert names.any_cancel == "streetcar.v1.cancel.*"
    assert names.any_generate == "streetcar.v1.generate.>"
    assert names.any_beat() == "streetcar.v1.beat.*.*"
    assert names.any_beat("kv_store") == "streetcar.v1.beat.kv_store.*"


def test_another_prefix_moves_them_all() -> None:
    names = Subjects("town.line")
    assert names.plan("e") == "town.line.engine.e.plan"
    assert names.any_kv.startswith("town.line.")


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("kind", ["generate", "cancel", "plan", "submit", "updates", "lease"])
def test_no_subject_is_built_from_a_bad_id(kind: str, text: str) -> None:
    with pytest.raises(InvariantError):
        getattr(Subjects(), kind)(text)


def test_tails() -> None:
    names = Subjects()
    assert names.tail("streetcar.v1.generate.m", 1) == "m"
    assert names.tail("streetcar.v1.generate.a.b", 1) == "a.b"
    assert names.tail("streetcar.v1.kv.e.lease", 1) == "e.lease"
    assert names.tail("streetcar.v1.kv.e.lease", 2) == "lease"
