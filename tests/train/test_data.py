"""Conversations to examples: which tokens count, what is refused, and what a report says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specheads.errors import UserError
from specheads.train.conversations import Renderer
from specheads.train.data import (
    NOT_A_BOUNDARY,
    NOTHING_COUNTED,
    Example,
    describe,
    digest,
    load_examples,
    read_records,
    split,
    token_counts,
)

MARKED_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NEWLINE_TEMPLATE = (  # as ChatML: a newline follows the end of a turn, which nobody generates
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FORGETFUL_TEMPLATE = (  # keeps an answer only while it is the last message
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] != 'assistant' or loop.last %}{{ message['content'] }}{% endif %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "is 1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "is 2"},
    {"role": "user", "content": "bye"},
]


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def load(
    tmp_path: Path, tokenizer: Any, *records: dict[str, Any], max_length: int = 100, **options: Any
) -> list[Example]:
    file = write(tmp_path / "data.jsonl", *records)
    return load_examples(file, tokenizer, max_length=max_length, **options).examples


def marked(example: Example, tokenizer: Any) -> str:
    """The example's text with its counted tokens in brackets."""
    text, inside = "", False
    for token, counted in zip(example.ids.tolist(), example.loss_mask.tolist(), strict=True):
        text += "[" if counted and not inside else "]" if inside and not counted else ""
        text, inside = text + tokenizer.decode([token]), counted
    return text + "]" * inside


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Two characters that stand together can become one token: the boundary before an answer may vanish."""
    vocabulary = {token: i for i, token in enumerate(["<eos>", "a", "b", ":", "?", ":b"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(":", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = (
        "{% for message in messages %}{{ '?' if message['role'] == 'user' else ':' }}{{ message['content'] + '<eos>' }}"
        "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    return fast


@pytest.mark.parametrize("template", [None, MARKED_TEMPLATE, NEWLINE_TEMPLATE])
def test_every_answer_and_its_end_count_and_nothing_else(
    tmp_path: Path, tiny_tokenizer: Any, template: str | None
) -> None:
    tiny_tokenizer.chat_template = template or tiny_tokenizer.chat_template
    (example,) = load(tmp_path, tiny_tokenizer, {"id": "c", "messages": CONVERSATION})
    gap = "\n" if template == NEWLINE_TEMPLATE else ""
    assert marked(example, tiny_tokenizer) == (
        f"<|system|>s<eos>{gap}<|user|>one<eos>{gap}<|assistant|>[is 1<eos>]{gap}"
        f"<|user|>two<eos>{gap}<|assistant|>[is 2<eos>]"
    )
    assert example.id == "c"
    assert example.ids.dtype == np.int32
    assert example.loss_mask.dtype == bool
    rendered = tiny_tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    assert example.ids.tolist() == rendered[: len(example.ids)]


def test_the_markers_of_a_template_are_what_decides(tmp_path: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = MARKED_TEMPLATE.replace(
        "{{ message['content'] + '<eos>' }}{% endgeneration %}",
        "{{ message['content'] }}{% endgeneration %}{{ '<eos>' }}",
    )
    (example,) = load(tmp_path, tiny_tokenizer, {"messages": CONVERSATION[:3]})
    assert marked(example, tiny_tokenizer) == "<|system|>s<eos><|user|>one<eos><|assistant|>[is 1]"


@pytest.mark.parametrize(
    ("answer", "finished", "expected"),
    [
        ("yes", False, "[yes]"),
        ("yes", True, "[yes<eos>]"),
        ("yes<eos>", True, "[yes<eos>]"),
        ("yes", None, "[yes]"),
    ],
)
def test_the_targets_own_ids_are_used_as_they_are(
    tmp_path: Path, tiny_tokenizer: Any, answer: str, finished: bool | None, expected: str
) -> None:
    record = {"turns": ["ok?"], "response_ids": tiny_tokenizer(answer)["input_ids"], "finished": finished}
    (example,) = load(tmp_path, tiny_tokenizer, record)
    assert marked(example, tiny_tokenizer) == f"<|user|>ok?<eos><|assistant|>{expected}"


def test_ids_are_not_tokenised_again(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer()
    odd = [tokenizer.convert_tokens_to_ids(token) for token in (":", "b")]  # encoding the same text gives one token
    assert len(tokenizer(":b")["input_ids"]) == 1
    (example,) = load(tmp_path, tokenizer, {"turns": ["a"], "response_ids": odd})
    assert example.ids[-2:].tolist() == odd


def test_end_of_turn_need_not_be_the_eos_token(tmp_path: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = NEWLINE_TEMPLATE.replace("<eos>", "<|system|>")
    assert Renderer(tiny_tokenizer).end_of_turn == tiny_tokenizer.convert_tokens_to_ids("<|system|>")
    assert Renderer(tiny_tokenizer, raw=True).end_of_turn == tiny_tokenizer.eos_token_id
    (example,) = load(tmp_path, tiny_tokenizer, {"turns": ["q"], "response_ids": [20], "finished": True})
    assert marked(example, tiny_tokenizer).endswith("<|system|>]")


def test_text_answers_with_and_without_a_template(tmp_path: Path, tiny_tokenizer: Any) -> None:
    record = {"prompt": "one ", "response": "two"}
    (example,) = load(tmp_path, tiny_tokenizer, record)
    assert marked(example, tiny_tokenizer) == "<|user|>one <eos><|assistant|>[two<eos>]"
    (example,) = load(tmp_path, tiny_tokenizer, record, raw=True)
    assert marked(example, tiny_tokenizer) == "one [two]"
    (example,) = load(tmp_path, tiny_tokenizer, record | {"finished": True}, raw=True)
    assert marked(example, tiny_tokenizer) == "one [two<eos>]"
    (example,) = load(tmp_path, tiny_tokenizer, {"prompt": "", "response": "two"}, raw=True)
    assert marked(example, tiny_tokenizer) == "[two]"  # plain text without a prompt: all of it counts
    tokens = tiny_tokenizer("two")["input_ids"]
    (example,) = load(tmp_path, tiny_tokenizer, {"prompt": "one ", "response_ids": tokens}, raw=True)
    assert marked(example, tiny_tokenizer) == "one [two]"


def test_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = FORGETFUL_TEMPLATE
    (example,) = load(
        tmp_path, tiny_tokenizer, {"messages": CONVERSATION[:3]}
    )  # one answer, the last: nothing is unclear
    assert marked(example, tiny_tokenizer).endswith("[is 1<eos>]")
    with pytest.raises(UserError, match="line 1: the chat template rewrites"):
        load(tmp_path, tiny_tokenizer, {"messages": CONVERSATION})
    tiny_tokenizer.chat_template = NEWLINE_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|>think' }}")
    with pytest.raises(UserError, match="the chat template rewrites"):
        load(tmp_path, tiny_tokenizer, {"messages": CONVERSATION[:3]})


def test_answer_that_merges_with_its_prompt_is_left_out_and_counted(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer()
    good, bad = {"id": "good", "prompt": "a", "response": "a"}, {"id": "bad", "prompt": "a", "response": "b"}
    corpus = load_examples(write(tmp_path / "data.jsonl", good, bad, bad), tokenizer, max_length=10)
    assert [example.id for example in corpus.examples] == ["good"]
    assert corpus.dropped == {NOT_A_BOUNDARY: 2}
    assert f"left out   2 documents: {NOT_A_BOUNDARY}" in describe(corpus.examples, tokenizer, dropped=corpus.dropped)
    with pytest.raises(UserError, match="1 documents: answer does not begin at a token boundary"):
        load(tmp_path, tokenizer, bad)
    with pytest.raises(UserError, match="token boundary"):
        load(tmp_path, tokenizer, {"prompt": ":", "response": "b"}, raw=True)


def test_cut_to_max_length(tmp_path: Path, tiny_tokenizer: Any) -> None:
    long, short, hopeless = (
        {"id": name, "turns": [prompt], "response": answer}
        for name, prompt, answer in [("long", "q", "abcdefgh"), ("short", "q", "ab"), ("hopeless", "q" * 20, "a")]
    )
    file = write(tmp_path / "data.jsonl", long, short, hopeless)
    corpus = load_examples(file, tiny_tokenizer, max_length=8)
    assert [marked(example, tiny_tokenizer) for example in corpus.examples] == [
        "<|user|>q<eos><|assistant|>[abcd]",
        "<|user|>q<eos><|assistant|>[ab<eos>]",
    ]
    assert [example.full_length for example in corpus.examples] == [13, 7]
    assert corpus.dropped == {NOTHING_COUNTED: 1}
    report = describe(corpus.examples, tiny_tokenizer, dropped=corpus.dropped)
    assert "documents  2, 1 of them cut to max_length" in report
    assert "tokens     15, counted 7 (46.7%)" in report
    assert "shortest 7, median 7, 95 % within 7, longest 8" in report
    assert report.endswith("<|user|>q<eos><|assistant|>>>>abcd<<<")
    with pytest.raises(UserError, match="no token counts"):
        load(tmp_path, tiny_tokenizer, hopeless, max_length=8)


def test_mask_that_counts_nothing_or_everything_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = MARKED_TEMPLATE.replace("== 'assistant'", "== 'Assistant'")
    with pytest.raises(UserError, match="no token counts"):
        load(tmp_path, tiny_tokenizer, {"messages": CONVERSATION})
    tiny_tokenizer.chat_template = (
        "{% generation %}{% for message in messages %}{{ message['content'] }}{% endfor %}{% endgeneration %}"
    )
    with pytest.raises(UserError, match="every token counts"):
        load(tmp_path, tiny_tokenizer, {"messages": CONVERSATION})


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"turns": ["q"]}, "no answer to learn from .turns.; .* specheads regenerate"),
        ({"messages": CONVERSATION[:2]}, "no answer to learn from"),
        ({"messages": CONVERSATION[2:]}, "begins with an answer"),
        ({"messages": "text"}, "messages must be a list"),
        ({"prompt": "q", "response": 3}, "response must be a text"),
        ({"prompt": "q", "response_ids": "1 2"}, "list of integers"),
        ({"prompt": "q", "response_ids": [1, True]}, "list of integers"),
        ({"prompt": "q", "response_ids": [1, 61]}, "reach from 1 to 61, the tokenizer has 61"),
        ({"prompt": "q", "response_ids": [-1]}, "reach from -1"),
        ({"prompt": "q", "response_ids": []}, "no token counts"),
        ({"response_ids": [1]}, "expected one of the keys"),
    ],
)
def test_bad_records_are_refused_in_one_line(
    tmp_path: Path, tiny_tokenizer: Any, record: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named) as caught:
        load(tmp_path, tiny_tokenizer, record)
    assert "\n" not in str(caught.value)


def test_raw_needs_prompt_and_response(tmp_path: Path, tiny_tokenizer: Any) -> None:
    for record in ({"messages": CONVERSATION}, {"prompt": "q"}, {"messages": CONVERSATION[:2], "response": "a"}):
        with pytest.raises(UserError, match="line 1"):
            load(tmp_path, tiny_tokenizer, record, raw=True)
    tiny_tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        load(tmp_path, tiny_tokenizer, {"prompt": "q", "response": "a"})


def test_sources_of_the_datasets_library(tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    records = [{"id": str(i), "turns": ["q"], "response_ids": [20 + i, 21], "finished": True} for i in range(4)]
    jsonl = write(tmp_path / "data.jsonl", *records)
    expected = digest(load_examples(jsonl, tiny_tokenizer, max_length=20).examples)
    rows = datasets.Dataset.from_list(records)
    rows.to_parquet(tmp_path / "data.parquet")
    (tmp_path / "data.json").write_text(json.dumps(records))
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved_splits")
    (tmp_path / "folder").mkdir()
    rows.to_parquet(tmp_path / "folder" / "train.parquet")
    for source in ("data.parquet", "data.json", "saved", "saved_splits", "folder"):
        corpus = load_examples(tmp_path / source, tiny_tokenizer, max_length=20)
        assert digest(corpus.examples) == expected, source
    assert [number for number, _, _ in read_records(tmp_path / "folder")] == [1, 2, 3, 4]
    assert len(load_examples(tmp_path / "folder", tiny_tokenizer, max_length=20, limit=3).examples) == 3
    for source, options in [
        ("nowhere", {}),
        ("folder", {"dataset_split": "no"}),
        ("saved_splits", {"dataset_split": "no"}),
    ]:
        with pytest.raises(UserError, match=f"cannot read data from .*{source}") as caught:
            load_examples(tmp_path / source, tiny_tokenizer, max_length=20, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no file"):
        load_examples(tmp_path / "nowhere.jsonl", tiny_tokenizer, max_length=20)
    with pytest.raises(UserError, match="max_length is 1"):
        load_examples(jsonl, tiny_tokenizer, max_length=1)


def examples(count: int) -> list[Example]:
    return [
        Example(np.arange(3, dtype=np.int32) + i, np.array([False, True, True]), f"train-{i}", 3) for i in range(count)
    ]


def test_split_moves_no_document_when_data_is_added() -> None:
    few, many = examples(300), examples(2000)
    training, validation = split(few, 0.2, seed=1)
    assert len(training) + len(validation) == 300
    assert 30 < len(validation) < 90  # 60 expected; 30 lies four standard deviations away
    later_training, later_validation = split(many, 0.2, seed=1)
    assert {example.id for example in training} <= {example.id for example in later_training}
    assert {example.id for example in validation} <= {example.id for example in later_validation}
    assert {e.id for e in split(few, 0.2, seed=2)[1]} != {e.id for e in validation}
    assert {e.id for e in validation} <= {e.id for e in split(few, 0.4, seed=1)[1]}
    assert split(few, 0, seed=1) == (few, [])
    with pytest.raises(UserError, match="empty"):
        split(examples(1), 0.1, seed=0)
    with pytest.raises(UserError, match=r"share is 1\.0"):
        split(few, 1.0, seed=0)


def test_digest_sees_ids_masks_names_and_borders() -> None:
    base = examples(2)
    flipped = Example(base[0].ids, ~base[0].loss_mask, base[0].id, 3)
    renamed = Example(base[0].ids, base[0].loss_mask, "other", 3)
    one = Example(*(np.concatenate([getattr(e, part) for e in base]) for part in ("ids", "loss_mask")), "train-0", 6)
    digests = [digest(x) for x in (base, base[::-1], [flipped, base[1]], [renamed, base[1]], [one], [])]
    assert len(set(digests)) == 6
    assert digest(examples(2)) == digests[0]


def test_token_counts_are_of_counted_tokens() -> None:
    assert token_counts(examples(3), 6).tolist() == [0, 1, 2, 2, 1, 0]
    assert token_counts(examples(3), 6, counted=False).tolist() == [1, 1, 1, 0, 0, 0]
    with pytest.raises(UserError, match="token id 4, the target's vocabulary has 4"):
        token_counts(examples(3), 4)


def test_long_parts_are_shortened_in_the_report(tiny_tokenizer: Any) -> None:
    ids = np.array(tiny_tokenizer("a" * 1000 + "b" * 1000)["input_ids"], np.int32)
    report = describe([Example(ids, np.arange(2000) >= 1000, "x", 2000)], tiny_tokenizer)
    assert report.endswith("a" * 200 + " [...] " + "a" * 200 + ">>>" + "b" * 200 + " [...] " + "b" * 200 + "<<<")
