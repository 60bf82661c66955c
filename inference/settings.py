"""How `generate` and `compare` decode: the command line's options as one checked object."""

import hashlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specheads.errors import UserError
from specheads.inference.decoder import GenerationResult, SpeculativeDecoder
from specheads.inference.draft import Drafter
from specheads.target import TargetModel


@dataclass(frozen=True)
class DecodeSettings:
    """Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 change nothing.

    Raises:
        UserError: a value outside its range, by name.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    verification: str = "rejection"
    draft_length: int | str = "auto"
    raw: bool = False

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1 (off)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "more than 0; 1 is off"),
            "seed": (self.seed >= 0, "0 or more"),
        }
        for name, (fits, expected) in ranges.items():
            if not fits:
                raise UserError(f"{name.replace('_', '-')} is {getattr(self, name)}, expected {expected}")

    @property
    def repeats_plain(self) -> bool:
        """Whether every drafter must give the very tokens of plain decoding."""
        return self.temperature == 0

    @property
    def generation_arguments(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`; all are given, so that no default of a model steps in."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "repetition_penalty": self.repetition_penalty,
            "do_sample": self.temperature > 0,
        }
        if self.temperature > 0:
            arguments |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            arguments["min_p"] = self.min_p or None
        return arguments

    def decoder(self, target: TargetModel, drafter: Drafter) -> SpeculativeDecoder:
        """A decoder with these settings; plain decoding has no draft length to set."""
        length = "auto" if drafter.kind == "none" else self.draft_length
        return SpeculativeDecoder(target, drafter, verification=self.verification, draft_length=length)

    def generate(self, decoder: SpeculativeDecoder, ids_1P: Tensor, prompt_id: str, **changes: Any) -> GenerationResult:
        """Continue a prompt (1, length). Its random numbers are drawn from the seed and its id: each has its own, and
        every drafter starts from the same."""
        key = hashlib.sha256(f"{self.seed}:{prompt_id}".encode()).digest()
        seed = int.from_bytes(key[:8], "big") >> 1  # generators take 63 bits
        return decoder.generate(ids_1P, seed=seed, **self.generation_arguments | changes)
