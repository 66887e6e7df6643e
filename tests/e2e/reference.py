"""transformers on the same checkpoint: what the server's greedy tokens and log probs must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Reference:
    """Continues prompts with a transformers model, without a KV cache."""

    model: Any

    @classmethod
    def load(cls, checkpoint: Path) -> Reference:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        return cls(model.eval())

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Return `count` greedy tokens after `prompt`, and their log probabilities."""
        ids = list(prompt)
        log_probs = []
        for _ in range(count):
            scores = self._log_softmax(ids)[-1]
            ids.append(int(scores.argmax()))
            log_probs.append(float(scores[ids[-1]]))
        return ids[len(prompt) :], log_probs

    def log_probs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Return the log probability of each token of `output`, a continuation of `prompt`."""
        scores = self._log_softmax([*prompt, *output])[len(prompt) - 1 : -1]
        return [float(row[token]) for row, token in zip(scores, output, strict=True)]

    def _log_softmax(self, ids: Sequence[int]) -> Any:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
