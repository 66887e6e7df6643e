"""The portable ONNX model against transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnx.inliner
import pytest

from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.names import validate_checkpoint
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.export.portable import WEIGHTS_FILE, export_portable
from tests.parity.cases import CASES, VOCAB_SIZE, Reference
from tests.parity.driver import PortableModel, check_parity, make_workload

pytestmark = pytest.mark.parity

Exported = tuple[Reference, Path]
WORKLOAD = make_workload(VOCAB_SIZE)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Save and export a case once for all tests of this file."""

    @cache
    def export(name: str) -> Exported:
        folder = tmp_path_factory.mktemp(name)
        reference = CASES[name].save(folder / "checkpoint")
        spec = read_model_spec(folder / "checkpoint")
        reader = CheckpointReader(folder / "checkpoint")
        validate_checkpoint(reader, spec)
        path = export_portable(spec, reader, folder / "onnx", block_size=WORKLOAD.block_size)
        return reference, path

    return export


def test_the_sharded_case_is_sharded(exported: Callable[[str], Exported]) -> None:
    _, path = exported("v2_sharded")
    assert len(list(path.parents[1].glob("checkpoint/*.safetensors"))) > 1


@pytest.mark.parametrize("name", CASES)
def test_every_layer_and_logits_equal_the_reference(
    name: str, exported: Callable[[str], Exported]
) -> None:
    reference, path = exported(name)
    model = PortableModel(path, WORKLOAD)
    check_parity(reference, WORKLOAD, model.forward, model.layer_outputs)


@pytest.mark.parametrize("name", CASES)
def test_the_model_passes_the_full_checker(name: str, exported: Callable[[str], Exported]) -> None:
    _, path = exported(name)
    onnx.checker.check_model(str(path), full_check=True)


@pytest.mark.parametrize("name", ["v2_lite", "v2", "v3", "v3_one_group", "llama", "qwen2"])
def test_the_inlined_model_is_valid_and_gives_the_same_logits(
    name: str, exported: Callable[[str], Exported]
) -> None:
    reference, path = exported(name)
    inlined = onnx.inliner.inline_local_functions(onnx.load(path, load_external_data=False))
    assert {node.domain for node in inlined.graph.node} == {""}
    inlined_path = path.with_name("inlined.onnx")
    onnx.save(inlined, inlined_path)
    onnx.checker.check_model(str(inlined_path), full_check=True)
    model = PortableModel(inlined_path, WORKLOAD)
    check_parity(reference, WORKLOAD, model.forward, model.layer_outputs)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_failure_names_the_first_layer_that_is_off(
    layer: int, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    reference, path = exported("v2_lite")
    model = onnx.load(path, load_external_data=False)
    weights = bytearray(path.with_name(WEIGHTS_FILE).read_bytes())
    name = f"layers.{layer}.attention.o.weight"
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    start, length = int(entries["offset"]), int(entries["length"])
    weights[start : start + length] = (
        np.frombuffer(weights[start : start + length], np.float32) + 1e-2
    ).tobytes()
    (tmp_path / WEIGHTS_FILE).write_bytes(weights)
    onnx.save(model, tmp_path / path.name)
    damaged = PortableModel(tmp_path / path.name, WORKLOAD)
    with pytest.raises(AssertionError, match=rf"^layers\.{layer} is the first to differ"):
        check_parity(reference, WORKLOAD, damaged.forward, damaged.layer_outputs)
