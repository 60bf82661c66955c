"""Who may import whom: inference -> core, train -> core, train.evaluate -> inference, the command line -> all."""

import ast
import importlib
from pathlib import Path

import pytest

ROOMS = ("specheads", "specheads.train", "specheads.inference")
MORE_ALLOWED = {  # beside a module's own room and the core
    "specheads.cli": {"specheads.train", "specheads.inference"},
    "specheads.train.evaluate": {"specheads.inference"},
}


def room(module: str) -> str:
    """The package that a module belongs to: the longest of the three that its name begins with."""
    return max((name for name in ROOMS if f"{module}.".startswith(f"{name}.")), key=len)


def source_files() -> list[tuple[str, Path]]:
    """Every file with its import name. In a wheel the folders of train and inference lie inside that of specheads."""
    found = {}
    for package in ROOMS:
        folder = Path(importlib.import_module(package).__path__[0])
        for path in folder.rglob("*.py"):
            found[path] = ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
    return [(module, path) for path, module in sorted(found.items())]


def imported(source: str) -> set[str]:
    """Names of modules that a source imports, also inside functions; a relative import counts by its dots."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {f"{base}.{alias.name}" for alias in node.names} if base.startswith(("specheads", ".")) else {base}
    return names


def faults(module: str, source: str) -> list[str]:
    allowed = {room(module), "specheads"} | MORE_ALLOWED.get(module, set())
    names = imported(source)
    short = [name for name in names if name.split(".")[0] in {"", "train", "inference"}]
    return short + [name for name in names if name.startswith("specheads") and room(name) not in allowed]


@pytest.mark.parametrize(("module", "path"), source_files(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    assert faults(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specheads.head", "from specheads.inference.verify import verify_chain"),
        ("specheads.head", "from specheads import train"),
        ("specheads.heads.medusa", "def f():\n    import specheads.train.losses"),
        ("specheads.inference.decoder", "from specheads.train import losses"),
        ("specheads.train.loop", "from specheads.inference import verify"),
        ("specheads.train.loop", "import train.losses"),
        ("specheads.train.loop", "from . import losses"),
        ("specheads.inference.decoder", "from inference import verify"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str) -> None:
    assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specheads.cli", "from specheads.train import loop\nfrom specheads.inference import compare"),
        ("specheads.train.evaluate", "from specheads.inference import verify"),
        ("specheads.inference.drafters.head", "import torch\nfrom specheads.head import DraftHead"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert faults(module, source) == []
