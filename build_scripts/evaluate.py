#!/usr/bin/env python3
"""Measure an engine: loss on given text, agreement with another engine."""

from __future__ import annotations

import json
import lzma
import math
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.arguments import ArgumentParser, whole_number
from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.errors import ConfigError, DeepseekTritonError, EngineMismatchError
from deepseek_triton.evaluate.perplexity import (
    Scores,
    agreement,
    continue_greedily,
    cut_windows,
    score_windows,
)
from deepseek_triton.evaluate.stepping import SteppingScorer
from deepseek_triton.runner.base import ScoringRunner
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.runner.onnxruntime_cuda import OnnxRuntimeCudaRunner
from deepseek_triton.text.documents import read_documents, standard_library, token_stream
from deepseek_triton.text.tokenizer import Tokenizer

PROMPT_TOKENS = 64  # taken from the beginning of a window
NEW_TOKENS = 32
_DEFAULT_TOKENS = 1 << 20  # of the standard library


def main() -> int:
    """Run the command line; return its exit status."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, help="engine directory")
    parser.add_argument("--reference", default="", help="engine directory to compare with")
    parser.add_argument(
        "--text",
        default="",
        help="text file, folder or wheel; or .xz, tokens as train_demo.py keeps them "
        "(this Python's standard library)",
    )
    parser.add_argument(
        "--windows", type=whole_number(1), default=64, help="at most so many, spread evenly"
    )
    parser.add_argument(
        "--window-length", type=whole_number(1), default=512, help="tokens predicted in each"
    )
    parser.add_argument("--json", default="", help="file to write the figures to")
    args = parser.parse_args()
    if not args.engine:
        print("usage: make evaluate ENGINE=<folder> [TEXT=<text>]", file=sys.stderr)
        return 2
    try:
        figures = evaluate(
            Path(args.engine),
            Path(args.reference) if args.reference else None,
            args.text,
            args.windows,
            args.window_length,
        )
    except DeepseekTritonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for name, value in figures.items():
        print(f"{name:32} {value:.4f}" if isinstance(value, float) else f"{name:32} {value}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def evaluate(
    engine: Path, reference: Path | None, text: str, windows: int, length: int
) -> dict[str, Any]:
    """Return what is to be said of `engine`, by name."""
    for variable, folder in (("ENGINE", engine), ("REFERENCE", reference)):
        if folder is not None:  # before the text is read, which takes longer
            try:
                load_engine_dir(folder, verify_contents=False)
            except EngineMismatchError as error:
                raise EngineMismatchError(f"{variable}: {error}") from error
    cut = cut_windows(read_tokens(engine, text), length, windows)
    scores, outputs = _measure(engine, cut)
    figures: dict[str, Any] = {
        "engine": engine.name,
        "megabytes": _size(engine) / 1e6,
        "tokens": int(scores.log_probs.size),
        "loss_nats_per_token": scores.loss,
        "standard_error": scores.standard_error,
        "perplexity": math.exp(scores.loss),
    }
    if reference is not None:
        other, expected = _measure(reference, cut)
        difference = Scores(scores.log_probs - other.log_probs, scores.best_ids)
        figures |= {
            "reference_loss_nats_per_token": other.loss,
            "loss_over_reference": difference.loss,
            "standard_error_of_difference": difference.standard_error,
            "same_next_token": agreement(scores, other),
            "same_greedy_tokens": float((outputs == expected).mean()),
        }
    return figures


def _measure(engine: Path, windows: NDArray[np.int32]) -> tuple[Scores, NDArray[np.int32]]:
    """Score `windows` and continue their beginnings."""
    spec = load_engine_dir(engine, verify_contents=False).manifest.kv_cache
    longest = max(windows.shape[1], PROMPT_TOKENS + NEW_TOKENS)
    with closing(_open(engine, spec.blocks_for(longest))) as runner:
        scores = score_windows(runner, windows, engine.name)
        return scores, continue_greedily(runner, windows[:, :PROMPT_TOKENS], NEW_TOKENS)


def _open(path: Path, num_blocks: int) -> ScoringRunner:
    """Load an engine of any target that a runner of ours runs."""
    engine = load_engine_dir(path)
    target = engine.manifest.target
    if engine.manifest.provider == "cuda":
        return OnnxRuntimeCudaRunner(engine, num_blocks=num_blocks)
    if target == "onnxruntime":
        return OnnxRuntimeRunner(engine, num_blocks=num_blocks)
    if target == "cuda":
        try:
            import torch

            from deepseek_triton.runner.cuda import CudaRunner
        except ImportError as error:
            raise ConfigError(
                f"ENGINE: {path} is for cuda, which needs PyTorch ({error}); "
                "run .venv/bin/pip install -e '.[cuda]'"
            ) from error

        # Without a GPU in plain PyTorch, which is slow and takes fp32 alone.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return CudaRunner.open(
            engine,
            num_blocks=num_blocks,
            max_batch_size=1,
            max_context_len=num_blocks * engine.manifest.kv_cache.block_size,
            device=device,
        )
    if target in ("tensorrt", "tensorrt_rtx"):
        from deepseek_triton.runner.tensorrt import TensorRTRunner

        return SteppingScorer(TensorRTRunner(engine, num_blocks=num_blocks))
    raise ConfigError(f"ENGINE: {path} is for {target}, which runs in NVIDIA's container alone")


def read_tokens(folder: Path, text: str) -> NDArray[np.int32]:
    """Return the tokens of `text`, as --text takes it, by the tokenizer in `folder`."""
    if text.endswith(".xz"):
        try:
            data = lzma.decompress(Path(text).read_bytes())
        except (OSError, lzma.LZMAError) as error:
            raise ConfigError(f"TEXT: {text} cannot be read ({error})") from error
        return np.frombuffer(data, "<u2").astype(np.int32)
    documents = read_documents(Path(text), "TEXT") if text else standard_library()
    return token_stream(Tokenizer.load(folder), documents, None if text else _DEFAULT_TOKENS)


def _size(engine: Path) -> int:
    return sum(
        entry.size for entry in load_engine_dir(engine, verify_contents=False).manifest.files
    )


if __name__ == "__main__":
    sys.exit(main())
