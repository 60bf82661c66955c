"""`metrics.jsonl`: one object a log step."""

import json
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends objects; entries after step `up_to` (of a run that was killed later than its last checkpoint) are
    dropped, and a line that was cut short with them."""

    def __init__(self, path: Path, up_to: int) -> None:
        self.path = path
        kept = [line for line in self._lines() if line["step"] <= up_to]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)

    def write(self, step: int, values: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | values) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.split("\n") if line]
