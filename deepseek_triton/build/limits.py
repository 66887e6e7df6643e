"""The sizes that a compiled engine is made for: a target that compiles cannot run larger calls."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from deepseek_triton.errors import ConfigError

DEFAULT_CONTEXT_LEN = 8192  # memory for attention grows with it: a model's own may be 163,840


@dataclass(frozen=True)
class CallLimits:
    """Largest calls of a compiled engine. A step that holds more runs as several calls."""

    max_batch_size: int = 64  # rows of a decode call
    max_prefill_rows: int = 4  # rows of a prefill call
    max_chunk_len: int = 256  # tokens of one row in a prefill call
    max_context_len: int = 0  # tokens, prompt and output together; 0 = as many as are sensible
    compute_capabilities: tuple[str, ...] = ()  # "89" for 8.9; none: what the runtime takes

    def __post_init__(self) -> None:
        for variable, value, least, most in (
            ("MAX_BATCH", self.max_batch_size, 1, 4096),
            ("MAX_PREFILL", self.max_prefill_rows, 1, 4096),
            ("MAX_CHUNK", self.max_chunk_len, 1, 1 << 16),
            ("MAX_CONTEXT", self.max_context_len, 0, 1 << 24),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{variable}: {value} is not in {least} ... {most}")

    def resolved(self, model_max_context_len: int) -> CallLimits:
        """Return these limits with a context length that the model has; ConfigError if not."""
        length = self.max_context_len or min(DEFAULT_CONTEXT_LEN, model_max_context_len)
        if length > model_max_context_len:
            raise ConfigError(
                f"MAX_CONTEXT: {length} is more than the model's {model_max_context_len} tokens"
            )
        return dataclasses.replace(self, max_context_len=length)
