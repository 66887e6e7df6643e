"""A program with its weights on a device: runs one step, call by call.

Inside a CUDA graph the calls are recorded once and cost nothing later; a prefill runs them one by
one, the device being behind the host all along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepseek_triton.errors import EngineMismatchError
from deepseek_triton.runner.cuda_program import HIDDEN, LOGIT_ROWS, LOGITS, SQUARED_NORMS, Program
from deepseek_triton.runner.cuda_reference import Operator
from deepseek_triton.runner.cuda_step import Step


class CudaModel:
    """Executes `program` with one implementation for each operator."""

    def __init__(
        self,
        program: Program,
        weights: dict[str, Any],
        operators: Mapping[str, Operator],
        device: torch.device,
    ) -> None:
        """Raises EngineMismatchError for an operator without an implementation."""
        missing = sorted(program.functions() - set(operators))
        if missing:
            raise EngineMismatchError(
                f"the model calls {', '.join(missing)}, which this version does not run on CUDA"
            )
        self.program, self.weights, self.device = program, weights, device
        names = [n for call in program.calls for n in call.inputs if "_pool." in n]
        made = {name for call in program.calls for name in call.outputs}
        self._outputs = [name for name in (LOGITS, SQUARED_NORMS, HIDDEN) if name in made]
        self.pool_names = list(dict.fromkeys(names))
        last_use = {name: i for i, call in enumerate(program.calls) for name in call.inputs}
        # (call, implementation, values that nothing reads afterwards)
        self._plan = [
            (
                call,
                operators[call.op],
                [n for n in dict.fromkeys(call.inputs) if last_use[n] == i and n not in weights],
            )
            for i, call in enumerate(program.calls)
        ]

    def forward(self, step: Step) -> tuple[Tensor, ...]:
        """Return logits [R, V] of the wanted rows, and what else the program gives.

        That is squared norms [T, 1], none when all logits are wanted, and hidden states [T, D].
        Mutates the pools.

        Raises nothing about the values: a failed kernel shows at the next synchronisation.
        """
        with torch.inference_mode():
            return self._forward(step)

    def _forward(self, step: Step) -> tuple[Tensor, ...]:
        values: dict[str, Any] = dict(self.weights)
        values["input_ids"], values["positions"] = step.input_ids, step.positions
        values[LOGIT_ROWS], values[HIDDEN] = step.logit_rows, step.hidden
        for call, operator, dead in self._plan:
            result = operator(step, call, [values.get(name) for name in call.inputs])
            results = result if isinstance(result, tuple) else (result,)
            values.update(zip(call.outputs, results, strict=False))
            for name in dead:
                values.pop(name, None)
        return tuple(values[name] for name in self._outputs)
