#!/usr/bin/env bash
# The Python tests on several versions of torch, as CPU builds: run_torch_versions.sh WHEEL [VERSION...]
# Each version gets an environment of its own under target/torch, which is kept for the next run. TORCH_INDEX names another
# place to get torch from than PyTorch's own, whose CPU builds are small.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheel=$(realpath "$1")
shift
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.8.0 2.11.0)
for version in "${versions[@]}"; do
    venv=target/torch/$version
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" \
        --extra-index-url https://pypi.org/simple "torch==$version" numpy ml_dtypes pytest
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall "$wheel"
    printf '\n== torch %s\n' "$version"
    "$venv/bin/python" -m pytest -p no:cacheprovider python/tests/test_torch.py python/tests/test_gradients.py \
        python/tests/test_bias.py python/tests/test_flash_attn.py python/tests/test_compat.py \
        python/tests/test_sequences.py python/tests/test_append.py
done
