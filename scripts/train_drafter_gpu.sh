#!/usr/bin/env bash
# Train, evaluate and export a drafter on a GPU machine, offline, within SECONDS of wall clock. Run it again to go on:
# finished stages are kept, training goes on from its checkpoint. Exit 75: time was up before the end.
#
#   scripts/train_drafter_gpu.sh SECONDS OUT [breakeven train run's own options, such as --held-out FILE --bfcl DIR]
#
# Environment (all optional):
#   TARGET          model directory, GGUF file or name (smollm2-135m); or a prefix of its parts, joined first:
#                   TARGET=dir/model.gguf with dir/model.gguf.part-* beside it
#   CONFIG          training file or ready name (smollm2-135m)
#   ANSWER_SECONDS  time box of the answers (100)
#   TRAIN_SECONDS   time box of the training over all calls (what SECONDS leaves)
#   RESERVE         seconds kept for export and evaluation (150)
#   PYTHON, GPUS    interpreter (python3), processes for torchrun (1)
# Needs torch 2.11 or later and breakeven's dependencies, installed or on PYTHONPATH.
set -euo pipefail
if [[ $# -lt 2 ]]; then
  sed -n '2,15p' "$0" >&2
  exit 2
fi
seconds=$1 out=$2
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3} target=${TARGET:-smollm2-135m} config=${CONFIG:-smollm2-135m} gpus=${GPUS:-1}
answer_seconds=${ANSWER_SECONDS:-100} reserve=${RESERVE:-150}
train_seconds=${TRAIN_SECONDS:-$((seconds - answer_seconds - reserve - 60))}
if ((train_seconds < 1)); then
  echo "train_drafter_gpu.sh: $seconds s leave nothing for training; give more, or set TRAIN_SECONDS" >&2
  exit 2
fi
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true BREAKEVEN_CACHE=${BREAKEVEN_CACHE:-$out/cache}
mkdir -p "$out"
if [[ ! -e $target ]] && compgen -G "$target.part-*" >/dev/null; then
  cat "$target".part-* >"$target.joining"
  mv "$target.joining" "$target"
fi
launch=("$python")
if ((gpus > 1)); then
  launch=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus")
fi
exec "${launch[@]}" -m breakeven.cli.main train run "$config" --out "$out" --target "$target" \
  --max-seconds "$seconds" --answer-seconds "$answer_seconds" --train-seconds "$train_seconds" \
  --evaluate-reserve "$reserve" "$@"
