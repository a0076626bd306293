"""The page at `/` in a real browser: two stages, the same chats, and a document that arrives.

Compared is what the engine counts, tokens computed between two tokens of a chat, so the machine's
speed changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from shared.measure import example
from tests.browser import chromium

CHATS = list(example.CHATS)
DOCUMENT = "Blocks, slots and slices. " * 40


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any, example_server: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page. Whatever a test did, it had no error, and only our server was asked."""
    contexts, errors = [], []
    asked: set[str] = set()

    def open_page(width: int = 1280) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
        page.goto(f"{example_server.url}/?tokens=3000")  # the chats last until they are stopped
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not errors
    assert asked - {""} == {urlsplit(example_server.url).netloc}  # "" is of data:
    example_server.wait_until_idle()


def lines(panel: Any) -> dict[str, dict[str, str]]:
    """What the page says about each request, by its name."""
    found = panel.locator(".viewer__texts p").evaluate_all("all => all.map(p => ({...p.dataset}))")
    return {one["who"]: one for one in found}


def stall(page: Any, side: int) -> dict[str, dict[str, str]]:
    """Start the chats, send the document, and wait until its prompt is done."""
    panel = page.locator(".live").nth(side)
    run = int(panel.get_attribute("data-run")) + 1
    panel.locator("[data-button=start]").click()
    panel.and_(page.locator(f"[data-run='{run}']")).wait_for()
    enough = """([side, who, count]) => [...document.querySelectorAll(".live")][side]
        .querySelector(`.viewer__texts [data-who=${who}]`).dataset.generated >= count"""
    page.wait_for_function(enough, arg=[side, CHATS[-1], example.BEFORE_DOCUMENT])
    panel.locator("[data-button=send]").click()
    page.wait_for_function(enough, arg=[side, "document", 2])
    page.wait_for_function(enough, arg=[side, CHATS[0], 40])
    panel.locator("[data-button=stop]").click()
    page.wait_for_function(
        "side => [...document.querySelectorAll('.live')][side].dataset.state === 'idle'", arg=side
    )
    return lines(panel)


def test_the_stall_is_there_in_stage_03_and_gone_in_stage_04(
    visit: Callable[..., Any], example_server: Any
) -> None:
    page = visit()
    chosen = page.locator(".live select").evaluate_all("all => all.map(one => one.value)")
    assert chosen == ["stage-03", "stage-04"]
    page.locator("#document summary").click()
    page.fill("textarea", DOCUMENT)
    first, whole, chunks = stall(page, 0), stall(page, 0), stall(page, 1)
    prompt = len(example_server.tokenizer.encode(DOCUMENT))
    budget = example_server.engines["stage-04"].config.max_num_batched_tokens
    assert budget < prompt / 4
    for who in CHATS:
        assert int(first[who]["mostBetween"]) > prompt
        assert int(whole[who]["mostBetween"]) > prompt, (
            "the second run found the first in the cache"
        )
        assert int(chunks[who]["mostBetween"]) <= budget, "a step has at most the budget"
        assert float(whole[who]["longestGap"]) > 0 and float(chunks[who]["longestGap"]) > 0
        assert {whole[who]["reason"], chunks[who]["reason"]} == {"abort"}
    facts = page.locator("[data-fact=between]").all_inner_texts()
    for text, run in zip(facts, (whole, chunks), strict=True):
        assert int(text.replace(",", "")) == max(int(run[who]["mostBetween"]) for who in CHATS)


def test_it_shows_blocks_states_and_slices_while_chats_run(visit: Callable[..., Any]) -> None:
    page = visit(390)
    assert page.locator(".live select").nth(1).input_value() == "", "one column on a phone"
    panel = page.locator(".live").first
    panel.locator("[data-button=start]").click()
    page.wait_for_function(
        """() => document.querySelectorAll(".viewer__state.running").length === 4
            && document.querySelectorAll(".viewer__slice").length === 4"""
    )
    owners = panel.locator(".viewer__cell[data-kind=held]").evaluate_all(
        "all => [...new Set(all.map(cell => cell.dataset.who))]"
    )
    assert owners == CHATS, "in the order of the chats"
    assert panel.locator(".viewer__cell[data-kind=shared]").count() > 0, "the system prompt"
    assert panel.locator(".tick").count() > 4
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    panel.locator("[data-button=stop]").click()
    page.wait_for_function(
        """() => document.querySelector("[data-state=idle]")
            && !document.querySelector(".viewer__cell[data-kind=held]")"""
    )


def test_a_text_that_is_dropped_is_sent_at_once_while_chats_run(visit: Callable[..., Any]) -> None:
    page = visit()
    panel = page.locator(".live").nth(1)
    panel.locator("[data-button=start]").click()
    page.wait_for_function("document.querySelectorAll('.viewer__state.running').length === 4")
    page.evaluate(
        """text => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([text], "own.txt", { type: "text/plain" }));
            document.dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
        }""",
        DOCUMENT,
    )
    page.wait_for_function(
        "document.querySelectorAll('.viewer__texts [data-who=document]')[1].dataset.generated > 0"
    )
    assert page.inner_text("#length") == f"{len(DOCUMENT):,} characters"
    panel.locator("[data-button=stop]").click()


def test_what_the_server_refuses_is_said(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#document summary").click()
    page.fill("textarea", DOCUMENT * 12)
    panel = page.locator(".live").first
    panel.locator("[data-button=send]").click()
    page.wait_for_selector(".viewer__texts .failed")
    assert "8192" in panel.locator(".failed").inner_text().replace(",", "")


def test_a_key_is_asked_for_and_used(browser: Any, start_server: Callable[..., Any]) -> None:
    server = start_server((3,), api_key="secret")
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_selector("#key:not([hidden])")
    page.fill("#key input", "secret")
    page.click("#key button")
    page.wait_for_selector("body[data-ready]")
    page.close()


def test_the_example_is_the_courses(example_server: Any) -> None:
    words = httpx2.get(f"{example_server.url}/page/example.json").json()
    assert words["system"] == example.SYSTEM
    assert list(words["chats"]) == CHATS
    assert words["chats"]["B"] == f"{example.LEAD} {example.STORIES['B']}"
    messages = [
        {"role": "system", "content": words["system"]},
        {"role": "user", "content": words["task"] + words["document"]},
    ]
    asked = {"model": "stage-03", "messages": messages}
    answer = httpx2.post(f"{example_server.url}/tokenize", json=asked).json()
    assert abs(answer["count"] - example.DOCUMENT_TOKENS) < 10
