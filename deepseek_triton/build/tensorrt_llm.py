"""Target "tensorrt_llm": a checkpoint in NVIDIA's form, and the commands that compile and serve it.

Not made from ONNX: TensorRT-LLM brings its own layers, scheduler and cache. The engine directory
is its checkpoint folder (config.json and a safetensors file a rank) with the tokenizer and scripts.
"""

from __future__ import annotations

import json
from pathlib import Path

from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.parallel import Parallel
from deepseek_triton.build.trtllm_config import DTYPES, check_supported, checkpoint_config
from deepseek_triton.build.trtllm_scripts import (
    BUILD_SCRIPT,
    LLM_API_FILE,
    SERVE_SCRIPT,
    build_script,
    llm_api_config,
    serve_script,
)
from deepseek_triton.build.trtllm_weights import RankWeights
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.checkpoint.writer import require_space, write_safetensors
from deepseek_triton.export.precision import find_precision

RELEASE = "1.2.1"
"""The TensorRT-LLM release whose checkpoint form is written: the last that has engines."""

CONFIG_FILE = "config.json"


def write_checkpoint(
    spec: ModelSpec,
    reader: CheckpointReader,
    checkpoint_dir: Path,
    folder: Path,
    precision: str,
    *,
    limits: CallLimits,
    parallel: Parallel,
) -> Path:
    """Fill `folder`; return the path of its config.json. Memory stays near one checkpoint tensor.

    Raises ConfigError for a model or a number of ranks that TensorRT-LLM 1.2 cannot run,
    CheckpointError for a missing or misshapen tensor, OSError when the folder cannot be written.
    """
    check_supported(spec)
    parallel.check(spec)
    dtype = find_precision(precision).dtype
    config = checkpoint_config(spec, precision, parallel, reader.int4_group_size())
    ranks = [
        RankWeights(spec, reader, parallel, rank, dtype).tensors()
        for rank in range(parallel.world_size)
    ]
    require_space(folder.parent, sum(tensor.nbytes for tensors in ranks for tensor in tensors))
    for rank, tensors in enumerate(ranks):
        write_safetensors(folder / f"rank{rank}.safetensors", tensors, reader.release)
    for name, text in (
        (CONFIG_FILE, json.dumps(config, indent=1) + "\n"),
        (BUILD_SCRIPT, build_script(DTYPES[precision], limits, parallel)),
        (SERVE_SCRIPT, serve_script(limits, parallel)),
        (LLM_API_FILE, llm_api_config(checkpoint_dir.resolve(), limits, parallel)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            (folder / name).chmod(0o755)
    return folder / CONFIG_FILE
