"""The model `preprocessing`: a prompt's text becomes token ids, and the request gets its key."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseek_triton.backend.inputs import Inputs
from deepseek_triton.backend.metrics_reporter import register
from deepseek_triton.backend.opening import context_limit
from deepseek_triton.backend.pb import InferRequest, Pb, describe, model_parameters, text_tensor
from deepseek_triton.build.engine_dir import load_engine_dir
from deepseek_triton.config import EngineConfig
from deepseek_triton.errors import DeepseekTritonError, InvalidRequestError
from deepseek_triton.log import configure_logging
from deepseek_triton.metrics import FAILED
from deepseek_triton.text.tokenizer import Tokenizer
from deepseek_triton.wire import PREPROCESSING

_logger = logging.getLogger(__name__)


class PromptReader:
    """Validates and tokenizes prompts. An empty one is refused; a space is a prompt."""

    def __init__(self, tokenizer: Tokenizer, max_context_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_context_len = max_context_len
        longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        self._max_bytes = max_context_len * max(1, longest)

    def read(self, inputs: Inputs) -> dict[str, NDArray[Any]]:
        """Return the outputs for one request; raises InvalidRequestError."""
        inputs.check_one_prompt("QUERY")
        inputs.check_supported()
        max_tokens = inputs.integer("REQUEST_OUTPUT_LEN") or 0
        if max_tokens < 1:
            raise InvalidRequestError(
                inputs.field("REQUEST_OUTPUT_LEN"), f"{max_tokens}; at least 1 is needed"
            )
        ids = self._encode(inputs)
        end_id, pad_id = inputs.integer("END_ID"), inputs.integer("PAD_ID")
        end_id = self._tokenizer.eos_token_id if end_id is None else end_id
        pad_id = self._tokenizer.pad_token_id if pad_id is None else pad_id
        end_id = -1 if end_id is None else end_id
        return {
            "INPUT_ID": np.array([ids], np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)]], np.int32),
            "REQUEST_OUTPUT_LEN": np.array([[max_tokens]], np.int32),
            "OUT_END_ID": np.array([[end_id]], np.int32),
            "OUT_PAD_ID": np.array([[end_id if pad_id is None else pad_id]], np.int32),
            "REQUEST_KEY": text_tensor(uuid.uuid4().hex),
        }

    def _encode(self, inputs: Inputs) -> list[int]:
        field = inputs.field("QUERY")
        (text,) = inputs.texts("QUERY")
        if not text:
            raise InvalidRequestError(field, "empty; send at least one character")
        # No token has more bytes than the longest: spare the work on a prompt that cannot fit.
        num_bytes = len(text.encode())
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                field,
                f"{num_bytes} bytes cannot fit the context limit of {self._max_context_len} "
                "tokens; shorten the prompt",
            )
        ids = self._tokenizer.encode(text)
        if not ids:
            raise InvalidRequestError(field, "the tokenizer makes no token of it")
        return ids


class Preprocessing:
    """What Triton calls."""

    def __init__(self, pb: Pb | None = None) -> None:
        self._pb = pb or Pb()

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer of the engine directory; an error fails the load of the model."""
        config = EngineConfig.from_parameters(model_parameters(args))
        configure_logging(config.log_level)
        # The engine stage verifies the weights; here the manifest and the tokenizer are enough.
        engine_dir = load_engine_dir(Path(config.engine_dir), verify_contents=False)
        limit = context_limit(config, engine_dir.manifest)
        self.start(PromptReader(Tokenizer.load(engine_dir.path), limit))

    def start(self, reader: PromptReader) -> None:
        """Begin to work."""
        self._reader = reader
        self._family = register(self._pb, FAILED)  # kept: its samples vanish with it
        self._failed = self._family.Metric(labels={"stage": "preprocessing"})

    def execute(self, requests: Sequence[InferRequest]) -> list[Any]:
        """Answer each request by itself."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: InferRequest) -> Any:
        try:
            inputs = Inputs(PREPROCESSING, self._pb.inputs(request), for_ensemble=True)
            tensors = self._reader.read(inputs)
        except Exception as error:
            if isinstance(error, DeepseekTritonError):
                _logger.info("request %r refused: %s", request.request_id(), error)
            else:
                _logger.exception("request %r failed", request.request_id())
            self._failed.increment(1)
            return self._pb.error_response(*describe(error))
        wanted = request.requested_output_names()
        return self._pb.response({name: a for name, a in tensors.items() if name in wanted})
