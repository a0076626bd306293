"""From a user's input to token ids. Knows tokenizers, not engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from .checks import check_text, short

logger = logging.getLogger(__name__)


def encode(prompt: str | list[int], tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt given as text or as token ids.

    Raises:
        TypeError: the prompt is neither, or it is text and there is no tokenizer.
        ValueError: a token id is outside `0..vocab_size`, or the text is empty or broken.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("a text prompt needs a tokenizer; this engine has none: pass token ids")
        check_text("the prompt", prompt)
        token_ids = tokenizer.encode(prompt)
    elif isinstance(prompt, (list, tuple)):
        token_ids = list(prompt)
        for token_id in token_ids:
            if type(token_id) is not int:
                raise TypeError(f"token ids must be integers, got {short(token_id)}")
    else:
        raise TypeError(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")
    if not token_ids:
        raise ValueError("the prompt is empty")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise ValueError(f"token id {short(wrong)} is outside the vocabulary of {vocab_size}")
    return token_ids


def chat_prompt(tokenizer: Any, messages: str | list[dict[str, Any]]) -> str | list[int]:
    """A conversation in the model's own chat format, ready for `add_request`.

    Args:
        messages: one user message, or a list of `{"role": ..., "content": ...}`. A content is text
            or a list of parts `{"type": "text", "text": ...}`, whose texts are joined by line
            breaks (as vLLM does, vllm/entrypoints/chat_utils.py).

    Returns:
        Token ids; the plain text of a single message if the tokenizer has no chat template.

    Raises:
        TypeError: the messages are neither, or a content is neither.
        ValueError: a part is not text, the template cannot be parsed or refuses the messages, or
            there are several messages and no template.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(messages, str):
        if not template:
            return messages
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise TypeError(f"messages are text or a list of role and content, got {short(messages)}")
    for message in messages:
        check_text("the role of a message", message["role"])
    messages = [{**m, "content": _content_text(m["content"])} for m in messages]
    if not template:
        raise ValueError("this tokenizer has no chat template: pass one text instead of messages")
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program: it may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"the model's chat template failed: {lines[0]}") from error
    check_text("the prompt", text)
    return tokenizer.encode(text, add_special_tokens=False)  # the template brings its own


def _content_text(content: Any) -> str:
    """The text of a message's content, which is text or a list of text parts."""
    if isinstance(content, str):
        check_text("the content of a message", content)
        return content
    if not isinstance(content, list) or not content:
        raise TypeError(
            f"the content of a message is text or a list of parts, got {short(content)}"
        )
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise TypeError(f"a part of a message's content has a type, got {short(part)}")
        if part["type"] != "text":
            kind = short(part["type"])
            raise ValueError(f"only text is supported in a message's content, got a part {kind}")
        check_text("the text of a message's part", part.get("text"))
        texts.append(part["text"])
    return "\n".join(texts)


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text: those of the model's generation config, and the tokenizer's.

    The two often differ: the config of a chat model may still name what ended the documents of its
    pretraining, and the tokenizer what ends a turn. Whoever stops at one of them only never stops
    at the other. vLLM stops at both, too (v0.11.0, `SamplingParams.update_from_generation_config`
    in vllm/sampling_params.py). Ids that are not in the vocabulary (-1 for "none") do not count.
    """
    ids: set[int] = set()
    for owner in (getattr(model, "generation_config", None), tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        if eos is not None:
            ids |= {eos} if isinstance(eos, int) else set(eos)
    vocab_size = model.config.get_text_config().vocab_size
    return frozenset(i for i in ids if 0 <= i < vocab_size)


def special_stop_ids(stops: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """The ids of those stop strings that are special tokens of the tokenizer.

    Special tokens are left out of the text, so such a string is never found there; what the user
    means is the token, and one log line says so. A stop string with a special token inside of it
    stays a string, and a log line says that the token is never in the text.
    """
    if not stops:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token): token_id for token_id, token in added.items() if token.special}
    for stop in stops:
        if stop in special:
            token_id = special[stop]
            logger.info("stop %r is the special token %d, which ends the output", stop, token_id)
        elif inside := [token for token in special if token in stop]:
            logger.warning(
                "stop %s has the special token %r in it, which is never in the text",
                *(short(stop), inside[0]),
            )
    return frozenset(special[stop] for stop in stops if stop in special)
