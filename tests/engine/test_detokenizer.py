"""Text from tokens, piece by piece: nothing half-shown, nothing twice, nothing lost.

The tokenizers are made here: a byte-level BPE, and one that spells bytes out as SentencePiece does.
"""

from __future__ import annotations

import random
import re
import tracemalloc
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.engine.detokenizer import MAX_HELD, IncrementalDetokenizer, StopMatcher

TEXTS = [
    "The quick brown fox — naïve café, 3.14 ≈ π.",
    "你好，世界！今天天气很好。",
    "🙂👩‍👩‍👧‍👦🇨🇭 flags and families 👍🏽",
    "مرحبا بالعالم",
    "  two spaces,\n\n\ttabs ",
    "",
]
EOS = "<eos>"

# A slow machine is no failure.
generous = settings(deadline=None)


@cache
def byte_level() -> Tokenizer:
    """256 bytes, a few merges (some end inside a character), and one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_ids(data: bytes) -> list[int]:
    """The tokens that stand for single bytes, so that any byte string can be written."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable}
    letter |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [byte_level().token_to_id(letter[byte]) for byte in data]


@cache
def byte_fallback() -> Tokenizer:
    """As in Llama 2: "▁" for a space, and <0xNN> for each byte of an unknown character."""
    words = ["▁", "▁the", "▁cat", "s", "▁sat", ".", ",", "a"]
    tokens = [EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(EOS, normalized=False)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def fallback_ids(*parts: str | bytes) -> list[int]:
    ids: list[int] = []
    for part in parts:
        names = [part] if isinstance(part, str) else [f"<0x{byte:02X}>" for byte in part]
        ids += [byte_fallback().token_to_id(name) for name in names]
    return ids


def stream(tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.append(token_id) for token_id in token_ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.flush() == ""
    return pieces


class Counting:
    """A tokenizer that notes how many tokens each call decodes."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.sizes: list[int] = []

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.sizes.append(len(token_ids))
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


# ----------------------------------------------------------------------------------------------- D1


@pytest.mark.parametrize("text", TEXTS)
def test_d1_stream_equals_text(text):
    token_ids = byte_level().encode(text).ids
    pieces = stream(byte_level(), token_ids)
    assert "".join(pieces) == text
    # Complete text needs no flush.
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", ["你", "🙂", "é", "👩‍👧"])
def test_d1_nothing_half_shown(text):
    pieces = stream(byte_level(), byte_ids(text.encode()))
    assert len(pieces) - 1 == len(text.encode()) > len(text)
    assert [piece for piece in pieces if piece] == list(text)


def test_d1_tokens_that_end_inside_a_character():
    # "好" is e5 a5 bd: its first bytes come in one token with the end of what is before them.
    tokens = [b"\xe4\xbd\xa0\xe5", b"\xa5", b"\xbd!"]
    table = {bytes_: i for i, bytes_ in enumerate(tokens)}

    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return b"".join(tokens[i] for i in ids).decode(errors="replace")

    assert stream(Bytes(), list(table.values())) == ["", "", "你好!", ""]


@generous
@given(st.text())
def test_d1_any_text(text):
    assert "".join(stream(byte_level(), byte_level().encode(text).ids)) == text
    assert "".join(stream(byte_level(), byte_ids(text.encode()))) == text


@generous
@given(st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=60))
def test_d1_any_tokens(token_ids):
    """Bytes that are no text at all: a random model writes such."""
    pieces = stream(byte_level(), token_ids)
    assert "".join(pieces) == byte_level().decode(token_ids, skip_special_tokens=True)


@generous
@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
@example("🙂".encode(), [(1, MAX_HELD - 1)])
@example("é🙂".encode(), [(4, MAX_HELD + 5), (3, 2)])
def test_d1_any_bytes(data, special):
    """Also with special tokens, which have no text, in the middle of a character."""
    token_ids = byte_ids(data)
    for place, number in special:
        token_ids[place:place] = [byte_level().token_to_id(EOS)] * number
    assert "".join(stream(byte_level(), token_ids)) == data.decode(errors="replace")


@pytest.mark.parametrize("num_bad", range(2 * MAX_HELD))
def test_d1_a_character_after_bytes_that_are_none(num_bad):
    """Letting go of the bad bytes must not cut the character that has begun behind them."""
    data = b"\xff" * num_bad + "🙂你é".encode() + b"\xff" * num_bad + "🙂".encode()
    pieces = stream(byte_level(), byte_ids(data))
    assert "".join(pieces) == data.decode(errors="replace")


@pytest.mark.parametrize("before", ["", "a text that is shown already"])
def test_d1_many_special_tokens_inside_a_character(before):
    special = [byte_level().token_to_id(EOS)] * 30
    *known, last, end = byte_ids(f"{before}é".encode())
    assert "".join(stream(byte_level(), [*known, last, *special, end])) == f"{before}é"


def test_d1_an_incomplete_character_at_the_end():
    pieces = stream(byte_level(), byte_ids("ok 你".encode()[:-1]))
    assert pieces == ["o", "k", " ", "", "", "\ufffd"]


def test_d1_the_replacement_character_itself():
    pieces = stream(byte_level(), byte_ids("a\ufffdb".encode()))
    assert "".join(pieces) == "a\ufffdb"


# ----------------------------------------------------------------------------------------------- D2


@pytest.mark.parametrize(
    "token_ids, text",
    [
        (fallback_ids("▁the", "▁cat", "s", "▁sat", "."), "the cats sat."),
        (fallback_ids("▁", "▁", "▁the"), "  the"),
        (fallback_ids("▁cat", "▁", "▁cat"), "cat  cat"),
        (fallback_ids("你好".encode(), "▁cat"), "你好 cat"),
        (fallback_ids("▁the", "🙂🙂".encode(), "s"), "the🙂🙂s"),
        (fallback_ids(EOS, "▁the", EOS, "▁cat", EOS), "the cat"),
    ],
)
def test_d2_spaces_and_byte_fallback(token_ids, text):
    pieces = stream(byte_fallback(), token_ids)
    assert "".join(pieces) == text == byte_fallback().decode(token_ids)


def test_d2_shown_text_that_decodes_differently_later():
    """One bad byte makes this decoder spell all bytes before it as U+FFFD, shown ones too."""
    good, bad = fallback_ids("你".encode()), fallback_ids(b"\xff", "a")
    decode = byte_fallback().decode
    assert decode(good) == "你" and decode(good + bad) == "\ufffd\ufffd\ufffd\ufffda"
    pieces = stream(byte_fallback(), good + bad)
    # What was shown stays, and its three tokens are not shown a second time.
    assert [piece for piece in pieces if piece] == ["你", "\ufffda"]


def test_d2_bytes_that_one_bad_byte_spoils():
    """Here no place is clean to cut at, so after a while all that is held is shown."""
    tokenizer = Counting(byte_fallback())
    pieces = stream(tokenizer, fallback_ids(b"\xff" + b"A" * 20, "▁cat"))
    assert pieces[:MAX_HELD] == [""] * MAX_HELD
    assert pieces[MAX_HELD] == "\ufffd" * (MAX_HELD + 1)
    assert "".join(pieces).endswith(" cat")
    assert max(tokenizer.sizes) <= 2 * (MAX_HELD + 1)


def test_d2_text_that_gets_shorter():
    """A decoder that pulls punctuation to the word before it, as some clean-ups do."""
    words = ["It", " ", "is", " ", "!", " ", "so"]

    class CleaningUp:
        def decode(self, ids, skip_special_tokens):
            return "".join(words[i] for i in ids).replace(" !", "!")

    # The space was shown before the mark came, so it stays; nothing is lost or repeated.
    assert CleaningUp().decode(range(len(words)), True) == "It is! so"
    assert stream(CleaningUp(), list(range(len(words)))) == [*words, ""]


@generous
@given(st.lists(st.integers(0, byte_fallback().get_vocab_size() - 1), max_size=60))
def test_d2_any_tokens_are_shown_once(token_ids):
    """Bytes may be spelled in two ways, but each word comes out once and in its place."""
    joined = "".join(stream(byte_fallback(), token_ids))
    words = [byte_fallback().id_to_token(i).lstrip("▁") for i in token_ids]
    expected = [word for word in words if word in ("the", "cat", "sat")]
    assert re.findall("the|cat|sat", joined) == expected


# -------------------------------------------------------------------------------------- linear work


@pytest.mark.parametrize(
    "name, token_ids",
    [
        ("text", byte_level().encode(" ".join(TEXTS) * 10).ids),
        ("bytes that never become text", byte_ids(b"\xff" * 500)),
        ("beginnings of characters", byte_ids(b"\xe4" * 500)),
        ("continuations of characters", byte_ids(b"\x80" * 500)),
        ("special tokens only", [byte_level().token_to_id(EOS)] * 500),
        (
            "special tokens in a character",
            [*byte_ids(b"\xe4"), *[byte_level().token_to_id(EOS)] * 500],
        ),
    ],
)
def test_the_window_stays_short(name, token_ids):
    tokenizer = Counting(byte_level())
    stream(tokenizer, token_ids)
    assert len(token_ids) >= 500
    assert max(tokenizer.sizes) <= 2 * (MAX_HELD + 1)
    assert sum(tokenizer.sizes) <= 20 * len(token_ids)


# --------------------------------------------------------------------------------------- tokenizers


def test_without_tokenizer_there_is_no_text():
    assert stream(None, [1, 2, 3]) == ["", "", "", ""]


def test_hugging_face_tokenizer():
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOS)
    token_ids = tokenizer.encode("Hé 你好 🙂!" + EOS)
    assert tokenizer.eos_token_id in token_ids
    assert "".join(stream(tokenizer, token_ids)) == "Hé 你好 🙂!"
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "Hé 你好 🙂!"


def test_hugging_face_clean_up_is_left_out():
    """It would take back a space that was shown before a full stop came."""
    from transformers import PreTrainedTokenizerFast

    words = ["It", "is", "."]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([0, 1, 2]) == "It is."
    assert stream(tokenizer, [0, 1, 2]) == ["It", " is", " .", ""]


@pytest.mark.model
def test_smollm2_tokenizer(smollm2):
    _, tokenizer = smollm2
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        expected = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert "".join(stream(tokenizer, token_ids)) == expected == text


# ------------------------------------------------------------------------------------- stop strings


def run_matcher(stops, pieces) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join([*(matcher.append(piece) for piece in pieces), matcher.flush()])
    return text, matcher.stopped


def first_stop(text: str, stops: list[str], ends: set[int] | None = None) -> tuple[str, str | None]:
    """By the definition: the stop that ends first, then the longest; at an end that counts."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and (ends is None or end in ends):
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    "stops, pieces, text, stopped",
    [
        (["stop"], ["Hello st", "op there"], "Hello ", "stop"),
        (["stop"], ["Hello", " st", "ar"], "Hello star", None),
        (["stop"], ["Hello st"], "Hello st", None),
        (["stop"], ["s", "t", "o", "p"], "", "stop"),
        (["aab"], ["a", "a", "a", "b", "c"], "a", "aab"),
        (["aab"], ["aaab"], "a", "aab"),
        (["abab"], ["abaabab"], "aba", "abab"),
        (["\n\n"], ["one\n", "\ntwo"], "one", "\n\n"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["abcd", "bc"], ["ab", "cd"], "a", "bc"),
        (["c", "abc"], ["abc"], "", "abc"),
        (["b", "a"], ["ab"], "", "a"),
        (["你好"], ["说你", "好吗"], "说", "你好"),
        ([], ["anything", ""], "anything", None),
        ("ab", ["xaby"], "x", "ab"),
    ],
)
def test_t1_stop_strings(stops, pieces, text, stopped):
    assert run_matcher(stops, pieces) == (text, stopped)


def test_t1_withholds_only_what_may_begin_a_stop():
    matcher = StopMatcher(["<end>", "<|im|>"])
    shown = [matcher.append(piece) for piece in ["a <", "b <|", "im", "x<en", "d", "!"]]
    assert shown == ["a ", "<b ", "", "<|imx", "", "<end!"]
    assert matcher.flush() == ""


def test_t1_a_stop_that_may_not_count_is_not_withheld():
    matcher = StopMatcher(["ab"])
    assert [matcher.append("xab", may_stop=False), matcher.append("ab")] == ["xab", ""]
    assert matcher.stopped == "ab"


def test_t1_nothing_comes_after_a_stop():
    matcher = StopMatcher(["b"])
    assert [matcher.append("abc"), matcher.append("abc"), matcher.flush()] == ["a", "", ""]
    assert matcher.stopped == "b"


@pytest.mark.parametrize("stops", ["", [""], ["a", ""]])
def test_t2_empty_stop_is_refused(stops):
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(stops)


words = st.text("ab", min_size=1, max_size=5)


@generous
@given(st.lists(words, min_size=1, max_size=3), st.lists(st.text("abc", max_size=4), max_size=12))
def test_t1_any_stops_and_pieces(stops, pieces):
    expected = first_stop("".join(pieces), stops)
    assert run_matcher(stops, pieces) == expected
    # The outcome does not depend on where the text is cut.
    assert run_matcher(stops, list("".join(pieces))) == expected


@generous
@given(st.lists(words, min_size=1, max_size=3), st.lists(st.text("abc", max_size=4), max_size=12))
def test_t1_withheld_is_the_longest_possible_beginning(stops, pieces):
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        shown += matcher.append(piece)
        if matcher.stopped:
            return
        beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
        longest = max((b for b in beginnings if text.endswith(b)), key=len)
        assert shown == text[: len(text) - len(longest)]


pieces_with_permission = st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=12)


@generous
@given(st.lists(words, min_size=1, max_size=3), pieces_with_permission)
@example(["a", "ab"], [("a", False), ("c", True)])  # "a" passed, and was withheld for "ab"
def test_a_stop_counts_only_where_it_may_end(stops, pieces):
    """`min_tokens`: a stop string that is complete too early passes, a later one counts."""
    matcher, text, ends = StopMatcher(stops), "", set()
    shown = ""
    for piece, may_stop in pieces:
        if may_stop:
            ends |= set(range(len(text) + 1, len(text) + len(piece) + 1))
        text += piece
        shown += matcher.append(piece, may_stop)
    shown += matcher.flush()
    assert (shown, matcher.stopped) == first_stop(text, stops, ends)


def metaspace_tokenizer() -> Any:
    """A tokenizer of SentencePiece's kind: "▁" is a space, and bytes have tokens of their own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pieces = ["▁", "▁a", "a", "▁▁", *(f"<0x{byte:02X}>" for byte in "😀é ".encode())]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, [])
    )
    tokenizer.add_special_tokens([AddedToken(f"<s{i}>", special=True) for i in range(2)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_a_leading_space_before_special_tokens_is_kept():
    tokenizer = metaspace_tokenizer()
    special = tokenizer.token_to_id("<s0>")
    token_ids = [tokenizer.token_to_id("▁"), *[special] * 9, tokenizer.token_to_id("▁a")]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join([*map(detokenizer.append, token_ids), detokenizer.flush()])
    assert text == tokenizer.decode(token_ids) == " a"


def test_random_streams_of_a_metaspace_tokenizer():
    tokenizer, rng = metaspace_tokenizer(), random.Random(0)
    parts = [[tokenizer.token_to_id(piece)] for piece in ("▁", "▁a", "a", "▁▁", "<s0>", "<s1>")]
    parts.append([tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()])
    for _ in range(1500):
        token_ids = sum(rng.choices(parts, [3, 3, 1, 1, 20, 20, 1], k=rng.randrange(1, 50)), [])
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = "".join([*map(detokenizer.append, token_ids), detokenizer.flush()])
        assert text == tokenizer.decode(token_ids), token_ids


def test_t1_a_long_stop_string_costs_memory_once():
    stop = "ab" * 15_000
    tracemalloc.start()
    matcher = StopMatcher([stop])
    for _ in range(14_999):
        assert matcher.append("ab") == ""
    assert matcher.append("aa") == "ab" * 14_999 + "a"
    matcher.append(stop[1:])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert matcher.stopped == stop
    assert peak < 4 * 2**20, f"{peak:,} bytes at most for a stop string of {len(stop):,} characters"
