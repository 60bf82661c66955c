"""The contract that every head fulfils, and the one legend of its indices.

Index legend. `taps_BLTD[:, t]` is the target's state after it has read token t; the target's own logits there predict
token t+1. *Depth* k = 1, 2, ..., K is token t+1+k, drafted when token t+1 is already known. So the first token that a
head drafts (depth 1) is two places behind the newest state that it has seen:

    position        t        t+1            t+2        t+3
    known           state    token
    drafted                                 depth 1    depth 2

A head has two faces that must agree: the training forward gives, for every position t at once, the state from which
depth k is predicted; the drafting face goes step by step along chosen tokens. *Unrolling the drafting face along given
tokens yields the training forward's logits*: one test checks that for every registered head.

Shapes: B batch, L length, T taps, D width, K depths, V target vocabulary, Vd draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from specheads.config import HeadConfig, TargetFingerprint, parse
from specheads.errors import UserError
from specheads.layers import linear
from specheads.target import TargetModel


@dataclass(frozen=True)
class HeadInputs:
    """What a training forward sees. A row may hold several documents.

    Attributes:
        ids_BL: token ids.
        taps_BLTD: tapped states of the target at these tokens.
        last_hidden_BLD: the target's final state, which its output projection reads.
        position_ids_BL: position of each token in its document.
        document_BL: number of the document in the row, -1 for padding.
        loss_mask_BL: True where the token is part of an answer.
        deep_BL: True at the rows that are read at depths beyond the first; a head need not compute others. None: all.
    """

    ids_BL: Tensor
    taps_BLTD: Tensor
    last_hidden_BLD: Tensor
    position_ids_BL: Tensor
    document_BL: Tensor
    loss_mask_BL: Tensor
    deep_BL: Tensor | None = None

    def ids_ahead(self, distance: int) -> Tensor:
        """Token t+distance at place t, (B, L); zeros past the row's end."""
        return shift_left(self.ids_BL, distance)

    def causal_mask(self) -> Tensor:
        """True where position t may attend to position s: s <= t in the same document; (B, 1, L, L)."""
        same_BLL = self.document_BL[:, :, None] == self.document_BL[:, None, :]
        return same_BLL.tril()[:, None]

    def to(self, device: torch.device) -> "HeadInputs":
        return HeadInputs(**{name: x.to(device) for name, x in vars(self).items() if x is not None})


def shift_left(values: Tensor, distance: int) -> Tensor:
    """`values[:, t + distance]` at place t along dimension 1; zeros past the end."""
    kept = values[:, distance:]
    return torch.cat([kept, torch.zeros_like(values[:, : values.shape[1] - kept.shape[1]])], dim=1)


class DraftHead(nn.Module, ABC):
    """A drafter trained on a target's hidden states. It borrows the target's embedding and output projection by
    reference; its own tensors are all that its checkpoint holds."""

    type_name: ClassVar[str]
    Config: ClassVar[type[HeadConfig]]
    draft_vocab_ids: Tensor | None
    __call__: Callable[..., list[Tensor]]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.provenance: dict[str, Any] = {}
        self._borrowed: _Borrowed | None = None
        ids = None if config.draft_vocab_size is None else torch.full((config.draft_vocab_size,), -1)
        self.register_buffer("draft_vocab_ids", ids)

    # Making one

    @classmethod
    def derive_config(cls, target: TargetModel, options: dict[str, Any]) -> HeadConfig:
        """The configuration for `target`: what `options` leave open is derived from it.

        Raises:
            UserError: an option that this head does not know, or a value that does not fit.
        """
        defaults = cls.default_options(target)
        for name in ("target", "target_name", "format_version"):
            if name in options:
                raise UserError(
                    f"head {cls.type_name}: {name!r} is no option, it follows from the target; leave it out"
                )
        common = {"type": cls.type_name, "target": target.fingerprint, "target_name": target.model.name_or_path or None}
        return parse(cls.Config, defaults | options | common, f"head {cls.type_name}")

    @classmethod
    @abstractmethod
    def default_options(cls, target: TargetModel) -> dict[str, Any]:
        """Values of this head's fields that depend on the target."""

    def set_draft_vocabulary(self, ids: Tensor) -> None:
        """Choose the draft vocabulary: ascending target ids, (Vd,)."""
        assert self.draft_vocab_ids is not None
        self.draft_vocab_ids.copy_(ids)

    def initialise(self, target: TargetModel) -> None:
        """Start from what the target offers (called once, before training; the head is bound). Default: nothing."""

    # The target's parts

    def bind(self, target: TargetModel) -> Self:
        """Borrow the embedding and output projection of `target`.

        Raises:
            UserError: the head was trained for another target, or its draft vocabulary is none.
        """
        check_fingerprint(self.config.target, target)
        if self.draft_vocab_ids is not None:
            _check_draft_vocabulary(self.draft_vocab_ids, target.vocab_size)
        weight = target.projection.weight.detach()
        rows = weight if self.draft_vocab_ids is None else weight[self.draft_vocab_ids.to(weight.device)]
        self._borrowed = _Borrowed(target, rows)
        return self

    @property
    def target(self) -> TargetModel:
        """The target that the head is bound to."""
        return self._bound.target

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embedding of token ids, in the head's dtype; no gradient reaches it."""
        with torch.no_grad():
            return self.target.embedding(ids).to(self.dtype)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """The target's output projection, rows of the draft vocabulary: (..., D) to (..., Vd)."""
        rows = self._bound.projection_rows
        bias = getattr(self.target.projection, "bias", None)
        if bias is not None and self.draft_vocab_ids is not None:
            bias = bias[self.draft_vocab_ids]
        logits = linear(hidden.to(rows.dtype), rows, None if bias is None else bias.detach())
        return self.target.shape_logits(logits)

    @property
    def _bound(self) -> "_Borrowed":
        if self._borrowed is None:
            raise UserError("the head is not bound to a target; call head.bind(target) first")
        return self._borrowed

    # Facts

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.config.tap_layers

    @property
    def max_draft_length(self) -> int | None:
        """The most tokens that one round can draft; None where there is no limit."""
        return None

    @property
    def trains_projection(self) -> bool:
        """Whether `project` holds parameters that are trained; False where it is the target's own projection alone."""
        return True

    @property
    def default_draft_length(self) -> int:
        return min(self.config.default_draft_length, self.max_draft_length or self.config.default_draft_length)

    @property
    def nbytes(self) -> int:
        """Bytes of the head's own tensors, shared ones counted once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.state_dict().values()}.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes that the head needs beside the target: its own tensors and projection rows that were gathered."""
        gathered = (
            0 if self.draft_vocab_ids is None or self._borrowed is None else self._borrowed.projection_rows.nbytes
        )
        return self.nbytes + gathered

    # Training face

    @abstractmethod
    def forward(self, inputs: HeadInputs, depth: int) -> list[Tensor]:
        """States from which `project` predicts: element k-1 is (B, L, D), row t is for token t+1+k (depth k)."""

    @abstractmethod
    def project(self, hidden: Tensor, depth: int) -> Tensor:
        """Draft logits (..., Vd) of states (..., D) that `forward` or a drafting step gave for this depth (from 1)."""

    # Drafting face

    @abstractmethod
    def start(self) -> Any:
        """A fresh state for one generation; opaque to callers."""

    @abstractmethod
    def absorb(self, state: Any, ids_BL: Tensor, taps_BLTD: Tensor, next_ids_B: Tensor) -> Tensor:
        """Take in tokens that the target has read, and forget everything drafted.

        Args:
            state: from `start`; changed in place.
            ids_BL: the tokens, directly behind those absorbed before.
            taps_BLTD: the target's states at them.
            next_ids_B: the token that follows them, known but not yet read by the target.

        Returns:
            logits of depth 1, (B, Vd).
        """

    @abstractmethod
    def advance(self, state: Any, ids_B: Tensor) -> Tensor:
        """Go one depth on: `ids_B` (target ids) were chosen at the current depth. Returns the next logits, (B, Vd)."""

    # Keeping one

    def save_pretrained(self, directory: str | Path, provenance: dict[str, Any] | None = None) -> None:
        """Write the head's checkpoint; see `specheads.checkpoint`. `provenance` is by default what it came with."""
        from specheads.checkpoint import save_head

        save_head(self, Path(directory), provenance)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the head's checkpoint to the hub; returns the commit's address."""
        from specheads.checkpoint import push_head

        return push_head(self, repo_id, private=private, token=token)


@dataclass(frozen=True)
class _Borrowed:
    """References to a target's parts, kept out of the module tree so that they are neither trained nor saved."""

    target: TargetModel
    projection_rows: Tensor


def _check_draft_vocabulary(ids: Tensor, vocab_size: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size or not bool((ids.diff() > 0).all()):
        raise UserError(
            f"the head's draft vocabulary reaches from {low} to {high}, expected ascending ids from 0 to "
            f"{vocab_size - 1}; choose it with set_draft_vocabulary, or load an undamaged checkpoint"
        )


def check_fingerprint(expected: TargetFingerprint, target: TargetModel) -> None:
    """Refuse a target that a head was not made for.

    Raises:
        UserError: names the first fact that differs. A tokenizer that either side does not know is not compared.
    """
    actual = target.fingerprint
    for name, wanted in expected.model_dump().items():
        got = actual[name]
        if wanted != got and None not in (wanted, got):
            what = {"vocab_size": "vocabulary", "num_layers": "layers", "hidden_size": "hidden size"}.get(name, name)
            raise UserError(
                f"head was trained for a target with {what} {wanted}, this one has {got}; pass the matching target or "
                "retrain"
            )
