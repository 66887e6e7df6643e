"""An engine directory of a real shape with random weights: what a server can load."""

from __future__ import annotations

import itertools
import time
from importlib import resources
from pathlib import Path

import numpy as np
import onnx
import torch
from random_model import Shapes

from deepseek_triton.build.engine_dir import create_engine_dir, describe_files
from deepseek_triton.build.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CheckpointOrigin,
    Manifest,
)
from deepseek_triton.build.targets import find_target
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.export.functions import OPSET
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.portable import MODEL_FILE, WEIGHTS_FILE, write_graph
from deepseek_triton.export.precision import find_precision
from deepseek_triton.kv_cache.spec import KVCacheSpec

BLOCK_SIZE = 64
_CHUNK = 64 << 20  # numbers made at a time
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_random_engine(folder: Path, spec: ModelSpec, precision: str = "bf16") -> dict[str, float]:
    """Write the engine directory; return how long weights and checksums took, in seconds.

    All weights are drawn from one normal distribution: fast is what counts here.
    """
    started = time.perf_counter()
    with create_engine_dir(folder) as temporary:
        graph = GraphBuilder(find_precision(precision))
        write_graph(graph, spec, Shapes(), BLOCK_SIZE)
        onnx.save_model(graph.model(spec.architecture, WEIGHTS_FILE), temporary / MODEL_FILE)
        _write_noise(temporary / WEIGHTS_FILE, graph.weights.nbytes, precision)
        data = resources.files("deepseek_triton.checkpoint") / "data"
        for name in TOKENIZER_FILES:
            (temporary / name).write_bytes((data / name).read_bytes())
        written = time.perf_counter()
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            target="cuda",
            precision=precision,
            model=spec,
            kv_cache=KVCacheSpec(
                num_layers=spec.num_layers,
                width=spec.attention.pool_width,
                pools=spec.attention.pools,
                block_size=BLOCK_SIZE,
                dtype=np.dtype(find_precision(precision).dtype).name,
                itemsize=np.dtype(find_precision(precision).dtype).itemsize,
            ),
            max_context_len=4096,
            opset=OPSET,
            versions=find_target("cuda", precision).versions(),
            checkpoint=CheckpointOrigin("random", ""),
            model_file=MODEL_FILE,
            draft_file=None,
            tokenizer_files=TOKENIZER_FILES,
            files=describe_files(temporary),
        )
        (temporary / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return {"write_s": written - started, "hash_s": time.perf_counter() - written}


def _write_noise(path: Path, nbytes: int, precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chunks = [
        torch.randn(_CHUNK, device=device).mul_(0.02).to(dtype).cpu().view(torch.uint8).numpy()
        for _ in range(4)  # in turn: making more would take longer than writing
    ]
    with path.open("wb") as file:
        left = nbytes
        for chunk in itertools.cycle(chunks):
            part = chunk[:left]
            file.write(part.data)
            left -= len(part)
            if not left:
                return
