"""Medusa: parallel heads on the target's last hidden state (arXiv 2401.10774).

The head for depth k = 1..num_heads maps the final state after token t straight to token t+1+k; in the paper's count
from 0 head i predicts token t+2+i, which is depth i+1. No head sees the tokens drafted before it.

    known: state of token 7, token 8       head 1 -> depth 1, token 9     head 2 -> depth 2, token 10
"""

from typing import Any

from pydantic import Field
from torch import Tensor, nn

from specheads.config import HeadConfig, ProjectionKind
from specheads.errors import UserError
from specheads.head import DraftHead, HeadInputs
from specheads.layers import Linear
from specheads.registry import register_head
from specheads.target import TargetModel


class MedusaConfig(HeadConfig):
    """Attributes beside those of every head:

    num_heads: depths that can be drafted.
    num_blocks: residual blocks a head.
    projection: "target" shares the target's output projection; "low_rank" adds a low-rank correction of `rank` to it
        for each head; "own" trains a full copy for each head, as in the paper.
    """

    hidden_size: int
    num_heads: int = Field(default=4, ge=1)
    num_blocks: int = Field(default=1, ge=1)
    projection: ProjectionKind = "target"
    rank: int = Field(default=64, ge=1)


@register_head("medusa")
class MedusaHead(DraftHead):
    """Parallel heads; drafts at most `num_heads` tokens a round."""

    Config = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        if len(config.tap_layers) != 1:
            raise UserError(f"head medusa: tap_layers is {list(config.tap_layers)}, expected exactly one layer")
        width, tokens, depths = config.hidden_size, config.num_draft_tokens, range(config.num_heads)
        if width != config.target.hidden_size:
            raise UserError(
                f"head medusa: hidden_size is {width}, the target's is {config.target.hidden_size}; leave it out"
            )
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_ResidualBlock(width) for _ in range(config.num_blocks))) for _ in depths
        )
        self.lm_heads: Any = None  # a ModuleList, one entry a depth
        if config.projection == "own":
            self.lm_heads = nn.ModuleList(Linear(width, tokens, bias=False) for _ in depths)
        elif config.projection == "low_rank":
            self.lm_heads = nn.ModuleList(_LowRank(width, tokens, config.rank) for _ in depths)

    @classmethod
    def default_options(cls, target: TargetModel) -> dict[str, Any]:
        return {"hidden_size": target.hidden_size, "tap_layers": (target.num_layers,)}

    def initialise(self, target: TargetModel) -> None:
        if self.config.projection == "own" and self.lm_heads is not None:
            for lm_head in self.lm_heads:
                lm_head.weight.data.copy_(self._bound.projection_rows)

    @property
    def max_draft_length(self) -> int:
        return self.config.num_heads

    def forward(self, inputs: HeadInputs, depth: int) -> list[Tensor]:
        if depth > self.config.num_heads:
            raise UserError(f"head medusa has {self.config.num_heads} heads, depth {depth} was asked; use fewer")
        state_BLD = inputs.taps_BLTD[:, :, 0].to(self.dtype)
        return [block(state_BLD) for block in self.blocks[:depth]]

    def project(self, hidden: Tensor, depth: int) -> Tensor:
        if self.lm_heads is None:
            return self.target_logits(hidden)
        own = self.lm_heads[depth - 1](hidden)
        return own if self.config.projection == "own" else self.target_logits(hidden) + own

    @property
    def trains_projection(self) -> bool:
        return self.lm_heads is not None

    def start(self) -> "_State":
        return _State()

    def absorb(self, state: "_State", ids_BL: Tensor, taps_BLTD: Tensor, next_ids_B: Tensor) -> Tensor:
        state.hidden_BD, state.depth = taps_BLTD[:, -1, 0].to(self.dtype), 1
        return self._logits(state)

    def advance(self, state: "_State", ids_B: Tensor) -> Tensor:
        state.depth += 1
        return self._logits(state)

    def _logits(self, state: "_State") -> Tensor:
        assert state.hidden_BD is not None, "absorb comes before advance"
        return self.project(self.blocks[state.depth - 1](state.hidden_BD), state.depth)


class _State:
    """While drafting: the newest final state of the target and the depth whose logits were given last."""

    def __init__(self) -> None:
        self.hidden_BD: Tensor | None = None
        self.depth = 0


class _ResidualBlock(nn.Module):
    """x + SiLU(W x + b), W and b zero at the start, so that a head begins as the target's own prediction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class _LowRank(nn.Module):
    """A correction to logits of low rank, zero at the start."""

    def __init__(self, width: int, tokens: int, rank: int) -> None:
        super().__init__()
        self.down = Linear(width, rank, bias=False)
        self.up = Linear(rank, tokens, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))
