from __future__ import annotations

import io

from deepseek_triton.server.server_log import LogCopier, failure_reason

NVML = "Error: Failed to initialize NVML"
DCGM = (
    'W1130 05:04:01.820828 5835 metrics.cc:798] "DCGM unable to start: DCGM initialization error"'
)
CUDA = 'E1130 05:04:00.184060 5835 server.cc:241] "CudaDriverHelper has not been initialized."'


def load_failure(model: str, reason: str) -> str:
    return (
        f"E1130 05:04:01.819697 5835 model_lifecycle.cc:642] \"failed to load '{model}' "
        f'version 1: Internal: {reason}\\n\\nAt:\\n  /x/model.py(4): initialize\\n"'
    )


def test_a_models_own_message_comes_without_quoting_and_traceback() -> None:
    lines = [CUDA, load_failure("tensorrt_llm", 'ConfigError: num_blocks: \\"x\\" is no number')]
    expected = 'model tensorrt_llm: ConfigError: num_blocks: "x" is no number'
    assert failure_reason([*lines, NVML, "error: creating server: Internal"]) == expected


def test_two_models_that_fail_are_both_named() -> None:
    lines = [load_failure("a", "X: one"), load_failure("b", "X: two")]
    assert failure_reason(lines) == "model a: X: one\nmodel b: X: two"


def test_a_message_of_several_models_is_given_once() -> None:
    lines = [load_failure(model, "X: no manifest.json") for model in ("b", "a", "b")]
    assert failure_reason(lines) == "model b, a: X: no manifest.json"


def test_a_process_that_died_while_it_loaded_may_have_lacked_memory() -> None:
    line = (
        "E1130 05:04:01.819697 5835 model_lifecycle.cc:642] \"failed to load 'tensorrt_llm' "
        "version 1: Internal: Stub process 'tensorrt_llm_0_0' is not healthy.\""
    )
    reason = failure_reason([line])
    assert reason.startswith("model tensorrt_llm: Stub process 'tensorrt_llm_0_0' is not healthy. ")
    assert "memory" in reason


def test_an_ensemble_that_fails_with_its_model_is_not_the_reason() -> None:
    ensemble = load_failure("ensemble", "ensemble 'ensemble' depends on 'a' which has no version")
    assert failure_reason([ensemble, load_failure("a", "X: one")]) == "model a: X: one"


def test_without_a_failed_model_the_error_lines_count_but_not_those_about_gpus() -> None:
    error = "tritonserver: error while loading shared libraries: libfoo.so.1: cannot open"
    assert failure_reason(["I1130 fine", NVML, DCGM, CUDA, error]) == error


def test_without_any_error_the_last_lines_are_shown() -> None:
    assert failure_reason([f"line {i}" for i in range(20)]).splitlines()[-1] == "line 19"
    assert failure_reason([]) == "it wrote nothing"


def test_the_log_is_copied_and_a_broken_sink_does_not_stop_the_reading() -> None:
    class Broken(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError

    whole = io.BytesIO()
    for sink in (whole, Broken()):
        copier = LogCopier(io.BytesIO(b"one\n\xfftwo\nthree"), sink)
        copier.start()
        copier.join(5.0)
        assert copier.lines() == ["one", "\ufffdtwo", "three"]
    assert whole.getvalue() == b"one\n\xfftwo\nthree"
