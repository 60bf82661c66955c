#!/usr/bin/env bash
# From a fresh clone to a comparison: fetch a small target, let it answer prompts, train a draft head and a separate
# draft model on the answers, and decode with each beside plain decoding and prompt lookup.
#
#   scripts/quickstart.sh [--fast] [--target NAME_OR_FOLDER] [--output DIR]
#
#   --fast     fewer answers and training steps: shows the whole path, with heads too young to be quick
#   --target   another causal language model, a local folder or a hub name (default: SmolLM2-135M-Instruct)
#   --output   where everything goes (default work/quickstart)
#
# Stop it whenever you like and start it again: finished steps are skipped, the others go on where they stopped.
set -euo pipefail
start=$PWD
cd "$(dirname "$0")/.."

fast=false named_target='' output=work/quickstart
usage() { sed -n '2,11s/^# \{0,1\}//p' scripts/quickstart.sh; }
while [[ $# -gt 0 ]]; do
    case "$1" in
        --fast) fast=true; shift ;;
        --target) named_target=${2:?--target needs a name or a folder}; shift 2 ;;
        --output) output=${2:?--output needs a folder}; [[ $output == /* ]] || output=$start/$output; shift 2 ;;
        -h | --help) usage; exit 0 ;;
        *) echo "scripts/quickstart.sh: unknown option $1; see --help" >&2; exit 2 ;;
    esac
done
# A folder is meant as seen from where the script was called; anything else is a hub name.
[[ -z $named_target || ! -d $start/$named_target ]] || named_target=$start/$named_target

venv=.venv
results=$output
answer_options=(--samples 3 --max-new-tokens 192) compare_options=(--max-new-tokens 128)
if $fast; then
    results=$output/fast # kept apart, so that a full run never takes over what a fast one made
    answer_options=(--limit 140 --max-new-tokens 96)
    compare_options=(--limit 7 --max-new-tokens 64)
fi
mkdir -p "$results"

say() { printf '\n[%s/6] %s\n' "$1" "$2"; }

# once NAME PRODUCT COMMAND...: run the command unless an earlier run finished it. Training that is stopped by Ctrl-C
# saves its state and ends in good order, so only the product tells a finished step from a stopped one.
once() {
    local finished=$results/.finished-$1 product=$2
    shift 2
    if [[ -e $finished ]]; then
        echo "      finished earlier"
        return
    fi
    "$@"
    if [[ ! -e $product ]]; then
        echo "scripts/quickstart.sh: stopped before $product was there; start again to go on" >&2
        exit 1
    fi
    touch "$finished"
}

say 1 "Python environment in $venv (two minutes the first time)"
wanted=$(cat pyproject.toml scripts/constraints.txt | cksum)
if [[ "$(cat $venv/.quickstart-installed 2>/dev/null)" != "$wanted" ]]; then
    python=''
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [[ -n $python ]] || { echo "scripts/quickstart.sh: needs Python >= 3.11; install it or name it in PYTHON" >&2; exit 2; }
    [[ -x $venv/bin/pip ]] || "$python" -m venv $venv
    $venv/bin/pip install --quiet -c scripts/constraints.txt torch
    $venv/bin/pip install --quiet -c scripts/constraints.txt -e ".[gguf,report]"
    echo "$wanted" >$venv/.quickstart-installed
else
    echo "      finished earlier"
fi
specheads=$venv/bin/specheads

say 2 "target model"
fetched=$($venv/bin/python scripts/fetch_small_target.py --output "$output/target" ${named_target:+--target "$named_target"})
target=$(tail -n 1 <<<"$fetched")
echo "      $target"
if [[ "$(cat "$results/.target" 2>/dev/null || echo "$target")" != "$target" ]]; then
    echo "scripts/quickstart.sh: $results was made with target $(cat "$results/.target"); choose another --output" >&2
    exit 2
fi
echo "$target" >"$results/.target"
if [[ -d $target ]]; then export HF_HUB_OFFLINE=1; fi # everything is local from here on

train_options=(--target "$target" --data.train "$results/answers.jsonl" --features.cache "$results/features")
head_options=("${train_options[@]}") draft_model_options=("${train_options[@]}")
if $fast; then head_options+=(--steps 40) draft_model_options+=(--steps 15); fi

say 3 "the target answers the training prompts"
once answers "$results/answers.jsonl" $specheads regenerate --target "$target" --prompts scripts/quickstart_prompts.jsonl \
    --output "$results/answers.jsonl" --features "$results/features" --batch-size 96 "${answer_options[@]}"

say 4 "training a draft head on the answers"
once head "$results/eagle3/head" $specheads train --config configs/quickstart-eagle3.yaml "${head_options[@]}" \
    --output_dir "$results/eagle3"

say 5 "training a separate draft model on the same answers"
once draft-model "$results/draft-model/head" $specheads train --config configs/quickstart-draft-model.yaml "${draft_model_options[@]}" \
    --output_dir "$results/draft-model"

say 6 "comparing plain decoding, prompt lookup, the separate model and the head (keep the machine idle)"
once report "$results/report/report.html" $specheads compare --target "$target" \
    --head "$results/eagle3/head" --draft-model "$results/draft-model/head" --lookup \
    --prompts scripts/quickstart_eval_prompts.jsonl --output "$results/report" "${compare_options[@]}"

printf '\nThe report: %s/report.html\nThe figures: %s/results.json\n' "$results/report" "$results/report"
