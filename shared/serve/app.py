"""The routes: what a client may ask, and what it is answered.

Knows the driver and the protocol, and no engine. `create_app` makes an ASGI application for any
server that runs one.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.engine.checks import check_text
from shared.engine.prompts import chat_prompt

from . import protocol
from .driver import Busy, Closed, Driver, Failed, Stream
from .metrics import Metrics
from .pages import PAGE, add_page

MAX_BODY_BYTES = 4 * 2**20
BODY_SECONDS = 30  # for a request's body to come
MAX_LISTENERS = 16
RETRY_AFTER = "1"  # seconds after which a client may ask again

# By status: OpenAI's word for the kind of error.
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": protocol.ErrorBody, "description": text}
    for status, text in {
        400: "refused, for the reason in the message",
        401: "the key is missing or wrong",
        404: "there is no such model",
        408: "the body came too slowly",
        413: "the body is too large",
        429: "too many requests wait",
        500: "the engine failed",
        503: "the server is shutting down",
    }.items()
}

BEARER = HTTPBearer(auto_error=False, description="needed if the server has --api-key")


class APIError(Exception):
    """Ends a request with a status and an error in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = {"message": message, "type": kind, "param": param, "code": code}

    def response(self) -> Response:
        """The whole answer."""
        headers = {"Retry-After": RETRY_AFTER} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSON({"error": self.body}, self.status, headers)


class JSON(Response):
    """JSON as text of today: no character is escaped that need not be."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _json(content)


class Events(StreamingResponse):
    """Server-sent events; `at_end` is called when the client has all, or has gone.

    A generator's own `finally` would not do: if the client goes before the first byte, it is never
    begun.
    """

    media_type = "text/event-stream"

    def __init__(
        self, content: AsyncIterator[bytes], at_end: Callable[[], object], request_id: str = ""
    ) -> None:
        # No proxy may collect what is to be seen at once.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        if request_id:  # the step records' name for it, long before the first token tells
            headers["X-Request-Id"] = request_id
        super().__init__(content, headers=headers)
        self._at_end = at_end

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._at_end()


class BoundedBody:
    """Reads a request's body before anybody else sees it, up to a number of bytes and seconds.

    (Starlette's own `RequestBodyLimitMiddleware` answers in plain text and knows no time.)
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            body = await asyncio.wait_for(self._read(scope, receive), BODY_SECONDS)
        except (TimeoutError, asyncio.TimeoutError):
            error = APIError(408, f"the body was not there within {BODY_SECONDS} s")
            return await error.response()(scope, receive, send)
        except APIError as error:
            return await error.response()(scope, receive, send)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit():
            self._check(int(length))  # before a byte of it is read
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            self._check(len(body))
            if not message.get("more_body"):  # nor has a client that has gone
                return bytes(body)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise APIError(
                413,
                f"the body has {num_bytes} bytes or more, and at most {self.max_bytes} may come",
            )


def create_app(
    driver: Driver,
    tokenizer: Any,
    metrics: Metrics | None = None,
    api_key: str | None = None,
    allow_origins: Sequence[str] = (),
    model_root: str = "",
    keep_alive: float = 5.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    page: Path = PAGE,
) -> FastAPI:
    """An application that serves the engines of `driver`, which the caller starts and stops.

    Args:
        tokenizer: that of all engines.
        metrics: the observer of `driver`; without one, /metrics is empty.
        api_key: what clients must send; None lets everybody in.
        allow_origins: web pages of these origins may call, beside our own.
        model_root: the model's name, told with each stage.
        keep_alive: seconds of silence after which a stream sends a comment.
        max_body_bytes: of a request; more is answered 413.
        page: folder of the page at `/`.
    """
    app = FastAPI(
        title="mini vLLM in four stages",
        description="Each stage is a model: stage-01 to stage-04.",
        version="0.1.0",
        docs_url=None,  # they need the network
        redoc_url=None,
    )
    app.add_middleware(BoundedBody, max_bytes=max_body_bytes)
    if allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    created = int(time.time())

    def check_key(
        sent: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
    ) -> None:
        if api_key is None:
            return
        if sent is None:
            raise APIError(401, "an API key is needed: Authorization: Bearer KEY")
        # In constant time, so that nobody learns by trying how many characters are right.
        # (Headers are read as Latin-1, whatever bytes they are.)
        if not hmac.compare_digest(sent.credentials.encode("latin-1"), api_key.encode()):
            raise APIError(401, "this API key is wrong", code="invalid_api_key")

    # --- generation -----------------------------------------------------------------------------

    api = APIRouter(dependencies=[Depends(check_key)], responses=RESPONSES)

    @api.post("/v1/chat/completions")
    async def chat_completions(body: protocol.ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        return await answer(body, http, "chatcmpl", functools.partial(chat_prompt, tokenizer))

    @api.post("/v1/completions")
    async def completions(body: protocol.CompletionRequest, http: Request) -> Response:
        """Go on after one or several prompts."""
        return await answer(body, http, "cmpl", lambda prompt: prompt)

    async def answer(
        body: protocol.ChatRequest | protocol.CompletionRequest,
        http: Request,
        prefix: str,
        encode: Callable[[Any], str | list[int]],
    ) -> Response:
        check_model(body.model)
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        with refusals():
            params = body.sampling_params()
            stream = await driver.submit(
                body.model, body.prompts, params, body.cache_salt or "", request_id, encode
            )
        as_json = protocol.Answer(body, request_id, tokenizer)
        if body.stream:
            return Events(chunks(stream, as_json), lambda: driver.abort(stream), request_id)
        async with aborted_if_gone(http, stream):
            outputs = await stream.result()
        if failure := failed(outputs):
            raise failure
        return JSON(as_json.whole(outputs))

    async def chunks(stream: Stream, as_json: protocol.Answer) -> AsyncIterator[bytes]:
        try:
            while (outputs := await stream.next(keep_alive)) is not None:
                if failure := failed(outputs):
                    raise failure
                if not outputs:
                    yield b": " + progress(stream) + b"\n\n"
                # What one step made goes out at once, several choices or not.
                if events := [_event(chunk) for chunk in as_json.chunks(outputs)]:
                    yield b"".join(events)
            if last := as_json.last_chunk():
                yield _event(last)
        except Failed as error:
            yield _event({"error": APIError(500, str(error)).body})
        except APIError as error:
            yield _event({"error": error.body | {"code": error.status}})
        yield b"data: [DONE]\n\n"

    def progress(stream: Stream) -> bytes:
        """What a silent stream waits for; a comment, which clients skip."""
        found = driver.engines[stream.model].progress(stream.engine_ids[0])
        if not found:
            return b"waiting"
        text = "{state}, {prefilled_tokens} of {prompt_tokens} prompt tokens".format(**found)
        return text.encode()

    def failed(outputs: Sequence[Any]) -> APIError | None:
        """The error to answer if the server ended a completion: the client is still here."""
        reasons = {output.finish_reason for output in outputs}
        if "error" in reasons:
            return APIError(500, "the step that computed this request failed")
        if "abort" in reasons:
            return APIError(503, "the server is shutting down and has aborted this request")
        return None

    @asynccontextmanager
    async def aborted_if_gone(http: Request, stream: Stream) -> AsyncIterator[None]:
        """Abort the stream if the client closes its connection meanwhile."""

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            driver.abort(stream)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            driver.abort(stream)

    def check_model(name: str) -> Any:
        if name not in driver.engines:
            there = ", ".join(driver.engines)
            raise APIError(
                404,
                f"there is no model {name[:80]!r}; there are {there}",
                "model",
                "model_not_found",
            )
        return driver.engines[name]

    # --- text and tokens ------------------------------------------------------------------------

    @api.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest) -> Response:
        """Token ids of a text, or of messages in the model's chat format."""
        engine = check_model(body.model)

        def encode() -> dict[str, Any]:
            if body.messages is not None:
                ids = chat_prompt(tokenizer, protocol.conversation(body.messages))
            else:
                check_text("prompt", body.prompt)
                ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
            answer = {
                "count": len(ids),
                "max_model_len": engine.config.max_model_len,
                "tokens": ids,
            }
            if body.return_token_strs:
                answer["token_strs"] = [tokenizer.decode([i]) for i in ids]
            return answer

        with refusals():
            return JSON(await driver.in_tokenizer(encode))

    @api.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> Response:
        """The text of token ids."""
        check_model(body.model)
        size = len(tokenizer)
        if wrong := [i for i in body.tokens if not 0 <= i < size]:
            raise APIError(400, f"token id {wrong[0]} is outside the vocabulary of {size}")
        return JSON({"prompt": await driver.in_tokenizer(tokenizer.decode, body.tokens)})

    # --- what there is, and how it stands -------------------------------------------------------

    def card(name: str) -> dict[str, Any]:
        config = driver.engines[name].config
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "mini-vllm",
            "root": model_root or name,
            "max_model_len": config.max_model_len,
            "block_size": config.block_size,
            "num_blocks": config.num_blocks,
        }

    @api.get("/v1/models")
    async def models() -> Response:
        """All stages."""
        return JSON({"object": "list", "data": [card(name) for name in driver.engines]})

    @api.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        """One stage."""
        check_model(name)
        return JSON(card(name))

    @api.get("/events")
    async def events() -> Response:
        """Every step of every engine as it ends: server-sent events of `step_event`."""
        if driver.is_closed:
            raise APIError(503, "the server is shutting down")
        if driver.num_listeners >= MAX_LISTENERS:
            raise APIError(429, f"{MAX_LISTENERS} clients read the events, and no more may")
        listener = driver.listen()

        async def records() -> AsyncIterator[bytes]:
            yield b": steps follow\n\n"
            while (found := await listener.next(keep_alive)) is not None:
                yield b"".join(map(_event, found)) or b": idle\n\n"

        return Events(records(), lambda: driver.unlisten(listener))

    @app.get("/health", responses={503: RESPONSES[503]})
    async def health() -> Response:
        """200 while requests are taken."""
        if driver.error:
            raise APIError(503, "the engines have failed")
        if driver.is_closed:
            raise APIError(503, "the server is shutting down")
        return JSON({})

    @app.get("/metrics")
    async def prometheus() -> Response:
        """For Prometheus; see `shared/serve/metrics.py`."""
        text = generate_latest(metrics.registry) if metrics else b""
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    # --- errors ---------------------------------------------------------------------------------

    @app.exception_handler(APIError)
    async def api_error(_: Request, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(Failed)
    async def engines_failed(_: Request, error: Failed) -> Response:
        return APIError(500, str(error)).response()

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        message, param = _reasons(error.errors())
        return APIError(400, message, param).response()

    @app.exception_handler(StarletteHTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        response = APIError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        return APIError(500, "the server has a fault, which its log shows").response()

    app.include_router(api)
    add_page(app, driver, tokenizer, page)
    return app


@contextmanager
def refusals() -> Iterator[None]:
    """Within, what the driver and the engine refuse becomes the error that says so."""
    try:
        yield
    except Busy as error:
        raise APIError(429, str(error)) from error
    except Closed as error:
        raise APIError(503, str(error)) from error
    except (TypeError, ValueError) as error:
        raise APIError(400, str(error)) from error


def _json(content: Any) -> bytes:
    # Half of a surrogate pair, which JSON may bring in, goes out as it came: escaped.
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def _event(content: Any) -> bytes:
    return b"data: " + _json(content) + b"\n\n"


def _reasons(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One line about all that is wrong with a body, and the first field that is."""
    reasons: dict[str, list[str]] = {}
    for error in errors:
        place = [str(part) for part in error["loc"] if part != "body"]
        # Of a field that may be one of several types, all that it could be; not where it was not.
        name = place[0] if place and error["type"] != "json_invalid" else ""
        text = error["msg"].removeprefix("Value error, ")
        if name == "messages":
            text = f"{'.'.join(place[1:3])}: {text}" if len(place) > 1 else text
        if text not in reasons.setdefault(name, []):
            reasons[name].append(text)
    lines = [f"{name}: {'; or '.join(t[:4])}" if name else t[0] for name, t in reasons.items()]
    param = next((name for name in reasons if name), None)
    return "; ".join(lines[:8]), param
