"""Answers kept to a form: JSON, a JSON schema, a regular expression or a grammar.

A guide tells before each token which ones may come; the sampler gives the others no chance. The
work is llguidance's: an Earley parser over the bytes of the vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.errors import InvalidRequestError
from deepseek_triton.request import Guide, GuideState

_logger = logging.getLogger(__name__)

JSON, JSON_SCHEMA, REGEX, LARK = "json", "json_schema", "regex", "lark"
KINDS = (JSON, JSON_SCHEMA, REGEX, LARK)

_FIELD, _KIND_FIELD = "guided_decoding_guide", "guided_decoding_guide_type"
_MAX_CHARACTERS = 1 << 18
_BITS = 32
# Models that are made to begin JSON may go on with white space for ever.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\t]{0,16}"}


class Guides(Protocol):
    """Makes guides of what clients send."""

    def compile(self, kind: str, text: str) -> Guide:
        """Return a guide. Raises InvalidRequestError for an unknown kind or a broken text."""


@dataclass(frozen=True)
class GuideText:
    """A guide on its way to the process that compiles and follows it."""

    kind: str
    text: str

    def start(self) -> GuideState:
        """Raise RuntimeError: it must be compiled first."""
        raise RuntimeError(f"a guide of type {self.kind} was not compiled")


class GuideCompiler:
    """Compiles guides for one model; thread-safe."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`end_ids` are the tokens that end an answer whose form is complete."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def prepare(self) -> None:
        """Read the vocabulary now, seconds for a large one, rather than for the first guide.

        One that cannot be used is logged, and guides are refused.
        """
        try:
            self._load_vocabulary()
        except Exception as error:  # llguidance is missing, or raises bare ones
            _logger.warning("guided requests will be refused: %s", error)

    def compile(self, kind: str, text: str) -> CompiledGuide:
        """Return a guide. Raises InvalidRequestError for an unknown kind or a broken text."""
        if kind not in KINDS:
            raise InvalidRequestError(
                _KIND_FIELD, f"{kind!r} is not supported; there are {', '.join(KINDS)}"
            )
        if (kind == JSON) == bool(text):
            wanted = "leave it out" if kind == JSON else "send one"
            raise InvalidRequestError(_FIELD, f"a guide of type {kind}: {wanted}")
        if len(text) > _MAX_CHARACTERS:
            raise InvalidRequestError(
                _FIELD, f"{len(text)} characters; at most {_MAX_CHARACTERS} are allowed"
            )
        try:
            vocabulary = self._load_vocabulary()
        except Exception as error:
            raise InvalidRequestError(
                _KIND_FIELD, f"this engine cannot keep to a form ({error}); leave it out"
            ) from error
        return CompiledGuide(_matcher(vocabulary, kind, text).deep_copy, self._vocab_size)

    def _load_vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(
                    str(self._tokenizer_file),
                    n_vocab=self._vocab_size,
                    eos_token=self._end_ids,
                )
            return self._vocabulary


def _matcher(vocabulary: Any, kind: str, text: str) -> Any:
    """Return an LLMatcher that has seen no token; raises InvalidRequestError."""
    from llguidance import LLMatcher

    try:
        if kind == REGEX:
            grammar = LLMatcher.grammar_from_regex(text)
        elif kind == LARK:
            grammar = LLMatcher.grammar_from_lark(text)
        else:
            schema = text if kind == JSON_SCHEMA else "{}"
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)
    except ValueError as error:
        raise InvalidRequestError(_FIELD, f"not a usable {kind} ({error})") from error
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    if matcher.is_error():
        problem = matcher.get_error().splitlines()[0]
        raise InvalidRequestError(_FIELD, f"not a usable {kind} ({problem})")
    return matcher


class CompiledGuide:
    """A guide that any number of answers may follow, each with a state of its own."""

    def __init__(self, new_matcher: Callable[[], Any], vocab_size: int) -> None:
        self._new_matcher = new_matcher
        self._num_words = -(-vocab_size // _BITS)

    def start(self) -> GuideMatcher:
        """Return the state of an answer that has no token yet."""
        return GuideMatcher(self._new_matcher(), self._num_words)


class GuideMatcher:
    """Where one answer stands. Not thread-safe."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.uint32]:
        """Return the tokens that may come next: bit i % 32 of word i // 32 is token i's."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        return words[: self._num_words]

    def accept(self, token_id: int) -> str:
        """Take the token that came; return what is wrong, "" if nothing."""
        if self._matcher.consume_token(token_id):
            return ""
        return str(self._matcher.get_error() or "no token may follow").splitlines()[0]
