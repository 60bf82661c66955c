"""Lossless decoding: drafters propose, the target scores, verification decides. Names are imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specheads.inference.decoder import SpeculativeDecoder
    from specheads.inference.distribution import Sampler
    from specheads.inference.drafters.cascade import CascadeDrafter
    from specheads.inference.drafters.head import HeadDrafter
    from specheads.inference.drafters.lookup import LookupDrafter
    from specheads.inference.drafters.model import ModelDrafter
    from specheads.inference.drafters.none import NoDrafter

_HOMES = {
    "SpeculativeDecoder": "specheads.inference.decoder",
    "Sampler": "specheads.inference.distribution",
    "CascadeDrafter": "specheads.inference.drafters.cascade",
    "HeadDrafter": "specheads.inference.drafters.head",
    "LookupDrafter": "specheads.inference.drafters.lookup",
    "ModelDrafter": "specheads.inference.drafters.model",
    "NoDrafter": "specheads.inference.drafters.none",
}

__all__ = [
    "CascadeDrafter",
    "HeadDrafter",
    "LookupDrafter",
    "ModelDrafter",
    "NoDrafter",
    "Sampler",
    "SpeculativeDecoder",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
