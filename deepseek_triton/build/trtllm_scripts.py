"""What turns a TensorRT-LLM checkpoint into a server, inside NVIDIA's containers.

build.sh compiles the engines with TensorRT-LLM 1.2's own trtllm-build, serve.sh fills the Triton
models that the container carries and starts them, model.yaml is for the LLM API of 1.3 and later.
Options and template names: TensorRT-LLM 1.2's commands/build.py and triton_backend/.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.parallel import Parallel

BUILD_SCRIPT, SERVE_SCRIPT, LLM_API_FILE = "build.sh", "serve.sh", "model.yaml"
_MAX_QUEUE = 1024


def build_script(dtype: str, limits: CallLimits, parallel: Parallel) -> str:
    """Return build.sh: one engine a rank, into engines/ beside it."""
    options: Mapping[str, object] = {
        "--gpt_attention_plugin": dtype,
        "--gemm_plugin": dtype,
        "--kv_cache_type": "paged",
        "--use_paged_context_fmha": "enable",
        "--max_batch_size": limits.max_batch_size,
        "--max_input_len": limits.max_context_len,
        "--max_seq_len": limits.max_context_len,
        "--max_num_tokens": max(
            limits.max_prefill_rows * limits.max_chunk_len, limits.max_batch_size
        ),
        "--workers": parallel.world_size,
    }
    lines = " ".join(f"{name} {shlex.quote(str(value))}" for name, value in options.items())
    return f"""#!/bin/bash
# Compile this checkpoint with TensorRT-LLM 1.2 (Triton containers 26.04 to 26.07), on the GPUs that
# will run it.
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
trtllm-build --checkpoint_dir "$here" --output_dir "$here/engines" {lines}
"""


def template_values(limits: CallLimits) -> dict[str, dict[str, str]]:
    """Return by model what fills its config.pbtxt; $here is the folder of the script."""
    batch = str(limits.max_batch_size)
    tokenizer = {"tokenizer_dir": "$here", "triton_max_batch_size": batch}
    return {
        "preprocessing": tokenizer | {"preprocessing_instance_count": "1"},
        "postprocessing": tokenizer
        | {"postprocessing_instance_count": "1", "skip_special_tokens": "true"},
        "ensemble": {"triton_max_batch_size": batch, "logits_datatype": "TYPE_FP32"},
        "tensorrt_llm": {
            "triton_backend": "tensorrtllm",
            "triton_max_batch_size": batch,
            "decoupled_mode": "true",
            "engine_dir": "$here/engines",
            "batching_strategy": "inflight_fused_batching",
            "max_queue_delay_microseconds": "0",
            "max_queue_size": str(_MAX_QUEUE),
            "kv_cache_free_gpu_mem_fraction": "0.9",
            "enable_kv_cache_reuse": "true",
            "enable_chunked_context": "true",
            "exclude_input_in_output": "true",
            "encoder_input_features_data_type": "TYPE_FP16",
            "logits_datatype": "TYPE_FP32",
        },
    }


def serve_script(limits: CallLimits, parallel: Parallel) -> str:
    """Return serve.sh: the container's own Triton models, filled, on the default ports."""
    fills = "\n".join(
        f'python3 /app/tools/fill_template.py -i "$models/{model}/config.pbtxt" '
        + '"'
        + ",".join(f"{name}:{value}" for name, value in values.items())
        + '"'
        for model, values in template_values(limits).items()
    )
    names = " ".join(template_values(limits))
    return f"""#!/bin/bash
# Serve the engines that build.sh made, in the same container.
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
models="$here/model_repository"
rm -rf "$models" && mkdir "$models"
for model in {names}; do
    cp -r "/app/all_models/inflight_batcher_llm/$model" "$models/"
done
{fills}
exec python3 /app/scripts/launch_triton_server.py --world_size {parallel.world_size} \
    --model_repo "$models"
"""


def llm_api_config(checkpoint_dir: Path, limits: CallLimits, parallel: Parallel) -> str:
    """Return model.yaml for the LLM API's Triton model; it reads the Hugging Face checkpoint."""
    tokens = max(limits.max_prefill_rows * limits.max_chunk_len, limits.max_batch_size)
    return f"""# For TensorRT-LLM 1.3 or later: all_models/llmapi/tensorrt_llm/1/model.yaml.
model: {_quoted(str(checkpoint_dir))}
backend: pytorch
tensor_parallel_size: {parallel.tp}
pipeline_parallel_size: {parallel.pp}
moe_expert_parallel_size: {parallel.ep}
max_batch_size: {limits.max_batch_size}
max_num_tokens: {tokens}
max_seq_len: {limits.max_context_len}
kv_cache_config:
  enable_block_reuse: true
  free_gpu_memory_fraction: 0.9
triton_config:
  max_batch_size: 0
  decoupled: true
"""


def _quoted(text: str) -> str:
    """A YAML string in single quotes."""
    return "'" + text.replace("'", "''") + "'"
