"""The page at `/`: its files, the drawing code of the site's trace viewer, the example's words.

Everything that the page does with an engine goes through the public routes; nothing here does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles

from shared.draw.palette import stylesheet
from shared.engine.prompts import chat_prompt
from shared.measure import example
from shared.measure.episode import SUMMARY_TOKENS, document_text

from .driver import Driver

PAGE = Path(__file__).parent / "page"
VIEWER = Path(__file__).parents[2] / "docs" / "assets" / "viewer"  # the trace viewer's


def add_page(app: FastAPI, driver: Driver, tokenizer: Any, folder: Path = PAGE) -> None:
    """Add `/` and what it loads, all of it below `/page`."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(folder / "index.html")

    @app.get("/page/palette.css", include_in_schema=False)
    async def palette() -> Response:
        return Response(stylesheet(), media_type="text/css")

    @app.get("/page/example.json", include_in_schema=False)
    async def words() -> Response:
        return JSONResponse(await driver.in_tokenizer(example_words, tokenizer))

    app.mount("/page/viewer", StaticFiles(directory=VIEWER), name="viewer")
    app.mount("/page", StaticFiles(directory=folder), name="page")


def example_words(tokenizer: Any) -> dict[str, Any]:
    """The running example as the page needs it.

    Returns:
        system, lead: how all prompts begin; chats: what each asks, by letter; task and document:
        the document's prompt, of about `example.DOCUMENT_TOKENS` tokens; betweenChats: tokens that
        a chat has when the next one comes; summaryTokens: of the document's answer, at most.
    """
    task = f"{example.LEAD} {example.TASK}"
    question = chat_prompt(
        tokenizer,
        [{"role": "system", "content": example.SYSTEM}, {"role": "user", "content": task}],
    )
    room = example.DOCUMENT_TOKENS - len(question)
    tokens = tokenizer.encode(document_text(6 * room), add_special_tokens=False)
    return {
        "system": example.SYSTEM,
        "lead": example.LEAD,
        "chats": {name: f"{example.LEAD} {story}" for name, story in example.STORIES.items()},
        "task": task,
        "document": tokenizer.decode(tokens[:room]),
        "betweenChats": example.BETWEEN_CHATS,
        "summaryTokens": SUMMARY_TOKENS,
    }
