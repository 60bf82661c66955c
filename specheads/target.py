"""The frozen target: the only file that knows a transformers model's insides.

Tapped hidden states follow one convention everywhere: a tap is an index into transformers' `hidden_states`, so tap i is
the input of layer i, tap 0 the embeddings, and tap `num_layers` the state after the final norm, which the output
projection reads.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from specheads.errors import UserError
from specheads.layers import FewRowsLinear
from specheads.packed import pack as pack_layers
from specheads.packed import packed_bytes


@dataclass(frozen=True)
class TargetOutput:
    """What one target pass gives: `logits_BLV` of the positions kept, `taps_BLTD` of all (None if not asked)."""

    logits_BLV: Tensor
    taps_BLTD: Tensor | None


class TargetModel:
    """A transformers causal language model, used as it is: never copied, never patched.

    Args:
        model: any causal language model of transformers; put into eval mode.
        tokenizer: its tokenizer, for the fingerprint and for chat templates; may be missing.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if model.config.is_encoder_decoder:
            raise UserError(
                f"target {model.config.model_type} is an encoder-decoder model; expected a decoder-only causal "
                "language model: choose another target"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.embedding: Any = model.get_input_embeddings()
        self.projection: Any = model.get_output_embeddings()
        if self.projection is None:
            raise UserError(f"{type(model).__name__} has no output projection; expected a causal language model")
        self._decoder: Any = model.get_decoder()
        self._layers = self._find_layers()
        self._projection_checked = self._packing_checked = False

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        pack: bool = True,
        what: str = "target",
    ) -> "TargetModel":
        """Load a target and its tokenizer from a local folder or a hub name; `what` it is opens error messages.

        With `pack` a target in bfloat16 or float16 on a CPU without instructions for it computes from packed weights,
        so that a pass over a few tokens costs little more than one over one; it cannot be trained then.

        Raises:
            UserError: there is no such model, or transformers cannot load it.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            model, loaded = AutoModelForCausalLM.from_pretrained(
                name,
                output_loading_info=True,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                attn_implementation=attn_implementation,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"{what} {name!r} cannot be loaded ({reason}); expected a folder written by save_pretrained or a "
                "model's name on the hub"
            ) from error
        if loaded["missing_keys"]:
            missing = sorted(loaded["missing_keys"])
            raise UserError(
                f"{what} {name!r} cannot be loaded (it lacks tensor {missing[0]}, {len(missing)} in all, which would "
                "be random); expected a whole causal language model"
            )
        for module in model.modules():
            if type(module) is nn.Linear:  # the same weights, verified several rows at a time
                module.__class__ = FewRowsLinear
        if device is not None:
            model = model.to(device)
        if pack:
            pack_layers(model)
        return cls(model, tokenizer)

    @classmethod
    def wrap(
        cls, model: "PreTrainedModel | TargetModel", tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "TargetModel":
        """The `TargetModel` of a transformers model; a `TargetModel` is returned as it is."""
        return model if isinstance(model, TargetModel) else cls(model, tokenizer)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """Width of the state that the output projection reads."""
        return int(self.projection.weight.shape[1])

    @property
    def vocab_size(self) -> int:
        """Rows of the output projection; may be padded beyond the tokenizer."""
        return int(self.projection.weight.shape[0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, shared ones counted once, and of packed weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters()) + packed_bytes(self.model)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a head must agree on: architecture, sizes, vocabulary, digest of the tokenizer (None without one)."""
        return {
            "architecture": type(self.model).__name__,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "tokenizer": tokenizer_digest(self.tokenizer) if self.tokenizer is not None else None,
        }

    @property
    def max_positions(self) -> int | None:
        """Positions that the target has an embedding for; None where positions are computed (rotary and the like)."""
        if getattr(self.config, "rope_parameters", None):
            return None
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def rope_theta(self) -> float:
        """Base of the rotary positions; 10000 for models that have none."""
        parameters = getattr(self.config, "rope_parameters", None) or {}
        return float(parameters.get("rope_theta") or 10000.0)

    def llama_layer(self, index: int) -> dict[str, Tensor]:
        """Weights of a layer built as in Llama, and of the final norm, under short names.

        Raises:
            UserError: the target's layers are built otherwise: other parts, biases, norms that do more than multiply.
        """
        layer: Any = self._layers[index]
        short: dict[str, Tensor] = {}
        names = {f"self_attn.{n}_proj": n for n in "qkvo"} | {f"mlp.{n}_proj": n for n in ("gate", "up", "down")}
        names |= {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
        try:
            for name, key in names.items():
                short[key] = layer.get_submodule(name).weight.detach()
            norms = {"input_norm": layer.input_layernorm, "final_norm": self._decoder.norm}
            short["final_norm"] = norms["final_norm"].weight.detach()
        except AttributeError as error:
            raise self._unlike_llama(str(error)) from error
        other = [name for name, _ in layer.named_parameters() if name.removesuffix(".weight") not in names]
        if other:
            raise self._unlike_llama(f"they have {other[0]}")
        for name, norm in norms.items():  # of a row of ones Llama's norm makes its weight
            weight = short[name].float()
            if not torch.allclose(norm(torch.ones_like(short[name])[None])[0].float(), weight, rtol=0.02, atol=1e-3):
                raise self._unlike_llama("their norms do not multiply by their weight alone")
        return short

    def _unlike_llama(self, reason: str) -> UserError:
        kind = type(self.model).__name__
        return UserError(f"layers of {kind} are not built like Llama's ({reason}); use start_from auto or random")

    @torch.no_grad()
    def forward(
        self,
        ids_BL: Tensor,
        *,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        taps: Sequence[int] = (),
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        """One pass over `ids_BL` behind what `cache` holds.

        Args:
            ids_BL: token ids, (batch, length).
            cache: keys and values of the tokens before; appended to in place.
            attention_mask: (batch, cached + length), 0 hides a position (left padding).
            position_ids: (batch, length); default: counted from the cache's length.
            taps: hidden states wanted, see the module's docstring.
            logits_to_keep: logits of only the last so many positions; 0 keeps all.

        Returns:
            logits (batch, kept, vocab) and taps (batch, length, len(taps), width).

        Raises:
            UserError: a tap that does not exist, or a model that keeps its state elsewhere than in the cache.
        """
        before = cache.get_seq_length() if cache is not None else 0
        with self._tapping(taps) as tapped:
            output = self.model(
                input_ids=ids_BL,
                cache=cache,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=cache is not None,
                logits_to_keep=logits_to_keep,
            )
        if cache is not None and cache.get_seq_length() != before + ids_BL.shape[1]:
            raise UserError(
                f"{type(self.model).__name__} does not keep its state in the cache that it is given, so nothing can be "
                "rolled back; choose another target"
            )
        return TargetOutput(output.logits, _stack(tapped, taps))

    @torch.no_grad()
    def states(
        self,
        ids_BL: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Hidden states without logits or cache: taps (batch, length, taps, width) and the last (batch, length, width).

        Rows may hold several documents when `position_ids` restart at 0 in each: without an attention mask transformers
        then keeps their attention apart. The first such call checks that this model does.

        Raises:
            UserError: a tap that does not exist, or a model that lets the documents of a row see each other.
        """
        if position_ids is not None and attention_mask is None and not self._packing_checked:
            self._check_packing()
        final = self.num_layers
        with self._tapping([*taps, final]) as tapped:
            self._decoder(input_ids=ids_BL, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        taps_BLTD = _stack(tapped, taps)
        last_BLD = tapped[final]
        return last_BLD[:, :, None, :][:, :, :0] if taps_BLTD is None else taps_BLTD, last_BLD

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocab) of final hidden states (..., width), with the model's own scaling and capping.

        The first call compares the result with the model's own forward.

        Raises:
            UserError: the model does something between its last hidden state and its logits that is not known here.
        """
        if not self._projection_checked:
            self._check_projection()
        return self.shape_logits(self.projection(hidden))

    def shape_logits(self, logits: Tensor) -> Tensor:
        """What the model's configuration does to raw projected logits: scaling, then soft-capping (elementwise)."""
        scale = getattr(self.config, "logit_scale", None)
        divisor = getattr(self.config, "logits_scaling", None)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if scale is not None:
            logits = logits * scale
        if divisor is not None:
            logits = logits / divisor
        return torch.tanh(logits / cap) * cap if cap is not None else logits

    def _check_projection(self) -> None:
        probe = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        _, last_BLD = self.states(probe)
        expected = self.forward(probe).logits_BLV.float()
        got = self.shape_logits(self.projection(last_BLD)).float()
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.05
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
            raise UserError(
                f"{type(self.model).__name__} does not compute its logits as projection(last hidden state) with the "
                "scaling and soft-capping of its config; a head cannot be trained on it"
            )
        self._projection_checked = True

    def _check_packing(self) -> None:
        """Two rows that differ only in their first document must agree in the second."""
        self._packing_checked = True  # for the call below
        ids_BL = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 4, 5]], device=self.device) % self.vocab_size
        positions_BL = torch.tensor([[0, 1, 2, 0, 1]], device=self.device).expand_as(ids_BL)
        one_LD, other_LD = self.states(ids_BL, position_ids=positions_BL)[1][:, 3:].float()
        self._packing_checked = bool((one_LD - other_LD).abs().mean() <= 1e-3 * one_LD.abs().mean())
        if not self._packing_checked:
            raise UserError(
                f"{type(self.model).__name__} does not keep the documents of a packed row apart (its attention ignores "
                "positions that restart at 0); a head cannot be trained on it"
            )

    @contextmanager
    def _tapping(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Keep the tapped states of the passes inside: hooks stand only as long as the block runs."""
        tapped: dict[int, Tensor] = {}
        handles = []
        for tap in taps:
            if not 0 <= tap <= self.num_layers:
                raise UserError(f"tap layer {tap} does not exist; expected 0 to {self.num_layers} for this target")
        for tap in set(taps):
            if tap == self.num_layers:

                def keep_output(module: nn.Module, args: Any, output: Any, tap: int = tap) -> None:
                    tapped[tap] = output[0] if isinstance(output, tuple) else output.last_hidden_state

                handles.append(self._decoder.register_forward_hook(keep_output))
            else:

                def keep_input(module: nn.Module, args: Any, kwargs: Any, tap: int = tap) -> None:
                    tapped[tap] = args[0] if args else kwargs["hidden_states"]

                handles.append(self._layers[tap].register_forward_pre_hook(keep_input, with_kwargs=True))
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()

    def _find_layers(self) -> nn.ModuleList:
        count = self.config.num_hidden_layers
        for module in self._decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise UserError(f"{type(self.model).__name__}: no list of {count} decoder layers was found; not supported")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Sixteen hex digits of a tokenizer's vocabulary: equal where the same ids mean the same tokens."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def _stack(tapped: dict[int, Tensor], taps: Sequence[int]) -> Tensor | None:
    return torch.stack([tapped[tap] for tap in taps], dim=2) if taps else None
