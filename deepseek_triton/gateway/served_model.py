"""What the gateway must know of the model: name, tokenizer, chat template, defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton.arguments import naming
from deepseek_triton.build.engine_dir import way_out
from deepseek_triton.build.manifest import MANIFEST_NAME, Manifest
from deepseek_triton.checkpoint.fields import read_json_object
from deepseek_triton.errors import CheckpointError, ConfigError, EngineMismatchError
from deepseek_triton.text.chat_template import ChatTemplate
from deepseek_triton.text.tokenizer import Tokenizer

_AFFINE_BLOCKS = 4
_CHARACTERS_PER_TOKEN = 4  # roughly, of English


@dataclass(frozen=True)
class ServedModel:
    """Read from an engine directory; its weights are not touched and need not be there."""

    name: str
    created: int  # seconds since 1970: when the engine was built
    fingerprint: str
    max_context_len: int
    block_size: int  # tokens of a KV block
    tokenizer: Tokenizer
    template: ChatTemplate | None
    temperature: float  # of a request that names none
    top_p: float

    @classmethod
    def load(
        cls, engine_dir: Path, *, name: str = "", chat_template: Path | None = None
    ) -> ServedModel:
        """Read manifest, tokenizer, template and generation_config.json of `engine_dir`.

        Raises EngineMismatchError, TokenizerError or ConfigError, naming the option at fault.
        """
        with naming("--chat-template" if chat_template else "--engine"):
            template = ChatTemplate.load(engine_dir, chat_template)
        with naming("--engine"):
            return cls._read(engine_dir, name, template)

    @classmethod
    def _read(cls, engine_dir: Path, name: str, template: ChatTemplate | None) -> ServedModel:
        path = engine_dir / MANIFEST_NAME
        try:
            manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
            created = int(path.stat().st_mtime)
        except OSError as error:
            raise EngineMismatchError(
                f"{engine_dir}: no engine directory ({error.strerror}: {path.name}); "
                "build one with make engine"
            ) from error
        except EngineMismatchError as error:
            raise EngineMismatchError(f"{engine_dir}: {error}; {way_out(engine_dir)}") from error
        defaults = _generation_defaults(engine_dir / "generation_config.json")
        return cls(
            name=name or manifest.checkpoint.name,
            created=created,
            fingerprint=f"fp_{manifest.checkpoint.fingerprint[:10]}",
            max_context_len=manifest.max_context_len,
            block_size=manifest.kv_cache.block_size,
            tokenizer=Tokenizer.load(engine_dir),
            template=template,
            temperature=defaults.get("temperature", 1.0),
            top_p=defaults.get("top_p", 1.0),
        )

    def affinity(self, prompt: str) -> str:
        """Return what prompts share whose first KV blocks are the same; "" for a short prompt."""
        length = _AFFINE_BLOCKS * self.block_size * _CHARACTERS_PER_TOKEN
        return prompt[:length] if len(prompt) >= length else ""

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone; U+FFFD for bytes within a character."""
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")

    def count(self, text: str) -> int:
        """Return how many tokens `text` is, without what begins a prompt."""
        return len(self.tokenizer.encode(text)) - len(self.tokenizer.encode(""))

    def text_of(self, token_ids: Sequence[int]) -> str | None:
        """Return the text that tokenizes to `token_ids`; None if there is none."""
        text = self.tokenizer.decode_all(token_ids)
        encoded = self.tokenizer.encode(text)
        return text if encoded == list(token_ids) else None


def _generation_defaults(path: Path) -> Mapping[str, float]:
    try:
        content: Mapping[str, Any] = read_json_object(path) if path.is_file() else {}
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return {
        key: float(content[key])
        for key, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0))
        if isinstance(content.get(key), int | float) and low <= content[key] <= high
    }
