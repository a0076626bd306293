"""A client that measures its own stall: the running example through HTTP.

Four chats stream from one stage, a document arrives, and each chat tells its longest wait. Its HTTP
is the standard library's. Knows no engine: any server with vLLM's API will do.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from shared.measure import example
from shared.measure.episode import SUMMARY_TOKENS, document_text

URL = "http://127.0.0.1:8000"
OPENER = build_opener(ProxyHandler({}))  # the server is near: no proxy


def texts(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Send a chat, and yield its pieces of text as they come.

    Raises:
        RuntimeError: the server refuses it, or ends it with an error; the message is the server's.
        OSError: there is no server.
    """
    data = json.dumps({**body, "stream": True}).encode()
    request = Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    try:
        response = OPENER.open(request)
    except HTTPError as error:
        raise RuntimeError(json.load(error)["error"]["message"]) from error
    with response:
        for line in response:  # whole lines, however the network has cut them
            if not line.startswith(b"data: ") or line.rstrip() == b"data: [DONE]":
                continue  # an empty line, or a comment that keeps the connection open
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:  # none in the chunk that counts tokens
                if text := choice["delta"].get("content"):  # none in the first and the last one
                    yield text


def longest_gap(
    url: str,
    body: dict[str, Any],
    clock: Callable[[], float] = time.perf_counter,
    on_text: Callable[[int], object] = lambda count: None,
) -> float:
    """The longest time between two texts of a chat that follow each other, 0 if there are not two.

    Args:
        clock: read once for each text, as it comes.
        on_text: called after each text, with the number of texts so far.
    """
    longest, last = 0.0, None
    for count, _ in enumerate(texts(url, body), 1):
        now = clock()
        longest = max(longest, now - last) if last is not None else 0.0
        last = now
        on_text(count)
    return longest


class Chat(threading.Thread):
    """One request, in a thread of its own. `result` is its longest gap, or what went wrong."""

    def __init__(self, url: str, body: dict[str, Any], after: int) -> None:
        super().__init__(daemon=True)
        self.url, self.body, self.after = url, body, after
        self.reached = threading.Event()  # `after` texts, or the end
        self.first: float | None = None  # seconds until the first text
        self.result: float | Exception = 0.0

    def run(self) -> None:
        """Serve the request to its end."""
        sent = time.perf_counter()

        def on_text(count: int) -> None:
            if count == 1:
                self.first = time.perf_counter() - sent
            if count == self.after:
                self.reached.set()

        try:
            self.result = longest_gap(self.url, self.body, on_text=on_text)
        except (OSError, RuntimeError) as error:
            self.result = error
        self.reached.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example once and print what each chat has waited.

    Returns:
        The exit code: 1 if a request failed.
    """
    parser = argparse.ArgumentParser(prog="python -m shared.serve.stall", description=main.__doc__)
    parser.add_argument("--url", default=URL)
    parser.add_argument("--model", default="stage-03", help="default stage-03")
    parser.add_argument("--max-tokens", type=int, default=200, help="of each chat (default 200)")
    parser.add_argument("--characters", type=int, default=6000, help="of the document")
    args = parser.parse_args(argv)
    salt = uuid.uuid4().hex

    def body(words: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": example.SYSTEM},
            {"role": "user", "content": f"{example.LEAD} {words}"},
        ]
        # With a salt of its own (vLLM's addition), a run finds nothing that another has computed.
        always = {"model": args.model, "messages": messages, "cache_salt": salt}
        return {**always, "max_tokens": max_tokens, **more}

    # 1. Four chats, each a little after the one before, and the document when the last one streams.
    chats: dict[str, Chat] = {}
    for name, story in example.STORIES.items():
        is_last = len(chats) == len(example.STORIES) - 1
        after = example.BEFORE_DOCUMENT if is_last else example.BETWEEN_CHATS
        words = body(story, args.max_tokens, temperature=0, ignore_eos=True)
        chats[name] = Chat(args.url, words, after)
        chats[name].start()
        chats[name].reached.wait()
    task = example.TASK + document_text(args.characters)[: args.characters]
    document = Chat(args.url, body(task, SUMMARY_TOKENS, temperature=0), 1)
    document.start()

    # 2. What they saw.
    for name, chat in {**chats, "document": document}.items():
        chat.join()
        if isinstance(chat.result, Exception):
            reason = chat.result.reason if isinstance(chat.result, URLError) else chat.result
            print(f"{args.model} {name}: {reason}", file=sys.stderr)
            return 1
        first = 0.0 if chat.first is None else chat.first
        print(
            f"{args.model} {name:8}  first text after {1000 * first:6,.0f} ms, "
            f"longest wait {1000 * chat.result:6,.0f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
