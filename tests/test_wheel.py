"""The wheel as a user gets it: built from a copy of the checkout, installed afresh, imported from elsewhere."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "specheads", "train", "inference"]
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import specheads

assert specheads.__file__.startswith(sys.prefix), specheads.__file__
names = [m.name for m in pkgutil.walk_packages(specheads.__path__, "specheads.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
for expected in ("specheads.heads", "specheads.train", "specheads.inference", "specheads.inference.drafters"):
    assert expected in names, (expected, names)
for shadow in ("train", "inference"):
    assert importlib.util.find_spec(shadow) is None, shadow
print("modules:", len(names))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy, dist = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", dist, ".", cwd=copy)
    (built,) = dist.glob("specheads-*.whl")
    return built


def test_wheel_holds_every_source_file_under_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"specheads"}
    for folder, inside in (("specheads", ""), ("train", "train/"), ("inference", "inference/")):
        for path in (CHECKOUT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"specheads/{inside}{path.relative_to(CHECKOUT / folder).as_posix()}" in names


def test_installed_wheel_imports_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=tmp_path)
    # The dependencies are borrowed from the running environment, behind the fresh one's own packages. A plain path is
    # added; .pth files inside it are not read, so an editable install there stays out of sight.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "modules:" in run(python, "-c", IMPORT_EVERYTHING, cwd=elsewhere)
    script = python.with_name("specheads.exe" if os.name == "nt" else "specheads")
    assert "Usage" in run(script, "--help", cwd=elsewhere)
