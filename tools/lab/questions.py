"""Questions with new numbers on every try, and the reason for each usual wrong answer.

Answers come from the stage's own scheduler and block manager wherever they decide; the rest is the
chapter's arithmetic. A question is a dictionary:

    ask       the question
    form      "numbers", "names" or "slices" (a name and a number each), what is to be typed
    right     the answer: a list of numbers, of names, or of [name, number]
    mistakes  pairs of a wrong answer and the reason for it
    praise, hint  for the right answer, and for a wrong one that is not in `mistakes`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tools.lab import drive
from tools.lab.faults import request, setting

Files = Callable[[int], Mapping[str, str]]
Question = dict[str, Any]

ORDER = "Order does not matter. Write for instance: A 1, B 1, document 256."


def question(
    ask: str,
    right: list[Any],
    praise: str,
    mistakes: list[tuple[list[Any], str]],
    hint: str,
    form: str = "numbers",
) -> Question:
    """Put a question together; mistakes that lead to the right answer are left out."""
    wrong = [[answer, why] for answer, why in mistakes if answer != right]
    return {
        "ask": ask,
        "form": form,
        "right": right,
        "praise": praise,
        "mistakes": wrong,
        "hint": hint,
    }


def read(form: str, typed: str) -> list[Any] | None:
    """The typed text as an answer of that form; None if it is not one."""
    typed = typed.replace("¶", "document")
    if form == "numbers":
        found = re.findall(r"-?\d+(?:[.]\d+)?", re.sub(r"(?<=\d)[, ](?=\d{3}\b)", "", typed))
        return [float(n) if "." in n else int(n) for n in found] or None
    if form == "names":
        return re.findall(r"document|[A-Z]\b", re.sub(r"(?i)chat\s+|\bdoc\b", _name, typed)) or None
    pairs = re.findall(r"(document|doc|[A-Za-z])\W*(\d[\d,]*)", typed)
    return sorted([_name(name), int(n.replace(",", ""))] for name, n in pairs) or None


def _name(found: Any) -> str:
    text = found if isinstance(found, str) else found.group()
    if text.lower().startswith("chat"):
        return ""
    return "document" if text.lower() in ("doc", "document") else text.upper()


def judge(asked: Question, typed: str) -> dict[str, Any]:
    """Whether what was typed is right, and why not."""
    answer = read(asked["form"], typed)
    right = asked["right"]
    if asked["form"] == "slices":
        right = sorted(right)
    if answer is None:
        return {"right": None, "why": "Type the answer first."}
    if _same(answer, right):
        return {"right": True, "why": asked["praise"]}
    for wrong, why in asked["mistakes"]:
        if _same(answer, sorted(wrong) if asked["form"] == "slices" else wrong):
            return {"right": False, "why": why}
    if len(answer) != len(right) and asked["form"] == "numbers":
        many = f"{len(right)} numbers are" if len(right) > 1 else "One number is"
        return {"right": False, "why": f"{many} asked for. {asked['hint']}"}
    return {"right": False, "why": asked["hint"]}


def _same(answer: list[Any], right: list[Any]) -> bool:
    if len(answer) != len(right):
        return False
    return all(
        abs(a - b) <= 5e-3 * abs(b) if isinstance(b, float) else a == b
        for a, b in zip(answer, right, strict=True)
    )


# --- what a scheduler did ---------------------------------------------------------------------


def history(made: Mapping[str, Any], files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each step of a run, with names in place of numbers, and the tables before and in it."""
    recording = drive.run(made, files)["recording"]
    names = [one["id"] for one in recording["requests"]]
    tables: dict[str, list[int]] = {name: [] for name in names}
    cached = dict.fromkeys(names, 0)
    waiting: list[str] = []
    running: list[str] = []
    prefilling: list[str] = []
    steps = []
    for raw in recording["steps"]:
        step = {
            "step": raw["step"],
            "slices": [[names[r], n] for r, _, n in raw["slices"]],
            "starts": {names[r]: start for r, start, _ in raw["slices"]},
            "preempted": [names[r] for r in raw["preempted"]],
            "running": running,
            "prefilling": prefilling,
            "waiting": waiting,
            "cached": dict(cached),
            "before": {name: list(table) for name, table in tables.items()},
        }
        for r, keep, blocks in raw["tables"]:
            tables[names[r]] = tables[names[r]][:keep] + blocks
        for r, start, n in raw["slices"]:
            cached[names[r]] = start + n
        step["tables"] = {name: list(table) for name, table in tables.items()}
        ended = {names[r] for r, _ in raw["sampled"] if recording["requests"][r]["ended"]}
        waiting = [names[r] for r in raw["waiting"]]
        running = [
            names[r]
            for r in raw["running"]
            if not (names[r] in ended and recording["requests"][r]["ended"] == raw["end"])
        ]
        prefilling = [names[r] for r in raw["prefilling"]]
        step["free"] = raw["free"]
        steps.append(step)
    return steps


def some_traffic(rng: Random, stage: int) -> dict[str, Any]:
    """Three or four chats and a document."""
    chats = [
        request(name, 2 * i, rng.randint(20, 90), rng.randint(25, 40))
        for i, name in enumerate("ABCD"[: rng.randint(3, 4)])
    ]
    made = setting(
        *chats,
        request("document", 2 * len(chats) + rng.randint(2, 4), rng.randint(500, 1400), 6),
        block_size=rng.choice([8, 16]),
        num_blocks=256,
        max_num_batched_tokens=rng.choice([160, 256, 300]) if stage == 4 else 2048,
        max_prefill_chunk_size=rng.choice([100, 128, 256]),
    )
    return made | {"stage": stage}


def _state(made: Mapping[str, Any], step: Mapping[str, Any]) -> str:
    """The state before a step, in a sentence or two."""
    requests = {one["id"]: one for one in made["requests"]}
    parts = []
    streams = [name for name in step["running"] if name not in step["prefilling"]]
    if streams:
        parts.append(f"{', '.join(streams)} {'streams' if len(streams) == 1 else 'stream'}.")
    for name in step["prefilling"]:
        if name in step["running"]:
            done, total = step["cached"][name], requests[name]["prompt"]
            parts.append(f"{name} is in prefill: {done} of {total} prompt tokens are in the cache.")
    new = [
        one["id"]
        for one in made["requests"]
        if one["arrival"] <= step["step"]
        and (one["id"] in step["waiting"] or not step["cached"][one["id"]])
        and one["id"] not in step["running"]
    ]
    for name in new:
        parts.append(f"{name} waits with a prompt of {requests[name]['prompt']} tokens.")
    return " ".join(parts)


def next_slices(made: Mapping[str, Any], files: Mapping[str, str], index: int) -> Question:
    """Which slices will step `index` compute?"""
    steps = history(made, files)
    step = steps[index]
    options, stage = made["options"], made["stage"]
    right = step["slices"]
    streams = [name for name in step["running"] if name not in step["prefilling"]]
    requests = {one["id"]: one for one in made["requests"]}
    prompts = [[name, n] for name, n in right if name not in streams]
    with_streams = [[name, 1] for name in streams]
    mistakes: list[tuple[list[Any], str]] = [
        (prompts, "The streams decode in this step as well: one token each, before any prompt.")
        if stage == 4
        else (
            [*with_streams, *prompts],
            "Up to stage 03, a step computes prompts or decodes, never both. Prompts go first.",
        ),
        (
            with_streams,
            "A prompt is there as well. Is there room for some of it?"
            if stage == 4
            else "Prompts go first, up to stage 03; the streams wait for them.",
        ),
        (
            [*with_streams, *([n, requests[n]["prompt"] - step["cached"][n]] for n, _ in prompts)],
            "All that is left of the prompt is too much: the chunk size and the budget bound it.",
        ),
    ]
    if stage == 4:
        size = options["max_prefill_chunk_size"]
        budget = options["max_num_batched_tokens"]
        mistakes += [
            (
                [*with_streams, *([n, size] for n, _ in prompts)],
                "That is the chunk size. What else "
                "bounds a chunk: the budget that is left, and what is left of the prompt?",
            ),
            (
                [*with_streams, *([n, budget] for n, _ in prompts)],
                "That is the whole budget. The streams' tokens are charged to it, too.",
            ),
        ]
    ask = f"Stage {stage:02d}"
    if stage == 4:
        ask += f", budget {options['max_num_batched_tokens']} tokens, chunks of at most "
        ask += f"{options['max_prefill_chunk_size']}"
    return question(
        f"{ask}. {_state(made, step)} Which slices does the next step compute, and of how many "
        f"tokens? {ORDER}",
        right,
        "Right. That is what the scheduler does.",
        mistakes,
        "Decodes first, one token each. Then prompts that have begun, then new ones, while "
        "budget is left."
        if stage == 4
        else "If a prompt waits and fits, the step computes prompts, and each of them whole. If "
        "none does, each stream gets one token.",
        "slices",
    )


def victim(made: Mapping[str, Any], files: Mapping[str, str], index: int) -> Question:
    """Which request is preempted in step `index`?"""
    step = history(made, files)[index]
    right = step["preempted"][:1]
    holds = {name: len(step["before"][name]) for name in step["running"]}
    most = max(holds, key=lambda name: holds[name])
    least = min(holds, key=lambda name: holds[name])
    said = ", ".join(f"{name} holds {n}" for name, n in holds.items())
    return question(
        f"In order of arrival: {said} blocks. No block is free, and one of them needs another. "
        "Which one is preempted first?",
        right,
        "Right. The youngest is preempted, so the oldest always advances, and all finish.",
        [
            (
                [step["running"][0]],
                "If the oldest were preempted, two requests could preempt each other forever.",
            ),
            ([most], "It does not matter which one holds most. Which one arrived last?"),
            ([least], "It does not matter which one holds least. Which one arrived last?"),
        ],
        "Only a request that holds blocks can be preempted. Which of them arrived last?",
        "names",
    )


def where(made: Mapping[str, Any], files: Mapping[str, str], index: int, rng: Random) -> Question:
    """In which block, at which offset, is some token in step `index`?"""
    step = history(made, files)[index]
    size = made["options"]["block_size"]
    name = rng.choice([n for n, table in step["tables"].items() if table and n in step["starts"]])
    table, start = step["tables"][name], step["starts"][name]
    t = start
    block, offset = table[t // size], t % size
    shown = table if len(table) <= 12 else [*table[:2], "…", *table[t // size - 2 : t // size + 3]]
    first = f" (… up to index {t // size - 3})" if len(table) > 12 else ""
    return question(
        f"The slice of {name} begins at token {t}. Its block table is "
        f"[{', '.join(map(str, shown))}]{first}, blocks have {size} tokens. In which block, and at "
        "which offset, is this token written?",
        [block, offset],
        "Right: logical block by division, block by the table, offset by the remainder.",
        [
            ([t // size, offset], "That is the logical block. Look it up in the table."),
            ([block, 0], "A slice does not begin a new block. The offset is the remainder."),
            (
                [table[0], 0],
                "You counted from the start of the slice. Count from the sequence's.",
            ),
            ([block * size + offset], "That is the slot. The question asks for block and offset."),
        ],
        f"Logical block: {t} // {size}. Offset: {t} % {size}. The table says which block that is.",
    )


# --- chapter 0 --------------------------------------------------------------------------------


def kv_bytes(rng: Random, files: Files) -> Question:
    layers, heads, dim = (
        rng.choice([12, 24, 30, 32]),
        rng.choice([2, 3, 4, 8]),
        rng.choice([64, 128]),
    )
    right = 2 * layers * heads * dim * 2
    return question(
        f"A model has {layers} layers, {heads} KV heads, head dimension {dim}, numbers of 2 bytes. "
        "How many bytes does one token need in the KV cache?",
        [right],
        "Right: keys and values, for every layer and KV head.",
        [
            (
                [right // 2],
                "Keys and values: two vectors for each head, or 2 bytes for each number?",
            ),
            (
                [right // 4],
                "That is a count of numbers of one kind. Keys and values, 2 bytes each.",
            ),
            ([right // layers], "That is one layer. Every layer has a cache of its own."),
        ],
        "2 (K and V) × layers × KV heads × head dimension × bytes of a number.",
    )


def kv_prompt(rng: Random, files: Files) -> Question:
    per_token, tokens = rng.choice([46_080, 23_040, 131_072]), rng.randint(5, 40) * 100
    right = per_token * tokens / 1e6
    return question(
        f"One token needs {per_token:,} bytes in the KV cache. How many megabytes (10^6 bytes) "
        f"does a prompt of {tokens:,} tokens need?",
        [float(right)],
        "Right.",
        [
            ([float(right / 1000)], "That is gigabytes."),
            ([float(right * 1000)], "That is kilobytes."),
        ],
        f"{per_token:,} × {tokens:,} / 10^6.",
    )


def decode_floor(rng: Random, files: Files) -> Question:
    billions, bandwidth = rng.choice([1, 3, 7, 8, 14]), rng.choice([300, 900, 2000, 3350])
    right = 2 * billions / bandwidth * 1000
    return question(
        f"A model of {billions} billion weights of 2 bytes runs on a GPU that reads {bandwidth:,} "
        "GB/s. How many milliseconds does a decode step take at least?",
        [float(right)],
        "Right. A step reads every weight once, however few tokens it computes.",
        [
            ([float(right / 2)], "A weight has 2 bytes."),
            ([float(right / 1000)], "That is seconds."),
            ([float(1000 / right)], "That is steps per second."),
        ],
        "Bytes of all weights over bytes per second.",
    )


def ridge(rng: Random, files: Files) -> Question:
    flops, bandwidth = rng.choice([(989.4, 3350), (312, 2039), (121, 300), (65, 320)])
    right = flops * 1e12 / (bandwidth * 1e9)
    return question(
        f"A GPU computes {flops} TFLOP/s and reads {bandwidth:,} GB/s. Weights have 2 bytes, and a "
        "token costs 2 FLOP for each weight. With how many tokens in a step do computing and "
        "reading the weights take equally long?",
        [float(right)],
        "Right. Below it a step is bound by reading, above it by computing.",
        [
            ([float(right / 2)], "2 FLOP for each weight and token, and 2 bytes: the twos cancel."),
            ([float(right * 2)], "2 FLOP for each weight and token, and 2 bytes: the twos cancel."),
            ([float(right / 1000)], "Tera is 10^12, giga is 10^9."),
        ],
        "tokens × 2 × weights / FLOP/s = 2 × weights / bytes/s.",
    )


def stall(rng: Random, files: Files) -> Question:
    made = some_traffic(rng, rng.choice([3, 4]))
    stage = made["stage"]
    steps = history(made, files(stage))
    [document] = [one for one in made["requests"] if one["id"] == "document"]
    gaps, since = [], None
    for step in steps:
        if since is not None:
            since += sum(n for _, n in step["slices"])
        if ["A", 1] in step["slices"]:
            if since is not None:
                gaps.append(since)
            since = 0
    streams = sum(1 for one in made["requests"] if one["id"] != "document")
    chunk = made["options"]["max_prefill_chunk_size"]
    cut = f", in chunks of at most {chunk} with a budget of "
    cut += f"{made['options']['max_num_batched_tokens']}" if stage == 4 else ""
    return question(
        f"Stage {stage:02d}: {streams} chats stream, and a document of {document['prompt']} "
        f"tokens, none of which is in the cache, is computed{cut if stage == 4 else ''}. Up to how "
        "many tokens are computed between two tokens of chat A, including those of the step that "
        "yields the second one?",
        [max(gaps)],
        "Right. That is the stall, counted in tokens.",
        [
            (
                [document["prompt"]],
                "The streams' own tokens are computed as well, the next one of A included.",
            ),
            ([chunk], "The streams' tokens are computed in the same step."),
            ([streams], "That is a usual step, without the document."),
        ],
        "Which steps are between two tokens of A while the document is computed? Add up their "
        "tokens.",
    )


# --- chapter 1 --------------------------------------------------------------------------------


def slot(rng: Random, files: Files) -> Question:
    size = rng.choice([8, 16])
    table = rng.sample(range(40), rng.randint(3, 6))
    t = rng.randint(size + 1, len(table) * size - 1)
    scope: dict[str, Any] = {}
    scope["rooms"] = drive.load(files(1), "lab_question")
    [right] = scope["rooms"].block_manager.slot_mapping(table, t, 1, size)
    return question(
        f"A block table is {table}, blocks have {size} tokens. In which slot is token {t}?",
        [right],
        "Right: logical block by division, block by the table, offset by the remainder.",
        [
            ([t], "That is the token itself. The block table says where it is."),
            ([table[t // size]], "That is the block. A block has many slots."),
            ([table[t // size] * size], "That is the block's first slot. Add the offset."),
            ([table[t // size] + t % size], "A block has many slots: multiply it by their number."),
            ([right - 1], "One too far to the front. Tokens count from 0."),
            ([right + 1], "One too far to the back. Tokens count from 0."),
        ],
        f"Logical block {t} // {size}, which the table translates; offset {t} % {size}.",
    )


def blocks(rng: Random, files: Files) -> Question:
    size, tokens = rng.choice([8, 16, 32]), rng.randint(20, 400)
    rooms = drive.load(files(1), "lab_question")
    right = rooms.block_manager.BlockManager(100, size).num_blocks_for(tokens)
    return question(
        f"{tokens} tokens of a sequence are in the cache, blocks have {size} tokens. How many "
        "blocks does it hold, and how many of their slots are unused?",
        [right, right * size - tokens],
        "Right. Only the last block wastes anything.",
        [
            ([tokens // size, 0], "The last block is not full, but it is held."),
            ([tokens // size, tokens % size], "The last block is held, too; that many are in use."),
            ([right, tokens % size], "That many of the last block's slots are in use."),
        ],
        "Divide and round up. Then slots less tokens.",
    )


def counters(rng: Random, files: Files) -> Question:
    size, prompt, decodes = 16, rng.randint(20, 120), rng.randint(2, 20)
    made = setting(request("A", 0, prompt, decodes + 1), num_blocks=64) | {"stage": 1}
    made["options"] |= {"max_num_batched_tokens": 512, "block_size": size}
    last = history(made, files(1))[-1]
    cached, held = last["starts"]["A"] + 1, len(last["tables"]["A"])
    return question(
        f"A prompt of {prompt} tokens, then {decodes} decodes, blocks of {size}. How many tokens "
        "are in the cache, how many were generated, how many blocks are held?",
        [cached, decodes + 1, held],
        "Right. The newest token is generated and not in the cache.",
        [
            (
                [cached + 1, decodes + 1, held],
                "The newest token is not in the cache: it is the next input.",
            ),
            ([cached, decodes, held], "The prefill generates a token, too: the first one."),
            ([cached, decodes + 1, cached // size], "The last block is not full, and it is held."),
        ],
        "The prefill caches the whole prompt and generates one token. Each decode caches one and "
        "generates the next.",
    )


def slices_before(rng: Random, files: Files) -> Question:
    made = some_traffic(rng, 1)
    steps = history(made, files(1))
    chosen = [i for i, s in enumerate(steps) if i > 1 and len(s["running"]) > 1]
    prompts = [i for i in chosen if any(n > 1 for _, n in steps[i]["slices"])]
    index = rng.choice(prompts if rng.random() < 0.7 else chosen)
    return next_slices(made, files(1), index)


def victim_before(rng: Random, files: Files) -> Question:
    return _victim(rng, files, 1)


def _victim(rng: Random, files: Files, stage: int) -> Question:
    while True:
        chats = [
            request(name, i, rng.randint(10, 60), rng.randint(30, 60))
            for i, name in enumerate("ABC")
        ]
        made = setting(*chats, num_blocks=rng.randint(9, 12), block_size=16) | {"stage": stage}
        steps = history(made, files(stage))
        chosen = [i for i, s in enumerate(steps) if s["preempted"] and len(s["running"]) == 3]
        if chosen:
            return victim(made, files(stage), chosen[0])


def room(rng: Random, files: Files) -> Question:
    size, num, prompt = 16, rng.randint(8, 40), rng.randint(20, 100)
    rooms = drive.load(files(1), "lab_question")
    config = rooms.config.EngineConfig(block_size=size, num_blocks=num, max_model_len=100_000)
    manager = rooms.block_manager.BlockManager(num, size)
    right = rooms.scheduler.Scheduler(config, manager).check(prompt, None)
    return question(
        f"The pool has {num} blocks of {size} tokens, the model's context is far longer. A prompt "
        f"has {prompt} tokens. How many tokens may it generate at most?",
        [right],
        "Right. The last token is never an input, so it needs no slot.",
        [
            ([right - 1], "The last generated token is never written to the cache."),
            ([num * size], "The prompt is in the pool as well."),
            ([num - prompt], "Blocks, not slots, were counted."),
        ],
        "Slots of the pool, less the prompt, and one more. For whom?",
    )


# --- chapter 2 --------------------------------------------------------------------------------


def reads(rng: Random, files: Files) -> Question:
    size, length = rng.choice([8, 16]), rng.randint(20, 200)
    entries, last = -(-length // size), (length - 1) % size + 1
    return question(
        f"A context of {length} tokens, blocks of {size}. How many table entries does a decode "
        "read, and how many slots of the last block?",
        [entries, last],
        "Right. The slots after the last token hold old memory and are never loaded.",
        [
            ([length // size, last], "A last block that is not full is read as well."),
            ([entries, size], "The slots after the last token hold old memory."),
            ([entries, 0], "The remainder is 0, and yet the last block is read: it is a full one."),
            ([entries, size - last], "That is how many slots of the last block are empty."),
        ],
        f"Put {length} tokens into blocks of {size}.",
    )


def backwards(rng: Random, files: Files) -> Question:
    size = rng.choice([8, 16])
    table = rng.sample(range(40), 4)
    t = rng.randint(size, 4 * size - 1)
    slot_ = table[t // size] * size + t % size
    return question(
        f"Blocks have {size} slots, a sequence's table is {table}. Which of its tokens is in slot "
        f"{slot_}?",
        [t],
        "Right. The table is read backwards: block, then its place in the table, then the offset.",
        [
            ([slot_], "That is the slot itself."),
            ([slot_ % size], "That is the offset in its block. Which logical block is it?"),
            ([slot_ // size], "That is the block. At which index of the table is it?"),
            ([t + 1], "Tokens count from 0."),
        ],
        f"Block {slot_} // {size}, its index in the table, offset {slot_} % {size}.",
    )


def rows(rng: Random, files: Files) -> Question:
    start, n = rng.randint(20, 300), rng.randint(4, 30)
    row = rng.randint(1, n - 2)
    return question(
        f"A slice begins at token {start} and has {n} tokens. How many tokens does its row {row} "
        "(counted from 0) attend to?",
        [start + row + 1],
        "Right: all before the slice, those of the slice before it, and itself.",
        [
            ([start + row], "It attends to itself as well."),
            ([row + 1], "What was computed before the slice is in the cache, and is seen as well."),
            ([start + n], "That is the last row. A row sees nothing that comes after it."),
        ],
        "Its position is start plus row, and positions count from 0.",
    )


def loaded(rng: Random, files: Files) -> Question:
    lengths = [rng.randint(10, 90) for _ in range(3)]
    right = sum(lengths)
    padded = 3 * max(lengths)
    return question(
        f"Three sequences with contexts of {lengths[0]}, {lengths[1]} and {lengths[2]} tokens "
        "decode. Of how many tokens does the paged kernel load keys and values, for one layer?",
        [right],
        "Right. No padding, and no copy before.",
        [
            ([padded], "That is a padded batch. The kernel stops at the end of each context."),
            ([3], "That many are written. Each query attends to its whole context."),
            ([2 * right], "Loading once is enough; stage 01 copied them first."),
        ],
        "Each query reads its own context, and nothing else.",
    )


def merge(rng: Random, files: Files) -> Question:
    t1, t2 = rng.randint(1, 4), rng.randint(1, 4)
    a1, a2 = t1 * rng.randint(2, 20), t2 * rng.randint(2, 20)
    right = (a1 + a2) / (t1 + t2)
    return question(
        f"Two workers share a context, and their maxima are equal. One has total {t1} and "
        f"accumulator {a1}, the other total {t2} and accumulator {a2}. What is the output?",
        [float(right)],
        "Right: sums of accumulators over sums of totals.",
        [
            (
                [(a1 / t1 + a2 / t2) / 2],
                "Not the mean of the two outputs: the one with more weight counts more.",
            ),
            ([float(a1 / t1 + a2 / t2)], "Outputs cannot be added. Add accumulators and totals."),
            ([float(a1 + a2)], "Divide by the total in the end."),
        ],
        "Add the accumulators, add the totals, and divide.",
    )


# --- chapter 3 --------------------------------------------------------------------------------


def _shared_pair(rng: Random, files: Files) -> tuple[dict[str, Any], list[Any], int, int]:
    size = 16
    shared = rng.randint(2, 8) * size + rng.choice([0, 0, rng.randint(1, 15)])
    prompt = shared + rng.choice([0, rng.randint(1, 60)])
    made = setting(
        request("A", 0, shared + 70, 12, shared=shared),
        request("B", 4, prompt, 4, shared=shared),
        num_blocks=64,
        max_num_batched_tokens=1024,
    ) | {"stage": 3}
    return made, history(made, files(3)), shared, prompt


def found(rng: Random, files: Files) -> Question:
    _, steps, shared, prompt = _shared_pair(rng, files)
    right = next(s["starts"]["B"] for s in steps if "B" in s["starts"])
    return question(
        f"Blocks of 16. A is in the cache. B has a prompt of {prompt} tokens, and its first "
        f"{shared} are those of A. How many tokens of B are found?",
        [right],
        "Right: full blocks only, and the last token is always computed.",
        [
            ([shared], "Only full blocks are shared, and the last token must be computed."),
            (
                [shared // 16 * 16],
                "The last token of a prompt is always computed: its logits are needed.",
            ),
            ([right // 16], "Those are blocks. The question asks for tokens."),
        ],
        "How many full blocks are the same, and is the prompt's last token in one of them?",
    )


def left_to_compute(rng: Random, files: Files) -> Question:
    _, steps, shared, prompt = _shared_pair(rng, files)
    right = next(n for s in steps for name, n in s["slices"] if name == "B")
    return question(
        f"Blocks of 16. B's prompt has {prompt} tokens, the first {shared} are in the cache. How "
        "many tokens does its prefill compute in stage 03?",
        [right],
        "Right.",
        [
            (
                [prompt - shared],
                "Only full blocks are found. The rest is computed again.",
            ),
            ([prompt], "That is stage 02. Here the cached prefix is skipped."),
            ([0], "At least one token is computed: its logits are needed."),
        ],
        "Prompt less found; found are full blocks, without the last token.",
    )


def references(rng: Random, files: Files) -> Question:
    count, size = rng.randint(3, 6), 16
    shared = rng.randint(2, 5) * size
    made = setting(
        *(
            request(name, i, shared + 20, 30, shared=shared)
            for i, name in enumerate("ABCDEF"[:count])
        ),
        num_blocks=64,
        max_num_batched_tokens=1024,
    ) | {"stage": 3}
    step = history(made, files(3))[count + 2]
    first = step["tables"]["A"][0]
    right = sum(first in table for table in step["tables"].values())
    held = len({block for table in step["tables"].values() for block in table})
    alone = sum(len(table) for table in step["tables"].values())
    return question(
        f"{count} requests share their first {shared} tokens, blocks of 16. Each has {shared + 20} "
        f"prompt tokens and all stream; no table is longer than {len(step['tables']['A'])} blocks. "
        "What is the reference count of the first block, and how many different blocks do they "
        f"hold together? (Tables have {', '.join(str(len(t)) for t in step['tables'].values())} "
        "blocks.)",
        [right, held],
        "Right. Shared blocks count once for the pool, and once for each table in their count.",
        [
            ([1, held], "Each table that holds a block counts."),
            ([right, alone], "Shared blocks were counted once for each table."),
        ],
        "How many tables contain the first block? Then count each shared block once.",
    )


def reused(rng: Random, files: Files) -> Question:
    rooms = drive.load(files(3), "lab_question")
    size, lengths = 4, [rng.randint(5, 11), rng.randint(5, 11)]
    manager = rooms.block_manager.BlockManager(sum(-(-n // size) for n in lengths), size)
    made = []
    for r, n in enumerate(lengths):
        tokens = range(1000 * r, 1000 * r + n)
        sequence = rooms.sequence.Sequence("AB"[r], list(tokens), 1)
        manager.allocate(sequence, n)
        sequence.cached_token_count = n
        manager.publish(sequence, 0)
        made.append((sequence, list(sequence.block_table)))
    for sequence, _ in made:
        manager.free(sequence)
    other = rooms.sequence.Sequence("C", [9], 1)
    manager.allocate(other, 1)
    [right] = other.block_table
    (_, a), (_, b) = made
    return question(
        f"Blocks of {size}. A had {lengths[0]} tokens in blocks {a}, B had {lengths[1]} in {b}; "
        "full ones were published. A ended, then B. All blocks are free. Which block is allocated "
        "next?",
        [right],
        "Right: first blocks without published content, then the least recently used, tail first.",
        [
            (
                [a[0]],
                "The head of a chain is reused last: its children could not be found without it.",
            ),
            ([b[0]], "The head of a chain is reused last, and B was used more recently."),
            ([a[-1]], "Is there a free block without published content?"),
            (
                [b[-1]],
                "B was used more recently. Does that block have published content?",
            ),
        ],
        "A block that is not full has no hash and is reused first; of several, the one freed last. "
        "If all are full: least recently used, tail before head.",
    )


def shared_blocks(rng: Random, files: Files) -> Question:
    size, differs, total = 16, rng.randint(5, 120), 160
    return question(
        f"Two prompts of {total} tokens are the same but for token {differs}. Blocks of {size}. "
        "How many blocks do they share?",
        [differs // size],
        "Right. Every block after it has another parent, and so another hash.",
        [
            (
                [total // size - 1],
                "Blocks after the difference have another parent, so another hash.",
            ),
            ([-(-differs // size)], "The block with the difference in it is not shared."),
            ([differs], "Those are tokens."),
        ],
        "Which blocks are wholly before the difference?",
    )


# --- chapter 4 --------------------------------------------------------------------------------


def slices_mixed(rng: Random, files: Files) -> Question:
    made = some_traffic(rng, 4)
    steps = history(made, files(4))
    chosen = [
        i for i, s in enumerate(steps) if any(n == "document" and k > 1 for n, k in s["slices"])
    ]
    return next_slices(made, files(4), rng.choice(chosen))


def chunk_place(rng: Random, files: Files) -> Question:
    made = some_traffic(rng, 4)
    steps = history(made, files(4))
    chosen = [
        i for i, s in enumerate(steps) if "document" in s["starts"] and s["starts"]["document"]
    ]
    index = rng.choice(chosen)
    question_ = where(made, files(4), index, rng)
    return question_


def chunk_counters(rng: Random, files: Files) -> Question:
    prompt = rng.randint(300, 900)
    later = rng.randint(1, 3)
    made = setting(request("document", 0, prompt, 8), max_prefill_chunk_size=128)
    steps = history(made, files(4))
    first = next(i for i, s in enumerate(steps) if s["starts"]["document"] >= prompt) - 1
    step = steps[first + later]
    cached = step["starts"]["document"] + 1
    right = [prompt, cached, later + 1]
    after = f"{later} step{'s' * (later > 1)} after its last chunk"
    return question(
        f"A document of {prompt} tokens, {after}: what are `prefilled_token_count`, "
        "`cached_token_count` and the number of generated tokens?",
        right,
        "Right. The first counts the prompt only and stops.",
        [
            ([cached, cached, later + 1], "The first one stops at the prompt's length."),
            ([prompt, cached + 1, later + 1], "The newest token is not in the cache."),
            ([prompt, cached, later], "The last chunk yields the first token."),
            ([prompt, prompt, later + 1], "Every decode caches a token."),
        ],
        "The last chunk yields token 1; each step after it caches one and generates one.",
    )


def num_chunks(rng: Random, files: Files) -> Question:
    made = some_traffic(rng, 4)
    steps = history(made, files(4))
    [document] = [one for one in made["requests"] if one["id"] == "document"]
    right = sum(
        1
        for s in steps
        if "document" in s["starts"] and s["starts"]["document"] < document["prompt"]
    )
    streams = len(made["requests"]) - 1
    size, budget = (
        made["options"]["max_prefill_chunk_size"],
        made["options"]["max_num_batched_tokens"],
    )
    return question(
        f"{streams} chats stream all the time. A document of {document['prompt']} tokens arrives, "
        f"chunks of at most {size}, budget {budget}. In how many steps is its prompt computed?",
        [right],
        "Right.",
        [
            (
                [-(-document["prompt"] // budget)],
                "The budget is for all. The chunk size bounds it, too.",
            ),
            (
                [-(-document["prompt"] // size)],
                "The streams take their tokens from the budget "
                "first: is there room for a whole chunk?",
            ),
            ([document["prompt"] // size], "The rest is a chunk as well."),
            ([1], "That is stage 03."),
        ],
        f"A chunk has at most min({size}, {budget} - {streams}) tokens. Divide and round up.",
    )


def victim_mixed(rng: Random, files: Files) -> Question:
    return _victim(rng, files, 4)


def chunk_reads(rng: Random, files: Files) -> Question:
    size, k = rng.choice([64, 100, 128]), rng.randint(2, 5)
    prompt = size * (k + 2) + rng.randint(1, size - 1)
    return question(
        f"A prompt of {prompt} tokens in chunks of {size}. How many tokens does the last row of "
        f"chunk {k} (counted from 0) attend to?",
        [size * (k + 1)],
        "Right: up to the end of the chunk, not of the prompt.",
        [
            ([prompt], "What comes after the chunk is not written yet."),
            ([size], "The chunks before are in the cache, and are seen as well."),
            ([size * k], "The chunk's own tokens are seen as well."),
        ],
        "Chunks before it, and its own.",
    )


# --- chapter 5 --------------------------------------------------------------------------------


def measures(rng: Random, files: Files) -> Question:
    arrival = rng.randint(0, 20) * 10
    gaps = [rng.randint(2, 6) * 10 for _ in range(4)]
    gaps[rng.randint(0, 3)] = rng.randint(20, 90) * 10
    times = [arrival + rng.randint(5, 20) * 10]
    for gap in gaps:
        times.append(times[-1] + gap)
    ttft, itl, tpot = times[0] - arrival, max(gaps), (times[-1] - times[0]) / 4
    return question(
        f"A request is added at {arrival} ms; its tokens come at {', '.join(map(str, times))} ms. "
        "TTFT, longest ITL, TPOT, in ms?",
        [ttft, itl, float(tpot)],
        "Right. Which of the three did the user notice?",
        [
            ([times[0], itl, float(tpot)], "TTFT begins when the request was added."),
            ([ttft, itl, float((times[-1] - times[0]) / 5)], "Five tokens have four gaps."),
            ([ttft, itl, float((times[-1] - arrival) / 5)], "TPOT leaves the first wait out."),
            ([ttft, sorted(gaps)[1], float(tpot)], "The question asks for the longest gap."),
        ],
        "TTFT: added to first token. ITL: each gap. TPOT: (last - first) / (n - 1).",
    )


def ratio(rng: Random, files: Files) -> Question:
    usual, longest = rng.randint(20, 60), rng.randint(5, 40) * 100
    return question(
        f"Streams usually have a token every {usual} ms. While a long prompt is computed, the "
        f"longest gap is {longest:,} ms. What is the stall ratio?",
        [float(longest / usual)],
        "Right.",
        [
            ([float(usual / longest)], "The other way round: longest over usual."),
            ([float(longest - usual)], "It is a ratio, not a difference."),
        ],
        "The longest gap over the usual one.",
    )


def quantile(rng: Random, files: Files) -> Question:
    gaps, stalls = rng.choice([500, 1000, 2000]), rng.choice([1, 3, 30, 60])
    share = stalls / gaps
    right = 50 if share > 0.5 else 90 if share > 0.1 else 99 if share > 0.01 else 100
    return question(
        f"{stalls} of {gaps:,} gaps are stalls of two seconds. Which is the first of p50, p90, "
        "p99, p100 (the maximum) that shows them? Type its number.",
        [right],
        "Right. A percentile misses what is rarer than its distance from 100.",
        [
            ([n], f"p{n} leaves {100 - n} % of the gaps above it; {100 * share:g} % are stalls.")
            for n in (50, 90, 99, 100)
        ],
        "How large a share are the stalls?",
    )


def waste(rng: Random, files: Files) -> Question:
    tokens, size = [rng.randint(10, 90) for _ in range(3)], 16
    slots = sum(-(-n // size) * size for n in tokens)
    right = 100 * (1 - sum(tokens) / slots)
    return question(
        f"Three sequences hold {tokens[0]}, {tokens[1]} and {tokens[2]} tokens in blocks of "
        f"{size}. What is the KV waste, in per cent?",
        [float(right)],
        "Right.",
        [
            ([float(100 - right)], "That is what is used."),
            ([float(100 * (slots / sum(tokens) - 1))], "Over the slots, not over the tokens."),
        ],
        "1 - tokens / slots of all blocks.",
    )


def output_rate(rng: Random, files: Files) -> Question:
    count, prompt, new, seconds = (
        rng.randint(2, 9),
        100 * rng.randint(1, 9),
        10 * rng.randint(2, 9),
        4,
    )
    return question(
        f"{count} requests with {prompt} prompt tokens each generate {new} tokens each, all in "
        f"{seconds} s. Output tokens per second, and total tokens per second?",
        [float(count * new / seconds), float(count * (prompt + new) / seconds)],
        "Right.",
        [
            ([float(new / seconds), float((prompt + new) / seconds)], "That is one request."),
            (
                [float(count * new / seconds), float(count * prompt / seconds)],
                "Total is prompts and output together.",
            ),
        ],
        "Add up over the requests. Total counts prompt tokens, too.",
    )


# --- chapter 6 --------------------------------------------------------------------------------


def vllm_order(rng: Random, files: Files) -> Question:
    budget, streams = rng.choice([128, 256]), rng.randint(2, 3)
    left = budget * rng.randint(2, 4)
    names = "ABC"[:streams]
    right = [["document", budget]]
    return question(
        f"vLLM, budget {budget}, no other bound. In `running`, in this order: a document with "
        f"{left} tokens left to compute, then the streams {', '.join(names)}. Which slices has "
        f"the next step? {ORDER}",
        right,
        "Right. vLLM goes through `running` in order, decodes or not. Ours takes decodes first.",
        [
            (
                [*([name, 1] for name in names), ["document", budget - streams]],
                "That is our order: decodes first. vLLM goes through `running` in order.",
            ),
            ([*([name, 1] for name in names)], "The document is first in `running`."),
            ([["document", left]], "The budget bounds it."),
        ],
        "There are no phases: each request in `running`, in order, while budget is left.",
        "slices",
    )


def our_order(rng: Random, files: Files) -> Question:
    return slices_mixed(rng, files)


def pages(rng: Random, files: Files) -> Question:
    size, shared = rng.choice([16, 32, 64]), rng.randint(70, 400)
    return question(
        f"SGLang, page size {size}: a prompt shares {shared} tokens with the tree. How many are "
        "used?",
        [shared // size * size],
        "Right: matches are cut to whole pages.",
        [([shared], "With pages of one token, yes."), ([shared // size], "Those are pages.")],
        f"Whole pages of {size}.",
    )


def retracted(rng: Random, files: Files) -> Question:
    outputs = rng.sample(range(5, 90), 4)
    names = "ABCD"
    least = names[outputs.index(min(outputs))]
    engine = rng.choice(["vLLM", "SGLang"])
    said = ", ".join(f"{name} has generated {n}" for name, n in zip(names, outputs, strict=True))
    right = ["D"] if engine == "vLLM" else [least]
    why = {
        "vLLM": "vLLM preempts from the end of `running`.",
        "SGLang": "SGLang retracts those that have generated least.",
    }
    return question(
        f"Memory runs out while four requests decode, in order of arrival: {said} tokens. Which "
        f"one does {engine} preempt first?",
        right,
        f"Right. {why[engine]}",
        [([name], why[engine]) for name in names],
        why[engine],
        "names",
    )


def admitted(rng: Random, files: Files) -> Question:
    free, size, prompt = rng.randint(10, 40), 16, rng.randint(100, 900)
    need = -(-prompt // size)
    return question(
        f"{free} blocks of {size} are free. A prompt of {prompt} tokens waits, and its first chunk "
        "has 64. How many free blocks does our stage 04 require to admit it, and how many vLLM "
        "by default?",
        [4, need],
        "Right. vLLM checks the whole prompt, but reserves nothing.",
        [
            ([need, need], "Ours asks for the blocks of the first chunk."),
            ([4, 4], "vLLM admits a prompt only if the whole of it would fit now."),
            ([need, 4], "The other way round."),
        ],
        "Ours allocates chunk by chunk. vLLM checks the whole prompt "
        "(`scheduler_reserve_full_isl`).",
    )


CHAPTERS: dict[int, tuple[Callable[[Random, Files], Question], ...]] = {
    0: (kv_bytes, kv_prompt, decode_floor, ridge, stall),
    1: (slot, blocks, counters, slices_before, victim_before, room),
    2: (reads, backwards, rows, loaded, merge),
    3: (found, left_to_compute, references, reused, shared_blocks),
    4: (slices_mixed, chunk_place, chunk_counters, num_chunks, victim_mixed, chunk_reads),
    5: (measures, ratio, quantile, waste, output_rate),
    6: (vllm_order, our_order, pages, retracted, admitted),
}


def ask(chapter: int, kind: int, seed: int, files: Files) -> Question:
    """A question of a chapter; the same seed gives the same numbers."""
    kinds = CHAPTERS[chapter]
    return kinds[kind % len(kinds)](Random(seed), files)
