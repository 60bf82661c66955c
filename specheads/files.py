"""Files that appear whole or not at all: written under another name, then renamed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make the file under a temporary name beside `path`, then rename it to `path`."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    text = json.dumps(value, indent=2) + "\n"
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))
