"""What cannot be honoured is refused by name, on both ways into the loop; what can be is not."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from specheads.errors import UserError
from specheads.inference import LookupDrafter, ModelDrafter, SpeculativeDecoder

PROMPT = torch.tensor([[5, 6, 7, 8]])
REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "prefill_chunk_size": 2,
    "use_cache": False,
    "cache_implementation": "static",
    "synced_gpus": True,
    "num_assistant_tokens": 7,
    "assistant_confidence_threshold": 0.3,
    "guidance_scale": 1.5,
    "dola_layers": "low",
}


def ways(model: PreTrainedModel) -> list[Any]:
    decoder = SpeculativeDecoder(model, LookupDrafter(), draft_length=3)

    def through_transformers(ids: torch.Tensor, **settings: Any) -> Any:
        return model.generate(ids, custom_generate=decoder, **settings)

    return [decoder.generate, through_transformers]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_on_both_ways(name: str, tiny_llama: PreTrainedModel) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": name == "num_return_sequences", name: REFUSED[name]}
    for generate in ways(tiny_llama):
        with pytest.raises(UserError, match=name):
            generate(PROMPT, **settings)


def test_an_assistant_is_refused_and_not_dropped(tiny_llama: PreTrainedModel, make_llama: Any) -> None:
    for generate in ways(tiny_llama):
        with pytest.raises(UserError, match="assistant_model"):
            generate(PROMPT, assistant_model=make_llama(seed=1), max_new_tokens=4)


def test_constraints_are_refused(tiny_llama: PreTrainedModel) -> None:
    for generate in ways(tiny_llama):
        with pytest.raises(UserError, match=r"num_beams|force_words_ids"):
            generate(PROMPT, force_words_ids=[[4]], num_beams=2, max_new_tokens=4)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": PROMPT.expand(2, -1)}, "input_ids has 2 rows"),
        ({"input_ids": PROMPT, "attention_mask": torch.tensor([[0, 1, 1, 1]])}, "attention_mask hides"),
        ({"input_ids": torch.tensor([[0, 0, 5, 6]])}, "attention_mask hides .*pad tokens in a prompt without a mask"),
        ({"input_ids": PROMPT, "position_ids": torch.tensor([[1, 2, 3, 4]])}, "position_ids"),
    ],
)
def test_inputs_that_the_loop_cannot_take(inputs: dict[str, Any], message: str, tiny_llama: PreTrainedModel) -> None:
    for generate in ways(tiny_llama):
        ids = inputs["input_ids"]
        with pytest.raises(UserError, match=message):
            generate(ids, max_new_tokens=4, **{name: value for name, value in inputs.items() if name != "input_ids"})


def test_embeddings_a_used_cache_and_further_tensors(tiny_llama: PreTrainedModel, tiny_gpt2: PreTrainedModel) -> None:
    embeds = tiny_llama.get_input_embeddings()(PROMPT)
    for generate in ways(tiny_llama):
        with pytest.raises(UserError, match="inputs_embeds"):
            generate(PROMPT, inputs_embeds=embeds, max_new_tokens=4)
        with pytest.raises(UserError, match="cache=DynamicCache"):
            generate(PROMPT, cache=DynamicCache(), max_new_tokens=4)
    for generate in ways(tiny_gpt2):
        with pytest.raises(UserError, match="token_type_ids"):
            generate(PROMPT, token_type_ids=torch.zeros_like(PROMPT), max_new_tokens=4)


def test_a_decoder_works_for_its_own_target_only(tiny_llama: PreTrainedModel, make_llama: Any) -> None:
    with pytest.raises(UserError, match="another LlamaForCausalLM than this decoder's target"):
        make_llama(seed=3).generate(PROMPT, custom_generate=SpeculativeDecoder(tiny_llama), max_new_tokens=4)


def test_a_misspelt_argument_is_transformers_own_error(tiny_llama: PreTrainedModel) -> None:
    for generate in ways(tiny_llama):
        with pytest.raises(ValueError, match="max_new_tokenz"):
            generate(PROMPT, max_new_tokenz=4)


def test_plain_settings_in_other_words_are_taken(tiny_llama: PreTrainedModel) -> None:
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(PROMPT),
        "position_ids": torch.arange(4)[None],
        "generation_config": GenerationConfig(
            max_new_tokens=5, num_beams=1, num_return_sequences=1, use_cache=True, cache_implementation="dynamic"
        ),
    }
    expected = tiny_llama.generate(PROMPT, max_new_tokens=5)
    by_decoder, by_transformers = (generate(PROMPT, **settings) for generate in ways(tiny_llama))
    assert torch.equal(by_decoder.sequences, expected)
    assert torch.equal(by_transformers, expected)
    as_dict = ways(tiny_llama)[1](PROMPT, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(as_dict.sequences, expected)


def test_last_result_tells_what_happened(tiny_llama: PreTrainedModel) -> None:
    decoder = SpeculativeDecoder(tiny_llama)
    assert decoder.last_result is None
    sequences = tiny_llama.generate(PROMPT, custom_generate=decoder, max_new_tokens=5)
    assert decoder.last_result is not None
    assert torch.equal(decoder.last_result.sequences, sequences)
    assert decoder.last_result.stats.new_tokens == sequences.shape[1] - 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verification": "typical"}, "verification is 'typical'; expected one of rejection"),
        ({"draft_length": -1}, "draft_length is -1"),
        ({"draft_length": "long"}, "draft_length is 'long'; expected \"auto\" or"),
        ({"draft_length": True}, "draft_length is True"),
        ({"draft_length": 2.0}, r"draft_length is 2\.0"),
    ],
)
def test_a_decoder_s_own_settings(settings: dict[str, Any], message: str, tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(UserError, match=message):
        SpeculativeDecoder(tiny_llama, ModelDrafter(tiny_llama), **settings)


def test_a_length_beyond_the_drafter_s_reach(tiny_llama: PreTrainedModel) -> None:
    drafter = LookupDrafter()
    drafter.max_draft_length = 4
    with pytest.raises(UserError, match="draft_length is 5, but lookup lookup drafts at most 4 tokens a round; pass 4"):
        SpeculativeDecoder(tiny_llama, drafter, draft_length=5)
    SpeculativeDecoder(tiny_llama, drafter, draft_length=4)
