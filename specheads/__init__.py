"""Train a small draft head on a frozen language model, and decode with it faster without changing the output's law.

`import specheads` loads neither torch nor transformers: the names below are imported when they are first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specheads.checkpoint import load_head
    from specheads.errors import UserError
    from specheads.head import DraftHead
    from specheads.target import TargetModel

_HOMES = {
    "load_head": "specheads.checkpoint",
    "DraftHead": "specheads.head",
    "TargetModel": "specheads.target",
    "UserError": "specheads.errors",
}

__all__ = ["DraftHead", "TargetModel", "UserError", "__version__", "load_head"]

__version__ = version("specheads")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
