#!/usr/bin/env bash
# The Python tests on older versions of torch: run_torch_versions.sh WHEEL [VERSION...]. Without versions they are the oldest
# that hands over tensors, by capsules, and the first with the exchange API; the newest is what the other tests have.
# `run_torch_versions.sh prepare [VERSION...]` makes their environments alone.
# Each has an environment of its own under target/torch, kept for the next run. CPU builds come from PyTorch's own index, or
# from TORCH_INDEX. Where that cannot be reached, PyPI has builds with CUDA, of several GB: those are removed after their tests,
# and uv, if there is one, unpacks them on all cores and what they share once.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheel=$1
shift
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.8.0 2.10.0)
cpu_builds=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
pypi=https://pypi.org/simple

reaches() {
    python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=20)' "$1" 2>/dev/null
}

# An environment with that version and all that the tests need.
prepare() {
    local venv=target/torch/$1
    local packages=("torch==$1" numpy ml_dtypes pytest) pip=("$venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir)
    [ ! -e "$venv/ready" ] || return 0
    rm -rf "$venv" && python3 -m venv "$venv"
    if reaches "$cpu_builds"; then
        "${pip[@]}" --index-url "$cpu_builds" --extra-index-url "$pypi" "${packages[@]}"
    else
        touch "$venv/large"
        ! command -v uv >/dev/null || pip=(uv pip install --quiet --python "$venv/bin/python" --cache-dir target/torch/cache)
        "${pip[@]}" "${packages[@]}"
    fi
    touch "$venv/ready"
}

# What has nothing to do with torch, or needs packages for the newest one, is left to the other tests.
check() {
    local venv=target/torch/$1
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall "$wheel"
    printf '\n== torch %s\n' "$1"
    "$venv/bin/python" -m pytest -p no:cacheprovider -r f python/tests -k "not jax and not cupy and not cuda and not numpy" \
        --ignore python/tests/test_command.py --ignore python/tests/test_docs.py --ignore python/tests/test_jax.py \
        --ignore python/tests/test_sim.py --ignore python/tests/test_transformers.py
    [ ! -e "$venv/large" ] || rm -rf "$venv"
}

for version in "${versions[@]}"; do
    prepare "$version"
    [ "$wheel" = prepare ] || check "$version"
done
[ "$wheel" = prepare ] || rm -rf target/torch/cache
