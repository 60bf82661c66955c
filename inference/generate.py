"""Prompts to texts: what `specheads generate` prints."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specheads.inference.draft import Drafter
from specheads.inference.settings import DecodeSettings
from specheads.prompts import Prompt, render_prompt
from specheads.target import TargetModel


def generate_texts(
    target: TargetModel, drafter: Drafter, prompts: Sequence[Prompt], settings: DecodeSettings
) -> Iterator[dict[str, Any]]:
    """Yield one object a prompt: id, text, token_ids, new_tokens, rounds, drafted, accepted, seconds, finish_reason.

    `text` and `token_ids` are what was generated, without the prompt; the text without special tokens.

    Raises:
        UserError: a prompt that cannot be rendered, or a setting that cannot be honoured.
    """
    decoder = settings.decoder(target, drafter)
    assert target.tokenizer is not None
    encoded = [(prompt, render_prompt(target.tokenizer, prompt, raw=settings.raw)) for prompt in prompts]
    for prompt, ids in encoded:
        result = settings.generate(decoder, torch.tensor([ids], device=target.device), prompt.id)
        new_ids, stats = result.sequences[0, len(ids) :].tolist(), result.stats
        yield {
            "id": prompt.id,
            "text": target.tokenizer.decode(new_ids, skip_special_tokens=True),
            "token_ids": new_ids,
            "new_tokens": stats.new_tokens,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "seconds": stats.seconds,
            "finish_reason": result.finish_reason,
        }
