"""A separate small model, distilled with the same loop: the other side of every comparison (arXiv 2211.17192).

It reads the tokens themselves and none of the target's states. Its checkpoint is a plain transformers folder, embedding
and projection included, which `--draft-model` takes like any other model.

    known: token 7, token 8       reads ..., 7, 8 -> depth 1, token 9
"""

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from specheads.cache import PreallocatedCache
from specheads.config import HeadConfig, nearest
from specheads.errors import UserError
from specheads.head import DraftHead, HeadInputs, shift_left
from specheads.registry import register_head
from specheads.target import TargetModel


class DraftModelConfig(HeadConfig):
    """Attributes beside those of every head:

    num_layers: layers of the small model.
    start_from: "target" copies the target's embedding, projection, final norm and first layers; "random" does not.
    model: the target's own transformers configuration, from which the small model's is made.
    overrides: fields of that configuration to change, such as hidden_size; not with start_from "target".
    """

    num_layers: int = Field(default=2, ge=1)
    start_from: Literal["random", "target"] = "target"
    model: dict[str, Any]
    overrides: dict[str, Any] = Field(default_factory=dict)


@register_head("draft_model")
class DraftModelHead(DraftHead):
    """A small causal language model of the target's own kind."""

    Config = DraftModelConfig
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig) -> None:
        super().__init__(config)
        if config.draft_vocab_size is not None or config.tap_layers:
            raise UserError("head draft_model is a whole model: leave out draft_vocab_size and tap_layers")
        if config.start_from == "target" and config.overrides:
            raise UserError(f"head draft_model: overrides {config.overrides} need start_from random, got target")
        if config.num_layers > config.target.num_layers:
            raise UserError(
                f"head draft_model: num_layers is {config.num_layers}, the target itself has "
                f"{config.target.num_layers}; use fewer"
            )
        for key in config.overrides.keys() - config.model.keys():
            raise UserError(f"head draft_model: overrides have unknown key {key!r}{nearest(key, list(config.model))}")
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(_small_config(config))

    @classmethod
    def default_options(cls, target: TargetModel) -> dict[str, Any]:
        return {"model": target.config.to_dict()}

    def initialise(self, target: TargetModel) -> None:
        if self.config.start_from == "target":
            source, own = target.model.state_dict(), self.model.state_dict()
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(source[name])

    def forward(self, inputs: HeadInputs, depth: int) -> list[Tensor]:
        decoder = self.model.get_decoder()
        hidden = decoder(input_ids=inputs.ids_BL, position_ids=inputs.position_ids_BL, use_cache=False)
        return [shift_left(hidden.last_hidden_state, k) for k in range(1, depth + 1)]

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.shape_logits(self.model.get_output_embeddings()(hidden))

    def start(self) -> "_State":
        return _State(PreallocatedCache(self.model.config))

    def absorb(self, state: "_State", ids_BL: Tensor, taps_BLTD: Tensor, next_ids_B: Tensor) -> Tensor:
        tokens_BL = torch.cat([ids_BL, next_ids_B[:, None]], dim=1)
        if state.context:  # the first of these tokens was the next one of the call before
            tokens_BL = tokens_BL[:, 1:]
        state.cache.rollback(state.context)
        state.context += tokens_BL.shape[1]
        return self._step(state, tokens_BL)

    def advance(self, state: "_State", ids_B: Tensor) -> Tensor:
        return self._step(state, ids_B[:, None])

    def _step(self, state: "_State", tokens_BL: Tensor) -> Tensor:
        return self.model(input_ids=tokens_BL, cache=state.cache, logits_to_keep=1).logits[:, -1]

    def save_pretrained(self, directory: str | Path, provenance: dict[str, Any] | None = None) -> None:
        """Write a plain transformers folder, the target's tokenizer included; it has no place for `provenance`."""
        self.model.save_pretrained(directory)
        if self._borrowed is not None and self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(directory)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the same files; returns the commit's address."""
        if self._borrowed is not None and self.target.tokenizer is not None:
            self.target.tokenizer.push_to_hub(repo_id, private=private, token=token)
        return str(self.model.push_to_hub(repo_id, private=private, token=token))


class _State:
    def __init__(self, cache: PreallocatedCache) -> None:
        self.cache = cache
        self.context = 0


def _small_config(config: DraftModelConfig) -> Any:
    values = copy.deepcopy(config.model) | config.overrides | {"num_hidden_layers": config.num_layers}
    if values.get("layer_types") is not None:
        values["layer_types"] = values["layer_types"][: config.num_layers]
    model_type = values.pop("model_type")
    return CONFIG_MAPPING[model_type].from_dict(values)
