"""The replay that opens the home page and the README: two engines stream, and one of them stops.

Texts and times are those of two recordings of the trace viewer; nothing else is shown. `element`
is the page's still, which a script sets in motion. `python -m tools.site.hero` writes the README's
animated pictures, `--check` compares them.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from shared.draw.palette import DARK, LIGHT
from tools.site.sources import ROOT

TRACES = ROOT / "docs" / "assets" / "traces"
RECORDINGS = ("example-03", "example-04-256")
DOCUMENT = "document"
BEFORE, AFTER = 0.5, 0.8  # seconds shown before the document comes, and after its last first token
HOLD = 3.0  # seconds for which the end stands before it begins again
PICTURES = {"": (860, 54, "ABCD"), "-narrow": (400, 23, "AB")}  # width, columns, chats


@dataclass(frozen=True)
class Side:
    """One engine's part, in seconds from the document's arrival, until `end`.

    tokens: for each request its (time, text), in order.
    computed: (time, prompt tokens of the document that are in the cache by then).
    wait: the longest time between two tokens of a chat: (chat, from, to).
    """

    stage: int
    chunk_size: int | None
    names: list[str]
    tokens: list[list[tuple[float, str]]]
    computed: list[tuple[float, int]]
    prompt_tokens: int
    wait: tuple[int, float, float]
    first_token: float


def side(name: str) -> Side:
    """What the hero shows of a recording. Raises ValueError if no document is in it."""
    content = json.loads((TRACES / f"{name}.json").read_text(encoding="utf-8"))
    names = [request["id"] for request in content["requests"]]
    if DOCUMENT not in names:
        raise ValueError(f"{name} has no request {DOCUMENT!r}; it has {', '.join(names)}")
    doc = names.index(DOCUMENT)
    zero = content["requests"][doc]["arrived"]
    tokens: list[list[tuple[float, str]]] = [[] for _ in names]
    computed = []
    for step in content["steps"]:
        at = round(step["end"] - zero, 3)
        for r, first, count in step["slices"]:
            if r == doc and not tokens[doc]:
                computed.append((at, first + count))
        for r, text in step.get("sampled", []):
            tokens[r].append((at, text))
    gaps = [
        (b[0] - a[0], r, a[0], b[0])
        for r, each in enumerate(tokens)
        if r != doc
        for a, b in zip(each, each[1:], strict=False)
    ]
    _, chat, start, end = max(gaps)
    return Side(
        content["stage"],
        content["chunk_size"],
        names,
        tokens,
        computed,
        content["requests"][doc]["prompt_tokens"],
        (chat, start, end),
        tokens[doc][0][0],
    )


@cache
def sides() -> tuple[Side, ...]:
    """Both, left and right."""
    return tuple(side(name) for name in RECORDINGS)


def last(both: Sequence[Side]) -> float:
    """When the replay ends: a little after both documents have their first token."""
    return round(max(one.first_token for one in both) + AFTER, 3)


def freeze(both: Sequence[Side]) -> float:
    """The moment of the still: the left engine's chats have waited nearly as long as they will."""
    _, start, end = both[0].wait
    return round(start + 0.9 * (end - start), 3)


def text_at(tokens: Sequence[tuple[float, str]], time: float) -> str:
    """What of a text is there at a time, on one line."""
    return " ".join("".join(text for at, text in tokens if at <= time).split())


def made_from(words: Mapping[str, Any]) -> str:
    """What was recorded, and on what machine."""
    content = json.loads((TRACES / f"{RECORDINGS[0]}.json").read_text(encoding="utf-8"))
    machine = content["machine"]
    return str(words["recorded"]).format(
        model=content["model"], cpu=machine["cpu"], cores=machine["cores"], date=content["date"]
    )


def _title(one: Side, words: Mapping[str, Any]) -> str:
    key = "chunks" if one.chunk_size else "whole"
    tokens = f"{one.prompt_tokens:,}"
    return str(words[key]).format(stage=f"{one.stage:02d}", chunk=one.chunk_size, tokens=tokens)


def _label(both: Sequence[Side], words: Mapping[str, Any]) -> str:
    left, right = (round(1000 * (one.wait[2] - one.wait[1])) for one in both)
    return str(words["label"]).format(left=f"{left:,}", right=f"{right:,}")


# --- the page ---------------------------------------------------------------------------------


def element(words: Mapping[str, Any]) -> str:
    """The still, as HTML on one line. `data-sides` has what the script needs to move it."""
    both, now = sides(), freeze(sides())
    end = last(both)
    parts, data = [], []
    for one in both:
        doc = one.names.index(DOCUMENT)
        rows = []
        for r, name in enumerate(one.names):
            text = text_at(one.tokens[r], now)
            if r == doc and not text:
                text = str(words["computing"])
            waits = one is both[0] and r != doc
            since = now - max(at for at, _ in one.tokens[r] if at <= now) if waits else 0
            rows.append(
                f'<p class="hero__line{" waits" if waits else ""}" data-who="{escape(name)}">'
                f'<span class="hero__mark">{escape(name) if r != doc else "¶"}</span>'
                f'<span class="hero__text"><span>{escape(text)}</span></span>'
                f'<span class="hero__wait">{f"{since:.1f} s" if waits else ""}</span></p>'
            )
        done = max((count for at, count in one.computed if at <= now), default=0)
        parts.append(
            f'<div class="hero__side"><p class="hero__title">{escape(_title(one, words))}</p>'
            f"{''.join(rows)}"
            f'<div class="hero__bar"><i style="width:{100 * done / one.prompt_tokens:.1f}%"></i>'
            f"</div></div>"
        )
        data.append(
            {
                "doc": doc,
                "tokens": [[t for t in each if t[0] <= end] for each in one.tokens],
                "computed": [[at, count / one.prompt_tokens] for at, count in one.computed],
            }
        )
    _, start, stop = both[1].wait  # a wait is marked when it is longer than any on the right
    replay = {"sides": data, "first": -BEFORE, "last": end, "still": now, "hold": HOLD}
    replay |= {"long": round(1.1 * (stop - start), 3)}
    attributes = "".join(
        f' data-{key}="{escape(json.dumps(value, ensure_ascii=False, separators=(",", ":")))}"'
        for key, value in {"replay": replay, "words": words}.items()
    )
    return (
        f'\n<figure class="hero" data-search-exclude data-lab="hero" data-open{attributes}>'
        f'<div class="hero__sides" role="img" aria-label="{escape(_label(both, words))}">'
        f"{''.join(parts)}</div><figcaption><span>{escape(made_from(words))}</span></figcaption>"
        f"</figure>\n"
    )


# --- the README -------------------------------------------------------------------------------

FILLS = ("a", "b", "c", "d", "doc", "free", "warn")
LINES = 4  # of a text, at most
LINE = 17


class _Clock:
    """Times as CSS: what appears at one is hidden before it. The still is what is there anyway."""

    def __init__(self, both: Sequence[Side]) -> None:
        self.now, self.end = freeze(both), last(both)
        self.length = BEFORE + self.end + HOLD
        self.rules: dict[str, str] = {}

    def share(self, time: float) -> str:
        return f"{100 * (time + BEFORE) / self.length:.2f}%"

    def appears(self, time: float) -> str:
        """The class of what appears at a time; empty for what was there before."""
        if time <= -BEFORE:
            return ""
        name = f"t{round(1000 * (time + BEFORE))}"
        self.rules[name] = f"@keyframes {name}{{0%{{opacity:0}}{self.share(time)}{{opacity:1}}}}"
        return f"{name} later" if time > self.now else name

    def css(self) -> str:
        names = [
            f".{name}{{animation-name:{name}}}" if f"@keyframes {name}{{" in rule else ""
            for name, rule in self.rules.items()
        ]
        return "".join([*self.rules.values(), *names])


def _lines(tokens: Sequence[tuple[float, str]], end: float, width: int) -> list[list[Any]]:
    """A text in lines of `width` characters, each made of (time, piece); the first ones only."""
    times = []  # of each character, white space made one
    for at, text in tokens:
        if at <= end:
            times += [(at, " " if c.isspace() else c) for c in text]
    kept = [
        one
        for i, one in enumerate(times)
        if one[1] != " " or (i and times[i - 1][1] != " ")  # none at the beginning, none twice
    ]
    lines: list[list[Any]] = []
    place = 0
    for line in textwrap.wrap("".join(c for _, c in kept), width)[:LINES]:
        while kept[place][1] == " ":
            place += 1
        pieces: list[Any] = []
        for at, char in kept[place : place + len(line)]:
            if pieces and pieces[-1][0] == at:
                pieces[-1][1] += char
            else:
                pieces.append([at, char])
        place += len(line)
        lines.append(pieces)
    return lines


def picture(
    words: Mapping[str, Any], width: int, columns: int, chats: str, still: bool = False
) -> str:
    """Both sides as an SVG that moves, without a script.

    Args:
        words: its titles.
        width: of the whole, in pixels.
        columns: characters of a line of text.
        chats: those that are shown.
        still: whether it stands, for those who want no motion.
    """
    both = sides()
    clock = _Clock(both)
    gap, margin = 20, 14
    side_width = (width - 2 * margin - gap) / 2
    step = (side_width - 24) / columns  # of a character
    titles = [len(textwrap.wrap(_title(one, words), columns)) for one in both]
    top = 38.0 + LINE * max(titles)
    height, parts = 0.0, []
    for s, one in enumerate(both):
        x, y = margin + s * (side_width + gap), 30.0
        for line in textwrap.wrap(_title(one, words), columns):
            parts.append(f'<text class="title" x="{x:.0f}" y="{y:.0f}">{escape(line)}</text>')
            y += LINE
        y = top
        if s == 0:
            _, start, end = one.wait
            clock.rules["stall"] = (
                f"@keyframes stall{{0%{{opacity:0}}{clock.share(start)}{{opacity:.12}}"
                f"{clock.share(end)}{{opacity:0}}}}"
            )
            parts.append(
                f'<rect class="warn stall" x="{x - 6:.0f}" y="{y - 17:.0f}" rx="3" opacity=".12" '
                f'width="{side_width + 12:.0f}" height="{len(chats) * (LINES * LINE + 8) - 6}"/>'
            )
        doc = one.names.index(DOCUMENT)
        for name in [*chats, DOCUMENT]:
            r = one.names.index(name)
            mark, colour = ("¶", "doc") if r == doc else (name, name.lower())
            parts.append(
                f'<rect class="{colour}" x="{x:.0f}" y="{y - 12:.0f}" width="16" height="16" rx="2"/>'
                f'<text class="mark" x="{x + 8:.0f}" y="{y:.0f}">{mark}</text>'
            )
            shown = _lines(one.tokens[r], clock.end, columns)
            if r == doc:
                until = f"until{s}"
                clock.rules[until] = (
                    f"@keyframes {until}{{0%{{opacity:0}}{clock.share(0)}{{opacity:1}}"
                    f"{clock.share(one.first_token)}{{opacity:0}}}}"
                )
                hidden = " later" if one.first_token <= clock.now else ""
                parts.append(
                    f'<text class="wait {until}{hidden}" x="{x + 24:.0f}" y="{y:.0f}">'
                    f"{escape(str(words['computing']))}</text>"
                )
                shown = shown[:2]
            for i, pieces in enumerate(shown):
                place = x + 24
                for at, piece in pieces:
                    parts.append(
                        f'<text class="{clock.appears(at)}" x="{place:.1f}" '
                        f'y="{y + i * LINE:.0f}" textLength="{step * len(piece):.1f}">'
                        f"{escape(piece)}</text>"
                    )
                    place += step * len(piece)
            y += (2 if r == doc else LINES) * LINE + 8
        parts.append(_bar(one, clock, x, y - 6, side_width))
        seconds = f"{1000 * (one.wait[2] - one.wait[1]):,.0f}"
        css = f"result warn {clock.appears(one.wait[2]).split()[0]}" if s == 0 else "result"
        parts.append(
            f'<text class="{css}" '
            f'x="{x:.0f}" y="{y + 22:.0f}">'
            f"{escape(words['longest'].format(time=seconds))}</text>"
        )
        height = max(height, y + 36)
    used = ("background", "text", "muted", "on", *FILLS)
    light, dark = ("".join(f"--{key}:{theme[key]};" for key in used) for theme in (LIGHT, DARK))
    fills = "".join(f".{key}{{fill:var(--{key})}}" for key in FILLS)
    motion = (
        f"text,.stall{{animation:{clock.length:.2f}s step-end infinite}}"
        f".grow{{animation:{clock.length:.2f}s linear infinite}}{clock.css()}"
        "@media(prefers-reduced-motion:reduce){text,.grow,.stall{animation:none}}"
    )
    css = (
        f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        f"text{{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:var(--text);"
        f"white-space:pre}}{fills}"
        ".title,.result,.mark{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;"
        "font-weight:600}.mark{font-size:11px;text-anchor:middle;fill:var(--on)}"
        ".wait{fill:var(--muted);font-style:italic}.warn{fill:var(--warn)}.later{opacity:0}"
        f".grow{{transform-box:fill-box}}{'' if still else motion}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'role="img" aria-label="{escape(_label(both, words), quote=True)}"><style>{css}</style>'
        f'<rect width="{width}" height="{height:.0f}" rx="6" fill="var(--background)"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _bar(one: Side, clock: _Clock, x: float, y: float, width: float) -> str:
    """How much of the document's prompt is computed: it grows while a step runs."""
    name = f"bar{one.stage}"
    points = [(0.0, 0.0), *((at, n / one.prompt_tokens) for at, n in one.computed)]
    rule = "0%{transform:scaleX(0)}"
    rule += "".join(f"{clock.share(at)}{{transform:scaleX({part:.3f})}}" for at, part in points)
    clock.rules[name] = f"@keyframes {name}{{{rule}100%{{transform:scaleX(1)}}}}"
    still = points[-1][1]
    for (a, from_), (b, to) in zip(points, points[1:], strict=False):
        if a <= clock.now < b:
            still = from_ + (to - from_) * (clock.now - a) / (b - a)
    return (
        f'<rect class="free" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="5"/>'
        f'<rect class="doc grow {name}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="5" '
        f'style="transform:scaleX({still:.3f})"/>'
    )


def pictures(words: Mapping[str, Any]) -> dict[Path, str]:
    """Path -> content of the README's pictures."""
    folder = ROOT / "docs" / "assets"
    return {
        folder / f"hero{name}{kind}.svg": picture(words, *how, still=kind == "-still")
        for name, how in PICTURES.items()
        for kind in ("", "-still")
    }


def main() -> int:
    """Write or compare; returns 1 if `--check` finds a difference."""
    from tools.site.macros import read_data

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    for path, content in pictures(read_data("words")["hero"]).items():
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != content):
            print(f"{path.name} is not what the recordings say; run python -m tools.site.hero")
            return 1
        if not check:
            path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
