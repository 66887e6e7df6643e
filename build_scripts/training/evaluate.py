"""What the demo model can do: held-out loss, completions that parse, drafts that are accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .data import Windows
from .export import from_checkpoint
from .judge import accepts, cut, is_valid_so_far, known_names, repeats
from .model import DemoModel
from .shards import decompress

BEGIN, END = 0, 1
COMPLETION_TOKENS = 64
_LONGEST_HEAD = 192  # tokens


@dataclass(frozen=True)
class Head:
    """The opening of a held-out function: decorators, signature, docstring if it has one."""

    place: str
    text: str  # ends with a line feed
    source: str  # the whole function


def read_heads(path: Path, count: int) -> list[Head]:
    """The first `count` functions of heads.json."""
    heads = []
    for each in json.loads(path.read_text(encoding="utf-8"))[:count]:
        lines = each["source"].split("\n")
        text = "\n".join(lines[: each["head_lines"] + each["docstring_lines"]]) + "\n"
        heads.append(Head(each["place"], text, each["source"]))
    return heads


@torch.no_grad()
def generate(
    model: DemoModel, prompts: Sequence[Sequence[int]], count: int, temperature: float, seed: int
) -> list[list[int]]:
    """Continue each prompt by up to `count` tokens, the end token included.

    Without a KV cache, rows padded to one length: causality hides the padding.
    """
    device = model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + count, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    for step in range(count):
        longest = int(lengths.max()) + step
        hidden = model.hidden(ids[:, :longest])[rows, lengths + step - 1]
        ids[rows, lengths + step] = _sample(model.lm_head(hidden), temperature, generator)
    outputs = []
    for row, prompt in enumerate(prompts):
        output = ids[row, len(prompt) : len(prompt) + count].tolist()
        outputs.append(output[: output.index(END) + 1] if END in output else output)
    return outputs


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    shares = torch.softmax(logits.float() / temperature, -1)
    return torch.multinomial(shares, 1, generator=generator)[:, 0]


@torch.no_grad()
def held_out(model: DemoModel, data: Path, meta: dict[str, int], batch: int) -> dict[str, float]:
    """Loss over the whole held-out split, and how often the draft head agrees with the main one."""
    device = model.embed_tokens.weight.device
    length = model.config.max_position_embeddings
    windows = Windows(decompress(data), length + 2, seed=0)
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    steps = math.ceil(windows.per_epoch / batch)
    for step in range(steps):
        window = torch.from_numpy(windows.batch(step, batch)).to(device)
        hidden = model.hidden(window[:, :-2])
        drafted = model.draft_hidden(hidden, window[:, 1:-1])
        logits, draft_logits = model.lm_head(hidden), model.lm_head(drafted)
        totals[0] += _loss(logits, window[:, 1:-1])
        totals[1] += _loss(draft_logits, window[:, 2:])
        agree = draft_logits[:, :-1].argmax(-1) == logits[:, 1:].argmax(-1)
        totals[2] += agree.double().mean()
    loss, draft_loss, agreement = (totals / steps).tolist()
    return {
        "tokens": steps * batch * length,
        "loss_nats_per_token": loss,
        "bits_per_byte": loss / math.log(2) * meta["tokens"] / meta["bytes"],
        "draft_loss_nats_per_token": draft_loss,
        "draft_agreement": agreement,
    }


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).double()


@torch.no_grad()
def draft_acceptance(
    model: DemoModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> float:
    """Share of greedily generated tokens, from the second on, that the draft head foresaw."""
    device = model.embed_tokens.weight.device
    hits = total = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output]], device=device)
        hidden = model.hidden(ids[:, :-1])
        drafts = model.lm_head(model.draft_hidden(hidden, ids[:, 1:]))[0].argmax(-1)
        # drafts[t] foresees token t + 2; the second generated token is at len(prompt) + 1.
        foreseen = drafts[len(prompt) - 1 : -1] == ids[0, len(prompt) + 1 :]
        hits += int(foreseen.sum())
        total += len(output) - 1
    return hits / max(total, 1)


def completions(
    model: DemoModel, tokenizer: Tokenizer, heads: Sequence[Head], temperatures: Sequence[float]
) -> dict[str, Any]:
    """Complete every head at every temperature; shares accepted, and some examples."""
    prompts = [[BEGIN, *tokenizer.encode(h.text, add_special_tokens=False).ids] for h in heads]
    kept = [index for index, prompt in enumerate(prompts) if len(prompt) <= _LONGEST_HEAD]
    prompts, heads = [prompts[index] for index in kept], [heads[index] for index in kept]
    names = [share for head in heads if (share := known_names(head.source)) is not None]
    report: dict[str, Any] = {"heads": len(heads), "human_known_names": _mean(names)}
    for temperature in temperatures:
        outputs = generate(model, prompts, COMPLETION_TOKENS, temperature, seed=0)
        verdicts = [
            _judge(head, tokenizer.decode(output, skip_special_tokens=True), END in output)
            for head, output in zip(heads, outputs, strict=True)
        ]
        part: dict[str, Any] = {
            name: _mean([v[name] for v in verdicts if v[name] is not None]) for name in _SHARES
        }
        if temperature == 0:
            part["draft_acceptance"] = draft_acceptance(model, prompts, outputs)
        part["examples"] = [{"text": v["text"], "accepted": v["accepted"]} for v in verdicts[:25]]
        report[f"temperature_{temperature:g}"] = part
    return report


_SHARES = ("accepted", "valid_so_far", "ended", "repeats", "known_names")


def _judge(head: Head, completion: str, ended: bool) -> dict[str, Any]:
    return {
        "text": head.text + completion,
        "ended": ended,
        "accepted": accepts(head.text, completion, ended),
        "valid_so_far": is_valid_so_far(head.text, completion, ended),
        "repeats": repeats(completion),
        "known_names": known_names(cut(head.text, completion, ended)),
    }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(len(values), 1), 4)


def evaluate(
    checkpoint: Path, corpus: Path, heads: int, temperatures: Sequence[float], device: str
) -> dict[str, Any]:
    """Evaluate an exported checkpoint in float32."""
    model = from_checkpoint(checkpoint).to(device)
    meta = json.loads((corpus / "held_out.json").read_text())
    report: dict[str, Any] = {"held_out": held_out(model, corpus / "held_out.xz", meta, batch=16)}
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    chosen = read_heads(corpus / "heads.json", heads)
    return report | completions(model, tokenizer, chosen, temperatures)
