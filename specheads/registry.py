"""Head types by name. A head registers itself; every module in `specheads.heads` is found without being listed."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from specheads.config import nearest
from specheads.errors import UserError

if TYPE_CHECKING:
    from specheads.head import DraftHead

    Head = TypeVar("Head", bound=DraftHead)

_heads: "dict[str, type[DraftHead]]" = {}


def register_head(name: str) -> "Callable[[type[Head]], type[Head]]":
    """Class decorator: make a head known under `name`."""

    def register(head: "type[Head]") -> "type[Head]":
        assert name not in _heads, f"two heads are called {name}"
        head.type_name = name
        _heads[name] = head
        return head

    return register


def head_types() -> "dict[str, type[DraftHead]]":
    """All head types that this install knows, by name."""
    import specheads.heads

    for module in pkgutil.iter_modules(specheads.heads.__path__):
        importlib.import_module(f"specheads.heads.{module.name}")
    return dict(sorted(_heads.items()))


def get_head_type(name: str) -> "type[DraftHead]":
    """The head type called `name`.

    Raises:
        UserError: there is none; the message lists the known names and the nearest.
    """
    known = head_types()
    if name not in known:
        raise UserError(f"head type {name!r} is unknown{nearest(name, list(known))}")
    return known[name]
