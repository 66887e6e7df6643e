"""An engine directory of a real shape with random weights: what a server can load."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

import onnx
import torch
from random_model import Shapes

from deepseek_triton.build.engine_dir import EngineDir, create_engine_dir, describe_files
from deepseek_triton.build.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CheckpointOrigin,
    Manifest,
)
from deepseek_triton.build.onnxruntime import build_cuda
from deepseek_triton.build.pipeline import kv_cache_spec
from deepseek_triton.build.targets import find_target
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.export.functions import OPSET
from deepseek_triton.export.graph import GraphBuilder
from deepseek_triton.export.portable import MODEL_FILE, WEIGHTS_FILE, write_graph
from deepseek_triton.export.precision import find_precision

BLOCK_SIZE, ONNXRUNTIME_BLOCK_SIZE = 64, 16
_CHUNK = 64 << 20  # numbers made at a time
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_random_engine(folder: Path, spec: ModelSpec, precision: str = "bf16") -> dict[str, float]:
    """Write an engine directory of the target cuda; return how long its parts took, in seconds.

    All weights are drawn from one normal distribution: fast is what counts here.
    """
    started = time.perf_counter()
    with create_engine_dir(folder) as temporary:
        _write_model(temporary, spec, precision, BLOCK_SIZE)
        data = resources.files("deepseek_triton.checkpoint") / "data"
        for name in TOKENIZER_FILES:
            (temporary / name).write_bytes((data / name).read_bytes())
        written = time.perf_counter()
        manifest = replace(
            _manifest(spec, precision, BLOCK_SIZE),
            tokenizer_files=TOKENIZER_FILES,
            files=describe_files(temporary),
        )
        (temporary / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return {"write_s": written - started, "hash_s": time.perf_counter() - written}


def onnxruntime_engine(folder: Path, spec: ModelSpec, precision: str) -> EngineDir:
    """Write the model of an engine for ONNX Runtime's CUDA provider; nothing verifies it."""
    folder.mkdir()
    _write_model(folder, spec, precision, ONNXRUNTIME_BLOCK_SIZE)
    build_cuda(folder / MODEL_FILE)
    manifest = _manifest(spec, precision, ONNXRUNTIME_BLOCK_SIZE)
    return EngineDir(folder, replace(manifest, target="onnxruntime", provider="cuda"))


def _write_model(folder: Path, spec: ModelSpec, precision: str, block_size: int) -> None:
    graph = GraphBuilder(find_precision(precision))
    write_graph(graph, spec, Shapes(), block_size)
    onnx.save_model(graph.model(spec.architecture, WEIGHTS_FILE), folder / MODEL_FILE)
    _write_noise(folder / WEIGHTS_FILE, graph.weights.nbytes, precision)


def _manifest(spec: ModelSpec, precision: str, block_size: int) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        target="cuda",
        precision=precision,
        model=spec,
        kv_cache=kv_cache_spec(spec, precision, block_size, False),
        max_context_len=4096,
        opset=OPSET,
        versions=find_target("cuda", precision).versions(),
        checkpoint=CheckpointOrigin("random", ""),
        model_file=MODEL_FILE,
        draft_file=None,
        tokenizer_files=(),
        files=(),
    )


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
