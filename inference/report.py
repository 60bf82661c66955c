"""`report.html`: a comparison as one page that needs no network."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2


def write_report(results: dict[str, Any], path: Path) -> None:
    """Render what `results.json` holds; texts from prompts and names are escaped."""
    source = files("specheads.inference").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    fastest = max(run["speedup"] for run in results["runs"])
    categories = sorted({name for run in results["runs"] for name in run["categories"]})
    page = environment.from_string(source).render(results=results, fastest=fastest, categories=categories)
    path.write_text(page, encoding="utf-8")
