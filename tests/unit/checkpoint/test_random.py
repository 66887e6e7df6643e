from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepseek_triton.checkpoint import random as random_checkpoint
from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.names import validate_checkpoint
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.random import write_random_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.errors import BuildError, CheckpointError, ConfigError
from deepseek_triton.quantize.checkpoint import open_checkpoint
from deepseek_triton.text.tokenizer import Tokenizer

SCRIPT = Path(__file__).parents[3] / "build_scripts" / "make_checkpoint.py"
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2}


def small(arch: str = "v2-lite") -> dict[str, Any]:
    return preset_config(arch) | SMALL


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("arch", PRESETS)
def test_what_is_written_is_a_whole_valid_checkpoint(tmp_path: Path, arch: str) -> None:
    folder = write_random_checkpoint(tmp_path / "out", small(arch))
    spec = read_model_spec(folder)
    validate_checkpoint(CheckpointReader(folder), spec)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == spec.vocab_size == random_checkpoint.TOKENIZER_VOCAB_SIZE
    assert tokenizer.bos_token_id == spec.bos_token_id
    assert spec.eos_token_ids == (tokenizer.eos_token_id,)
    assert list(tmp_path.iterdir()) == [folder]


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    first, again, other = (
        write_random_checkpoint(tmp_path / name, small(), seed)
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert digests(first) == digests(again)
    assert digests(first)["model.safetensors"] != digests(other)["model.safetensors"]


def test_the_bytes_are_the_same_on_every_machine(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "out", small(), 7)
    weights = CheckpointReader(folder).read("model.layers.1.self_attn.o_proj.weight")
    digest = hashlib.sha256(weights.tobytes()).hexdigest()
    assert digest == "50e1b2ecdc832917cc9a5a70070ef58072548d6ce0d28e9e5c10b80e9eef1ead"


def test_shards_and_dtype_do_not_change_the_values(tmp_path: Path) -> None:
    whole = CheckpointReader(write_random_checkpoint(tmp_path / "whole", small("v3")))
    folder = write_random_checkpoint(tmp_path / "cut", small("v3"), num_shards=3, dtype="bfloat16")
    cut = CheckpointReader(folder)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert cut.names() == whole.names()
    for name in whole.names():
        expected = whole.read(name).astype(cut.dtype(name))
        np.testing.assert_array_equal(cut.read(name), expected)
    assert cut.dtype("lm_head.weight").name == "bfloat16"
    assert cut.dtype("model.layers.1.mlp.gate.e_score_correction_bias") == np.float32


def test_weights_are_spread_as_the_recipe_says(tmp_path: Path) -> None:
    reader = CheckpointReader(write_random_checkpoint(tmp_path / "out", small("v3")))
    embedding = reader.read("model.embed_tokens.weight")
    assert abs(embedding.mean()) < 0.01
    assert embedding.std() == pytest.approx(1.0, rel=0.01)
    head = reader.read("lm_head.weight")
    assert head.std() == pytest.approx(2 / np.sqrt(32), rel=0.01)
    assert abs(np.corrcoef(embedding.ravel(), head.ravel())[0, 1]) < 0.01
    assert reader.read("model.norm.weight").mean() == pytest.approx(1.0, abs=0.1)
    bias = reader.read("model.layers.1.mlp.gate.e_score_correction_bias")
    assert np.unique(bias).size == bias.size


def test_the_same_call_again_keeps_the_folder(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "out", small())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    write_random_checkpoint(folder, small())
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_another_product_is_replaced_only_when_asked(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "out", small(), 0)
    with pytest.raises(CheckpointError, match="--overwrite"):
        write_random_checkpoint(folder, small(), 1)
    write_random_checkpoint(folder, small(), 1, overwrite=True)
    fresh = write_random_checkpoint(tmp_path / "fresh", small(), 1)
    assert digests(folder) == digests(fresh)


def test_a_damaged_product_is_not_taken_for_the_real_one(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "out", small())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="--overwrite"):
        write_random_checkpoint(folder, small())


def test_a_foreign_folder_is_never_touched(tmp_path: Path) -> None:
    precious = tmp_path / "out" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    with pytest.raises(CheckpointError, match="not made by this command"):
        write_random_checkpoint(precious.parent, small(), overwrite=True)
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError(28, "No space left")])
def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: Any
) -> None:
    def fail(*_: object) -> None:
        raise interruption

    monkeypatch.setattr(random_checkpoint, "_write_tensor", fail)
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        write_random_checkpoint(tmp_path / "out", small())
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_random_checkpoint(tmp_path / "file" / "out", small())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be at least 0"),
        ({"num_shards": 0}, "num_shards must be at least 1"),
        ({"dtype": "int4"}, "dtype 'int4' is unknown"),
        ({"config": {"vocab_size": 100}}, "vocab_size must be at least 4096"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    config = small() | arguments.pop("config", {})
    with pytest.raises(ConfigError, match=message):
        write_random_checkpoint(tmp_path / "out", config, **arguments)


def test_a_published_config_gets_our_tokenizers_ids_and_plain_weights(tmp_path: Path) -> None:
    published = small("v3") | {
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "torch_dtype": "float8",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    folder = write_random_checkpoint(tmp_path / "out", published, dtype="bfloat16")
    spec = read_model_spec(folder)
    validate_checkpoint(open_checkpoint(folder, spec), spec)
    tokenizer = Tokenizer.load(folder)
    assert (spec.bos_token_id, spec.eos_token_ids) == (
        tokenizer.bos_token_id,
        (tokenizer.eos_token_id,),
    )


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(BuildError, match="GB are to be written"):
        write_random_checkpoint(tmp_path / "out", small())
    assert list(tmp_path.iterdir()) == []


def test_a_large_checkpoint_is_streamed(tmp_path: Path) -> None:
    """The writer's memory does not grow with the checkpoint: 100 MB are written, few are held."""
    code = (
        "import resource, sys\n"
        "from deepseek_triton.checkpoint.presets import preset_config\n"
        "from deepseek_triton.checkpoint.random import write_random_checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "write_random_checkpoint(sys.argv[1], preset_config('v2-lite') | {'vocab_size': 100000})\n"
        "print(peak() - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, check=True
    )
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 100e6
    assert int(run.stdout) * 1024 < 30e6


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_the_command_writes_a_checkpoint(tmp_path: Path) -> None:
    run = run_script("--out", str(tmp_path / "out"), "--arch", "v3", "--seed", "5")
    assert run.returncode == 0, run.stderr
    assert str(tmp_path / "out") in run.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["random_weights"]["seed"] == 5


def test_the_command_takes_a_published_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small("v2") | {"vocab_size": 5000}))
    out = tmp_path / "out"
    run = run_script(
        *("--out", str(out), "--config", str(config), "--dtype", "bfloat16", "--shards", "2")
    )
    assert run.returncode == 0, run.stderr
    assert read_model_spec(out).vocab_size == 5000
    assert len(list(out.glob("model-0000?-of-00002.safetensors"))) == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ("--out", "x", "--arch", "v3", "--config", "c.json"),
            2,
            "error: CONFIG (--config): takes the place of ARCH (--arch)",
        ),
        (("--out", "x", "--config", "no.json"), 1, "error: no.json: cannot be read"),
        (("--out", ""), 2, "error: OUT (--out): empty; make checkpoint OUT=dir"),
        (("--out", "x", "--arch", "v9"), 1, "error: ARCH: 'v9' is unknown"),
        (("--out", "/proc/nope/out"), 1, "error: /proc/nope/out: the folder cannot be written"),
    ],
)
def test_the_command_fails_in_one_line(
    arguments: tuple[str, ...], status: int, message: str
) -> None:
    run = run_script(*arguments)
    assert run.returncode == status
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parity
@pytest.mark.parametrize("arch", sorted({*PRESETS} - {"moe"}))  # which transformers lacks
def test_transformers_loads_it_and_writes_what_we_read(tmp_path: Path, arch: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = write_random_checkpoint(tmp_path / "out", small(arch), num_shards=2)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    spec = read_model_spec(folder)
    scaling = model.model.layers[0].self_attn.scaling
    assert scaling == pytest.approx(spec.attention.softmax_scale, rel=1e-12)
    model.save_pretrained(tmp_path / "saved", max_shard_size="500KB")
    ours, theirs = CheckpointReader(folder), CheckpointReader(tmp_path / "saved")
    assert read_model_spec(tmp_path / "saved") == spec
    assert set(theirs.names()) == set(ours.names())
    for name in ours.names():
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))


@pytest.mark.parity
def test_the_chat_template_writes_deepseeks_form(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_random_checkpoint(tmp_path / "out", small())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "2+2?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>1+1?<｜Assistant｜>2<｜end▁of▁sentence｜>"
        "<｜User｜>2+2?<｜Assistant｜>"
    )
    assert Tokenizer.load(folder).encode(text).count(0) == 1
