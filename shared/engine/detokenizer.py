"""Tokens to text, one token at a time, and the search for stop strings in that text.

Knows nothing of requests, ids' meaning or sampling. `IncrementalDetokenizer` knows a tokenizer
only by its `decode`; `StopMatcher` knows no tokens at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a decoder shows for bytes that are not (yet) a character.
REPLACEMENT = "\ufffd"

# With more tokens than this held back, look for some to let go of. A character has at most four
# bytes and a token at least one, unless it is special, so ordinary text never comes here.
MAX_HELD = 8


class IncrementalDetokenizer:
    """The text of a growing list of tokens, in pieces that are never taken back.

    A token's text depends on its neighbours: a character's bytes may span tokens, and some
    decoders put or drop a space between two tokens. So each step decodes a small window twice,
    without and with the new tokens, and the difference is the new text:

        tokens    0 . . . . prefix_offset . . . read_offset . . . len
                            |<- shown, decoded ->|<- not shown ->|
                            |<-   again, as context for these  ->|

    While the window ends in U+FFFD, a character is incomplete and the new tokens are held back.
    The method is that of `detokenize_incrementally` (vLLM v0.11.0,
    vllm/transformers_utils/detokenizer_utils.py), which took it from text-generation-inference.
    Two things differ: only generated tokens are decoded, so that the whole equals
    `tokenizer.decode(token_ids)`, and bytes that can never become a character are let go of, so
    that the window stays short and the work linear whatever the tokens are.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=True) -> str`; None gives no text.
    """

    def __init__(self, tokenizer: Any):
        # The Rust tokenizer inside a Hugging Face one decodes in half the time, and without the
        # clean-up of spaces that some have, which would change text that was already shown.
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._token_ids: list[int] = []
        self._prefix_offset = 0
        self._read_offset = 0
        self._prefix_text = ""
        self._pieces: list[str] = []
        self._special: dict[int, bool] = {}

    @property
    def text(self) -> str:
        """All text that was returned so far."""
        return "".join(self._pieces)

    def append(self, token_id: int) -> str:
        """Take the next token; return the text that became readable, often that of one token.

        "" while a character is incomplete, and for a special token.
        """
        if self._tokenizer is None:
            return ""
        self._token_ids.append(token_id)
        end = len(self._token_ids)
        new_text = self._new_text(end)
        if new_text and not new_text.endswith(REPLACEMENT):
            return self._show(new_text, end)
        if end - self._read_offset > MAX_HELD:
            return self._let_go()
        return ""

    def flush(self) -> str:
        """Return what is still held back, U+FFFD for an incomplete character. The tokens end."""
        if self._tokenizer is None:
            return ""
        end = len(self._token_ids)
        return self._show(self._new_text(end), end)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=True)

    def _is_special(self, token_id: int) -> bool:
        """Whether a token is left out of every text. One without text of its own need not be: a
        leading "▁" decodes to nothing alone, and to a space behind other tokens.
        """
        if token_id not in self._special:
            decode = self._tokenizer.decode
            shown, whole = (decode([token_id], skip_special_tokens=skip) for skip in (True, False))
            self._special[token_id] = not shown and bool(whole)
        return self._special[token_id]

    def _new_text(self, end: int) -> str:
        """What the tokens from `read_offset` to `end` add to the shown text."""
        text = self._decode(self._prefix_offset, end)
        if text.startswith(self._prefix_text):
            return text[len(self._prefix_text) :]
        # The new tokens change how the shown ones decode. What was shown stays, so these tokens
        # are decoded by themselves: nothing is shown twice, and nothing is lost.
        return self._decode(self._read_offset, end)

    def _show(self, new_text: str, end: int) -> str:
        self._prefix_offset = self._read_offset
        self._read_offset = end
        self._prefix_text = self._decode(self._prefix_offset, end)
        self._pieces.append(new_text)
        return new_text

    def _let_go(self) -> str:
        """Shorten the held tokens, of which there are too many; return what they show."""
        # 1. Forget special tokens: a character may continue after them.
        held = self._token_ids[self._read_offset :]
        self._token_ids[self._read_offset :] = [t for t in held if not self._is_special(t)]
        end = len(self._token_ids)
        if end - self._read_offset <= MAX_HELD:
            return ""
        # 2. Show all up to the last place where no character is cut in two: there the parts
        # decode to the same apart as together, while the two halves of a character decode to one
        # more U+FFFD. Such a place is near, since an incomplete character has three bytes at most.
        new_text = self._new_text(end)
        for cut in range(end - 1, self._read_offset, -1):
            left = self._new_text(cut)
            if left + self._decode(cut, end) == new_text:
                return self._show(left, cut)
        return self._show(new_text, end)


class StopMatcher:
    """Lets text through until it contains a stop string, whichever tokens it comes in.

    Only text that may turn out to be the beginning of a stop string is withheld: the longest
    suffix that is a proper prefix of one. Of several stop strings, the one that is complete first
    wins, and of two that end together the longer one; so the outcome does not depend on how the
    text was cut into pieces. Neither the stop string nor what follows it is let through.

    Each stop string is matched by the algorithm of Knuth, Morris and Pratt, in time and memory
    that grow with the lengths of text and stop strings, not with their products.

    Args:
        stops: the stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if "" in self._stops:
            raise ValueError(f"a stop string must not be empty, got {stops!r}")
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each that the text ends with
        self._withheld = ""
        self.stopped: str | None = None

    def append(self, text: str, may_stop: bool = True) -> str:
        """Take the next text; return what may be shown now. "" once a stop string was found.

        Args:
            may_stop: False lets a stop string pass that is complete within this text; one that is
                only begun here still counts when it is completed later.
        """
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        known = len(self._withheld)
        text = self._withheld + text
        for end, character in enumerate(text[known:], known + 1):
            complete = self._advance(character)
            if complete and may_stop:
                self.stopped = max(complete, key=len)
                self._withheld = ""
                return text[: end - len(self.stopped)]
        held = max(self._matched)
        self._withheld = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the withheld text: no more comes, so it does not begin a stop string."""
        text, self._withheld = self._withheld, ""
        return text

    def _advance(self, character: str) -> list[str]:
        """Take the next character; return the stop strings that end with it."""
        complete = []
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                complete.append(stop)
                matched = borders[-1]
            self._matched[i] = matched
        return complete


def _borders(stop: str) -> list[int]:
    """For each beginning of `stop`, the longest proper prefix of it that is also its suffix."""
    borders, length = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
