"""Prompts files: JSON Lines in, messages and token ids out. Loads neither torch nor transformers.

A line has one of three keys:

    turns      list of user messages, e.g. {"id": "a-1", "category": "code", "turns": ["Sort a list.", "Now in C."]}
    prompt     one text
    messages   list of {"role": "system" | "user" | "assistant", "content": text}

`category` and `id` are kept. Several `turns` without the answers that stood between them are not a conversation that
anybody had: only the first turn is used. Who has the answers writes `messages`, ending with the user's last message.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specheads.errors import UserError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """One prompt to answer. `raw` is its plain text, or None where only a chat template can join several messages."""

    id: str
    category: str | None
    messages: list[dict[str, str]]
    raw: str | None


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line of a JSON Lines file that is not blank.

    Lines end at "\\n" alone: strings may hold U+2028 and the like, at which `str.splitlines` would cut.

    Raises:
        UserError: no such file, not UTF-8, or a line that is not a JSON object (its number is named).
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no file {str(path)!r}; expected a JSON Lines file, one object a line")
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parse_object(line, f"{path}, line {number}")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompts file, or its first `limit` prompts.

    Raises:
        UserError: what `read_json_lines` and `parse_prompt` refuse, an id that occurs twice (answers are told apart by
            it), a file without prompts, a limit below 1.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}, expected at least 1 prompt")
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, record in islice(read_json_lines(path), limit):
        prompt = parse_prompt(record, number=number, where=f"{path}, line {number}")
        if prompt.id in lines:
            raise UserError(
                f"{path}, line {number}: id {prompt.id!r} is already that of line {lines[prompt.id]}; give every "
                "prompt an id of its own, or none an id"
            )
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path} holds no prompt; expected one JSON object a line with turns, prompt or messages")
    return prompts


def parse_prompt(record: dict[str, Any], *, number: int, where: str) -> Prompt:
    """One record as a Prompt; `number` is its id where it names none, `where` opens the error message.

    Of several `turns` the first is used (see the top of this file). A key that is None counts as absent.

    Raises:
        UserError: none of the keys, a wrong type, or `messages` that do not end with a user message.
    """
    identifier, category = record.get("id"), record.get("category")
    if isinstance(identifier, (list, dict)) or isinstance(category, (list, dict)):
        raise UserError(f"{where}: id and category must be single values")
    messages = _messages(record, where)
    if messages[-1]["role"] != "user":
        last = messages[-1]["role"]
        raise UserError(f"{where}: messages end with role {last!r}, expected user; leave the answer out")
    return Prompt(
        id=str(number if identifier is None else identifier),
        category=None if category is None else str(category),
        messages=messages,
        raw=messages[0]["content"] if len(messages) == 1 else None,
    )


def parse_messages(value: Any, where: str) -> list[dict[str, str]]:
    """Check a list of messages and return it with nothing but `role` and `content`.

    Raises:
        UserError: not a list, empty, a role outside system/user/assistant, or a content that is no text.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: messages must be a list with at least one message")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UserError(f"{where}: each message must be an object with role and content, both texts")
        if message.get("role") not in ROLES:
            raise UserError(f"{where}: role {message.get('role')!r} is none of {', '.join(ROLES)}")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def render_prompt(tokenizer: Any, prompt: Prompt, raw: bool = False) -> list[int]:
    """Token ids of a prompt as the target is to read it.

    By the tokenizer's chat template, with the generation prompt (what opens the assistant's turn); with `raw` the text
    is encoded as it stands, with the special tokens that the tokenizer adds by itself.

    Raises:
        UserError: no chat template and not `raw`, a template that refuses the messages, `raw` for several messages, or
            a prompt that encodes to no token.
    """
    if raw:
        if prompt.raw is None:
            raise UserError(
                f"prompt {prompt.id!r} has several messages, joined only by a chat template; leave out --raw"
            )
        ids = tokenizer(prompt.raw)["input_ids"]
    else:
        text = render_text(tokenizer, prompt.messages, add_generation_prompt=True, where=prompt.id)
        ids = encode_text(tokenizer, text)
    if not ids:
        raise UserError(f"prompt {prompt.id!r} encodes to no token; expected a text")
    return list(ids)


def render_text(
    tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool = False, where: str = ""
) -> str:
    """Messages as the text that the tokenizer's chat template makes of them.

    Raises:
        UserError: the tokenizer has no chat template (the remedy named is --raw), or the template refuses the messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError("the target's tokenizer has no chat template; pass --raw to use the prompts' plain text")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the chat template refuses {where!r}: {reason}; mend its messages or leave it out") from error


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that already holds its special tokens, as a rendered chat template does."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(record).__name__}")
    try:
        if "\\u" in line:
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} holds half a character (a lone surrogate); mend the text or leave it out") from error
    return record


def _messages(record: dict[str, Any], where: str) -> list[dict[str, str]]:
    if record.get("messages") is not None:
        return parse_messages(record["messages"], where)
    if record.get("turns") is not None:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise UserError(f"{where}: turns must be a list of user messages, each a text")
        return [{"role": "user", "content": turns[0]}]
    if record.get("prompt") is not None:
        if not isinstance(record["prompt"], str):
            raise UserError(f"{where}: prompt must be a text, got {type(record['prompt']).__name__}")
        return [{"role": "user", "content": record["prompt"]}]
    found = ", ".join(record) or "nothing"
    raise UserError(f"{where}: expected one of the keys turns, prompt, messages; found {found}")
