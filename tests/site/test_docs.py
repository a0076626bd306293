"""The pages say what is: names, numbers, links, code and figures, without building the site.

`make site` builds it, strictly. These tests need no docs extra: they render the pages' macros with
jinja and look at the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import pytest
import yaml

from shared.bench import goodput
from shared.measure.roofline import GPUS, ModelSize, Roofline
from tools.site import bench as docs_bench
from tools.site import example as docs_example
from tools.site import figures as docs_figures
from tools.site import hooks as docs_hooks
from tools.site import macros as docs_macros
from tools.site import sources as docs_code
from tools.site import tables as docs_tables
from tools.site.sources import DocsError

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_data" not in path.parts)
CHAPTERS = [path for path in PAGES if path.parent.name == "chapters"]
NAMES = [str(path.relative_to(DOCS)) for path in PAGES]

# Names that are not ours: languages, tools, other engines. Each is a word in code style on a page.
EXTERNAL_NAMES = set(
    """
    generate transformers torch numba triton exp rope make diff git pip import venv safetensors
    AttentionInterface scaled_dot_product_attention is_causal position_ids logits_to_keep SDPA
    EngineCore EngineCore.step EngineCore.step_with_batch_queue step_with_batch_queue
    prepare_inputs compute_slot_mappings UnifiedRadixCache UnifiedRadixCache.match_prefix
    VLLM_USE_V2_MODEL_RUNNER=0 num_cached_tokens context_len execute_model update_from_output Scheduler.add_request Request
    RequestStatus num_computed_tokens num_tokens_with_spec SchedulerOutput KVCacheManager BlockPool
    BlockPool.get_new_blocks KVCacheManager.allocate_slots allocate_slots touch free_blocks
    get_computed_blocks cache_full_blocks hash_block_tokens FreeKVCacheBlockQueue _prepare_inputs
    BlockHashToBlockMap _maybe_evict_cached_block get_new_blocks Scheduler.finish_requests
    _free_request Scheduler._preempt_request Scheduler._update_after_schedule None
    determine_available_memory kernel_unified_attention reduce_segments long_prefill_token_threshold
    scheduler_reserve_full_isl num_tokens query_start_loc running waiting
    ReqToTokenPool Req ReqKvInfo kv_committed_len event_loop_normal event_loop_overlap
    get_next_batch_to_run get_new_batch_prefill PrefillAdder PrefillAdder.add_one_req
    add_chunked_req ScheduleBatch ScheduleBatch.retract_decode retract_decode chunked_req
    chunked_prefill_size
    max_prefill_tokens prefill_decode_interval page_size RadixCache RadixCache.match_prefix evict
    AsyncLLM AsyncLLM.generate EngineCoreProc.run_busy_loop RequestOutputCollector ROUTER PUSH PULL
    with_cancellation VLLM_V1_OUTPUT_PROC_CHUNK_SIZE TokenizerManager DetokenizerManager openai
    Scheduler._abort_on_queued_limit create_abort_task vllm:inter_token_latency_seconds
    match_prefix insert extra_key cache_salt DynamicChunkSizer torch.nn.functional running.pop()
    """.split()
)
# What exercises ask the reader to add, labels of drawings, and what is no name at all.
OTHER_SPANS = {
    *(
        "@triton.jit",
        "max_prefilling",
        "stall_share",
        "A0",
        "A2",
        "while True",
        'ARGS="-k word"',
        "random:",
    ),
    *("import stages.04_chunked_prefill", "ModuleNotFoundError: No module named 'stages'"),
}
EXTERNAL_PATHS = (
    *("vllm/", "python/sglang/", "managers/", "mem_cache/", "model_executor/", "layers/"),
    *("arg_groups/", "disaggregation/"),
)
EXTERNAL_FILES = set(
    """
    kv_cache_coordinator.py single_type_kv_cache_manager.py block_pool.py kv_cache_utils.py
    flash_attn.py merge_attn_states.py chunked_prefill_paged_decode.py decode_attention.py
    extend_attention.py output_processor.py gpu_model_runner.py request.py python3.12-venv
    trace.json .gguf ui.perfetto.dev latency throughput site/index.html site/ build/bench .venv
    """.split()
)
COMMANDS = ("make", ".venv/bin/python", "python -m", "git ", "pip ", "vllm ", "diff ", "--")


# --- the pages' text --------------------------------------------------------------------------


class Environment:
    """What `define_env` is given by mkdocs-macros, as far as it uses it."""

    def __init__(self, locale: str = "en") -> None:
        self.variables: dict[str, Any] = {}
        self.macros: dict[str, Any] = {}
        self.page = SimpleNamespace(file=SimpleNamespace(locale=locale))

    def macro(self, function: Any) -> Any:
        self.macros[function.__name__] = function
        return function


@cache
def rendered(path: Path) -> str:
    """A page as mkdocs-macros hands it to Markdown. An unknown name anywhere is an error."""
    environment = Environment()
    docs_macros.define_env(environment)
    page = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(page)
    return template.render(**environment.variables, **environment.macros)


def prose(path: Path) -> str:
    """A page's own words: without front matter, macros, fenced code and formulas."""
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\{\{.*?\}\}", "0", text, flags=re.DOTALL)
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)


def code_spans() -> Iterator[tuple[str, str]]:
    """(page, what stands in backticks) for every page, and for the words of figures and diffs."""
    for path in PAGES:
        if path.stem in ("setup", "troubleshooting"):  # which name what is on other machines
            continue
        for span in re.findall(r"`([^`\n]+)`", prose(path)):
            yield str(path.relative_to(DOCS)), span
        for note in re.findall(r"\{\{ code\(.*?\) \}\}", path.read_text(), flags=re.DOTALL):
            for span in re.findall(r"`([^`\n]+)`", note):
                yield str(path.relative_to(DOCS)), span
    for path in sorted((DOCS / "_data").glob("*.yml")):
        without_comments = re.sub(r"^ *#.*$", "", path.read_text(), flags=re.MULTILINE)
        for span in re.findall(r"`([^`]+)`", without_comments):
            yield path.name, " ".join(span.split())


# --- names ------------------------------------------------------------------------------------


@cache
def symbols() -> frozenset[str]:
    """Everything that has a name in the repository's Python files: what is defined there, its
    parameters and attributes, and keys of dictionaries."""
    found: set[str] = set()
    for folder in ("stages", "shared", "tests", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            found.add(path.stem)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    found.add(node.name)
                elif isinstance(node, ast.arg):
                    found.add(node.arg)
                elif isinstance(node, (ast.Name, ast.Attribute)):
                    if isinstance(node.ctx, ast.Store):
                        found.add(node.id if isinstance(node, ast.Name) else node.attr)
                elif isinstance(node, ast.Dict):
                    found |= {
                        key.value
                        for key in node.keys
                        if isinstance(key, ast.Constant) and isinstance(key.value, str)
                    }
    return frozenset(found)


@cache
def texts() -> str:
    """All Python sources as one string, for options that are looked up as text."""
    files = [p for f in ("stages", "shared", "tools") for p in (ROOT / f).rglob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in [*files, ROOT / "conftest.py"])


def is_path(span: str) -> bool:
    return bool(re.fullmatch(r"[\w./-]+/[\w./-]*|[\w.-]+\.(py|json|yml|toml|md|gguf)", span))


def path_exists(span: str) -> bool:
    if span.startswith(EXTERNAL_PATHS) or span in EXTERNAL_FILES:
        return True
    if (ROOT / span).exists() or (ROOT / "stages" / span).exists():
        return True
    return any((ROOT / f).rglob(span) for f in ("shared", "tools", "tests")) and any(
        True for f in ("stages", "shared", "tools", "tests") for _ in (ROOT / f).rglob(span)
    )


def unknown_names(span: str) -> list[str]:
    """Identifiers of a piece of Python that nothing in the repository is called by."""
    if span in EXTERNAL_NAMES:
        return []
    try:
        tree = ast.parse(span.replace("..", ":").replace("×", "*"))
    except SyntaxError:
        return [span]
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg)
    return sorted(used - symbols() - EXTERNAL_NAMES)


def problem(span: str) -> str | None:
    """What is wrong with a name in code style; None if it stands for something."""
    if span in EXTERNAL_FILES | EXTERNAL_NAMES | OTHER_SPANS or (ROOT / "stages" / span).is_dir():
        return None
    if re.fullmatch(r"(smollm2|tiny|random)(:[\w.-]+)?", span):
        return None
    if span.startswith("--"):
        option = span.split()[0]
        field = option[2:].replace("-", "_")
        known = f'"{option}"' in texts() or field in symbols() or option in EXTERNAL_OPTIONS
        return None if known else f"no program has the option {option}"
    if span.startswith("/"):
        return None if f'"{span}"' in texts() else f"the server has no route {span}"
    if span.startswith(COMMANDS):
        modules = re.findall(r"python -m (\w[\w.]*\w)", span)
        missing = [m for m in modules if m not in ("pytest", *EXTERNAL_MODULES) and not module(m)]
        targets = re.match(r"make ([a-z-]+)", span)
        makefile = (ROOT / "Makefile").read_text()
        if targets and not re.search(rf"^{targets[1]}:", makefile, flags=re.MULTILINE):
            return f"make has no target {targets[1]}"
        return f"no module {missing}" if missing else None
    if is_path(span) or " " not in span and "/" in span and not span.startswith("t "):
        return None if path_exists(span) or not is_path(span) else f"there is no file {span}"
    unknown = unknown_names(span)
    return f"nothing is called {', '.join(unknown)}" if unknown else None


EXTERNAL_OPTIONS = {
    *("--enable-mixed-chunk", "--max-num-batched-tokens", "--api-server-count"),
    *("--max-queued-requests", "--max-num-queued-reqs", "--sse-keep-alive-interval"),
}
EXTERNAL_MODULES = ("sglang.benchmark.serving",)


def module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_names_in_code_style_exist() -> None:
    spans = list(code_spans())
    assert len(spans) > 400, "the pages' code spans were not found"
    wrong = {f"{page}: `{span}`: {why}" for page, span in spans if (why := problem(span))}
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize(
    "span",
    [
        *("Scheduler.schedul", "max_chunk_size", "stages/05_more", "schedule.py", "make sites"),
        *("--max-chunk", "python -m shared.nothing", "block_tables[i] + slott", "/v1/models/all"),
    ],
)
def test_a_name_that_is_nowhere_is_found_out(span: str) -> None:
    assert problem(span)


def shell_commands() -> Iterator[tuple[str, str]]:
    """(page, command) for every line of every block of shell code."""
    for path in PAGES:
        for _, block in re.findall(
            r"^( *)```sh\n(.*?)^\1```$", path.read_text(), flags=re.DOTALL | re.MULTILINE
        ):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.sub(r"  +# .*", "", line).strip()
                if command and not command.startswith("#"):
                    yield path.name, command


def test_what_listings_import_is_there() -> None:
    found = 0
    for path in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.M | re.S):
            for line in re.findall(r"^from shared[\w.]* import [\w, ]+$", block, re.M):
                exec(line, {})
                found += 1
    assert found > 1


def test_commands_exist() -> None:
    commands = list(shell_commands())
    assert len(commands) > 40, "the shell commands were not found"
    wrong = []
    for page, command in commands:
        ours = " -m " in command or command.startswith("make")
        parts = [command, *re.findall(r"(?<= )--[a-z][\w-]*", command)] if ours else []
        wrong += [f"{page}: {command}: {why}" for part in parts if (why := problem(part))]
        tests = re.findall(r"(?:stages|tests)/[\w./]+", command)
        wrong += [f"{page}: there is no {name}" for name in tests if not (ROOT / name).exists()]
    assert not wrong, "\n".join(wrong)


# --- code, figures, tables --------------------------------------------------------------------


def test_a_missing_name_ends_the_build() -> None:
    path = "stages/04_chunked_prefill/scheduler.py"
    with pytest.raises(DocsError, match="defines no Scheduler.plan"):
        docs_code.listing(path, "Scheduler.plan")
    with pytest.raises(DocsError, match="no line contains 'if luck'"):
        docs_code.listing(path, "Scheduler.schedule", notes=[["if luck", "?"]])
    with pytest.raises(DocsError, match="there is no file stages/05"):
        docs_code.listing("stages/05/scheduler.py", "Scheduler")


def test_a_listing_is_the_source() -> None:
    path = "stages/01_block_manager/block_manager.py"
    shown = docs_code.listing(path, "slot_mapping").split("\n", 2)[2]
    assert shown.split("\n```")[0] in (ROOT / path).read_text()


def test_a_diff_needs_its_sentences_and_no_others() -> None:
    words = {"new_file": "new", "lines": "lines"}
    sentences = docs_macros.read_data("diffs")["03-04"]
    assert "Decodes first" in docs_code.stage_diff(3, 4, sentences, words)
    few = {name: why for name, why in sentences.items() if name != "scheduler.py"}
    with pytest.raises(DocsError, match="changes scheduler.py"):
        docs_code.stage_diff(3, 4, few, words)
    without = {k: v for k, v in sentences["scheduler.py"].items() if k != "Scheduler.commit"}
    with pytest.raises(DocsError, match="no sentence for the hunk in Scheduler.commit"):
        docs_code.stage_diff(3, 4, sentences | {"scheduler.py": without}, words)
    many = sentences | {"kv_cache.py": {"file": "?"}}
    with pytest.raises(DocsError, match="does not change kv_cache.py"):
        docs_code.stage_diff(3, 4, many, words)


def test_every_figure_and_table_is_shown_somewhere() -> None:
    text = "\n".join(path.read_text() for path in PAGES)
    shown = set(re.findall(r'\{\{ figure\("(\w+)"\) \}\}', text))
    assert shown == set(docs_figures.FIGURES)
    assert set(re.findall(r'\{\{ table\("(\w+)"\) \}\}', text)) == set(docs_tables.TABLES)


@pytest.mark.parametrize("name", docs_figures.FIGURES)
def test_a_figure_has_a_caption_and_only_the_site_s_colours(name: str) -> None:
    html = docs_figures.figure(name, docs_macros.read_data("words")["figures"])
    caption = re.search(r"<figcaption>(.+)</figcaption>", html)
    assert caption and "{" not in caption[1]
    assert html.strip().count("\n") == 0, "a figure must be one line, to stand in a list"
    own = re.sub(r"var\(--fig-\w+, #\w+\)", "", html)
    assert not re.search(r"#[0-9a-f]{3,6}\b|rgb\(", own), "a colour that ignores the mode"
    drawings = re.findall(r"<svg.*?</svg>", html)
    for drawing, most in zip(drawings, (720, docs_figures.NARROW), strict=True):
        x = [float(v) for v in re.findall(r'<text x="(-?[\d.]+)"', drawing)]
        y = [float(v) for v in re.findall(r'<text x="-?[\d.]+" y="(-?[\d.]+)"', drawing)]
        width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)', drawing)[0])
        assert width <= most, "wider than the frame that it is for"
        assert 0 <= min(x) and max(x) <= width, "text outside of the drawing"
        assert 0 <= min(y) and max(y) <= height, "text outside of the drawing"
    arrows = re.findall(r'<marker id="([^"]+)"', html)
    assert len(set(arrows)) == len(arrows), "an arrow's head is defined twice, once out of sight"


def test_languages_have_the_same_words() -> None:
    def keys(value: Any, prefix: str = "") -> set[str]:
        if not isinstance(value, dict):
            return {prefix}
        return {key for name, one in value.items() for key in keys(one, f"{prefix}/{name}")}

    for name in ("words", "diffs"):
        english = keys(docs_macros.read_data(name))
        for path in (DOCS / "_data").glob(f"{name}.*.yml"):
            assert keys(yaml.safe_load(path.read_text(encoding="utf-8"))) == english, path.name


# --- links and structure ----------------------------------------------------------------------


PARTS = (
    *("The problem", "The idea", "The data structure", "The diff", "The rules"),
    *("Run it", "Measured", "How vLLM and SGLang do it", "Check yourself"),
)


@pytest.mark.parametrize("path", [p for p in CHAPTERS if p.name[0] in "1234"], ids=lambda p: p.name)
def test_a_chapter_has_its_parts_in_order(path: Path) -> None:
    heads = re.findall(r"^## (.+)$", path.read_text(), flags=re.MULTILINE)
    found = [next((i for i, head in enumerate(heads) if head.startswith(p)), -1) for p in PARTS]
    assert -1 not in found, f"missing: {[p for p, i in zip(PARTS, found, strict=True) if i < 0]}"
    assert found == sorted(found), heads


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.name)
def test_a_chapter_asks_and_gives_an_exercise(path: Path) -> None:
    text = path.read_text()
    assert len(re.findall(r"^\?\?\? question", text, flags=re.MULTILINE)) >= 4
    exercise = text.partition('!!! example "Exercise"')[2]
    assert re.search(r"`test_\w+`|test_\w+\.py|pytest|a test", exercise)


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_footnotes_are_used_and_given(path: Path) -> None:
    text = path.read_text()
    used = set(re.findall(r"\[\^(\w+)\](?!:)", text))
    given = set(re.findall(r"^\[\^(\w+)\]:", text, flags=re.MULTILINE))
    assert used == given


def test_nothing_comes_from_another_host() -> None:
    for path in [*DOCS.rglob("*.css"), *DOCS.rglob("*.js"), *DOCS.rglob("*.svg")]:
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r"url\(\s*['\"]?(?:https?:)?//|@import|src=['\"]https?:", text)
        assert not fetched, path.name
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top">x</h1><a href="sub/a.html#b">ok</a>')
    (tmp_path / "sub/a.html").write_text(
        '<p id="b"></p><a href="../index.html#top">ok</a><a href="../gone.html">1</a>'
        '<a href="../index.html#gone">2</a><script src="https://example.org/x.js"></script>'
        '<a href="https://example.org">ok</a>'
    )
    assert list(docs_hooks.broken_links(tmp_path)) == [
        "sub/a.html: https://example.org/x.js comes from another host",
        "sub/a.html: ../gone.html leads nowhere",
        "sub/a.html: ../index.html#gone: there is no such place on the page",
    ]


@pytest.mark.parametrize(
    ("answer", "swallowed"),
    [
        ("    254. Six tokens.", ["254. Six tokens."]),
        ("    16.", ["16."]),
        ("\n    - One.", ["- One."]),
        ("    254 tokens. Six of them.", []),
        ("    2.5 blocks.", []),
        ("    -3 is no token id.", []),
        ("    Two kinds:\n\n    1. one\n    2. two", []),
    ],
)
def test_an_answer_that_begins_with_a_list_is_found(answer: str, swallowed: list[str]) -> None:
    page = f"""Text.\n\n1. a list\n\n??? question "How many?"\n{answer}\n\nMore.\n"""
    assert docs_hooks.swallowed_answers(page) == swallowed


def test_a_notebook_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_hooks, "ROOT", tmp_path)
    stream = {"output_type": "stream", "text": ["1 < 2\n", "\x1b[31mred\x1b[0m\n"]}
    table = {"output_type": "display_data", "data": {"text/html": ["<b>\n", "x</b>"]}}
    slider = {"output_type": "display_data", "data": {docs_hooks.WIDGET: {}, "text/plain": "moves"}}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text {{ as it is }}."]},
        {"cell_type": "markdown", "source": ["[a](../docs/chapters/a.md) [b](02_b.ipynb)"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [stream, slider, table]},
        {"cell_type": "code", "source": ["  \n"], "outputs": []},
    ]
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    page = docs_hooks.notebook_page(path)
    assert jinja2.Environment().from_string(page).render().count("{{ as it is }}") == 1
    assert "```python\nprint(1)\n```" in page and page.count("```") == 2
    assert "1 &lt; 2\nred</pre>" in page and "<b> x</b>" in page and "moves" not in page
    assert "[a](../chapters/a.md) [b](02_b.md)" in page


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.2-1b", 32_768),
        ("qwen3-0.6b", 114_688),
        ("smollm2-135m", 23_040),
    ],
)
def test_bytes_per_token(name: str, size: int) -> None:
    """2 x layers x KV heads x head dimension x 2 bytes, worked out by hand."""
    assert ModelSize.named(name).kv_bytes == size


def test_parameters_are_about_what_the_names_say() -> None:
    for name, billions in (("llama-3.1-8b", 8.03), ("llama-3.2-1b", 1.24), ("qwen3-0.6b", 0.60)):
        assert ModelSize.named(name).total / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_step_multiplies_all_weights_but_the_input_embedding() -> None:
    """Llama-3.1-8B: 32 layers of four projections and an MLP of three matrices, and the output
    layer. The table of 128,256 embeddings is looked up, not multiplied; a tied one is both."""
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14_336)
    weights = 32 * layer + 128_256 * 4096
    assert ModelSize.named("llama-3.1-8b").matrices == weights
    tied = ModelSize.named("llama-3.2-1b")
    assert tied.matrices == tied.total
    rows = docs_tables.table("work", docs_macros.read_data("words")["tables"]).strip().split("\n")
    chunk = [cell.strip() for cell in rows[4].strip("| ").split("|")]
    assert chunk[1:] == [
        "256",
        f"{2 * 256 * weights / 1e12:.2f}",
        f"{2 * weights / 1e9:.1f}",
        "256",
    ]
    assert chunk[2:4] == ["3.84", "15.0"]


def test_an_80_gb_gpu_holds_nearly_half_a_million_tokens_beside_the_weights() -> None:
    size = ModelSize.named("llama-3.1-8b")
    assert 480_000 < (80e9 - 2 * size.total) / size.kv_bytes < 490_000


def test_what_the_roofline_assumes_is_said() -> None:
    line = Roofline(GPUS["h100"], ModelSize.named("llama-3.1-8b"))
    text = " ".join(prose(DOCS / "chapters" / "5-measuring.md").split())
    assert f"{100 * line.flop_share:.0f} % of the data sheet's FLOP/s" in text
    assert f"{100 * line.byte_share:.0f} % of its bandwidth" in text
    assert f"an overhead of {1e3 * line.overhead:g} ms" in text


def test_the_pool_when_the_document_arrives() -> None:
    """Chat A: 47 tokens of prompt and eight decodes, in blocks 0, 1, 2 and, later, 7."""
    step = docs_example.run(1)[11]
    assert step.tables["A"] == [0, 1, 2, 7]
    assert step.tables["D"] == [12, 13, 14, 15, 16]
    assert step.cached == {"A": 55, "B": 60, "C": 67, "D": 75}
    shared = docs_example.run(3)[11]
    assert [shared.tables[name][:2] for name in "ABCD"] == [[0, 1]] * 4


def test_tokens_between_two_tokens_of_a_chat() -> None:
    """The prompt and five decodes; the same without 32 found tokens; a chunk and four decodes."""
    most = [max(docs_example.tokens_between(docs_example.run(n), "A")) for n in (1, 2, 3, 4)]
    assert most == [1500 + 5, 1500 + 5, 1468 + 5, 256 + 4]


def test_chunks_of_the_document() -> None:
    chunks = docs_example.chunks(docs_example.run(4), "doc")
    assert [n for _, _, n in chunks] == [256] * 5 + [188]
    assert chunks[0][1] == 32 and sum(n for _, _, n in chunks) == 1468


def test_twelve_thousand_tokens_of_which_eight_thousand_are_found() -> None:
    steps, chunks = docs_figures.hit_run()
    assert [(start, n) for _, start, n in chunks] == [(s, 1000) for s in range(8000, 12000, 1000)]
    assert len(steps) == 4


def test_the_oldest_partial_prefill_advances() -> None:
    keeper = docs_tables.deadlock_run()
    assert [step.preempted for step in keeper.steps[:4]] == [[], [], [], ["B"]]
    assert keeper.steps[2].num_free_blocks == 0, "without a full pool there is no deadlock to break"


def test_the_other_order_delays_the_document() -> None:
    ours, other = (docs_tables.orders_run(order) for order in ("123", "132"))
    counts = [len(docs_example.chunks(keeper.steps, "doc")) for keeper in (ours, other)]
    assert counts == [6, 24]


# --- measured numbers -------------------------------------------------------------------------

RESULTS = {
    "format": "mini-vllm-bench",
    "version": 1,
    "benchmark": "stall",
    "complete": True,
    "failures": [],
    "date": "2030-01-02T03:04:05+00:00",
    "commit": "abc1234567",
    "command": "python -m shared.bench stall",
    "machine": {"cpu": "A <fast> CPU", "cores": 8, "gpu": None},
    "versions": {"python": "3.12", "torch": "9.9"},
    "columns": {"gap_max": {"title": "longest gap", "unit": "ms", "formula": "f", "better": ""}},
    "rows": [
        {
            "table": "stall",
            "name": "stage 04",
            "params": {"chunk": 256},
            "values": {"gap_max": {"median": 1234.5, "min": 1, "max": 2, "rounds": [1]}},
        }
    ],
}


def test_a_measured_table_says_where_and_when() -> None:
    words = docs_macros.read_data("words")["results"]
    html = docs_bench.results_table(RESULTS, "stall", ["gap_max"], words)
    caption = html.partition("<figcaption>")[2]
    for part in ("A &lt;fast&gt; CPU", "8 cores", "torch 9.9", "2030-01-02", "abc1234567"):
        assert part in caption
    assert "1,234" in html and "longest gap (ms)" in html


def test_a_ratio_is_of_two_medians() -> None:
    row = RESULTS["rows"][0] | {"name": "stage 03", "values": {"gap_max": {"median": 2469.0}}}
    results = RESULTS | {"rows": [*RESULTS["rows"], row]}
    assert docs_bench.ratio(results, "stall", "gap_max", "stage 03", "stage 04") == "2.0"
    with pytest.raises(docs_bench.DocsError, match="stage 05"):
        docs_bench.ratio(results, "stall", "gap_max", "stage 03", "stage 05")


def test_a_spread_is_from_the_smallest_to_the_largest_median() -> None:
    rows = [
        {"table": table, "name": "stage 04", "params": {}, "values": {"gap_max": {"median": m}}}
        for table, m in (("block size", 100.0), ("block size", 113.4), ("block size", 90.0))
    ]
    assert docs_bench.spread(RESULTS | {"rows": rows}, "block size", "gap_max") == "26"


def test_rows_are_chosen_by_their_parameters() -> None:
    values = {"gap_max": {"median": 7.0, "min": 7, "max": 7, "rounds": [7]}}
    row = RESULTS["rows"][0] | {"params": {"chunk": 1024}, "values": values}
    results = RESULTS | {"rows": [*RESULTS["rows"], row]}
    assert docs_bench.median(results, "stall", "gap_max", "stage 04", {"chunk": 1024}) == 7
    words = docs_macros.read_data("words")["results"]
    both = docs_bench.results_table(results, "stall", ["gap_max"], words)
    assert (
        re.search(r"<td[^>]*>\s*1,024</td>", both)
        and "stage 04" not in both.partition("<figcaption>")[0]
    )
    one = docs_bench.results_table(results, "stall", ["gap_max"], words, where={"chunk": 256})
    assert "1,234" in one and "1,024" not in one and "chunk" not in one
    with pytest.raises(DocsError, match="no row with {'chunk': 1}"):
        docs_bench.pick(results, "stall", where={"chunk": 1})


def test_pictures_of_measurements_say_where_and_when() -> None:
    words = docs_macros.read_data("words")["results"]
    times = [0.1 * i for i in range(-3, 9)]
    run = {"stream-0": {"token_times": times}, "long": {"token_times": [0.5, 0.6]}}
    results = RESULTS | {"series": {"stage 03": {"requests": run}}, "claims": []}
    html = docs_bench.stall_picture(results, ["stage 03"], words)
    dots = 2 + sum(-0.18 * 0.625 <= t <= 0.625 for t in times)
    drawings = re.findall(r"<svg.*?</svg>", html)  # the wide one, and one for phones
    assert [drawing.count("<circle") for drawing in drawings] == [dots, dots]
    assert "2030-01-02" in html.partition("<figcaption>")[2]
    with pytest.raises(DocsError, match="no series"):
        docs_bench.stall_picture(results, ["stage 04"], words)
    with pytest.raises(DocsError, match="no claims"):
        docs_bench.claims(results, words)


def test_a_picture_has_both_variants_and_words(tmp_path: Path) -> None:
    (tmp_path / "gaps-light.png").touch()
    with pytest.raises(DocsError, match="no picture gaps-dark.png; python -m shared.bench plots"):
        docs_bench.picture("gaps", "What is seen.", folder=tmp_path)
    (tmp_path / "gaps-dark.png").touch()
    text = docs_bench.picture("gaps", "What is\n seen.", "More.", "chapters/4.md", tmp_path)
    for variant in ("light", "dark"):
        url = f"../assets/bench/gaps-{variant}.png#only-{variant}"
        assert f"\n![What is seen.]({url}){{ loading=lazy }}\n" in text
    assert "<figcaption markdown>More.</figcaption>" in text


def test_results_that_prove_nothing_are_refused(tmp_path: Path) -> None:
    for change, why in (
        ({"complete": False}, "interrupted"),
        ({"failures": ["rows differ"]}, "failed"),
        ({"version": 7}, "expected 1"),
    ):
        (tmp_path / "stall.json").write_text(json.dumps(RESULTS | change))
        with pytest.raises(DocsError, match=why):
            docs_bench.load("stall", tmp_path)
    with pytest.raises(DocsError, match="no results ladder.json"):
        docs_bench.load("ladder", tmp_path)
    with pytest.raises(DocsError, match="no table 'sweep'"):
        docs_bench.pick(RESULTS, "sweep")


def test_chapter_2_says_what_its_claims_found() -> None:
    """Level or ahead of SDPA everywhere but for one sequence of 256 tokens; and the first table
    shows both ways to call SDPA, of which a claim takes the faster."""
    results = docs_bench.load("attention")
    kernel = {c["text"]: c["value"] for c in results["claims"] if "contiguous /" in c["text"]}
    assert len(kernel) >= 9
    behind = [text for text, value in kernel.items() if value < 0.95]
    assert behind == ["contiguous / numba, context 256, batch 1"]
    table = "decode attention of one layer"
    smallest = {"context": 256, "batch": 1}
    assert 0.02 < docs_bench.median(results, table, "time", "numba", smallest) < 0.04  # ms
    for context in (256, 1024, 4096):
        where = {"context": context, "batch": 8}
        dense = [
            docs_bench.median(results, table, "time", row, where)
            for row in ("contiguous", "contiguous, gqa")
        ]
        ratio = min(dense) / docs_bench.median(results, table, "time", "numba", where)
        claimed = kernel[f"contiguous / numba, context {context}, batch 8"]
        assert ratio == pytest.approx(claimed, rel=0.2), "table and claim tell different stories"
    assert '"contiguous, gqa"' in (DOCS / "chapters" / "2-paged-attention.md").read_text()


def test_chapter_5_says_why_the_p99_of_all_gaps_misses_the_stall() -> None:
    """Four gaps, one per stream, are less than 1 % of all; of 300 they would be the p99."""
    results = docs_bench.load("stall")
    gaps = sorted(docs_bench.gaps(results, "stage 03"))
    stalls = [gap for gap in gaps if gap > 1]
    assert len(stalls) == 4 and len(stalls) < 0.01 * len(gaps)
    assert np.percentile(gaps, 99) < 0.1 < np.percentile(gaps[-300:], 99)
    medians = [docs_bench.median(results, "stall", "itl_p99", f"stage 0{n}") for n in (3, 4)]
    assert medians[0] < medians[1], "the older engine wins by p99"
    text = " ".join(rendered(DOCS / "chapters" / "5-measuring.md").split())
    assert f"4 gaps, one per stream, of {len(gaps)}" in text and "With 300 gaps" in text


def test_chapter_5_says_why_goodput_is_below_the_rate() -> None:
    results = docs_bench.load("goodput")
    rate = docs_bench.median(results, "highest rate", "highest_rate", "stage 04")
    best = docs_bench.median(results, "highest rate", "best_goodput", "stage 04")
    at = {"rate": rate}
    assert docs_bench.median(results, "goodput", "in_time", "stage 04", at) == 100
    assert docs_bench.median(results, "goodput", "goodput", "stage 04", at) == best < rate
    rates = [row["params"]["rate"] for row in docs_bench.pick(results, "goodput")]
    counts = [max(goodput.FEWEST, round(goodput.FULL["seconds"] * rate)) for rate in rates]
    assert f"with {min(counts)} to {max(counts)} requests" in " ".join(
        (DOCS / "chapters" / "5-measuring.md").read_text().split()
    )
