"""tokenizer.json exactly as it stands, through the tokenizers library alone.

transformers' tokenizer classes rewrite parts of DeepSeek's tokenizers (pre-tokenizer, decoder) and
so change ids and lose spaces; they are not used. A tokenizer that does not give back what it was
given is refused when it is loaded, not discovered in answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from deepseek_triton.checkpoint.fields import read_json_object
from deepseek_triton.errors import CheckpointError, TokenizerError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

ROUND_TRIP_TEXTS = (
    "How are you doing?",
    "0 12 345 6789 3.14159",
    "\n\n",
    "  leading and trailing  ",
    "你好，世界！深度学习是什么？",
    "naïve café e\u0301 — “quotes” 👩‍👩‍👧 🎉",
    "def f(x):\n\tif x:\n\t\treturn [x, 'y']  # done\n",
)


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    GPT-2's map: printable Latin-1 stands for itself, the other bytes count up from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _bytes_of_characters()


def _text_bytes(token: str) -> bytes:
    """Return the bytes of a vocabulary entry, as the ByteLevel decoder reads it."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # an added token that is plain text
        return token.encode()


class Tokenizer:
    """Text to ids and back. Immutable, safe to share between threads."""

    def __init__(
        self, library: tokenizers.Tokenizer, config: Mapping[str, Any], where: str = TOKENIZER_FILE
    ) -> None:
        """Check `library` and adopt it; `config` is the content of tokenizer_config.json.

        Mutates `library`: truncation and padding are switched off. Raises TokenizerError.
        """
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._where = where
        self.bos_token_id = self._special_id(config, "bos_token")
        self.eos_token_id = self._special_id(config, "eos_token")
        self.pad_token_id = self._special_id(config, "pad_token")
        self._prefix = self._begin_ids(config)
        self._token_bytes = self._build_token_bytes()
        self._check_token_bytes()
        self._check_round_trip()

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Load tokenizer.json and, if there, tokenizer_config.json of a checkpoint or engine.

        Raises TokenizerError, naming the file, if one is missing or broken or would not round-trip.
        """
        path = Path(directory) / TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(
                f"{path}: not found; save the tokenizer in its fast form (tokenizer.json)"
            )
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"{path}: not a readable tokenizer ({error})") from error
        config_path = path.with_name(CONFIG_FILE)
        try:
            config = read_json_object(config_path) if config_path.is_file() else {}
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error
        return cls(library, config, str(path))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's vocabulary may be padded beyond it."""
        return len(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, begun by one BOS if the tokenizer adds it.

        The text of special tokens counts as those tokens; a BOS that is already there is not
        doubled. Raises UnicodeEncodeError for lone surrogates.
        """
        text.encode()
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens; unknown ids add nothing."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included; unknown ids add nothing."""
        return self._library.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that an id adds to the text: b"" if special or unknown.

        They may begin or end within a character.
        """
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""

    def has_id(self, token_id: int) -> bool:
        """Return whether an entry of the vocabulary, or an added token, has this id."""
        return self._library.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry or added token by its exact text."""
        found: int | None = self._library.token_to_id(token)
        return found

    def _special_id(self, config: Mapping[str, Any], key: str) -> int | None:
        token = config.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            return None
        token_id = self._library.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise TokenizerError(f"{self._where}: {key} {token!r} is not in the vocabulary")
        return token_id

    def _begin_ids(self, config: Mapping[str, Any]) -> list[int]:
        """Return what goes before each text: [BOS] or []. tokenizer_config.json decides if it does.

        Anything else that the post-processor adds would be lost, so it is refused.
        """
        plain: list[int] = self._library.encode("a", add_special_tokens=False).ids
        processed: list[int] = self._library.encode("a").ids
        bos = [] if self.bos_token_id is None else [self.bos_token_id]
        if processed not in (plain, bos + plain):
            raise TokenizerError(
                f"{self._where}: its post_processor adds tokens other than bos_token, "
                "which is not supported"
            )
        add_bos = config.get("add_bos_token")
        if add_bos is None:
            add_bos = processed != plain
        if add_bos and not bos:
            raise TokenizerError(f"{self._where}: add_bos_token is set without a bos_token")
        return bos if add_bos else []

    def _build_token_bytes(self) -> list[bytes]:
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            table[token_id] = _text_bytes(token)
        for token_id, added in self._library.get_added_tokens_decoder().items():
            if added.special:
                table[token_id] = b""
        return table

    def _check_token_bytes(self) -> None:
        """Compare our bytes of the whole vocabulary with the library's decoder."""
        ours = b"".join(self._token_bytes).decode(errors="replace")
        if ours != self.decode(range(len(self._token_bytes))):
            decoder = type(self._library.decoder).__name__
            raise TokenizerError(
                f"{self._where}: its decoder ({decoder}) is not byte-level, "
                "as those of DeepSeek are; it cannot be streamed"
            )

    def _check_round_trip(self) -> None:
        for text in ROUND_TRIP_TEXTS:
            decoded = self.decode(self.encode(text))
            if decoded != text:
                raise TokenizerError(
                    f"{self._where}: {text!r} comes back as {decoded!r}; "
                    "take tokenizer.json from the original checkpoint"
                )
