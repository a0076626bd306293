"""What clients send and what they get: OpenAI's shapes, with vLLM's additions.

Knows neither HTTP nor engines: requests become `SamplingParams` and prompts, outputs become JSON.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.engine.outputs import RequestOutput
from shared.engine.sampling_params import SamplingParams

MAX_CHOICES = 128  # completions of one request, over all its prompts
MAX_LOGPROBS = 20
MAX_REPORTED = 256  # choices times log-probabilities of each token, the chosen one counted
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters
MAX_IDS = 1024  # in stop_token_ids and logit_bias
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; the same number as in vLLM

# Accepted and without effect: who asks, and where to keep what. They never change an answer.
METADATA = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
# What clients send though they do not ask for anything: values at which these change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "priority": (0,),
}

StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
TokenIds = list[int]


class Body(BaseModel):
    """A request's body. What it names and is not here is refused by its name."""

    # Strict: "0.5" is no number, and 1 is not true. Extra names are kept only to be looked at.
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str = Field(description="which stage answers", examples=["stage-04"])

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in METADATA or value in NEUTRAL.get(name, ()):
                continue
            raise ValueError(f"{name} is not supported by this server")
        return self


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end counts tokens; the other: so does every chunk."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Body):
    """What chats and completions have in common. Ranges are checked by `SamplingParams`."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_IDS)
    # vLLM's additions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_IDS)] | None = None
    cache_salt: str | None = Field(None, max_length=1000)

    @model_validator(mode="after")
    def _check_options(self) -> Generation:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is for requests with stream: true only")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside each; None for no report."""
        raise NotImplementedError

    @property
    def num_prompts(self) -> int:
        """Prompts of the request."""
        return 1

    def sampling_params(self) -> SamplingParams:
        """Parameters for the engine. Raises ValueError for what is out of range."""
        self._check_size()
        same = (
            "n max_tokens temperature top_p seed stop presence_penalty frequency_penalty top_k "
            "min_p repetition_penalty min_tokens ignore_eos stop_token_ids"
        ).split()
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        given.setdefault("max_tokens", None)
        bias = {_token_id(key): value for key, value in (self.logit_bias or {}).items()}
        return SamplingParams(**given, logprobs=self.num_logprobs, logit_bias=bias)

    def _check_size(self) -> None:
        choices = self.num_prompts * (self.n or 1)
        if choices > MAX_CHOICES:
            raise ValueError(
                f"{self.num_prompts} prompts times n {self.n or 1} are {choices} choices, and at "
                f"most {MAX_CHOICES} are allowed"
            )
        if self.num_logprobs is not None and choices * (1 + self.num_logprobs) > MAX_REPORTED:
            raise ValueError(
                f"{choices} choices times {1 + self.num_logprobs} log-probabilities of a token are "
                f"more than {MAX_REPORTED}"
            )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ValueError(f"logit_bias maps token ids to numbers, got the key {key[:80]!r}")
    return int(key)


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Message:
        for name, value in (self.model_extra or {}).items():
            if name != "name" and value not in (None, [], ""):
                raise ValueError(f"{name} in a message is not supported by this server")
        return self


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_completion_tokens is not None:  # the newer name
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[Any]:
        """One conversation, for `chat_prompt`."""
        return [conversation(self.messages)]


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: int | None = 16  # as in OpenAI's API
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> list[Any]:
        """Each text or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [prompt]
        return prompt


class TokenizeRequest(Body):
    """`POST /tokenize`: text, or messages in the model's chat format, as vLLM has it."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is needed")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    tokens: TokenIds


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as `shared.engine.prompts.chat_prompt` takes them."""
    plain = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role  # the newer name
        extra = message.model_extra or {}
        name = {"name": extra["name"]} if extra.get("name") else {}
        plain.append({"role": role, "content": message.content, **name})
    return plain


class Answer:
    """One request's outputs as JSON, whole or in chunks.

    Args:
        request: what was asked.
        request_id: such as "chatcmpl-...".
        tokenizer: names tokens in `logprobs`.
    """

    def __init__(self, request: Generation, request_id: str, tokenizer: Any) -> None:
        self.request = request
        self.is_chat = isinstance(request, ChatRequest)
        self.request_id = request_id
        self.tokenizer = tokenizer
        self.created = int(time.time())
        self.options = request.stream_options or StreamOptions()
        self._last: dict[int, RequestOutput] = {}
        self._num_reported: dict[int, int] = {}  # tokens of a choice whose logprobs were sent
        self._num_chars: dict[int, int] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer that is not streamed, from the last outputs of all choices."""
        self._last = {output.index: output for output in outputs}
        choices = []
        for output in outputs:
            choice: dict[str, Any] = {"index": output.index, "logprobs": self._logprobs(output)}
            if self.is_chat:
                choice["message"] = {
                    "role": "assistant",
                    "content": output.text,
                    "refusal": None,
                }
            else:
                choice["text"] = output.text
            choices.append(choice | _end(output))
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._envelope(kind, choices) | {"usage": self.usage()}

    def chunks(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        """What is to be sent for these outputs. One without news gives nothing."""
        for output in outputs:
            is_first = output.index not in self._last
            self._last[output.index] = output
            if self.is_chat and is_first:
                yield self._chunk(output.index, {"role": "assistant", "content": ""})
            logprobs = self._logprobs(output)
            if output.new_text or output.finished or logprobs:
                delta = {"content": output.new_text} if output.new_text else {}
                yield self._chunk(
                    output.index,
                    delta if self.is_chat else output.new_text,
                    logprobs,
                    _end(output),
                )

    def last_chunk(self) -> dict[str, Any] | None:
        """The chunk that counts tokens, if it was asked for."""
        if not self.options.include_usage:
            return None
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._envelope(kind, []) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens in and out. A prompt counts once, however many completions it has."""
        n = self.request.n or 1
        firsts = [output for index, output in self._last.items() if index % n == 0]
        # Until the first completion of a prompt has an output, another stands for it.
        prompts = {i // n: o for i, o in self._last.items()} | {o.index // n: o for o in firsts}
        num_prompt = sum(len(output.prompt_token_ids) for output in prompts.values())
        num_output = sum(len(output.token_ids) for output in self._last.values())
        num_cached = sum(output.metrics.num_cached_tokens for output in prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }

    def _chunk(
        self,
        index: int,
        content: dict[str, Any] | str,
        logprobs: dict[str, Any] | None = None,
        end: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta" if self.is_chat else "text": content,
            "logprobs": logprobs,
            **(end or {"finish_reason": None}),
        }
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        chunk = self._envelope(kind, [choice])
        if self.options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif self.options.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        """Those of the tokens that were not reported yet."""
        start = self._num_reported.get(output.index, 0)
        self._num_reported[output.index] = len(output.token_ids)
        if output.logprobs is None or start == len(output.token_ids):
            return None
        tokens = list(zip(output.token_ids, output.logprobs, strict=True))[start:]
        num_top = self.request.num_logprobs or 0
        if self.is_chat:
            content = [
                self._named(token_id, logprobs[token_id])
                | {"top_logprobs": [self._named(i, p) for i, p in _likeliest(logprobs, num_top)]}
                for token_id, logprobs in tokens
            ]
            return {"content": content, "refusal": None}
        names = [self._text(token_id) for token_id, _ in tokens]
        offsets = []
        for name in names:
            offsets.append(self._num_chars.get(output.index, 0))
            self._num_chars[output.index] = offsets[-1] + len(name)
        return {
            "tokens": names,
            "token_logprobs": [_finite(logprobs[token_id]) for token_id, logprobs in tokens],
            "top_logprobs": [
                # The chosen token is always among them, likely or not.
                {self._text(i): _finite(logprobs[i]) for i in self._reported(token_id, logprobs)}
                for token_id, logprobs in tokens
            ],
            "text_offset": offsets,
        }

    def _reported(self, token_id: int, logprobs: dict[int, float]) -> list[int]:
        likeliest = [i for i, _ in _likeliest(logprobs, self.request.num_logprobs or 0)]
        return list(dict.fromkeys([*likeliest, token_id]))

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _likeliest(logprobs: dict[int, float], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest of a `SampledToken`'s, whose chosen one comes first."""
    return sorted(logprobs.items(), key=lambda pair: -pair[1])[:count]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _end(output: RequestOutput) -> dict[str, Any]:
    if not output.finished:
        return {"finish_reason": None}
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
