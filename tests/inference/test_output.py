"""Stops inside a block, streaming, and why a generation ended."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from specheads.errors import UserError
from specheads.inference import SpeculativeDecoder
from specheads.inference.draft import Drafter
from specheads.target import TargetModel

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6]])
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


class StopsAfter(StoppingCriteria):
    """Stops at a length, and remembers every sequence it was asked about."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[Any]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        assert not self.ends
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.fixture
def whole(tiny_llama: PreTrainedModel) -> list[int]:
    """What plain decoding gives when nothing stops it, prompt included."""
    return tiny_llama.generate(PROMPT, eos_token_id=None, **GREEDY)[0].tolist()


@pytest.fixture
def perfect(scripted: Any, whole: list[int]) -> Drafter:
    """Always right, and goes on beyond any stop."""
    return scripted(lambda place: whole[min(place, len(whole) - 1)])


def both(model: PreTrainedModel, drafter: Drafter, draft_length: int, **settings: Any) -> tuple[Tensor, Any]:
    expected = model.generate(PROMPT, **{**GREEDY, **settings})
    return expected, SpeculativeDecoder(model, drafter, draft_length=draft_length).generate(
        PROMPT, **{**GREEDY, **settings}
    )


@pytest.mark.parametrize("draft_length", [0, 1, 4, 9])
@pytest.mark.parametrize("place", range(6, 20))
def test_end_of_sequence_at_every_place_of_a_block(
    place: int, draft_length: int, tiny_llama: PreTrainedModel, perfect: Drafter, whole: list[int]
) -> None:
    expected, result = both(tiny_llama, perfect, draft_length, eos_token_id=[60, whole[place]])
    assert torch.equal(result.sequences, expected)
    assert result.sequences.shape[1] <= place + 1
    assert result.finish_reason == "eos"
    assert result.stats.new_tokens == expected.shape[1] - 6
    assert result.stats.accepted <= result.stats.new_tokens


@pytest.mark.parametrize("draft_length", [0, 3, 9])
@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7, 24])
def test_length(draft_length: int, new_tokens: int, tiny_llama: PreTrainedModel, perfect: Drafter) -> None:
    expected, result = both(tiny_llama, perfect, draft_length, max_new_tokens=new_tokens, eos_token_id=None)
    assert torch.equal(result.sequences, expected)
    assert (result.finish_reason, result.stats.new_tokens) == ("length", new_tokens)
    expected, result = both(
        tiny_llama, perfect, draft_length, max_new_tokens=None, max_length=6 + new_tokens, eos_token_id=None
    )
    assert torch.equal(result.sequences, expected)
    _, result = both(
        tiny_llama,
        perfect,
        draft_length,
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(6 + new_tokens)]),
        eos_token_id=None,
    )
    assert torch.equal(result.sequences, expected)


def test_the_end_of_sequence_as_the_last_token_allowed(
    tiny_llama: PreTrainedModel, perfect: Drafter, whole: list[int]
) -> None:
    place = next(i for i in range(8, 30) if whole[i] not in whole[6:i])
    _, result = both(tiny_llama, perfect, 9, eos_token_id=whole[place], max_new_tokens=place - 5)
    assert result.finish_reason == "eos"


@pytest.mark.parametrize("draft_length", [0, 2, 9])
@pytest.mark.parametrize("length", [7, 9, 15])
def test_a_user_s_own_criterion_is_asked_once_a_token_with_the_exact_sequence(
    length: int, draft_length: int, tiny_llama: PreTrainedModel, perfect: Drafter, whole: list[int]
) -> None:
    plain, ours = StopsAfter(length), StopsAfter(length)
    expected = tiny_llama.generate(PROMPT, stopping_criteria=[plain], eos_token_id=None, **GREEDY)
    result = SpeculativeDecoder(tiny_llama, perfect, draft_length=draft_length).generate(
        PROMPT, stopping_criteria=StoppingCriteriaList([ours]), eos_token_id=None, **GREEDY
    )
    assert torch.equal(result.sequences, expected)
    assert ours.asked == plain.asked
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("draft_length", [0, 1, 5])
@pytest.mark.parametrize("way", ["argument", "config", "model's config", "criterion"])
def test_stop_strings(
    way: str,
    draft_length: int,
    tiny_llama: PreTrainedModel,
    tiny_tokenizer: Any,
    perfect: Drafter,
    whole: list[int],
) -> None:
    stop = tiny_tokenizer.decode(whole[10:12])
    settings = GREEDY | {"eos_token_id": None}
    expected = tiny_llama.generate(PROMPT, stop_strings=[stop], tokenizer=tiny_tokenizer, **settings)
    assert 7 < expected.shape[1] < len(whole)
    speculative = SpeculativeDecoder(tiny_llama, perfect, draft_length=draft_length)
    extra: dict[str, Any] = {"tokenizer": tiny_tokenizer}
    if way == "argument":
        extra["stop_strings"] = [stop]
    elif way == "model's config":
        tiny_llama.generation_config.stop_strings = [stop]
    elif way == "criterion":
        extra = {"stopping_criteria": [StopStringCriteria(tiny_tokenizer, [stop])]}
    else:
        config = type(tiny_llama.generation_config)(stop_strings=[stop], **settings)
        config.eos_token_id = -1
        extra |= {"generation_config": config}
        settings = {}
    result = speculative.generate(PROMPT, **settings, **extra)
    assert torch.equal(result.sequences, expected)
    assert result.finish_reason == "stop"


def test_stop_strings_can_be_switched_off(tiny_llama: PreTrainedModel, perfect: Drafter, whole: list[int]) -> None:
    tiny_llama.generation_config.stop_strings = ["a"]
    decoder = SpeculativeDecoder(tiny_llama, perfect, draft_length=5)
    assert decoder.generate(PROMPT, stop_strings=None, eos_token_id=None, **GREEDY).sequences[0].tolist() == whole
    with pytest.raises(UserError, match=r"stop_strings=\['a'\] needs a tokenizer"):
        decoder.generate(PROMPT, eos_token_id=None, **GREEDY)


def test_stop_strings_use_the_target_s_tokenizer(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any, whole: list[int]
) -> None:
    target = TargetModel(tiny_llama, tiny_tokenizer)
    stop = tiny_tokenizer.decode(whole[8:10])
    result = SpeculativeDecoder(target).generate(PROMPT, stop_strings=stop, eos_token_id=None, **GREEDY)
    assert result.finish_reason == "stop"
    assert result.sequences.shape[1] <= 10


@pytest.mark.parametrize("draft_length", [0, 5])
def test_a_streamer_gets_what_transformers_would_give_it(
    draft_length: int, tiny_llama: PreTrainedModel, perfect: Drafter, whole: list[int]
) -> None:
    settings = GREEDY | {"eos_token_id": whole[15]}
    recorders = [Recorder() for _ in range(3)]
    speculative = SpeculativeDecoder(tiny_llama, perfect, draft_length=draft_length)
    expected = tiny_llama.generate(PROMPT, streamer=recorders[0], **settings)
    speculative.generate(PROMPT, streamer=recorders[1], **settings)
    tiny_llama.generate(PROMPT, streamer=recorders[2], custom_generate=speculative, **settings)
    assert [token for value in recorders[0].values[1:] for token in value] == expected[0, 6:].tolist()
    for recorder in recorders[1:]:
        assert recorder.values == recorders[0].values
        assert recorder.ends == recorders[0].ends == 1


def test_a_text_streamer(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any, perfect: Drafter, capsys: pytest.CaptureFixture[str]
) -> None:
    streamer = TextStreamer(tiny_tokenizer, skip_prompt=True)
    result = SpeculativeDecoder(tiny_llama, perfect, draft_length=5).generate(PROMPT, streamer=streamer, **GREEDY)
    assert capsys.readouterr().out.strip() == tiny_tokenizer.decode(result.sequences[0, 6:]).strip()
