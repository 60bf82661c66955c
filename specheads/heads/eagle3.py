"""EAGLE-3: one or a few decoder layers over fused states of several target layers (arXiv 2503.01840).

Step 0 at position t reads [embedding of token t+1; fused states of token t]; its output predicts token t+2 (depth 1).
Step i reads the embedding of token t+1+i and, in place of the fused states, the output of step i-1: in training too
(the paper's *training-time test*), with the true tokens. Its rotary position is t+i. It attends to the step-0 keys up
to t and to its own row's keys of steps 1..i.

    known: state of token 7, token 8       step 0: E(8), states(7)  -> depth 1, token 9
    drafted token 9                        step 1: E(9), output 0   -> depth 2, token 10
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from specheads.config import HeadConfig
from specheads.errors import UserError
from specheads.head import DraftHead, HeadInputs
from specheads.layers import (
    GatedMLP,
    KeyValueBuffers,
    Linear,
    Places,
    RMSNorm,
    RotaryAttention,
    RotaryTable,
    Rotation,
    block_mask,
    rotary,
)
from specheads.registry import register_head
from specheads.target import TargetModel


class Eagle3Config(HeadConfig):
    """Attributes beside those of every head:

    hidden_size: width of the head, the target's own (its projection is shared).
    num_layers: decoder layers; the first reads embedding and state side by side.
    projection: "target" shares the rows of the target's output projection, frozen; "own" trains a copy of them.
    norm_taps: normalise each tapped state before fusing them (EAGLE-3.1, arXiv 2605.09992).
    norm_feedback: feed back the normed output instead of the raw one (EAGLE-3.1).
    start_from: "target" copies the weights of the target's last layer (Llama-like targets, default sizes); "auto" does
        so where it can.
    """

    hidden_size: int
    num_layers: int = Field(default=1, ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    intermediate_size: int = Field(ge=1)
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    projection: Literal["target", "own"] = "target"
    norm_taps: bool = False
    norm_feedback: bool = False
    start_from: Literal["random", "target", "auto"] = "random"


@register_head("eagle3")
class Eagle3Head(DraftHead):
    """Autoregressive head with its own keys and values; drafts chains of any length."""

    Config = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width, taps = config.hidden_size, len(config.tap_layers)
        if taps == 0:
            raise UserError("head eagle3: tap_layers is empty, expected at least one tapped layer")
        if width != config.target.hidden_size:
            raise UserError(
                f"head eagle3: hidden_size is {width}, the target's is {config.target.hidden_size}; leave it out"
            )
        if config.num_heads % config.num_kv_heads:
            raise UserError(
                f"head eagle3: num_heads is {config.num_heads}, expected a multiple of num_kv_heads "
                f"{config.num_kv_heads}"
            )
        if config.head_dim % 2:
            raise UserError(f"head eagle3: head_dim is {config.head_dim}, expected an even number (rotary positions)")
        self.tap_norms = nn.ModuleList(
            RMSNorm(width, eps=config.norm_eps) for _ in range(taps if config.norm_taps else 0)
        )
        self.fc = Linear(taps * width, width, bias=False)
        self.embedding_norm = RMSNorm(width, eps=config.norm_eps)
        self.layers: Any = nn.ModuleList(_Layer(config, first=index == 0) for index in range(config.num_layers))
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.lm_head = Linear(width, config.num_draft_tokens, bias=False) if config.projection == "own" else None

    @classmethod
    def default_options(cls, target: TargetModel) -> dict[str, Any]:
        config, layers = target.config, target.num_layers
        heads = config.num_attention_heads
        return {
            "hidden_size": target.hidden_size,
            "tap_layers": tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)})),
            "num_heads": heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or target.hidden_size // heads,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            "rope_theta": target.rope_theta,
        }

    def initialise(self, target: TargetModel) -> None:
        if self.lm_head is not None:
            self.lm_head.weight.data.copy_(self._bound.projection_rows)
        if self.config.start_from != "random":
            try:
                weights = target.llama_layer(target.num_layers - 1)
                for layer in self.layers:
                    layer.check_sizes(weights)
            except UserError:
                if self.config.start_from == "auto":
                    return
                raise
            for layer in self.layers:
                layer.copy_from(weights)
            width = self.config.hidden_size
            with torch.no_grad():
                self.norm.weight.copy_(weights["final_norm"])
                self.fc.weight.zero_()  # begin with the last tapped state alone
                self.fc.weight[:, -width:].copy_(torch.eye(width))

    def fuse(self, taps_BLTD: Tensor) -> Tensor:
        """The tapped states as one state, (B, L, D)."""
        taps = taps_BLTD.to(self.dtype).unbind(2)
        if self.config.norm_taps:
            taps = tuple(norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True))
        return self.fc(torch.cat(taps, dim=-1))

    def _output(self, hidden_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """(state to project, state to feed back)."""
        normed = self.norm(hidden_BLD)
        return normed, normed if self.config.norm_feedback else hidden_BLD

    def forward(self, inputs: HeadInputs, depth: int) -> list[Tensor]:
        mask, positions, outputs = inputs.causal_mask(), inputs.position_ids_BL, []
        feedback, places = self.fuse(inputs.taps_BLTD), None
        memories: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        for step in range(depth):
            ids = inputs.ids_ahead(step + 1)
            if step == 1 and inputs.deep_BL is not None:
                places = Places(inputs.deep_BL)
                feedback, positions = places.take(feedback), places.take(positions)
                mask = places.take(mask[:, 0])[:, None]  # its rows are the queries; all keys of step 0 stay
            if places is not None:
                ids = places.take(ids)
            embedded = self.embedding_norm(self.embed(ids))
            rotation = rotary(positions + step, self.config.head_dim, self.config.rope_theta)
            hidden = feedback
            for layer, memory in zip(self.layers, memories, strict=True):
                hidden = layer.train_step(embedded, hidden, rotation, mask, memory)
            output, feedback = self._output(hidden)
            outputs.append(output if places is None else places.put_back(output))
        return outputs

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target_logits(hidden) if self.lm_head is None else self.lm_head(hidden)

    @property
    def trains_projection(self) -> bool:
        return self.lm_head is not None

    def start(self) -> "_State":
        table = RotaryTable(self.config.head_dim, self.config.rope_theta, self.dtype, self.fc.weight.device)
        return _State([KeyValueBuffers() for _ in self.layers], table)

    def absorb(self, state: "_State", ids_BL: Tensor, taps_BLTD: Tensor, next_ids_B: Tensor) -> Tensor:
        for buffers in state.buffers:
            buffers.rollback(state.context)
        tokens_BL = torch.cat([ids_BL[:, 1:], next_ids_B[:, None]], dim=1)
        logits_BV = self._step(state, tokens_BL, self.fuse(taps_BLTD), state.context)
        state.context += ids_BL.shape[1]
        state.drafted = 0
        return logits_BV

    def advance(self, state: "_State", ids_B: Tensor) -> Tensor:
        state.drafted += 1
        assert state.feedback_B1D is not None, "absorb comes before advance"
        return self._step(state, ids_B[:, None], state.feedback_B1D, state.context - 1 + state.drafted)

    def _step(self, state: "_State", tokens_BL: Tensor, hidden: Tensor, first_position: int) -> Tensor:
        rotation = state.rotary.at(first_position, tokens_BL.shape[1])
        embedded = self.embedding_norm(self.embed(tokens_BL))
        for index, (layer, buffers) in enumerate(zip(self.layers, state.buffers, strict=True), start=1):
            hidden = layer.draft_step(embedded, hidden, rotation, buffers, only_last=index == len(self.layers))
        output, state.feedback_B1D = self._output(hidden[:, -1:])
        return self.project(output, depth=1)[:, 0]


class _State:
    """While drafting: keys and values by layer, how many belong to the context, the last output, depths drafted."""

    def __init__(self, buffers: list[KeyValueBuffers], table: RotaryTable) -> None:
        self.buffers = buffers
        self.rotary = table
        self.context = 0
        self.drafted = 0
        self.feedback_B1D: Tensor | None = None


class _Layer(nn.Module):
    """A decoder layer; the first one's queries, keys and values read [embedding; state], twice as wide."""

    def __init__(self, config: Eagle3Config, first: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.first = first
        self.hidden_norm = RMSNorm(width, eps=config.norm_eps)
        self.attention = RotaryAttention(
            2 * width if first else width,
            width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self.mlp_norm = RMSNorm(width, eps=config.norm_eps)
        self.mlp = GatedMLP(width, config.intermediate_size)

    def _read(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        normed = self.hidden_norm(hidden)
        return torch.cat([embedded, normed], dim=-1) if self.first else normed

    def _finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden))

    def train_step(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotation: Rotation,
        mask: Tensor,
        memory: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        query, key, value = self.attention.queries_keys_values(self._read(embedded, hidden), rotation)
        memory.append((key, value))
        if len(memory) == 1:
            attended = self.attention.attend(query, key, value, mask)
        else:
            attended = self.attention.attend_steps(query, *memory[0], mask, memory[1:])
        return self._finish(hidden, attended)

    def draft_step(
        self, embedded: Tensor, hidden: Tensor, rotation: Rotation, buffers: KeyValueBuffers, only_last: bool
    ) -> Tensor:
        """Output of all new rows, or of the last alone where nothing reads the others: their keys are all it takes."""
        query, key, value = self.attention.queries_keys_values(self._read(embedded, hidden), rotation)
        key, value = buffers.append(key, value)
        if only_last:
            query, hidden = query[:, :, -1:], hidden[:, -1:]
        mask = block_mask(query.shape[2], key.shape[2], key.device)
        return self._finish(hidden, self.attention.attend(query, key, value, mask))

    def check_sizes(self, weights: dict[str, Tensor]) -> None:
        """Refuse a Llama layer of other sizes than this one."""
        for name, module in self._counterparts().items():
            expected = list(module.weight.shape)
            if self._reads_embedding(name):
                expected[1] //= 2
            if list(weights[name].shape) != expected:
                raise UserError(
                    f"head eagle3: start_from target needs the target's sizes, {name} is {expected} here and "
                    f"{list(weights[name].shape)} there; leave the sizes to their defaults or use start_from random"
                )

    @torch.no_grad()
    def copy_from(self, weights: dict[str, Tensor]) -> None:
        """Start as a copy of a Llama layer; what reads the embedding (half of queries, keys, values) starts at 0."""
        for name, module in self._counterparts().items():
            own: Tensor = module.weight
            if self._reads_embedding(name):
                own.zero_()
                own = own[:, own.shape[1] // 2 :]
            own.copy_(weights[name])

    def _reads_embedding(self, name: str) -> bool:
        return self.first and name in ("q", "k", "v")

    def _counterparts(self) -> dict[str, Any]:
        return {
            "q": self.attention.q_proj,
            "k": self.attention.k_proj,
            "v": self.attention.v_proj,
            "o": self.attention.o_proj,
            "gate": self.mlp.gate_proj,
            "up": self.mlp.up_proj,
            "down": self.mlp.down_proj,
            "input_norm": self.hidden_norm,
            "mlp_norm": self.mlp_norm,
        }
