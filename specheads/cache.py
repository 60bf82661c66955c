"""Key/value storage that is written in place and rolled back by moving an index."""

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from specheads.errors import UserError

_FIRST_CAPACITY = 256
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class GrowingBuffer:
    """One tensor that grows by doubling along its second to last dimension; `length` says how much of it counts.

    Used for keys and for values, shape (batch, heads, length, width). Appending copies only the new entries, forgetting
    copies nothing.
    """

    def __init__(self) -> None:
        self.storage: Tensor | None = None
        self.length = 0

    def append(self, new: Tensor) -> Tensor:
        """Write `new` (batch, heads, n, width) behind what is there; returns a view of all that counts."""
        end = self.length + new.shape[-2]
        if self.storage is None or end > self.storage.shape[-2]:
            self._grow(new, end)
        assert self.storage is not None
        self.storage[..., self.length : end, :] = new
        self.length = end
        return self.storage[..., :end, :]

    def view(self) -> Tensor:
        """The entries that count, (batch, heads, length, width)."""
        assert self.storage is not None, "nothing was stored yet"
        return self.storage[..., : self.length, :]

    def _grow(self, like: Tensor, needed: int) -> None:
        capacity = _FIRST_CAPACITY
        while capacity < needed:
            capacity *= 2
        grown = like.new_empty((*like.shape[:-2], capacity, like.shape[-1]))
        if self.storage is not None:
            grown[..., : self.length, :] = self.storage[..., : self.length, :]
        self.storage = grown

    @property
    def nbytes(self) -> int:
        return 0 if self.storage is None else self.storage.nbytes


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one attention layer in two `GrowingBuffer`s.

    Sliding-window layers keep every key as well: the mask hides what lies outside the window, and a rollback past the
    window's edge stays possible.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.key_buffer, self.value_buffer = GrowingBuffer(), GrowingBuffer()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: buffers take shape, dtype and device from the first states."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keys = self.key_buffer.append(key_states)
        self.values = self.value_buffer.append(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.key_buffer.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.key_buffer.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def rollback(self, length: int) -> None:
        self.key_buffer.length = self.value_buffer.length = min(length, self.key_buffer.length)

    def select_rows(self, rows: Tensor) -> None:
        for buffer in (self.key_buffer, self.value_buffer):
            if buffer.storage is not None:
                buffer.storage = buffer.storage[rows]


class PreallocatedCache(Cache):
    """A transformers cache whose rollback moves an index; pass it to a model as `cache=`.

    Raises:
        UserError: the model has layers whose state cannot be rolled back this way (recurrent, convolution, ...).
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        unknown = sorted(set(layer_types) - _ATTENTION_LAYERS)
        if unknown:
            raise UserError(
                f"target of type {config.model_type} has layers of type {', '.join(unknown)}, whose state cannot be "
                f"rolled back; expected only {', '.join(sorted(_ATTENTION_LAYERS))}: choose another target"
            )
        self._layers = [PreallocatedLayer() for _ in layer_types]
        super().__init__(layers=list(self._layers))

    def rollback(self, length: int) -> None:
        """Keep the first `length` tokens and forget the rest; copies nothing."""
        for layer in self._layers:
            layer.rollback(length)

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these rows of the batch (indices, int64)."""
        for layer in self._layers:
            layer.select_rows(rows)

    @property
    def nbytes(self) -> int:
        return sum(layer.key_buffer.nbytes + layer.value_buffer.nbytes for layer in self._layers)
