"""Which of transformers' generation arguments can be honoured. The others are refused by name, never ignored."""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from specheads.errors import UserError
from specheads.target import TargetModel

_AT_MOST_ONE = ("num_beams", "num_beam_groups", "num_return_sequences")
_UNSUPPORTED_SETTINGS = (
    "penalty_alpha",
    "constraints",
    "force_words_ids",
    "dola_layers",
    "assistant_early_exit",
    "use_mtp",
    "prompt_lookup_num_tokens",
    "token_healing",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "prefill_chunk_size",
    "compile_config",
)
# Settings of transformers' own assisted generation have defaults of their own, so they count only when they were given.
_UNSUPPORTED_ARGUMENTS = (
    "assistant_model",
    "assistant_tokenizer",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "max_matching_ngram_size",
    "speculation_type",
    "synced_gpus",
    "inputs_embeds",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)
_PREPARED = ("attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep")


def caller_arguments() -> dict[str, Any]:
    """The variables of the `generate` of transformers that is calling; empty outside one.

    Transformers 5.24 does not hand `streamer`, `assistant_model` and `synced_gpus` on to a callable `custom_generate`,
    and without looking there they would be ignored in silence.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    for _ in range(4):
        if frame.f_code is code:
            return dict(frame.f_locals)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raise for what the user gave by name and the loop cannot honour.

    Raises:
        UserError: naming the argument.
    """
    for name in _UNSUPPORTED_ARGUMENTS:
        value = arguments.get(name)
        if value is not None and value is not False:
            raise _refusal(name, value if isinstance(value, (int, float, str)) else type(value).__name__)


def refuse_settings(config: GenerationConfig) -> None:
    """Raise for a setting of the prepared configuration (the model's own defaults included) that cannot be honoured.

    Raises:
        UserError: naming the setting.
    """
    for name in _AT_MOST_ONE:
        if (getattr(config, name, None) or 1) > 1:
            raise _refusal(name, getattr(config, name))
    for name in _UNSUPPORTED_SETTINGS:
        if getattr(config, name, None):
            raise _refusal(name, getattr(config, name))
    if getattr(config, "cache_implementation", None) not in (None, "dynamic"):
        raise _refusal("cache_implementation", config.cache_implementation)
    if config.use_cache is False:
        raise _refusal("use_cache", False)


def refuse_inputs(target: TargetModel, model: object, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise for inputs that the loop cannot take: another model, several rows, padding, a used cache, further tensors.

    Raises:
        UserError: naming the input.
    """
    if model is not target.model:
        raise UserError(
            f"generate was called on another {type(model).__name__} than this decoder's target; build a decoder for it"
        )
    if input_ids.shape[0] != 1:
        raise UserError(f"input_ids has {input_ids.shape[0]} rows; expected 1: call generate once for each prompt")
    if input_ids.shape[1] == 0:
        raise UserError("input_ids is empty; expected at least one token: put a beginning-of-sequence token there")
    if input_ids.device.type != target.device.type:
        raise UserError(f"input_ids is on {input_ids.device}; expected {target.device}: move it there")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise UserError(
            "attention_mask hides tokens of the prompt (padding, or pad tokens in a prompt without a mask); expected "
            "only ones: pass the prompt without padding"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and not torch.equal(
        positions, torch.arange(input_ids.shape[1], device=positions.device).expand_as(positions)
    ):
        raise UserError("position_ids does not count 0, 1, 2, ...; expected plain positions: leave it out")
    cache = model_kwargs.get("cache")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise _refusal("cache", type(cache).__name__)
    for name, value in model_kwargs.items():
        if name not in _PREPARED and value is not None:
            raise _refusal(name, type(value).__name__)


def refuse_length(target: TargetModel, input_ids: Tensor, config: GenerationConfig) -> None:
    """Refuse to run past the positions that a target has embeddings for; the last token is never read.

    Raises:
        UserError: says how many tokens there are, and how many positions.
    """
    longest, limit = config.max_length - 1, target.max_positions
    if limit is not None and longest > limit:
        raise UserError(
            f"a prompt of {input_ids.shape[1]} tokens and {config.max_length - input_ids.shape[1]} new ones take "
            f"{longest} positions, the target has {limit}; lower max_new_tokens or shorten the prompt"
        )


def _refusal(name: str, value: object) -> UserError:
    return UserError(f"{name}={value} cannot be honoured by speculative decoding here; leave it out")
