"""What the demo model loses in half precision and in INT4: loss on held-out text, size, agreement.

Every engine scores the same windows; differences to fp32 are taken token by token, so that they are
known far better than the losses themselves. INT4 checkpoints are made and kept in .cache/perf.

    python perf/bench_quantization.py --text CORPUS/held_out.xz   # docs/demo-model.md makes it
                                           # writes perf/results/quantization.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from bench_engine import CACHE
from numpy.typing import NDArray
from record import save_result

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.calibrate.quantize import GROUP_SIZES, QuantizeOptions, quantize_checkpoint
from deepseek_triton.evaluate.perplexity import (
    Scores,
    agreement,
    continue_greedily,
    cut_windows,
    score_windows,
)
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.text.documents import standard_library

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build_scripts"))
from evaluate import NEW_TOKENS, PROMPT_TOKENS, read_tokens  # noqa: E402

DEMO = ROOT / "models" / "demo"
PRECISIONS = ("fp32", "fp16", "bf16")
INT4 = tuple(
    QuantizeOptions(method, group_size, symmetric)
    for method, group_size, symmetric in product(("rtn", "awq"), GROUP_SIZES[::-1], (False, True))
)


def quantized(options: QuantizeOptions) -> Path:
    """Return the demo model's checkpoint in INT4, made if it is not there."""
    zeros = "symmetric" if options.symmetric else "zero-points"
    out = CACHE / f"demo-{options.method}-{options.group_size}-{zeros}"
    if not out.is_dir():
        quantize_checkpoint(DEMO, out, options, standard_library())
    return out


def measure(
    checkpoint: Path, precision: str, windows: NDArray[np.int32]
) -> tuple[int, Scores, NDArray[np.int32]]:
    """Return the engine's bytes, its scores of `windows` and its continuations of their heads."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        engine = Path(folder) / "engine"
        manifest = build_engine(checkpoint, engine, precision=precision)
        longest = max(windows.shape[1], PROMPT_TOKENS + NEW_TOKENS)
        blocks = manifest.kv_cache.blocks_for(longest)
        with closing(OnnxRuntimeRunner.load(engine, num_blocks=blocks)) as runner:
            scores = score_windows(runner, windows, f"{checkpoint.name} {precision}")
            outputs = continue_greedily(runner, windows[:, :PROMPT_TOKENS], NEW_TOKENS)
        return sum(entry.size for entry in manifest.files), scores, outputs


def main() -> None:
    """Measure every variant, print it and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, help="held-out text or tokens, as evaluate takes")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens predicted in a window")
    args = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    windows = cut_windows(read_tokens(DEMO, args.text), args.length, args.windows)
    variants = [(DEMO, precision) for precision in PRECISIONS]
    variants += [(quantized(options), "fp32") for options in INT4]
    measured: dict[str, Any] = {"tokens": windows[:, 1:].size}
    reference: tuple[Scores, NDArray[np.int32]] | None = None
    for checkpoint, precision in variants:
        size, scores, outputs = measure(checkpoint, precision, windows)
        reference = reference or (scores, outputs)
        over = Scores(scores.log_probs - reference[0].log_probs, scores.best_ids)
        name = precision if checkpoint == DEMO else checkpoint.name.removeprefix("demo-")
        measured[name] = {
            "checkpoint_mb": round(_size(checkpoint) / 1e6, 2),
            "engine_mb": round(size / 1e6, 2),
            "loss_nats_per_token": round(scores.loss, 4),
            "over_fp32": round(over.loss, 4),
            "standard_error_of_difference": round(over.standard_error, 4),
            "same_next_token": round(agreement(scores, reference[0]), 4),
            "same_greedy_tokens": round(float((outputs == reference[1]).mean()), 4),
        }
        print(name, measured[name], flush=True)
    print(save_result("quantization", measured))


def _size(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


if __name__ == "__main__":
    main()
