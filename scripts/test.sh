#!/usr/bin/env bash
# Lint, type-check and test the project as its users get it: as a wheel, in an environment of its own.
#
#   scripts/test.sh [--fast] [--real] [PYTEST ARGUMENTS...]
#
#   --fast   do not look at the environment's packages (the project's own wheel is always built anew)
#   --real   also run the tests marked `real`, on the small model that scripts/fetch_small_target.py fetches
#
# Needs Python >= 3.11 and, for the first run, pip's package index. VENV names the environment (default .venv-test),
# PYTHON the interpreter that makes it, WORKERS the number of test processes (default 2, one thread each).
set -euo pipefail
cd "$(dirname "$0")/.."

fast=false real=false
while [[ $# -gt 0 ]]; do
    case "$1" in
        --fast) fast=true ;;
        --real) real=true ;;
        *) break ;;
    esac
    shift
done

venv=${VENV:-.venv-test}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PIP_DISABLE_PIP_VERSION_CHECK=1
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 # parallel processes with several threads each wait for one another

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "scripts/test.sh: no Python >= 3.11 found; install one, or name it in PYTHON" >&2
    exit 2
}

step() { printf '\n== %s\n' "$*"; }

wanted=$(cat pyproject.toml scripts/constraints.txt | cksum)
if ! $fast && [[ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]]; then
    step "environment $venv"
    if [[ ! -x "$venv/bin/pip" ]]; then
        python=$(find_python)
        "$python" -m venv "$venv"
    fi
    "$venv/bin/pip" install --quiet -c scripts/constraints.txt torch "setuptools>=77" wheel
    "$venv/bin/pip" install --quiet -c scripts/constraints.txt --no-build-isolation ".[dev]"
    echo "$wanted" >"$venv/.installed"
fi
[[ -x "$venv/bin/python" ]] || { echo "scripts/test.sh: no environment in $venv; run once without --fast" >&2; exit 2; }
bin=$(cd "$venv/bin" && pwd)

step "wheel"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf build # what an earlier build left there would be packed again, deleted files included
"$bin/python" -m build --wheel --no-isolation --outdir "$scratch" . >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
"$bin/pip" install --quiet --no-deps --force-reinstall "$scratch"/specheads-*.whl

step "ruff"
"$bin/ruff" check .
"$bin/ruff" format --check .

step "mypy (installed wheel)"
config=$PWD/pyproject.toml cache=$PWD/.mypy_cache
(cd "$scratch" && "$bin/mypy" --config-file "$config" --cache-dir "$cache" -p specheads)

# The checkout's own folders must not be importable here: neither as `specheads` nor as `train` and `inference`.
step "pytest"
marker='not real'
if $real; then marker=''; fi
cd tests
unset PYTHONPATH
"$bin/pytest" --rootdir .. -c ../pyproject.toml -n "${WORKERS:-2}" -m "$marker" "$@"
