"""The course's colours, once: pictures read them here, the site's pages as `stylesheet()`.

Knows no picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# By name, light and dark. Chats are a to d; `doc` is prefill and what it costs.
COLOURS = {
    "a": ("#3a6cb0", "#7fabea"),
    "b": ("#217d74", "#5cc3b5"),
    "c": ("#7a5fae", "#b79ee2"),
    "d": ("#797623", "#c5c266"),
    "doc": ("#bb5416", "#f2995a"),
    "shared": ("#4a5560", "#aab4bd"),
    "free": ("#e6eaed", "#2a333b"),
    "line": ("#9aa5ad", "#6b7781"),
    "text": ("#1f2a33", "#dfe5ea"),
    "muted": ("#5a6670", "#9aa6b0"),
    "on": ("#ffffff", "#12181d"),
    "warn": ("#b3261e", "#ff8a80"),
    "soft": ("#f3f5f7", "#20282f"),
    "edge": ("#00000038", "#000000b0"),
}
CHATS = ("a", "b", "c", "d")
DOCUMENTS = ("doc", "document", "long")  # what the one long prompt is called

Theme = Mapping[str, str]
# Besides the colours, `name` ends a file's name, and `background` is the page's.
LIGHT: Theme = {"name": "light", "background": "#ffffff", **{k: c for k, (c, _) in COLOURS.items()}}
DARK: Theme = {"name": "dark", "background": "#1e2529", **{k: c for k, (_, c) in COLOURS.items()}}
THEMES = (LIGHT, DARK)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A to D and the document have their own colour everywhere; others take one in turn."""
    colours = {}
    for i, name in enumerate(names):
        own = name.lower() if name.lower() in CHATS else CHATS[i % len(CHATS)]
        colours[name] = "doc" if name in DOCUMENTS else own
    return colours


def variable(name: str) -> str:
    """A colour as the page has it; where there is no page of ours, the light one."""
    name = name.lower()  # a chat's name is a colour
    return f"var(--fig-{name}, {LIGHT[name]})"


def stylesheet() -> str:
    """The colours as CSS variables, `--fig-a` and so on, for both modes of the site."""
    text = ""
    for where, theme in ((":root", LIGHT), ('[data-md-color-scheme="slate"]', DARK)):
        lines = "".join(f"  --fig-{name}: {theme[name]};\n" for name in COLOURS)
        text += f"{where} {{\n{lines}}}\n"
    return text
