"""The tensors of the served models: names, dtypes, shapes and what an absent one means. Data only.

The names are those of NVIDIA's tensorrtllm_backend, so that its clients work unchanged. The
config.pbtxt files say the same; a test compares both with each other and with the contract.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Scalar = bool | int | float | str
Dims = tuple[int, ...]

PREPROCESSING = "preprocessing"
ENGINE = "tensorrt_llm"
POSTPROCESSING = "postprocessing"
ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Tensor:
    """One input or output of a model.

    A tensor with `implemented` False is declared because the contract has it. A request may send
    it empty, or holding only `neutral` values, which mean what its absence means; else the request
    is refused.
    """

    name: str
    dtype: str  # as in config.pbtxt, without TYPE_
    dims: Dims = (1,)  # without the batch dimension
    optional: bool = True  # says nothing for an output
    client_name: str = ""  # the ensemble's name for it, where that differs
    implemented: bool = True
    neutral: tuple[Scalar, ...] = ()
    own: bool = False  # not in the contract

    @property
    def ensemble_name(self) -> str:
        """What a client of the ensemble calls it."""
        return self.client_name or self.name


@dataclass(frozen=True)
class ModelWire:
    """Inputs and outputs of one model, in the order of its config.pbtxt."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def _needed(name: str, dtype: str, dims: Dims = (1,), client: str = "") -> Tensor:
    return Tensor(name, dtype, dims, optional=False, client_name=client)


def _unsupported(
    name: str, dtype: str, dims: Dims = (1,), neutral: tuple[Scalar, ...] = (), client: str = ""
) -> Tensor:
    return Tensor(name, dtype, dims, client_name=client, implemented=False, neutral=neutral)


def _own(name: str, dtype: str, dims: Dims = (1,)) -> Tensor:
    return Tensor(name, dtype, dims, own=True)


# What a request reports besides its tokens; on the engine stage and on the ensemble alike.
_REPORT = (
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("context_logits", "FP32", (-1, -1), implemented=False),
    Tensor("generation_logits", "FP32", (-1, -1, -1), implemented=False),
    Tensor("batch_index", "INT32"),
    Tensor("sequence_index", "INT32"),
    Tensor("kv_cache_alloc_new_blocks", "INT32"),
    Tensor("kv_cache_reused_blocks", "INT32"),
    Tensor("kv_cache_alloc_total_blocks", "INT32"),
    Tensor("arrival_time_ns", "INT64"),
    Tensor("first_scheduled_time_ns", "INT64"),
    Tensor("first_token_time_ns", "INT64"),
    Tensor("last_token_time_ns", "INT64"),
    Tensor("acceptance_rate", "FP32", implemented=False),
    Tensor("total_accepted_draft_tokens", "INT32", implemented=False),
    Tensor("total_draft_tokens", "INT32", implemented=False),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    _own("finish_reason", "STRING"),  # "" until the last response: stop, length, cancelled, error
)

# What a request of the ensemble reports if it was asked to by request parameter.
_TOKENS = (
    _own("output_token_ids", "INT32", (-1, -1)),
    _own("top_token_ids", "INT32", (-1, -1)),
    _own("top_log_probs", "FP32", (-1, -1)),
)

# Accepted by the engine stage under the same names as by the ensemble.
_SHARED_INPUTS = (
    Tensor("temperature", "FP32"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("min_tokens", "INT32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("seed", "UINT64"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("return_perf_metrics", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),  # the last response has both anyway
    Tensor("return_num_output_tokens", "BOOL"),
    Tensor("exclude_input_in_output", "BOOL"),  # absent: true for a stream, else false
    _unsupported("num_return_sequences", "INT32", neutral=(1,)),
    _unsupported("beam_width", "INT32", neutral=(1,)),
    _unsupported("return_context_logits", "BOOL", neutral=(False,)),
    _unsupported("return_generation_logits", "BOOL", neutral=(False,)),
    _unsupported("prompt_embedding_table", "FP16", (-1, -1)),
    _unsupported("prompt_vocab_size", "INT32", neutral=(0,)),
    _unsupported("lora_task_id", "UINT64", neutral=(0,)),
    _unsupported("lora_weights", "FP16", (-1, -1)),
    _unsupported("lora_config", "INT32", (-1, 3)),
    Tensor("guided_decoding_guide_type", "STRING"),  # json, json_schema, regex or lark
    Tensor("guided_decoding_guide", "STRING"),
    _own("min_length", "INT32"),  # older name of min_tokens
    _own("random_seed", "UINT64"),  # older name of seed
    _own("stop_words", "STRING", (-1,)),  # passed through to postprocessing, which has the text
)

_PREPROCESSING_INPUTS = (
    _needed("QUERY", "STRING", client="text_input"),
    _unsupported("DECODER_QUERY", "STRING", (1,), ("",), "decoder_text_input"),
    _unsupported("IMAGE_BYTES", "UINT8", (-1, -1, -1, -1)),
    _unsupported("IMAGE_URL", "STRING", (1,), ("",)),
    _unsupported("IMAGES", "STRING", (-1,), ("",)),
    _unsupported("VIDEO_BYTES", "UINT8", (-1, -1, -1, -1)),
    _needed("REQUEST_OUTPUT_LEN", "INT32", client="max_tokens"),
    _unsupported("BAD_WORDS_DICT", "STRING", (-1,), ("",), "bad_words"),
    # Stop strings are matched on the text: the ensemble hands them past preprocessing.
    _unsupported("STOP_WORDS_DICT", "STRING", (-1,), ("",), "stop_words"),
    _unsupported("EMBEDDING_BIAS_WORDS", "STRING", (-1,), ("",), "embedding_bias_words"),
    _unsupported("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,), (0.0,), "embedding_bias_weights"),
    Tensor("END_ID", "INT32", client_name="end_id"),
    Tensor("PAD_ID", "INT32", client_name="pad_id"),
    _unsupported("PROMPT_TABLE_EXTRA_ID", "UINT64", (1,), (0,), "prompt_table_extra_id"),
)

_PREPROCESSING_OUTPUTS = (
    Tensor("INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_INPUT_LEN", "INT32"),
    Tensor("DECODER_INPUT_ID", "INT32", (-1,), implemented=False),
    Tensor("REQUEST_DECODER_INPUT_LEN", "INT32", implemented=False),
    Tensor("BAD_WORDS_IDS", "INT32", (2, -1), implemented=False),
    Tensor("STOP_WORDS_IDS", "INT32", (2, -1), implemented=False),
    Tensor("EMBEDDING_BIAS", "FP32", (-1,), implemented=False),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    Tensor("OUT_END_ID", "INT32"),
    Tensor("OUT_PAD_ID", "INT32"),
    Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,), implemented=False),
    Tensor("PIXEL_VALUES", "FP16", (-1, -1, -1, -1), implemented=False),
    Tensor("ASPECT_RATIO_IDS", "INT64", (-1,), implemented=False),
    Tensor("ASPECT_RATIO_MASK", "INT64", (-1, -1), implemented=False),
    Tensor("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1), implemented=False),
    Tensor("IMAGE_SIZES", "INT64", (-1, 2), implemented=False),
    Tensor("IS_VIDEO_INPUT", "BOOL", implemented=False),
    Tensor("ATTENTION_MASK", "INT64", (-1,), implemented=False),
    Tensor("IMAGE_GRID_THW", "INT64", (3,), implemented=False),
    Tensor("VISION_INPUT_ID", "INT32", (-1,), implemented=False),
    _own("REQUEST_KEY", "STRING"),
)

_ENGINE_INPUTS = (
    Tensor("input_ids", "INT32", (-1,), client_name="text_input"),
    _unsupported("encoder_input_features", "FP16", (-1, -1)),
    _unsupported("encoder_output_lengths", "INT32", neutral=(0,)),
    _needed("input_lengths", "INT32", client="text_input"),
    _needed("request_output_len", "INT32", client="max_tokens"),
    _unsupported("draft_input_ids", "INT32", (-1,)),
    _unsupported("decoder_input_ids", "INT32", (-1,)),
    _unsupported("decoder_input_lengths", "INT32", neutral=(0,)),
    _unsupported("draft_logits", "FP32", (-1, -1)),
    _unsupported("draft_acceptance_threshold", "FP32", neutral=(0.0, 1.0)),
    Tensor("end_id", "INT32"),  # absent: the model's end ids; -1: none
    Tensor("pad_id", "INT32"),  # nothing is padded
    _unsupported("stop_words_list", "INT32", (2, -1), (0, -1)),
    _unsupported("bad_words_list", "INT32", (2, -1), (0, -1)),
    _unsupported("embedding_bias", "FP32", (-1,), (0.0,)),
    Tensor("runtime_top_k", "INT32", client_name="top_k"),
    Tensor("runtime_top_p", "FP32", client_name="top_p"),
    _unsupported("runtime_top_p_min", "FP32"),
    _unsupported("runtime_top_p_decay", "FP32", neutral=(1.0,)),
    _unsupported("runtime_top_p_reset_ids", "INT32", neutral=(-1,)),
    _unsupported("len_penalty", "FP32", (1,), (0.0, 1.0), "length_penalty"),
    _unsupported("early_stopping", "BOOL", neutral=(False,)),
    _unsupported("beam_search_diversity_rate", "FP32", neutral=(0.0,)),
    Tensor("stop", "BOOL"),  # ends the request named by request_key, else by the request's id
    Tensor("streaming", "BOOL", client_name="stream"),
    _unsupported("prompt_table_extra_ids", "UINT64", (-1,), (0,)),
    _unsupported("cross_attention_mask", "BOOL", (-1, -1)),
    _unsupported("mrope_rotary_cos_sin", "FP32", (-1,)),
    _unsupported("mrope_position_deltas", "INT64", neutral=(0,)),
    _unsupported("context_phase_params", "UINT8", (-1,)),
    _unsupported("skip_cross_attn_blocks", "BOOL", neutral=(False,)),
    _unsupported("retention_token_range_starts", "INT32", (-1,)),
    _unsupported("retention_token_range_ends", "INT32", (-1,)),
    _unsupported("retention_token_range_priorities", "INT32", (-1,)),
    _unsupported("retention_token_range_durations_ms", "INT32", (-1,)),
    _unsupported("retention_decode_priority", "INT32"),
    _unsupported("retention_decode_duration_ms", "INT32"),
    _unsupported("lookahead_window_size", "INT32"),
    _unsupported("lookahead_ngram_size", "INT32"),
    _unsupported("lookahead_verification_set_size", "INT32"),
    *_SHARED_INPUTS,
    _own("request_key", "STRING"),  # unique; sent by preprocessing and by abort
)

_ENGINE_OUTPUTS = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("sequence_length", "INT32", (-1,)),
    Tensor("context_phase_params", "UINT8", (-1,), implemented=False),
    *_REPORT,
    _own("step_packet", "UINT8", (-1,)),  # what postprocessing must know; see backend.packet
)

_ENSEMBLE_ONLY_INPUTS = (
    _needed("text_input", "STRING"),
    _unsupported("decoder_text_input", "STRING", neutral=("",)),
    _needed("max_tokens", "INT32"),
    _unsupported("bad_words", "STRING", (-1,), ("",)),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    _unsupported("length_penalty", "FP32", neutral=(0.0, 1.0)),
    Tensor("stream", "BOOL"),
    _unsupported("prompt_table_extra_id", "UINT64", neutral=(0,)),
    _unsupported("embedding_bias_words", "STRING", (-1,), ("",)),
    _unsupported("embedding_bias_weights", "FP32", (-1,), (0.0,)),
)

MODELS = {
    PREPROCESSING: ModelWire(_PREPROCESSING_INPUTS, _PREPROCESSING_OUTPUTS),
    ENGINE: ModelWire(_ENGINE_INPUTS, _ENGINE_OUTPUTS),
    POSTPROCESSING: ModelWire(
        (
            _needed("TOKENS_BATCH", "INT32", (-1, -1)),
            _needed("SEQUENCE_LENGTH", "INT32", (-1,)),
            _own("STEP_PACKET", "UINT8", (-1,)),
        ),
        (
            Tensor("OUTPUT", "STRING", (-1,), client_name="text_output"),
            *(replace(tensor, own=True) for tensor in _REPORT),
            *_TOKENS,
        ),
    ),
    ENSEMBLE: ModelWire(
        (
            *_ENSEMBLE_ONLY_INPUTS,
            *(replace(t, own=t.own and t.name != "stop_words") for t in _SHARED_INPUTS),
        ),
        (Tensor("text_output", "STRING", (-1,)), *_REPORT, *_TOKENS),
    ),
}
"""Every model of the repository. Extra tensors of ours are marked `own`."""
