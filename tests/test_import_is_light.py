"""`import specheads` and `specheads --help` answer at once: they load neither torch nor transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "transformers", "accelerate", "datasets", "matplotlib", "numpy"]
REPORT = f"import sys; print('loaded:', [name for name in {HEAVY} if name in sys.modules])"


@pytest.mark.parametrize(
    "program",
    [
        "import specheads; specheads.__version__; dir(specheads)",
        "import specheads.inference, specheads.train, specheads.heads",
        "from specheads import UserError",
        "import sys; sys.argv[1:] = ['--help']; from specheads.cli import main; main()",
        "import sys; sys.argv[1:] = ['train', '--help']; from specheads.cli import main; main()",
    ],
)
def test_loads_nothing_heavy(program: str, tmp_path: Path) -> None:
    source = f"try:\n    exec({program!r})\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n{REPORT}"
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_every_lazy_name_exists() -> None:
    import specheads
    import specheads.inference

    for package in (specheads, specheads.inference):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no_such_name"):
            package.no_such_name  # noqa: B018
