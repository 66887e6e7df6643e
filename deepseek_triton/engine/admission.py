"""What a request must satisfy before an engine takes it."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_triton.errors import InvalidRequestError, OverloadedError
from deepseek_triton.kv_cache.spec import KVCacheSpec
from deepseek_triton.request import Request
from deepseek_triton.scheduler import check_fits


@dataclass(frozen=True)
class Admission:
    """Limits of one engine. Plain data: they are checked on either side of a process border."""

    vocab_size: int
    max_context_len: int | None  # tokens, prompt and output together; None: what the cache holds
    kv_cache: KVCacheSpec
    num_blocks: int
    max_requests: int  # that run or wait

    def check(self, request: Request) -> None:
        """Raise InvalidRequestError for a request that can never run."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.max_tokens
        if num_prompt == 0:
            raise InvalidRequestError("prompt", "empty; at least one token is needed")
        if max_tokens < 1:
            raise InvalidRequestError("max_tokens", f"{max_tokens}; at least 1 is needed")
        ids = request.prompt_token_ids
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise InvalidRequestError(
                "prompt", f"a token id is outside the vocabulary, 0 to {self.vocab_size - 1}"
            )
        limit = self.max_context_len
        if limit is not None and num_prompt + max_tokens > limit:
            raise InvalidRequestError(
                "max_tokens",
                f"a prompt of {num_prompt} tokens and max_tokens {max_tokens} exceed the "
                f"context limit of {limit} tokens; shorten the prompt or lower max_tokens",
            )
        check_fits(self.kv_cache, self.num_blocks, num_prompt, max_tokens)

    def check_room(self, num_requests: int) -> None:
        """Raise OverloadedError if `num_requests` that run or wait are all that there may be."""
        if num_requests >= self.max_requests:
            raise OverloadedError(
                f"{self.max_requests} requests run or wait already; try again later"
            )
