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
    problem = "stages/01_a/model_runner.py:1: a stage must not leave its own folder"
    assert problem in violations(root)


@pytest.mark.parametrize("line", ["import scheduler", "from scheduler import Scheduler"])
def test_neighbours_are_named_relatively(root: Path, line: str) -> None:
    (root / "stages/01_a/model_runner.py").write_text(line + "\n")
    assert violations(root) == ["stages/01_a/model_runner.py:1: write .scheduler, not scheduler"]


# A file with an import that breaks a rule, and what is said.
BROKEN = {
    "a stage imports a program": (
        "stages/01_a/engine.py",
        "from shared.measure.metrics import span",
        "stages/01_a/engine.py:1: a stage must not import shared.measure.metrics",
    ),
    "a stage's __main__ imports more than the cli": (
        "stages/01_a/__main__.py",
        "from shared.programs.live import LiveAnswers",
        "stages/01_a/__main__.py:1: a stage must not import shared.programs.live",
    ),
    "an engine reaches another room": (
        "shared/engine/outputs.py",
        "from shared.measure import metrics",
        "01_a: an engine must not reach shared.measure.metrics",
    ),
    "a room imports a later one": (
        "shared/models/loading.py",
        "from shared.draw import palette",
        "shared/models/loading.py:1: models must not import draw",
    ),
    "in a function, too": (
        "shared/draw/palette.py",
        "def f():\n    from shared.bench import run",
        "shared/draw/palette.py:2: draw must not import bench",
    ),
    "a program imports another": (
        "shared/demo/view.py",
        "from shared.bench.run import run",
        "shared/demo/view.py:1: demo must not import bench",
    ),
    "what stands beside the rooms imports one": (
        "shared/__init__.py",
        "from .measure import metrics",
        "shared/__init__.py:1: shared must not import measure",
    ),
    "a room that is not in the list": (
        "shared/attic/old.py",
        "import math",
        "shared/attic/old.py: attic is no package of the list",
    ),
    "a circle": (
        "shared/measure/metrics.py",
        "from .roofline import GPUS",
        "shared/measure/metrics.py -> shared/measure/roofline.py -> shared/measure/metrics.py",
    ),
}
HOUSE = {
    "shared/bench/run.py": "from shared.draw.palette import LIGHT\n",
    "shared/draw/palette.py": "from shared.measure import metrics\n",
    "shared/engine/outputs.py": "import math\n",
    "shared/measure/metrics.py": "from shared.engine.outputs import Request\n",
    "shared/measure/roofline.py": "def f():\n    from . import metrics\n",
    "shared/programs/live.py": "from shared.engine import outputs\n",
}


@pytest.mark.parametrize("case", BROKEN)
def test_rooms_of_shared(root: Path, case: str) -> None:
    for name, text in HOUSE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert violations(root) == []
    name, line, problem = BROKEN[case]
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(line + "\n")
    assert problem in violations(root)


def test_an_engine_has_few_modules(root: Path) -> None:
    (root / "shared/engine").mkdir(exist_ok=True)
    names = [f"m{i:02d}" for i in range(21)]
    for i, name in enumerate(names):
        following = names[i + 1 : i + 2]
        text = f"from .{following[0]} import x\n" if following else "x = 1\n"
        (root / f"shared/engine/{name}.py").write_text(text)
    (root / "stages/01_a/engine.py").write_text("from shared.engine.m01 import x\n")
    assert violations(root) == []
    (root / "stages/01_a/engine.py").write_text("from shared.engine.m00 import x\n")
    assert violations(root) == ["01_a: 21 modules of shared, at most 20"]


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
