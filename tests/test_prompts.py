"""Prompts files and their rendering: what is read, what is refused, and that nothing heavy is imported for it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specheads.errors import UserError
from specheads.prompts import Prompt, parse_prompt, read_prompts, render_prompt


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join((x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)) + "\n" for x in lines), "utf-8"
    )
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_three_kinds_of_lines(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        user("one"),
        {"role": "assistant", "content": "1"},
        user("two"),
    ]
    file = write(
        tmp_path / "prompts.jsonl",
        {"id": "a", "category": "chat", "turns": ["hello"], "license": "x"},
        "",
        {"prompt": "once"},
        {"id": 7, "messages": messages, "turns": None},
    )
    assert read_prompts(file) == [
        Prompt("a", "chat", [user("hello")], "hello"),
        Prompt("3", None, [user("once")], "once"),  # no id: the line number
        Prompt("7", None, messages, None),
    ]
    assert [prompt.id for prompt in read_prompts(file, limit=2)] == ["a", "3"]


def test_of_several_turns_the_first_is_used() -> None:
    prompt = parse_prompt({"turns": ["first", "second"]}, number=1, where="here")
    assert prompt.messages == [user("first")]
    assert prompt.raw == "first"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_lines_end_at_newline_only(tmp_path: Path, separator: str) -> None:
    text = f"before{separator}after"
    file = tmp_path / "prompts.jsonl"
    # JSON allows a carriage return between two keys, and a file written on Windows ends its lines with one.
    file.write_bytes(f'{{"prompt": "{text}"}}\n{{"id": "last",\r"prompt": "x"}}\r\n'.encode())
    assert [(p.id, p.raw) for p in read_prompts(file)] == [("1", text), ("last", "x")]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "no prompt"),
        (["  ", ""], "no prompt"),
        ([{"prompt": "ok"}, '{"prompt": '], "line 2"),
        ([{"prompt": "ok"}, "[1]"], "line 2"),
        ([{"text": "no key of ours"}], "turns, prompt, messages; found text"),
        ([{"prompt": None}], "turns, prompt, messages"),
        ([{"prompt": 3}], "prompt must be a text"),
        ([{"turns": "hello"}], "turns must be a list"),
        ([{"turns": []}], "turns must be a list"),
        ([{"turns": ["a", 1]}], "turns must be a list"),
        ([{"messages": []}], "at least one message"),
        ([{"messages": ["hello"]}], "role and content"),
        ([{"messages": [{"role": "user", "content": None}]}], "role and content"),
        ([{"messages": [{"role": "tool", "content": "x"}]}], "'tool'"),
        ([{"messages": [user("q"), {"role": "assistant", "content": "a"}]}], "end with role 'assistant'"),
        ([{"id": ["a"], "prompt": "x"}], "single values"),
        ([{"prompt": "ok \u00e9"}, '{"prompt": "cut \\ud83d"}'], "line 2 holds half a character"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, lines: list[Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        read_prompts(write(tmp_path / "prompts.jsonl", *lines))
    assert "\n" not in str(caught.value)
    assert "prompts.jsonl" in str(caught.value)


def test_missing_file_bad_encoding_and_bad_limit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="no file"):
        read_prompts(tmp_path)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match="UTF-8"):
        read_prompts(latin)
    with pytest.raises(UserError, match="limit is 0"):
        read_prompts(latin, limit=0)


def test_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n')
    assert read_prompts(file)[0].raw == "x"


def test_rendering(tiny_tokenizer: Any) -> None:
    prompt = parse_prompt({"turns": ["hi"]}, number=1, where="here")
    ids = render_prompt(tiny_tokenizer, prompt)
    assert type(ids) is list
    assert all(type(token) is int for token in ids)
    assert tiny_tokenizer.decode(ids) == "<|user|>hi<eos><|assistant|>"
    assert ids == tiny_tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    assert tiny_tokenizer.decode(render_prompt(tiny_tokenizer, prompt, raw=True)) == "hi"


def test_what_cannot_be_rendered(tiny_tokenizer: Any) -> None:
    one = parse_prompt({"prompt": "hi"}, number=1, where="here")
    several = parse_prompt({"messages": [{"role": "system", "content": "s"}, user("hi")]}, number=2, where="here")
    with pytest.raises(UserError, match="leave out --raw"):
        render_prompt(tiny_tokenizer, several, raw=True)
    with pytest.raises(UserError, match="no token"):
        render_prompt(tiny_tokenizer, parse_prompt({"prompt": ""}, number=3, where="here"), raw=True)
    tiny_tokenizer.chat_template = "{{ raise_exception('system role\nnot supported') }}"
    with pytest.raises(UserError, match="'2': system role not supported"):
        render_prompt(tiny_tokenizer, several)
    tiny_tokenizer.chat_template = None
    with pytest.raises(UserError, match="--raw"):
        render_prompt(tiny_tokenizer, one)


def test_raw_keeps_the_special_tokens_that_the_tokenizer_adds(tiny_tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tiny_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    prompt = parse_prompt({"prompt": "hi"}, number=1, where="here")
    assert tiny_tokenizer.decode(render_prompt(tiny_tokenizer, prompt, raw=True)) == "<eos>hi"
    assert tiny_tokenizer.decode(render_prompt(tiny_tokenizer, prompt)) == "<|user|>hi<eos><|assistant|>"


def test_import_is_light() -> None:
    code = (
        "import sys, specheads.prompts; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
