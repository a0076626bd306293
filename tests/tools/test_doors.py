"""Who may import whom: the repository keeps the rules, and the checker sees each broken one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check.doors import violations

ROOT = Path(__file__).resolve().parents[2]

GOOD = {
    "shared/stages.py": "import importlib\n\n\n"
    'def load_stage(n):\n    return importlib.import_module(f"stages.{n:02d}_a")\n',
    "stages/01_a/__init__.py": "from .engine import LLMEngine\n",
    "stages/01_a/config.py": "import math\n",
    "stages/01_a/sequence.py": "from enum import Enum\n",
    "stages/01_a/block_manager.py": "from .sequence import Sequence\n",
    "stages/01_a/scheduler.py": "from . import config\nfrom .block_manager import BlockManager\n",
    "stages/01_a/attention.py": "import torch\n\nfrom .kv_cache import KVCache\n",
    "stages/01_a/kv_cache.py": "import torch\n",
    "stages/01_a/model_runner.py": "from .attention import run\nfrom .sequence import Sequence\n",
    "stages/01_a/engine.py": "from shared.engine.outputs import Request\n\nfrom .config import C\n",
    "stages/01_a/test_stage.py": "import torch\n\nfrom shared import load_stage\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in GOOD.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_repository_keeps_the_rules() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize("room", ["sequence", "block_manager", "scheduler"])
@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "import torch.nn.functional as F",
        "from torch import Tensor",
        "from transformers import PreTrainedModel",
        "from shared.engine.outputs import RequestOutput",
        "if TYPE_CHECKING:\n    import torch",
        "def f():\n    import torch",
    ],
)
def test_bookkeeping_knows_no_tensor_and_nothing_shared(root: Path, room: str, line: str) -> None:
    (root / f"stages/01_a/{room}.py").write_text(line + "\n")
    assert any(f"{room} must not" in each for each in violations(root))


@pytest.mark.parametrize("line", ["from .config import C", "from . import config"])
def test_bookkeeping_reaches_no_tensor_by_way_of_a_neighbour(root: Path, line: str) -> None:
    (root / "stages/01_a/sequence.py").write_text(line + "\n")
    (root / "stages/01_a/config.py").write_text("import torch\n")
    assert "stages/01_a/config.py:1: sequence must not reach torch" in violations(root)


def test_neighbour_may_use_what_is_shared_but_brings_no_tensor(root: Path) -> None:
    (root / "stages/01_a/config.py").write_text("from shared.engine.checks import check\n")
    (root / "shared/engine").mkdir(exist_ok=True)
    (root / "shared/engine/checks.py").write_text("from .numbers import limit\n")
    (root / "shared/engine/numbers.py").write_text("import math\n")
    assert violations(root) == []
    (root / "shared/engine/numbers.py").write_text("import torch\n")
    assert violations(root) == ["shared/engine/numbers.py:1: scheduler must not reach torch"]
    (root / "shared/engine/numbers.py").write_text("import math\n")
    (root / "shared/__init__.py").write_text("import torch\n")
    assert violations(root) == ["shared/__init__.py:1: scheduler must not reach torch"]


@pytest.mark.parametrize("room", ["sequence", "block_manager", "scheduler"])
@pytest.mark.parametrize("file", ["attention", "kv_cache"])
def test_attention_knows_no_sequence(root: Path, file: str, room: str) -> None:
    path = root / f"stages/01_a/{file}.py"
    path.write_text(path.read_text() + f"from .{room} import X\n")
    line = len(path.read_text().splitlines())
    assert f"stages/01_a/{file}.py:{line}: attention must not reach {room}" in violations(root)


@pytest.mark.parametrize("line", ["import torch", "import numpy as np", "from torch import Tensor"])
def test_engine_knows_no_tensor(root: Path, line: str) -> None:
    (root / "stages/01_a/engine.py").write_text(line + "\n")
    (problem,) = violations(root)
    assert problem.startswith("stages/01_a/engine.py:1: engine must not import")


@pytest.mark.parametrize(
    "line",
    [
        "import stages",
        "from stages.other import engine",
        "from shared import load_stage",
        "from shared.stages import load_stage",
        "from .. import other",
        "from ..other import engine",
    ],
)
def test_stage_does_not_leave_its_folder(root: Path, line: str) -> None:
    (root / "stages/01_a/model_runner.py").write_text(line + "\n")
    assert violations(root) == [
        "stages/01_a/model_runner.py:1: a stage must not leave its own folder"
    ]


@pytest.mark.parametrize("line", ["import scheduler", "from scheduler import Scheduler"])
def test_neighbours_are_named_relatively(root: Path, line: str) -> None:
    (root / "stages/01_a/model_runner.py").write_text(line + "\n")
    assert violations(root) == ["stages/01_a/model_runner.py:1: write .scheduler, not scheduler"]


@pytest.mark.parametrize(
    "line",
    [
        "import stages",
        "from stages import something",
        'from importlib import import_module\nimport_module("stages.01_a")',
        'import importlib\nimportlib.import_module(f"stages.{1}")',
        '__import__("stages.01_a")',
    ],
)
def test_shared_finds_stages_by_load_stage_alone(root: Path, line: str) -> None:
    (root / "shared/bench").mkdir()
    (root / "shared/bench/run.py").write_text(line + "\n")
    (problem,) = violations(root)
    assert problem.startswith("shared/bench/run.py:") and problem.endswith("use load_stage")
