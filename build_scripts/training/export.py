"""Between the training model and a Hugging Face checkpoint as DeepSeek lays it out."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import DemoConfig
from .model import DemoModel

_STACKED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # of a layer with experts
_SHARD_BYTES = 16_000_000

# The chat template and special tokens are those of every checkpoint that this project writes.
_TOKENIZER_CONFIG = (
    Path(__file__).parents[2] / "deepseek_triton" / "checkpoint" / "data" / "tokenizer_config.json"
)


def to_checkpoint(model: DemoModel) -> dict[str, Tensor]:
    """Return the checkpoint's tensors: bfloat16, the routers' biases float32.

    The multi-token-prediction layer repeats embedding and head, as DeepSeek's files do.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        value = value if name.endswith("correction_bias") else value.bfloat16()
        for part, tensor in _checkpoint_parts(_file_name(name, model.config), value):
            tensors[part] = tensor.contiguous()
    extra = f"model.layers.{model.config.num_hidden_layers}"
    tensors[f"{extra}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{extra}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def from_checkpoint(folder: Path) -> DemoModel:
    """Load an exported model in float32, on the CPU, in evaluation mode."""
    config = DemoConfig.from_json(json.loads((folder / "config.json").read_text()))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    model = DemoModel(config)
    state = {}
    for name, value in model.state_dict().items():
        stored = _file_name(name, config)
        if not name.endswith(_STACKED):
            state[name] = tensors[stored].float()
            continue
        experts = [tensors[part] for part, _ in _checkpoint_parts(stored, value)]
        stacked = torch.stack(experts).float()
        state[name] = stacked.mT if stored.endswith("down_proj") else stacked
    model.load_state_dict(state)
    return model.eval()


def write_checkpoint(model: DemoModel, tokenizer: Path, out: Path) -> None:
    """Write config, weights in shards, tokenizer and SHA256SUMS to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    config = model.config.to_json()
    _write_json(out / "config.json", config)
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _write_json(out / "generation_config.json", {"_from_model_config": True, **ids})
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    chat = json.loads(_TOKENIZER_CONFIG.read_text(encoding="utf-8"))
    chat["model_max_length"] = model.config.max_position_embeddings
    _write_json(out / "tokenizer_config.json", chat)
    _write_shards(to_checkpoint(model), out)
    files = sorted(path for path in out.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(sums))


def _file_name(name: str, config: DemoConfig) -> str:
    """The checkpoint's name of a parameter of the training model."""
    if name.startswith("lm_head."):
        return name
    return "model." + name.replace("mtp.", f"layers.{config.num_hidden_layers}.", 1)


def _checkpoint_parts(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor under its name, or a stack of experts one by one."""
    if not name.endswith(_STACKED):
        return [(name, value)]
    layer, _, projection = name.rpartition(".")
    experts = value.mT if projection == "down_proj" else value
    return [
        (f"{layer}.experts.{index}.{projection}.weight", expert)
        for index, expert in enumerate(experts)
    ]


def _write_shards(tensors: dict[str, Tensor], out: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    _write_json(out / "model.safetensors.index.json", index)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
