"""What the demo model loses when its heads see a part of the context: all heads, or some of them.

All heads keep the most recent n tokens and the first 4. Then head by head: each is cut to 64
tokens alone, on calibration text, and the heads that lose least are cut together. Losses are on
held-out text (docs/demo-model.md: boltons was never trained on), calibration is on other text.

    pip download --no-deps boltons==25.0.0
    python perf/bench_truncation.py --text boltons-25.0.0-py3-none-any.whl
                                           # writes perf/results/truncation.json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench_engine import CACHE
from numpy.typing import NDArray
from record import save_result
from tqdm import tqdm

from deepseek_triton.build.engine_dir import EngineDir, load_engine_dir
from deepseek_triton.evaluate.perplexity import cut_windows, score_windows
from deepseek_triton.evaluate.truncation import truncate
from deepseek_triton.runner.onnxruntime import OnnxRuntimeRunner
from deepseek_triton.server.engine_cache import ensure_engine
from deepseek_triton.text.documents import read_documents, standard_library, token_stream
from deepseek_triton.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
SINK = 4
SHORT = 64  # tokens that a head keeps when it is cut
LENGTH = 1024  # tokens of a window
WINDOWS = 12
CALIBRATION_WINDOWS = 3


def loss(engine: EngineDir, windows: NDArray[np.int32]) -> float:
    """Nats a token."""
    blocks = engine.manifest.kv_cache.blocks_for(LENGTH)
    runner = OnnxRuntimeRunner(engine, num_blocks=blocks)
    try:
        return score_windows(runner, windows, engine.path.name).loss
    finally:
        runner.close()


def cut_loss(engine: EngineDir, windows: NDArray[np.int32], retained: NDArray[np.int32]) -> float:
    """Nats a token when head h of layer l keeps retained[l, h] tokens."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        return loss(truncate(engine, Path(folder), retained, SINK), windows)


def main() -> None:
    """Measure, print and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, help="held-out text: file, folder or wheel")
    text = Path(parser.parse_args().text)
    folder = CACHE / "demo-plain"
    ensure_engine(ROOT / "models" / "demo", folder)
    engine = load_engine_dir(folder)
    tokenizer = Tokenizer.load(folder)
    held_out = cut_windows(token_stream(tokenizer, read_documents(text)), LENGTH, WINDOWS)
    other = token_stream(tokenizer, standard_library(), 1 << 17)
    calibration = cut_windows(other, LENGTH, CALIBRATION_WINDOWS)
    model = engine.manifest.model
    full = np.full((model.num_layers, model.attention.num_heads), LENGTH, np.int32)

    whole = loss(engine, held_out)
    measured: dict[str, Any] = {"text": text.name, "window": LENGTH, "sink": SINK, "loss": whole}
    measured["all_heads"] = {
        str(n): cut_loss(engine, held_out, np.full_like(full, n)) - whole
        for n in (512, 256, 128, 64)
    }
    base, cost = loss(engine, calibration), np.zeros(full.shape)
    for layer, head in tqdm(list(np.ndindex(full.shape)), desc="heads", disable=None):
        alone = full.copy()
        alone[layer, head] = SHORT
        cost[layer, head] = cut_loss(engine, calibration, alone) - base
    order = np.argsort(cost, axis=None)
    measured["cost_of_each_head_alone"] = cost.round(5).tolist()
    measured["cheapest_heads"] = {}
    for share in (0.25, 0.5, 0.75):
        some = full.copy()
        some.reshape(-1)[order[: int(share * full.size)]] = SHORT
        measured["cheapest_heads"][f"{share:.0%}"] = cut_loss(engine, held_out, some) - whole
    print({key: value for key, value in measured.items() if key != "cost_of_each_head_alone"})
    print(save_result("truncation", measured))


if __name__ == "__main__":
    main()
