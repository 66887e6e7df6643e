"""config.pbtxt files against the contract's tensors, and against the package's own tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from deepseek_triton.wire import ENSEMBLE, MODELS, Tensor

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
CONTRACT: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(
    Path(__file__).with_name("contract.json").read_text()
)
# Types that the contract leaves to whoever builds the engine.
PLACEHOLDERS = {
    "${logits_datatype}": "FP32",
    "${encoder_input_features_data_type}": "FP16",
    "${prompt_embedding_table_data_type}": "FP16",
}
# Ours alone. Anything else that the contract does not have is a mistake.
EXTRAS = {
    ("preprocessing", "input"): set(),
    ("preprocessing", "output"): {"REQUEST_KEY"},
    ("tensorrt_llm", "input"): {"min_length", "random_seed", "stop_words", "request_key"},
    ("tensorrt_llm", "output"): {"finish_reason", "step_packet"},
    ("postprocessing", "input"): {"STEP_PACKET"},
    ("postprocessing", "output"): {t.name for t in MODELS["postprocessing"].outputs} - {"OUTPUT"},
    ("ensemble", "input"): {"min_length", "random_seed"},
    ("ensemble", "output"): {
        "finish_reason",
        "output_token_ids",
        "top_token_ids",
        "top_log_probs",
    },
}
SIDES = [(model, side) for model in MODELS for side in ("input", "output")]


def config(model: str) -> Any:
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def declared(model: str, side: str) -> dict[str, Any]:
    tensors = getattr(config(model), side)
    by_name = {tensor.name: tensor for tensor in tensors}
    assert len(by_name) == len(tensors), "a tensor is declared twice"
    return by_name


def dtype_name(tensor: Any) -> str:
    return str(model_config_pb2.DataType.Name(tensor.data_type)).removeprefix("TYPE_")


@pytest.mark.parametrize(("model", "side"), SIDES)
def test_every_tensor_of_the_contract_is_declared_as_it_says(model: str, side: str) -> None:
    tensors = declared(model, side)
    for wanted in CONTRACT[model][side]:
        assert wanted["name"] in tensors, f"{wanted['name']} is missing"
        tensor = tensors[wanted["name"]]
        assert dtype_name(tensor) == PLACEHOLDERS.get(wanted["dtype"], wanted["dtype"]), wanted
        assert list(tensor.dims) == json.loads(wanted["dims"]), wanted
        assert tensor.HasField("reshape") == wanted["reshape"], wanted
        if side == "input":
            assert tensor.optional == wanted["optional"], wanted
            assert tensor.allow_ragged_batch == wanted["ragged"], wanted


@pytest.mark.parametrize(("model", "side"), SIDES)
def test_nothing_but_the_listed_extras_is_added(model: str, side: str) -> None:
    contract = {tensor["name"] for tensor in CONTRACT[model][side]}
    extra = {name: t for name, t in declared(model, side).items() if name not in contract}
    assert set(extra) == EXTRAS[model, side]
    if side == "input":
        assert all(tensor.optional for tensor in extra.values()), "upstream's clients send none"


@pytest.mark.parametrize(("model", "side"), SIDES)
def test_the_package_knows_the_same_tensors(model: str, side: str) -> None:
    known: tuple[Tensor, ...] = getattr(MODELS[model], f"{side}s")
    tensors = declared(model, side)
    assert [t.name for t in known] != [] and {t.name for t in known} == set(tensors)
    assert {t.name for t in known if t.own} == EXTRAS[model, side]
    for tensor in known:
        found = tensors[tensor.name]
        assert dtype_name(found) == tensor.dtype, tensor
        assert tuple(found.dims) == tensor.dims, tensor
        if side == "input":
            assert found.optional == tensor.optional, tensor


@pytest.mark.parametrize("model", MODELS)
def test_models_batch_and_run_once_on_the_cpu(model: str) -> None:
    parsed = config(model)
    assert parsed.name == model
    assert parsed.max_batch_size >= 1
    if model == ENSEMBLE:
        assert parsed.platform == "ensemble"
        return
    assert parsed.backend == "python"
    (group,) = parsed.instance_group
    assert (group.count, group.kind) == (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    assert not parsed.HasField("dynamic_batching")  # it hides cancellations from the model


@pytest.mark.parametrize("model", MODELS)
def test_no_placeholder_is_left_to_fill(model: str) -> None:
    assert "${" not in (REPOSITORY / model / "config.pbtxt").read_text()


def test_the_streaming_models_are_decoupled() -> None:
    decoupled = {m for m in MODELS if config(m).model_transaction_policy.decoupled}
    assert decoupled == {"tensorrt_llm", "postprocessing"}


class TestEnsemble:
    """The wiring of the steps."""

    steps = {step.model_name: step for step in config(ENSEMBLE).ensemble_scheduling.step}

    def test_runs_the_three_models_in_order(self) -> None:
        assert list(self.steps) == ["preprocessing", "tensorrt_llm", "postprocessing"]

    def test_feeds_every_input_to_a_step_and_fills_every_output(self) -> None:
        fed = {name for step in self.steps.values() for name in step.input_map.values()}
        made = {name for step in self.steps.values() for name in step.output_map.values()}
        assert set(declared(ENSEMBLE, "input")) <= fed
        assert set(declared(ENSEMBLE, "output")) <= made
        assert fed <= made | set(declared(ENSEMBLE, "input"))

    @pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm", "postprocessing"])
    def test_maps_tensors_that_exist_and_agree(self, model: str) -> None:
        inputs, outputs = declared(model, "input"), declared(model, "output")
        outer = declared(ENSEMBLE, "input")
        for name, source in self.steps[model].input_map.items():
            assert name in inputs
            if source in outer:
                assert inputs[name].data_type == outer[source].data_type, name
                assert list(inputs[name].dims) == list(outer[source].dims), name
        for name, target in self.steps[model].output_map.items():
            assert name in outputs
            if target in declared(ENSEMBLE, "output"):
                found = declared(ENSEMBLE, "output")[target]
                assert (outputs[name].data_type, list(outputs[name].dims)) == (
                    found.data_type,
                    list(found.dims),
                ), name

    def test_feeds_each_optional_input_to_a_step_that_may_go_without(self) -> None:
        for step in self.steps.values():
            inputs = declared(step.model_name, "input")
            for name, source in step.input_map.items():
                if source in (outer := declared(ENSEMBLE, "input")) and outer[source].optional:
                    assert inputs[name].optional, f"{step.model_name}.{name}"

    def test_names_tensors_as_error_messages_do(self) -> None:
        for model in ("preprocessing", "tensorrt_llm"):
            named = {t.name: t.ensemble_name for t in MODELS[model].inputs}
            for name, source in self.steps[model].input_map.items():
                if source in declared(ENSEMBLE, "input"):
                    assert named[name] == source
