"""Heads are found by name, without a list; a name that is unknown is answered with the nearest."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import specheads.heads
from specheads import registry
from specheads.errors import UserError
from specheads.head import DraftHead
from specheads.registry import get_head_type, head_types, register_head


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    head_types()
    before = dict(registry._heads)
    yield
    registry._heads.clear()
    registry._heads.update(before)


def test_every_file_in_heads_registers_one_head() -> None:
    files = {path.stem for path in Path(specheads.heads.__path__[0]).glob("*.py")} - {"__init__"}
    found = head_types()
    assert {head.__module__.rpartition(".")[2] for head in found.values()} == files
    assert {"draft_model", "eagle3", "medusa"} <= set(found)
    assert list(found) == sorted(found)
    for name, head in found.items():
        assert issubclass(head, DraftHead)
        assert head.type_name == name
        assert get_head_type(name) is head


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle", "head type 'eagle' is unknown; did you mean 'eagle3'"),
        ("Medusa", "head type 'Medusa' is unknown; did you mean 'medusa'"),
        ("qqq", "head type 'qqq' is unknown; known: "),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        get_head_type(name)
    assert str(error.value).startswith(message)
    assert all(known in str(error.value) for known in head_types())


def test_a_new_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tried_head.py").write_text(
        "from specheads.heads.medusa import MedusaHead\n"
        "from specheads.registry import register_head\n\n\n"
        "@register_head('tried')\n"
        "class TriedHead(MedusaHead):\n"
        "    pass\n",
        "utf-8",
    )
    monkeypatch.setattr(specheads.heads, "__path__", [*specheads.heads.__path__, str(tmp_path)])
    assert get_head_type("tried").type_name == "tried"
    assert get_head_type("medusa").type_name == "medusa"


def test_a_name_is_given_once() -> None:
    with pytest.raises(AssertionError, match="two heads are called medusa"):
        register_head("medusa")(get_head_type("eagle3"))
    assert get_head_type("medusa").type_name == "medusa"
