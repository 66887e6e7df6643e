"""llama.cpp's side of bench_llama_cpp.py, for a Python that has llama-cpp-python: no use by itself.

    convert CHECKPOINT F32 Q4_0    # two GGUF files of a DeepSeek-V2 checkpoint in float32
    score GGUF < {"prompts": …}    # log probs of each prompt's own tokens, float32 KV
    version
    decode GGUF < {"prompts": …, "warmup": n, "timed": n, "threads": n}

Each prints JSON. Q4_0 is what llama.cpp's own quantiser makes of the float32 file by default.
"""

from __future__ import annotations

import collections
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors import safe_open

ERROR_LEVEL = 4  # ggml_log_level
F32_KV, DEFAULT_KV = 0, 1  # ggml types; llama.cpp's default is float16
Q4_0 = 2  # llama_ftype
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


class Tensors:
    """The tensors of a checkpoint by name, float32."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(path, "np") for path in sorted(folder.glob("*.safetensors"))]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> Any:
        return self._where[name].get_tensor(name)


def convert(checkpoint: Path, plain: Path, quantized: Path) -> None:
    """Write both files, unless they are there."""
    if quantized.exists():
        return
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(plain, "deepseek2")
    add_metadata(writer, config)
    tensors = Tensors(checkpoint)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    writer.add_tensor("output.weight", tensors["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        add_layer(writer, tensors, layer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = Q4_0
    unfinished = quantized.with_suffix(".partial")
    status = llama_cpp.llama_model_quantize(
        str(plain).encode(), str(unfinished).encode(), ctypes.byref(options)
    )
    if status:
        sys.exit(f"llama.cpp could not quantise {plain}: status {status}")
    unfinished.rename(quantized)


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Say the model's shape in llama.cpp's names: latent attention is one group of wide heads."""
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def add_layer(
    writer: gguf.GGUFWriter, tensors: Tensors, layer: int, config: dict[str, Any]
) -> None:
    """Add one layer: experts stacked, kv_b_proj cut into keys (transposed) and values by head."""
    ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
    for name, new_name in LAYER_NAMES.items():
        if f"{ours}.{name}.weight" in tensors:
            writer.add_tensor(f"{theirs}.{new_name}.weight", tensors[f"{ours}.{name}.weight"])
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = tensors[f"{ours}.self_attn.kv_b_proj.weight"]
    both = both.reshape(heads, nope + config["v_head_dim"], config["kv_lora_rank"])
    keys = np.ascontiguousarray(both[:, :nope].transpose(0, 2, 1))
    writer.add_tensor(f"{theirs}.attn_k_b.weight", keys)
    writer.add_tensor(f"{theirs}.attn_v_b.weight", np.ascontiguousarray(both[:, nope:]))
    if f"{ours}.mlp.gate.weight" not in tensors:
        return
    experts = range(config["n_routed_experts"])
    for part in ("gate", "up", "down"):
        names = [f"{ours}.mlp.experts.{expert}.{part}_proj.weight" for expert in experts]
        stacked = np.stack([tensors[name] for name in names])
        writer.add_tensor(f"{theirs}.ffn_{part}_exps.weight", stacked)


def stored_bytes(path: Path) -> dict[str, dict[str, int]]:
    """Return how many tensors of which type a file holds, and their bytes.

    Tensors of no layer (embedding, output) are listed by name too.
    """
    count: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in gguf.GGUFReader(path).tensors:
        key = tensor.tensor_type.name
        for name in (key, f"{tensor.name} {key}") if "blk" not in tensor.name else (key,):
            count[name]["tensors"] += 1
            count[name]["bytes"] += int(tensor.n_bytes)
    return dict(count)


class Model:
    """A loaded file with room for `sequences` of `length` tokens each."""

    def __init__(
        self, path: Path, sequences: int, length: int, threads: int, *, exact: bool = False
    ) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = sequences * length, sequences
        options.n_batch = options.n_ubatch = max(512, sequences)
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = F32_KV if exact else DEFAULT_KV
        options.flash_attn_type = 0 if exact else -1  # off, or where llama.cpp thinks it suits
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            sys.exit(f"llama.cpp does not take {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, sequence, logits wanted) of each row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            sys.exit(f"llama_decode: status {status}")

    def logits(self, index: int) -> Any:
        """Return the logits [vocabulary] of row `index`, valid until the next run."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, (self._vocab_size,))


def score(path: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Return log probs of each prompt's tokens but the first, and the likeliest in their places.

    The KV cache is float32, and flash attention is off: what differs is rounding of weights alone.
    """
    model = Model(path, len(job["prompts"]), len(job["prompts"][0]), job["threads"], exact=True)
    log_probs, best = [], []
    for sequence, prompt in enumerate(job["prompts"]):
        model.run([(token, at, sequence, True) for at, token in enumerate(prompt[:-1])])
        for at, token in enumerate(prompt[1:]):
            logits = model.logits(at).astype(np.float64)
            log_probs.append(float(logits[token] - np.logaddexp.reduce(logits)))
            best.append(int(logits.argmax()))
    return {"log_probs": log_probs, "best_ids": best}


def decode(path: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each timed greedy step of all prompts at once, argmax included."""
    prompts, total = job["prompts"], job["warmup"] + job["timed"]
    room = len(prompts[0]) + total
    model = Model(path, len(prompts), room, job["threads"])
    tokens = []
    for sequence, prompt in enumerate(prompts):
        last = len(prompt) - 1
        model.run([(token, at, sequence, at == last) for at, token in enumerate(prompt)])
        tokens.append(int(model.logits(last).argmax()))
    steps = []
    for step in range(total):
        started = time.perf_counter()
        at = len(prompts[0]) + step
        model.run([(token, at, sequence, True) for sequence, token in enumerate(tokens)])
        tokens = [int(model.logits(row).argmax()) for row in range(len(tokens))]
        if step >= job["warmup"]:
            steps.append(time.perf_counter() - started)
    return {"steps": steps}


@llama_cpp.llama_log_callback
def log_errors(level: int, text: bytes, data: Any) -> None:
    """Keep llama.cpp's many lines off the terminal, but for its errors."""
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


def main(arguments: list[str]) -> None:
    """Do what the first argument says."""
    verb, *paths = arguments
    llama_cpp.llama_log_set(log_errors, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    if verb == "convert":
        convert(*map(Path, paths))
        print(json.dumps(stored_bytes(Path(paths[2]))))
        return
    if verb == "version":
        print(json.dumps(llama_cpp.__version__))
        return
    work = {"score": score, "decode": decode}[verb]
    print(json.dumps(work(Path(paths[0]), json.load(sys.stdin))))


if __name__ == "__main__":
    main(sys.argv[1:])
