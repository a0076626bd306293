"""`tools/setup/venv.sh` on machines of every kind: `nvidia-smi` and `uname` are faked.

What it installs is installed by the real pip, from wheels made here: no test needs a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "bash dirname head sed grep rm cat tail sh env mkdir".split()
WHEELS = "https://download.pytorch.org/whl"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a script for a shell")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class Machine:
    """A checkout on a machine whose tools can be chosen."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin = root / "checkout", root / "bin"
        (self.root / "tools" / "setup").mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "setup" / "venv.sh", self.root / "tools" / "setup")
        (self.root / "constraints.txt").write_text("torch==2.13.0\n")
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(root),
            "PYTHON": sys.executable,
            "PROC_NVIDIA": "/nowhere",
            "WSL_SMI": "/nowhere",
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self.system("Linux x86_64")

    def program(self, name: str, script: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def system(self, name: str) -> None:
        words = name.split()
        script = f'[ "$1" = -m ] && echo {words[1]} || echo {words[0]}'
        self.program("uname", script)

    def gpu(self, driver: str, name: str, capability: str, program: str = "nvidia-smi") -> Path:
        """A `nvidia-smi` that answers the two queries as the real one does."""
        two = f"{driver}, {name}"
        return self.program(
            program,
            'case "$*" in\n'
            f'*driver_version,name,compute_cap*csv,noheader*) echo "{two}, {capability}";;\n'
            f'*driver_version,name*csv,noheader*) echo "{two}";;\n'
            "*) exit 9;; esac",
        )

    def run(self, what: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "tools" / "setup" / "venv.sh"), what],
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def plan(self, **env: str) -> tuple[str, str]:
        """The build's name, and what is said about it."""
        build, plan = self.run("build", **env), self.run("plan", **env)
        assert build.returncode == plan.returncode == 0, plan.stderr
        assert f"torch: build {build.stdout.strip()} from" in plan.stdout
        return build.stdout.strip(), plan.stdout


def wsl(machine: Machine) -> None:
    path = machine.gpu("581.29", "NVIDIA GeForce RTX 4070", "8.9", program="smi-of-wsl")
    machine.env["WSL_SMI"] = str(path)


def container(machine: Machine) -> None:
    path = machine.root / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module  590.44.01  Release Build\nGCC 12\n"
    )
    machine.env["PROC_NVIDIA"] = str(path)


def old_smi(machine: Machine) -> None:
    """It does not know the field compute_cap, and says so on standard output."""
    machine.program(
        "nvidia-smi",
        'case "$*" in *compute_cap*) echo "Field compute_cap is not valid"; exit 2;; esac\n'
        'echo "470.82.01, Tesla K80"',
    )


def two_gpus(machine: Machine) -> None:
    machine.program("nvidia-smi", 'echo "595.10, NVIDIA H200, 9.0"; echo "595.10, Tesla T4, 7.5"')


MACHINES: dict[str, tuple[Callable[[Machine], object], str, str]] = {
    "no driver": (lambda m: None, "cpu", "Found: no NVIDIA driver"),
    "new driver": (
        lambda m: m.gpu("580.65.06", "NVIDIA H100 80GB HBM3", "9.0"),
        "cu13",
        "Found: NVIDIA H100 80GB HBM3 (sm_90), driver 580.65.06",
    ),
    "Colab": (lambda m: m.gpu("550.54.15", "Tesla T4", "7.5"), "cu126", "Found: Tesla T4 (sm_75)"),
    "WSL": (wsl, "cu13", "Found: NVIDIA GeForce RTX 4070 (sm_89), driver 581.29"),
    "no nvidia-smi": (container, "cu13", "Found: an NVIDIA GPU, driver 590.44.01"),
    "two GPUs": (two_gpus, "cu13", "Found: NVIDIA H200 (sm_90), driver 595.10"),
    "Volta": (lambda m: m.gpu("580.65", "Tesla V100", "7.0"), "cu126", "sm_75 or later"),
    "Blackwell": (lambda m: m.gpu("570.10", "B200", "10.0"), "cpu", "update the driver, then run"),
    "driver too old": (
        lambda m: m.gpu("515.43.04", "NVIDIA A100", "8.0"),
        "cpu",
        "the driver is too old for any CUDA build of torch (525 or later; 580 for CUDA 13)",
    ),
    "driver and smi too old": (old_smi, "cpu", "Found: Tesla K80, driver 470.82.01"),
    "driver not loaded": (
        lambda m: m.program("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9"),
        "cpu",
        "Found: no NVIDIA driver",
    ),
    "Apple": (lambda m: m.system("Darwin arm64"), "usual", "Found: Darwin arm64"),
}
FROM = {"cpu": f"{WHEELS}/cpu", "cu126": f"{WHEELS}/cu126"}


@pytest.mark.parametrize("kind", MACHINES)
def test_which_torch(machine: Machine, kind: str) -> None:
    make, build, says = MACHINES[kind]
    make(machine)
    got, said = machine.plan()
    assert got == build and says in said
    assert f"from {FROM.get(build, 'the usual package index')}" in said


def test_an_index_that_is_named_is_used_on_every_machine(machine: Machine) -> None:
    for make in (MACHINES["no driver"][0], MACHINES["Colab"][0], MACHINES["new driver"][0]):
        make(machine)
        assert machine.plan(TORCH_INDEX=f"{WHEELS}/cu130/")[0] == "cu130"
        assert machine.plan(TORCH_INDEX=f"{WHEELS}/cpu")[0] == "cpu"
        assert machine.plan(TORCH_INDEX="https://mirror/simple")[0] == "simple"
        build, said = machine.plan(TORCH_INDEX="")
        assert build == "usual" and "from the usual package index; TORCH_INDEX says so" in said


@pytest.mark.parametrize(
    ("system", "says"),
    [
        ("MINGW64_NT-10.0-22631 x86_64", "this is Windows"),
        ("CYGWIN_NT-10.0 x86_64", "in WSL 2 (wsl --install) they do"),
        ("Darwin x86_64", "this is an Intel Mac, for which there is no torch since 2.3"),
    ],
)
def test_machines_without_torch(machine: Machine, system: str, says: str) -> None:
    """The reason is named at once, and is no guess about the network."""
    machine.system(system)
    done = machine.run("base")
    assert done.returncode == 1 and says in done.stderr
    assert not (machine.root / ".venv").exists()


def wheels(folder: Path, version: str, cuda: str | None) -> str:
    """A folder with a wheel of torch that has nothing but its version."""
    folder.mkdir()
    files = {
        "torch/__init__.py": "raise ImportError('the script must not import it: that is slow')",
        "torch/version.py": f"__version__ = {version!r}\ncuda = {cuda!r}\n",
        "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name if "/" in name else f"torch-{version}.dist-info/{name}", text)
    return str(folder)


@pytest.mark.slow
def test_the_build_follows_the_machine(machine: Machine, tmp_path: Path) -> None:
    """`2.13.0+cpu` satisfies the pin, so pip alone would keep it for ever."""
    cpu = wheels(tmp_path / "cpu", "2.13.0+cpu", None)
    cu13 = wheels(tmp_path / "cu13", "2.13.0", "13.0")
    cu126 = wheels(tmp_path / "cu126", "2.13.0+cu126", "12.6")

    def torch(find_links: str, **env: str) -> tuple[str, str]:
        done = machine.run("torch", PIP_FIND_LINKS=find_links, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        [path] = (machine.root / ".venv").glob("lib/python*/site-packages/torch/version.py")
        facts: dict[str, str] = {}
        exec(path.read_text(), facts)
        return facts["__version__"], done.stdout

    assert torch(cpu)[0] == "2.13.0+cpu"
    version, said = torch(cpu)
    assert version == "2.13.0+cpu" and said == ""  # it is there
    stamp = machine.root / ".venv" / ".installed-cpu-base"
    stamp.touch()

    machine.gpu("590.1", "NVIDIA L4", "8.9")
    version, said = torch(cu13)
    assert version == "2.13.0" and "replaces the build cpu" in said and not stamp.exists()
    assert torch(cu13) == ("2.13.0", "")

    (machine.bin / "nvidia-smi").unlink()  # as on a machine that lost its GPU for a day
    assert torch(cpu) == ("2.13.0", "")
    assert torch(cpu, TORCH_INDEX=f"{WHEELS}/cpu")[0] == "2.13.0+cpu"

    machine.gpu("550.54", "Tesla T4", "7.5")
    version, said = torch(cu126)
    assert version == "2.13.0+cu126" and "replaces the build cpu" in said

    machine.gpu("590.1", "Tesla T4", "7.5")
    done = machine.run("torch", PIP_FIND_LINKS=str(tmp_path))  # where there is no torch
    assert done.returncode == 1 and "TORCH_INDEX=" in done.stderr


def test_a_python_without_ensurepip(machine: Machine) -> None:
    """As Colab's: `python3-venv` is not installed, and its own pip makes up for that."""
    ensurepip = pytest.importorskip("ensurepip")
    python = machine.program(
        "colab-python", f'case "$*" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"'
    )
    bundled = str(Path(ensurepip.__file__).parent / "_bundled")
    done = machine.run("create", PYTHON=str(python), PIP_FIND_LINKS=bundled)
    assert done.returncode == 0, done.stdout + done.stderr
    pip = [str(machine.root / ".venv" / "bin" / "python"), "-m", "pip", "--version"]
    assert str(machine.root) in subprocess.run(pip, capture_output=True, text=True).stdout


def test_start_says_how_it_is_called_before_anything_is_installed(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tools" / "setup").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup" / "venv.sh", tmp_path / "tools" / "setup")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    for words in ([], ["STAGE=04"], ["DIR=mine"]):
        command = ["make", "start", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: make start STAGE=04 DIR=my_stage\n")
        assert not (tmp_path / ".venv").exists()
