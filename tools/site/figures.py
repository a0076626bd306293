"""The drawings of the course, each made from what the code does when the site is built.

Pools, queues and timelines are drawn from runs of the running example (`docs_example`); captions
and labels come from `docs/_data/words.LOCALE.yml`, where the numbers have names. A drawing returns
its canvas and those numbers.

Knows the bookkeeping of the stages and shapes; no model, no time.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from html import escape
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from shared.draw import figures as draw
from shared.draw.canvas import Canvas
from shared.measure.roofline import GPUS
from tools.site import sources as docs_code
from tools.site import example
from tools.site.sources import DocsError

Words = Mapping[str, str]
Drawing = tuple[Canvas, dict[str, Any]]

NAMES = [*example.CHATS, example.DOCUMENT]
NARROW = 340  # pixels of a drawing on a phone


def html(text: str) -> str:
    """Plain text with `code`, *emphasis* and **strong**, as HTML on one line."""
    text = escape(" ".join(text.split()), quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


def figure(name: str, words: Mapping[str, Words]) -> str:
    """A drawing with its caption, as HTML on one line. Raises DocsError if it is not known."""
    if name not in FIGURES:
        raise DocsError(f"no figure {name!r}; there are {', '.join(FIGURES)}")
    if name not in words:
        raise DocsError(f"figure {name!r} has no words")
    canvas, values = FIGURES[name](words[name])
    small, _ = FIGURES[name](words[name], narrow=True)
    data = linked(*LINKED[name], words[name]) if name in LINKED else ""
    caption = words[name]["caption"].format(**{**example.facts(), **values})
    plain = re.sub(r"[`*]", "", " ".join(caption.split()))
    return (
        f'\n<figure class="fig" data-search-exclude{data}>'
        f'<div class="fig__canvas fig__wide">{canvas.svg(plain)}</div>'
        f'<div class="fig__canvas fig__narrow">{small.svg(plain)}</div>'
        f"<figcaption>{html(caption)}</figcaption></figure>\n"
    )


def linked(path: str, name: str, words: Words) -> str:
    """Attributes of a figure whose slices belong to the numbered paragraphs of a function.

    A part of the figure has the number of its paragraph, "1" and so on; `words` name it.
    """
    parts = docs_code.paragraphs(path, name)
    lines = json.dumps({part: list(span) for part, span in parts.items()})
    titles = json.dumps({part: words[f"part_{part}"] for part in parts}, ensure_ascii=False)
    return (
        f' data-lab="linked" data-open data-code="{path}" data-parts="{escape(lines)}" '
        f'data-titles="{escape(titles)}" data-label="{escape(words["parts"])}"'
    )


def _label(name: str, words: Words) -> str:
    return words["document"] if name == example.DOCUMENT else f"{words['chat']} {name}"


# --- chapter 0 --------------------------------------------------------------------------------


def stall(words: Words, narrow: bool = False) -> Drawing:
    """Tokens of the chats as they come out, with whole prompts and with chunks."""
    first, last, fixed = 8, 22, 45
    panels, length = [], 0
    for stage, title in ((3, words["whole"]), (4, words["chunks"])):
        steps = [s for s in example.run(stage) if s.index >= first][: last - first]
        ends = [0, *accumulate(fixed + s.num_tokens for s in steps)]
        length = length or ends[-1]  # the first panel's, and what fits into it of the second
        shown = [(s, a, b) for s, (a, b) in zip(steps, pairwise(ends), strict=True) if b <= length]
        times = {
            _label(name, words): [b for s, _, b in shown if name in s.sampled] for name in NAMES
        }
        prompt = [(a, b, n if (n := s.tokens_of(example.DOCUMENT)) > 1 else 0) for s, a, b in shown]
        panels.append(draw.Panel(title, times, steps=prompt))
    width = NARROW if narrow else 700
    return draw.stall(panels, (0, length), width, steps=words["steps"]), {}


def roofline(words: Words, narrow: bool = False) -> Drawing:
    """What a step of so many tokens can reach on a GPU whose numbers are public."""
    gpu = GPUS["h100"]
    ridge = gpu.flops / gpu.bandwidth
    canvas = Canvas(NARROW if narrow else 640, 270)
    tokens = [4**n for n in range(0, 7, 2 if narrow else 1)]
    chart = draw.Chart(
        canvas, tokens, [1, 10, 100], (words["x"], ""), True, (1, 2**13), y_span=(0.1, 100), unit=" %"
    )
    chart.line([(1, 100 / ridge), (ridge, 100), (2**13, 100)], "text", 2)
    points = [
        (4, "A", words["decode"]),
        (256, "doc", words["chunk"]),
        (1500, "doc", words["prompt"]),
    ]
    for n, colour, label in points:
        share = min(1, n / ridge)
        x, y = chart.x(n), chart.y(100 * share)
        canvas.circle(x, y, 6, colour)
        if share < 1:  # right of the line, which rises
            canvas.text(x + 12, y + 14, label, "small")
        else:
            last = n == 1500 and narrow
            canvas.text(x + (40 if last else 0), y - 11, label, "small", "end" if last else "middle")
    return canvas, {"ridge": f"{ridge:.0f}", "decode_share": f"{100 * 4 / ridge:.1f} %"}


# --- chapter 1 --------------------------------------------------------------------------------


def _pool(
    step: example.Step, num_blocks: int, *entries: tuple[str, str], chat: str, narrow: bool
) -> Canvas:
    """The pool before a step, with the chats, and `entries` besides, in the legend."""
    chats = [(name.lower(), name if narrow else f"{chat} {name}") for name in example.CHATS]
    width, columns = (NARROW, 8) if narrow else (648, 16)
    return draw.pool(step.tables, num_blocks, width, [*chats, *entries], columns)


def pool_before(words: Words, narrow: bool = False) -> Drawing:
    """Stage 01's pool when the document arrives."""
    step = example.before_document(1)
    free = "free", words["free"]
    canvas = _pool(step, example.NUM_BLOCKS, free, chat=words["chat"], narrow=narrow)
    return canvas, {"free": step.num_free_blocks}


def table_to_pool(words: Words, narrow: bool = False) -> Drawing:
    """Chat A: logical blocks, its table, and where they lie."""
    step = example.before_document(1)
    table, cached, size = step.tables["A"], step.cached["A"], example.BLOCK_SIZE
    around = words["logical"], words["physical"]
    canvas = draw.block_table("A", step.tables, cached, size, around, NARROW if narrow else 680)
    return canvas, {"table": str(table), "cached": cached, "last": cached - (len(table) - 1) * size}


def slots(words: Words, narrow: bool = False) -> Drawing:
    """Token indices of chat A around the end of a block, with the slots that they are stored in."""
    step = example.before_document(1)
    table, size = step.tables["A"], example.BLOCK_SIZE
    shown = range(46, 51) if narrow else range(44, 55)
    found = example.rooms(1).block_manager.slot_mapping(table, 0, shown.stop, size)
    canvas = Canvas(NARROW if narrow else 640, 128)
    rows = [words["token"], words["block"], words["offset"], words["slot"]]
    for row, label in enumerate(rows):
        canvas.text(4, 24 + row * 30, label, "small muted")
    for i, t in enumerate(shown):
        x = (98 if narrow else 112) + i * 48
        values = [t, f"[{t // size}] = {table[t // size]}", t % size, found[t]]
        for row, cell in enumerate(values):
            strong = row == 3
            canvas.rect(x, 6 + row * 30, 45, 26, "A" if strong else "soft", opacity=1)
            canvas.text(x + 22.5, 24 + row * 30, cell, "small on" if strong else "small", "middle")
    return canvas, {"before": found[47], "after": found[48]}


def waste(words: Words, narrow: bool = False) -> Drawing:
    """What four chats take if each reserves its longest possible length, and with blocks."""
    facts = example.facts()
    longest = int(example.OPTIONS["max_model_len"])
    reserved = longest * len(example.CHATS)
    canvas = Canvas(NARROW, 158) if narrow else Canvas(640, 122)
    left = 4 if narrow else 130
    scale = (canvas.width - 10 - left) / reserved
    rows = [(words["reserve"], reserved), (words["blocks"], facts["before_slots"])]
    for row, (label, slots_taken) in enumerate(rows):
        y = 24 + row * 60 if narrow else 12 + row * 46
        canvas.text(4, y - 7 if narrow else y + 19, label, "small")
        canvas.rect(left, y, slots_taken * scale, 28, "free", stroke="line")
        canvas.rect(left, y, facts["before_tokens"] * scale, 28, "A")
        canvas.text(
            left + 6 + slots_taken * scale if row else left + 30,
            y + 19,
            f"{slots_taken:,} {words['slots']}",
            "small",
        )
    canvas.legend(
        left,
        canvas.height - 8,
        [("A", f"{words['used']}: {facts['before_tokens']}"), ("free", words["unused"])],
    )
    share = 100 * (1 - facts["before_tokens"] / reserved)
    return canvas, {
        "reserved": f"{reserved:,}",
        "share": f"{share:.0f} %",
        "longest": f"{longest:,}",
    }


def _step_grid(stage: int, first: int, last: int, words: Words, narrow: bool) -> Canvas:
    """Steps from left to right, sequences from top to bottom; a cell is the tokens of a slice."""
    steps = example.run(stage)
    first = max(first, last - 8) if narrow else first  # the last ones have the document
    columns = [
        draw.StepColumn(
            step.index,
            {name: n for name, _, n in step.slices},
            [name for name, _, n in step.slices if n > 1],
            step.preempted,
            _paragraph_of(steps, step.index) if stage == 4 else {},
        )
        for step in steps[first : last + 1]
    ]
    names = {name: _label(name, words) for name in NAMES}
    return draw.steps(columns, names, (words["step"], words["total"]), NARROW if narrow else 690)


def _paragraph_of(steps: list[example.Step], index: int) -> dict[str, str]:
    """Which paragraph of stage 04's `schedule` made each slice: it goes by the state before."""
    before = steps[index - 1].states if index else {}
    paragraph = {"running": "1", "prefilling": "2"}
    return {name: paragraph.get(before.get(name, ""), "3") for name, _, _ in steps[index].slices}


def steps_1(words: Words, narrow: bool = False) -> Drawing:
    """The first steps of the running example on stage 01."""
    return _step_grid(1, 0, 13, words, narrow), {}


# --- chapter 2 --------------------------------------------------------------------------------


def gather(words: Words, narrow: bool = False) -> Drawing:
    """Stage 01 copies blocks together; stage 02 reads them where they are."""
    step = example.before_document(1)
    table = step.tables["C"]
    shown = 20
    left, right = (4, 336) if narrow else (124, 672)
    width = (right - left) / shown
    tables = {name: blocks for name, blocks in step.tables.items() if max(blocks) < shown}
    canvas, y = Canvas(NARROW if narrow else 680, 270 if narrow else 226), 20.0

    def row(label: str, style: str = "small muted", depth: float = 42) -> float:
        """A label, beside its row or above it; returns where the row begins."""
        nonlocal y
        canvas.text(4, y + 18 if not narrow else y, label, style)
        top = y + 6 if narrow else y
        y = top + depth
        return top

    def head(label: str) -> None:
        nonlocal y
        canvas.text(4, y, label, "strong")
        y += 24 if narrow else 14

    head(words["gather"])
    top = row(words["pool"])
    middles = draw.block_row(canvas, left, top, right - left, tables, shown, "C")
    bottom, start = top + 28, 4 if narrow else 260
    y += 16
    top = row("" if narrow else words["copy"], depth=58)
    if narrow:  # beside, where no arrow crosses it
        canvas.text(336, top + 17, words["copy"], "small muted", "end")
    each = width + 14
    for i, block in enumerate(table):
        x1, x2 = middles[block], start + (i + 0.5) * each
        canvas.path(
            f"M{x1:.1f} {bottom}C{x1:.1f} {bottom + 18} {x2:.1f} {top - 18} {x2:.1f} {top - 2}",
            "line",
            1.3,
            arrow=True,
        )
        canvas.rect(start + i * each, top, each - 2, 26, "C")
        canvas.text(x2, top + 17, block, "small on", "middle")
    canvas.text(start + len(table) * each + 12, top + 17, words["sdpa"], "small code")
    head(words["paged"])
    top = row(words["pool"])
    draw.block_row(canvas, left, top, right - left, tables, shown, "C")
    for block in table:
        canvas.line(middles[block], top + 42, middles[block], top + 31, "line", 1.3, arrow=True)
    canvas.text(4, top + (62 if narrow else 46), words["kernel"], "small code")
    return canvas, {"table": str(table), "tokens": step.cached["C"]}


def _cut_evenly() -> Callable[..., Any]:
    """The function of the CPU kernel that shares the work out, without Numba around it."""
    path = "stages/02_paged_attention/paged_attention_cpu.py"
    node = docs_code.definitions(path)["_cut_evenly"]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    scope: dict[str, Any] = {"np": np}
    exec(compile(ast.Module([node], []), path, "exec"), scope)
    return scope["_cut_evenly"]


def split_kv(words: Words, narrow: bool = False) -> Drawing:
    """The blocks of all decodes in a row, cut evenly among workers."""
    step = example.run(1)[example.ARRIVALS[example.DOCUMENT] + 1]
    names = [name for name, _, _ in step.slices]
    context = np.array([step.cached[name] for name in names], np.int32)
    workers = 4
    starts, cuts = _cut_evenly()(context, example.BLOCK_SIZE, workers)
    canvas = Canvas(NARROW if narrow else 680, 132)
    scale = (canvas.width - 12) / starts[-1]
    for b, name in enumerate(names):
        x = 6 + starts[b] * scale
        for i in range(starts[b], starts[b + 1]):
            canvas.rect(6 + i * scale, 34, scale - 0.8, 28, name, radius=1)
        label = words["document"] if name == example.DOCUMENT else name
        middle = x + (starts[b + 1] - starts[b]) * scale / 2
        canvas.text(middle, 24, label, "small", "middle")
    for w in range(workers):
        x1, x2 = 6 + cuts[w] * scale, 6 + cuts[w + 1] * scale
        canvas.brace(x1 + 1, x2 - 1, 70)
        canvas.text((x1 + x2) / 2, 96, f"{words['worker']} {w}", "small muted", "middle")
        canvas.text(
            (x1 + x2) / 2,
            113,
            f"{cuts[w + 1] - cuts[w]} {words['blocks']}",
            "small muted",
            "middle",
        )
    doc = int(starts[-1] - starts[-2])
    return canvas, {"total": int(starts[-1]), "doc": doc, "contexts": ", ".join(map(str, context))}


# --- chapter 3 --------------------------------------------------------------------------------


def chain(words: Words, narrow: bool = False) -> Drawing:
    """The hashes of the first blocks of chats A and B."""
    keeper, hashes, size = example.Bookkeeper(3), {}, example.BLOCK_SIZE
    for name in "AB":
        tokens = example.prompt(name)
        sequence = example.rooms(3).sequence.Sequence(name, tokens, 1)
        blocks = len(tokens) // size
        for i in range(blocks):  # fills sequence.block_hashes as a lookup does
            keeper.block_manager._content(sequence, i, list(range(blocks)))
        hashes[name] = sequence.block_hashes
    labels = [f"{words['chat']} {name}" for name in hashes]
    around = words["tokens"], words["parent"]
    return draw.chains(hashes, size, labels, NARROW if narrow else 700, around), {}


def refs(words: Words, narrow: bool = False) -> Drawing:
    """Stage 03's pool when the document arrives: shared blocks once."""
    step = example.before_document(3)
    entries = ("shared", words["shared"]), ("free", words["free"])
    canvas = _pool(step, 32, *entries, chat=words["chat"], narrow=narrow)
    return canvas, {"held": step.num_held, "held_1": example.facts()["before_blocks"]}


def free_queue(words: Words, narrow: bool = False) -> Drawing:
    """The free queue after chats A and B have finished, next to be reused on the left."""
    keeper = example.Bookkeeper(3, num_blocks=12)
    keeper.add("A", example.prompt("A"), 4)
    keeper.step()
    keeper.add("B", example.prompt("B"), 4)
    labels: dict[int, str] = {}
    while keeper.scheduler.has_unfinished():
        step = keeper.step()
        for name, table in step.tables.items():
            for i, block in enumerate(table):
                full = (i + 1) * example.BLOCK_SIZE <= step.cached[name]
                shared = (i + 1) * example.BLOCK_SIZE <= example.SYSTEM_TOKENS
                labels[block] = ("S" if shared else name) + str(i) if full else "part"
    manager = keeper.block_manager
    canvas = Canvas(NARROW, 186) if narrow else Canvas(660, 112)
    columns = 6 if narrow else 12
    canvas.text(4, 18, words["next"], "small muted")
    end = 124 + 16 if narrow else 18
    canvas.text(canvas.width - 4, end, words["last"], "small muted", "end")
    for i, block in enumerate(manager._reuse_order):
        x, y = 4 + i % columns * 54.4, 28 + i // columns * 50
        published = block in manager._contents
        colour = {"S": "shared", "A": "A", "B": "B"}.get(labels.get(block, "")[:1], "free")
        colour = colour if published else "free"
        canvas.rect(x, y, 50, 44, colour)
        canvas.text(
            x + 25,
            y + 19,
            f"{words['block']} {block}",
            "small on" if published else "small muted",
            "middle",
        )
        label = labels.get(block, words["never"]) if published else words["nothing"]
        canvas.text(x + 25, y + 35, label, "small on" if published else "small muted", "middle")
    entries = [("shared", words["system"]), ("A", words["of_a"])]
    more = [("B", words["of_b"]), ("free", words["empty"])]
    if narrow:
        canvas.legend(4, 158, entries)
        canvas.legend(4, 178, more)
    else:
        canvas.legend(4, 100, [*entries, *more])
    return canvas, {}


def steps_3(words: Words, narrow: bool = False) -> Drawing:
    """The same steps on stage 03."""
    return _step_grid(3, 0, 13, words, narrow), {}


# --- chapter 4 --------------------------------------------------------------------------------


def steps_4(words: Words, narrow: bool = False) -> Drawing:
    """The document's chunks on stage 04."""
    return _step_grid(4, 6, 19, words, narrow), {}


def states(words: Words, narrow: bool = False) -> Drawing:
    """The state machine of stage 04."""
    if narrow:
        return _states_upright(words), {}
    canvas = Canvas(700, 322)
    boxes = {
        "WAITING": (10, 118, 110, "free"),
        "PREFILLING": (258, 118, 130, "doc"),
        "RUNNING": (578, 118, 110, "A"),
        "FINISHED": (578, 268, 110, "shared"),
    }
    for name, (x, y, w, colour) in boxes.items():
        canvas.rect(x, y, w, 38, colour, stroke="line", radius=6)
        style = "strong" if name == "WAITING" else "strong on"
        canvas.text(x + w / 2, y + 24, name, style, "middle")
    canvas.line(120, 130, 256, 130, "line", 1.5, arrow=True)
    canvas.text(188, 122, words["first"], "small muted", "middle")
    canvas.line(388, 137, 576, 137, "line", 1.5, arrow=True)
    canvas.text(482, 129, words["last"], "small muted", "middle")
    canvas.path("M70 118C120 16 560 16 626 116", "line", 1.5, arrow=True)
    canvas.text(348, 32, words["one"], "small muted", "middle")
    canvas.path("M305 118C292 78 354 78 341 116", "line", 1.5, arrow=True)
    canvas.text(323, 80, words["more"], "small muted", "middle")
    canvas.path("M258 146H122", "warn", 1.3, dashed=True, arrow=True)
    canvas.path("M600 156C580 206 150 206 106 158", "warn", 1.3, dashed=True, arrow=True)
    canvas.text(436, 210, words["preempted"], "small warn", "middle")
    canvas.line(652, 156, 652, 266, "line", 1.5, arrow=True)
    canvas.text(646, 240, words["ends"], "small muted", "end")
    canvas.path("M60 156C60 276 260 292 576 292", "line", 1.3, dashed=True, arrow=True)
    canvas.path("M290 156C290 250 380 280 576 280", "line", 1.3, dashed=True, arrow=True)
    canvas.text(300, 316, words["abort"], "small muted", "middle")
    return canvas, {}


def _states_upright(words: Words) -> Canvas:
    """The same from top to bottom."""
    canvas, left, width = Canvas(NARROW, 428), 92, 120
    boxes = {"WAITING": "free", "PREFILLING": "doc", "RUNNING": "A", "FINISHED": "shared"}
    for i, (name, colour) in enumerate(boxes.items()):
        canvas.rect(left, 20 + i * 108, width, 38, colour, stroke="line", radius=6)
        style = "strong" if name == "WAITING" else "strong on"
        canvas.text(left + width / 2, 44 + i * 108, name, style, "middle")
    for i, label in enumerate((words["first"], words["last"], words["ends"])):
        canvas.line(152, 58 + i * 108, 152, 125 + i * 108, "line", 1.5, arrow=True)
        for k, line in enumerate(textwrap.wrap(label, 13)):
            canvas.text(160, 84 + i * 108 + k * 14, line, "small muted")
    canvas.path("M212 44C292 60 292 240 214 252", "line", 1.5, arrow=True)
    for k, line in enumerate(textwrap.wrap(words["one"], 10)):
        canvas.text(268, 206 + k * 14, line, "small muted")
    canvas.path("M212 138C252 128 252 166 214 156", "line", 1.5, arrow=True)
    canvas.text(222, 126, words["more"], "small muted")
    canvas.path("M92 140C62 120 62 70 90 50", "warn", 1.3, dashed=True, arrow=True)
    canvas.path("M92 250C36 220 36 60 90 36", "warn", 1.3, dashed=True, arrow=True)
    for k, line in enumerate(textwrap.wrap(words["preempted"], 11)):
        canvas.text(4, 250 + k * 14, line, "small warn")
    canvas.path("M212 28C360 40 350 350 214 364", "line", 1.3, dashed=True, arrow=True)
    for k, line in enumerate(textwrap.wrap(words["abort"], 30)):
        canvas.text(150, 398 + k * 14, line, "small muted")
    return canvas


def between(words: Words, narrow: bool = False) -> Drawing:
    """Which tokens attend to which: whole prefill, chunk, decode."""
    canvas = Canvas(NARROW, 178) if narrow else Canvas(680, 246)
    n, cell, apart = 12, 7.6 if narrow else 14, 112 if narrow else 222
    panels = [(words["prefill"], 0, 12), (words["chunk"], 4, 8), (words["decode"], 11, 12)]
    for p, (title, first, last) in enumerate(panels):
        left, top = (20 if narrow else 30) + p * apart, 48
        style = "small strong" if narrow else "strong"
        canvas.text(left + n * cell / 2, 20, title, style, "middle")
        for q in range(n):
            for k in range(n):
                inside = first <= q < last
                if not inside:
                    canvas.rect(
                        left + k * cell, top + q * cell, cell - 1.5, cell - 1.5, "free", opacity=0.4
                    )
                elif k > q:
                    canvas.rect(left + k * cell, top + q * cell, cell - 1.5, cell - 1.5, "free")
                else:
                    colour = "doc" if k >= first else "shared"
                    canvas.rect(left + k * cell, top + q * cell, cell - 1.5, cell - 1.5, colour)
        canvas.text(left - 6, top + (first + last) / 2 * cell + 4, words["q"], "small muted", "end")
        canvas.text(left + n * cell / 2, top - 8, words["k"], "small muted", "middle")
    entries = [("doc", words["own"]), ("shared", words["earlier"]), ("free", words["hidden"])]
    if narrow:  # one below the other does not fit beside
        canvas.legend(4, 154, entries[:2])
        canvas.legend(4, 172, entries[2:])
    else:
        canvas.legend(30, 238, entries)
    return canvas, {}


def chunk_boundary(words: Words, narrow: bool = False) -> Drawing:
    """Block size 16, chunk size 1,000: the block in which one chunk ends and the next goes on."""
    size, chunk, count = 16, 1000, 8 if narrow else 18
    block, offset = chunk // size, chunk % size
    table = list(range(200, 200 + 2 * chunk // size + 1))  # any table will do
    mapping = example.rooms(4).block_manager.slot_mapping
    assert mapping(table, chunk, 1, size) == [table[block] * size + offset]
    canvas = Canvas(NARROW, 216) if narrow else Canvas(676, 172)
    left, width, first = 8, 40.5 if narrow else 36.5, chunk - (4 if narrow else 10)

    def x(t: int) -> float:
        return left + (t - first) * width

    ends = words["ends"].split(", ")[0] if narrow else words["ends"]
    canvas.text(left, 16, ends, "small")
    canvas.text(x(chunk), 16, words["begins"], "small")
    for t in range(first, first + count):
        canvas.rect(x(t), 26, width - 2, 28, "A" if t < chunk else "doc")
        canvas.text(x(t) + width / 2 - 1, 44, t, "small on", "middle")
        canvas.text(x(t) + width / 2 - 1, 70, t % size, "small muted", "middle")
    for b in [b for b in (block - 1, block) if (b + 1) * size > first]:
        x1 = x(max(b * size, first))
        x2 = x(min((b + 1) * size, first + count)) - 2
        canvas.brace(x1, x2, 80)
        canvas.text((x1 + x2) / 2, 106, f"{words['block']} {b}", "small", "middle")
    y = 138.0
    right = words["right"].format(t=chunk, block=block, offset=offset)
    for text, style in ((right, "small"), (words["wrong"].format(t=chunk), "small warn")):
        for line in textwrap.wrap(text, 48) if narrow else [text]:
            canvas.text(left, y, line, style)
            y += 16
        y += 7
    return canvas, {"block": block, "offset": offset, "last_offset": (chunk - 1) % size}


def occupancy(words: Words, narrow: bool = False) -> Drawing:
    """Blocks held, step by step: chunk by chunk, and the whole prompt at once."""
    first = example.ARRIVALS[example.DOCUMENT] - 2
    runs = [(example.run(4), "doc"), (example.run(4, reserve_full_prompt=True), "shared")]
    last = max(index for index, _, _ in example.chunks(runs[0][0], example.DOCUMENT)) + 2
    canvas = Canvas(NARROW if narrow else 640, 240)
    chart = draw.Chart(
        canvas, [], [0, 32, 64, 96, 128], (words["x"], ""), x_span=(first, last + 1)
    )
    for index in range(first, last + 1):
        x = chart.x(index + 0.5)
        canvas.text(x, chart.bottom + 18, index, "small muted", "middle")
    for steps, colour in reversed(runs):
        held = [(step.index, step.num_held) for step in steps[first : last + 1]]
        chart.line([*held, (last + 1, held[-1][1])], colour, 2.4, steps=True)
    canvas.legend(chart.left + 4, 16, [("doc", words["chunks"]), ("shared", words["whole"])])
    at = example.ARRIVALS[example.DOCUMENT]
    return canvas, {
        "chunk_free": runs[0][0][at].num_free_blocks,
        "whole_free": runs[1][0][at].num_free_blocks,
    }


def hit_and_chunks(words: Words, narrow: bool = False) -> Drawing:
    """12,000 tokens, 8,000 of them cached, chunks of 1,000: run on stage 04."""
    steps, slices = hit_run()
    canvas = Canvas(NARROW if narrow else 660, 92)
    left, width, total = 6, canvas.width - 12, 12_000
    scale = width / total
    canvas.rect(left, 26, 8000 * scale - 2, 34, "shared")
    hit = words["hit_narrow" if narrow else "hit"]
    canvas.text(left + 4000 * scale, 47, hit, "small on", "middle")
    for _, start_pos, n in slices:
        canvas.rect(left + start_pos * scale, 26, n * scale - 2, 34, "doc")
        canvas.fit(left + (start_pos + n / 2) * scale, 47, n * scale - 2, f"{n:,}", "on")
    for t in (0, 8000, 12_000) if narrow else (0, 8000, 10_000, 12_000):
        anchor = {0: "start", 12_000: "end"}.get(t, "middle")
        canvas.text(left + t * scale, 78, f"{t:,}", "small muted", anchor)
    label = words["chunks"].format(chunks=len(slices))
    canvas.text(left + 10_000 * scale, 17, label, "small muted", "middle")
    return canvas, {"steps": len(steps)}


def hit_run() -> tuple[list[example.Step], list[tuple[int, int, int]]]:
    """A prompt of 12,000 tokens whose first 8,000 are in the cache, in chunks of 1,000."""
    keeper = example.Bookkeeper(
        4,
        num_blocks=1024,
        max_num_batched_tokens=8192,
        max_model_len=16_384,
        max_prefill_chunk_size=1000,
    )
    prefix = list(range(8000))
    keeper.add("first", prefix, 1)
    keeper.drain()
    done = len(keeper.steps)
    keeper.add("second", [*prefix, *range(20_000, 24_000)], 1)
    keeper.drain()
    steps = keeper.steps[done:]
    return steps, example.chunks(steps, "second")


# --- chapter 5, and the whole -----------------------------------------------------------------


def measures(words: Words, narrow: bool = False) -> Drawing:
    """One request's life, with the measures drawn in."""
    canvas = Canvas(NARROW if narrow else 680, 150)
    y, scale = 64, 0.49 if narrow else 1
    canvas.line(20 * scale, y, 664 * scale, y, "line", 2)
    arrival = 40 * scale
    tokens = [x * scale for x in (230, 270, 310, 350, 530, 570, 610, 650)]
    canvas.path(f"M{arrival} {y - 14}v28", "text", 2)
    canvas.text(4 if narrow else arrival - 20, y + 34, words["added"], "small")
    for i, x in enumerate(tokens):
        canvas.circle(x, y, 5 if narrow else 6, "A")
        canvas.text(x, y + 24, i + 1, "small muted", "middle")

    def brace(x1: float, x2: float, top: float, label: str, colour: str) -> None:
        canvas.brace(x1 + 2, x2 - 2, top + 8, -8, colour)
        canvas.text((x1 + x2) / 2, top - 6, label, "small", "middle")

    brace(arrival, tokens[0], 36, "TTFT", "line")
    brace(tokens[1], tokens[2], 36, "ITL", "line")
    brace(tokens[3], tokens[4], 36, words["stall"], "warn")
    canvas.brace(tokens[0] + 2, tokens[-1] - 2, 106)
    canvas.text((tokens[0] + tokens[-1]) / 2, 134, words["tpot"], "small", "middle")
    return canvas, {}


def rooms(words: Words, narrow: bool = False) -> Drawing:
    """The modules of a stage and what they import."""
    if narrow:
        return _rooms_upright(words), {}
    canvas = Canvas(690, 264)
    canvas.text(8, 18, words["title"], "small muted")
    canvas.rect(8, 32, 270, 152, "soft", stroke="line", radius=6)
    canvas.text(143, 52, words["bookkeeping"], "small muted", "middle")
    canvas.rect(478, 32, 204, 152, "soft", stroke="line", radius=6)
    canvas.text(580, 52, words["tensors"], "small muted", "middle")
    boxes = {
        "sequence": (20, 66, 110, "shared"),
        "block_manager": (148, 66, 118, "shared"),
        "scheduler": (148, 134, 118, "shared"),
        "kv_cache": (524, 66, 112, "shared"),
        "attention": (524, 134, 112, "shared"),
        "model_runner": (322, 134, 116, "doc"),
        "engine": (322, 220, 116, "shared"),
    }
    for name, (x, y, width, colour) in boxes.items():
        canvas.rect(x, y, width, 34, colour, radius=4)
        canvas.text(x + width / 2, y + 22, name, "code on", "middle")
    canvas.line(148, 83, 132, 83, "line", 1.4, arrow=True)
    canvas.line(207, 134, 207, 102, "line", 1.4, arrow=True)
    canvas.line(580, 134, 580, 102, "line", 1.4, arrow=True)
    canvas.line(322, 151, 268, 151, "line", 1.4, arrow=True)
    canvas.line(438, 151, 522, 151, "line", 1.4, arrow=True)
    canvas.line(380, 220, 380, 170, "line", 1.4, arrow=True)
    canvas.path("M322 237C250 237 207 224 207 170", "line", 1.4, arrow=True)
    canvas.text(380, 124, words["meet"], "small muted", "middle")
    canvas.text(448, 242, words["engine"], "small muted")
    return canvas, {}


def _rooms_upright(words: Words) -> Canvas:
    """The same from top to bottom."""
    canvas = Canvas(NARROW, 362)
    for i, line in enumerate(textwrap.wrap(words["title"], 48)):
        canvas.text(8, 14 + i * 14, line, "small muted")
    canvas.rect(4, 40, 332, 108, "soft", stroke="line", radius=6)
    canvas.text(14, 58, words["bookkeeping"], "small muted")
    canvas.rect(4, 278, 332, 78, "soft", stroke="line", radius=6)
    canvas.text(14, 344, words["tensors"], "small muted")
    boxes = {
        "sequence": (14, 68, 92, "shared"),
        "block_manager": (122, 68, 110, "shared"),
        "scheduler": (122, 110, 110, "shared"),
        "engine": (14, 190, 70, "shared"),
        "model_runner": (122, 190, 110, "doc"),
        "attention": (132, 292, 90, "shared"),
        "kv_cache": (246, 292, 80, "shared"),
    }
    for name, (x, y, width, colour) in boxes.items():
        canvas.rect(x, y, width, 30, colour, radius=4)
        canvas.text(x + width / 2, y + 20, name, "code on", "middle")
    canvas.line(122, 83, 108, 83, "line", 1.4, arrow=True)
    canvas.line(177, 110, 177, 100, "line", 1.4, arrow=True)
    canvas.line(177, 190, 177, 142, "line", 1.4, arrow=True)
    canvas.line(177, 220, 177, 290, "line", 1.4, arrow=True)
    canvas.line(222, 307, 244, 307, "line", 1.4, arrow=True)
    canvas.line(84, 205, 120, 205, "line", 1.4, arrow=True)
    canvas.path("M49 190C49 150 90 126 120 126", "line", 1.4, arrow=True)
    for i, line in enumerate(textwrap.wrap(words["meet"], 14)):
        canvas.text(238, 204 + i * 14, line, "small muted")
    for i, line in enumerate(textwrap.wrap(words["engine"], 14)):
        canvas.text(14, 234 + i * 14, line, "small muted")
    return canvas


def serving(words: Words, narrow: bool = False) -> Drawing:
    """The threads of a server and what goes between them."""
    if narrow:
        return _serving_upright(words), {}
    canvas = Canvas(690, 236)
    for x, width, lane in ((8, 206, "loop"), (262, 166, "tokenizer"), (476, 206, "engines")):
        canvas.rect(x, 30, width, 176, "soft", stroke="line", radius=6)
        canvas.text(x + width / 2, 20, words[lane], "small muted", "middle")
    _box(canvas, 24, 46, 174, words["receive"])
    _box(canvas, 24, 158, 174, words["send"])
    _box(canvas, 278, 46, 134, words["encode"])
    _box(canvas, 492, 46, 174, words["queue"])
    _box(canvas, 492, 102, 174, words["step"], "doc")
    _box(canvas, 492, 158, 174, words["put"])
    canvas.line(198, 63, 276, 63, "line", 1.4, arrow=True)
    canvas.line(412, 63, 490, 63, "line", 1.4, arrow=True)
    canvas.line(579, 80, 579, 100, "line", 1.4, arrow=True)
    canvas.line(579, 136, 579, 156, "line", 1.4, arrow=True)
    canvas.line(492, 175, 200, 175, "line", 1.4, arrow=True)
    canvas.path("M111 80V118H490", "line", 1.4, dashed=True, arrow=True)
    canvas.text(270, 111, words["abort"], "small muted")
    canvas.text(270, 168, words["wake"], "small muted")
    canvas.text(8, 228, words["note"], "small muted")
    return canvas, {}


def _serving_upright(words: Words) -> Canvas:
    """The same from top to bottom."""
    canvas = Canvas(NARROW, 390)
    for y, width, height, lane in (
        (20, 332, 62, "loop"),
        (118, 166, 62, "tokenizer"),
        (216, 332, 112, "engines"),
    ):
        canvas.rect(4, y, width, height, "soft", stroke="line", radius=6)
        canvas.text(14, y + 16, words[lane], "small muted")
    _box(canvas, 14, 44, 150, words["receive"], height=30)
    _box(canvas, 178, 44, 150, words["send"], height=30)
    _box(canvas, 14, 142, 146, words["encode"], height=30)
    _box(canvas, 14, 240, 146, words["queue"], height=30)
    _box(canvas, 14, 288, 146, words["step"], "doc", height=30)
    _box(canvas, 182, 288, 146, words["put"], height=30)
    canvas.line(128, 74, 128, 140, "line", 1.4, arrow=True)
    canvas.line(128, 172, 128, 238, "line", 1.4, arrow=True)
    canvas.line(87, 270, 87, 286, "line", 1.4, arrow=True)
    canvas.line(160, 303, 180, 303, "line", 1.4, arrow=True)
    canvas.line(316, 288, 316, 76, "line", 1.4, arrow=True)
    canvas.path("M150 74V100H190V280H140V286", "line", 1.4, dashed=True, arrow=True)
    for y, name in ((120, "abort"), (174, "wake")):
        for i, line in enumerate(textwrap.wrap(words[name], 16)):
            canvas.text(200, y + i * 14, line, "small muted")
    for i, line in enumerate(textwrap.wrap(words["note"], 48)):
        canvas.text(8, 348 + i * 14, line, "small muted")
    return canvas


def _box(
    canvas: Canvas,
    x: float,
    y: float,
    width: float,
    text: str,
    fill: str = "shared",
    height: float = 34,
) -> None:
    canvas.rect(x, y, width, height, fill, radius=4)
    canvas.text(x + width / 2, y + height / 2 + 5, text, "small on", "middle")


# Figures whose parts belong to paragraphs of code on the same page.
LINKED = {"steps_4": ("stages/04_chunked_prefill/scheduler.py", "Scheduler.schedule")}

FIGURES: dict[str, Callable[..., Drawing]] = {
    drawing.__name__: drawing
    for drawing in (
        *(stall, roofline, pool_before, table_to_pool, slots, waste, steps_1, gather, split_kv),
        *(chain, refs, free_queue, steps_3, steps_4, states, between, chunk_boundary, occupancy),
        *(hit_and_chunks, measures, rooms, serving),
    )
}
