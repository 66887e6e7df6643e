"""The training loop: resumable, deterministic in its data, timed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .config import DemoConfig
from .data import Windows, load_windows, prefetch
from .model import DemoModel
from .optim import make_optimizers


@dataclass(frozen=True)
class TrainOptions:
    """What a run is made of; tokens a step = batch * length."""

    steps: int
    batch: int = 64
    length: int = 2048
    matrix_lr: float = 1e-2
    other_lr: float = 3e-3
    warmup: int = 100
    constant: float = 0.35  # of the steps, then linearly to zero
    mtp_weight: float = 0.3  # of the second loss until the decay, a third of that afterwards
    bias_rate: float = 1e-3  # of the routers' balance, zero in the last tenth
    seed: int = 0
    device: str = "cuda"
    config: DemoConfig = field(default_factory=DemoConfig)

    def rate(self, step: int) -> float:
        """Learning rate of a step as a share of the peak."""
        flat = self.constant * self.steps
        decay = (self.steps - step) / max(self.steps - flat, 1)
        return min((step + 1) / self.warmup, 1.0, decay)

    def draft_weight(self, step: int) -> float:
        """Weight of the multi-token-prediction loss."""
        return self.mtp_weight if step < self.constant * self.steps else self.mtp_weight / 3


@dataclass
class Run:
    """Everything that a resumed run needs."""

    model: DemoModel
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0  # of training, compilation included
    curve: list[dict[str, float]] = field(default_factory=list)


def train(data: Path, state: Path, options: TrainOptions, minutes: float) -> Run:
    """Train until `options.steps` or until `minutes` of this call are over; write `state`."""
    began = time.monotonic()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    run = _start(options, state)
    windows = load_windows(data / "train.xz", options.length + 2, options.seed)
    held_out = load_windows(data / "held_out.xz", options.length + 2, 0)
    losses = run.model.losses
    if options.device == "cuda":
        losses = torch.compile(losses, dynamic=False)
    before = run.seconds
    for batch in prefetch(windows, options.batch, run.step, options.steps):
        values = _step(run, options, losses, batch)
        run.step += 1
        done = run.step == options.steps or time.monotonic() - began > 60 * minutes
        if run.step % 50 == 0 or done:
            loss, draft_loss = values.tolist()  # waits for the device
            run.seconds = before + time.monotonic() - began
            _record(run, options, {"loss": loss, "draft_loss": draft_loss})
        if run.step % 500 == 0 or done:
            _record(run, options, held_out_losses(run.model, held_out, options))
        if done:
            break
    run.seconds = before + time.monotonic() - began
    _save(run, options, state)
    return run


def load_trained(state: Path) -> tuple[DemoModel, dict[str, Any]]:
    """Read a state → the model on the CPU, and its options, seconds and loss curve."""
    saved: dict[str, Any] = torch.load(state, map_location="cpu", weights_only=True)
    model = DemoModel(DemoConfig(**saved["options"]["config"]))
    model.load_state_dict(saved["model"])
    return model, {name: saved[name] for name in ("options", "step", "seconds", "curve")}


def _start(options: TrainOptions, state: Path) -> Run:
    model = DemoModel(options.config).to(options.device)
    run = Run(model, make_optimizers(model, options.matrix_lr, options.other_lr))
    if state.exists():
        saved: dict[str, Any] = torch.load(state, map_location=options.device, weights_only=True)
        if saved["options"] != asdict(options):
            raise SystemExit(f"{state} was made with other options: {saved['options']}")
        model.load_state_dict(saved["model"])
        for optimizer, content in zip(run.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        run.step, run.seconds, run.curve = saved["step"], saved["seconds"], saved["curve"]
    return run


def _save(run: Run, options: TrainOptions, state: Path) -> None:
    content = {
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "options": asdict(options),
        "step": run.step,
        "seconds": run.seconds,
        "curve": run.curve,
    }
    partial = state.with_suffix(".partial")
    torch.save(content, partial)
    os.replace(partial, state)


def _step(run: Run, options: TrainOptions, losses: Any, batch: NDArray[np.int64]) -> Tensor:
    """One update; returns the two losses, still on the device."""
    rate = options.rate(run.step)
    for optimizer, peak in zip(run.optimizers, (options.matrix_lr, options.other_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = peak * rate
    window = torch.from_numpy(batch).to(options.device)
    with autocast(options.device):
        loss, draft_loss = losses(window)
    (loss + options.draft_weight(run.step) * draft_loss).backward()
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for router in run.model.routers():
        router.update_bias(options.bias_rate if run.step < 0.9 * options.steps else 0.0)
    return torch.stack((loss.detach(), draft_loss.detach()))


def autocast(device: str) -> torch.autocast:
    """Bfloat16 on a GPU, nothing elsewhere."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


@torch.no_grad()
def held_out_losses(
    model: DemoModel, windows: Windows, options: TrainOptions, batches: int = 2
) -> dict[str, float]:
    """Mean losses in nats per token over the first batches of a split."""
    model.eval()
    total = torch.zeros(2, device=options.device)
    size = min(options.batch, windows.per_epoch)
    for index in range(batches):
        window = torch.from_numpy(windows.batch(index, size)).to(options.device)
        with autocast(options.device):
            total += torch.stack(model.losses(window))
    model.train()
    loss, draft_loss = (total / batches).tolist()
    return {"held_out_loss": loss, "held_out_draft_loss": draft_loss}


def _record(run: Run, options: TrainOptions, values: dict[str, float]) -> None:
    tokens = run.step * options.batch * options.length
    entry = {"step": run.step, "tokens": tokens, "seconds": round(run.seconds, 1)}
    entry |= {name: round(value, 4) for name, value in values.items()}
    run.curve.append(entry)
    print(json.dumps(entry), flush=True)
