"""One decoder layer: every linear layer scaled and rounded by the tokens that reach it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deepseek_triton.calibrate.experts import ExpertWeights, Routing
from deepseek_triton.calibrate.groups import Expert, Folding, ScaleGroup, experts, scale_groups
from deepseek_triton.calibrate.layer_model import LayerModel
from deepseek_triton.calibrate.statistics import Activations
from deepseek_triton.checkpoint.reader import CheckpointReader
from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.errors import CheckpointError
from deepseek_triton.quantize.awq_search import (
    Scheme,
    candidate_scales,
    output_error,
    scale_errors,
    search_clip,
)
from deepseek_triton.quantize.int4 import Int4Weight

T = TypeVar("T")


@dataclass(frozen=True)
class LinearReport:
    """What quantisation did to one linear layer.

    Errors are E‖x(W − Ŵ)ᵀ‖² / E‖xWᵀ‖² over the calibration tokens that reached it; without any,
    over white noise, which makes them errors of the weight.
    """

    name: str
    tokens: int
    rtn_error: float  # of rounding to nearest
    error: float  # of what was written


@dataclass(frozen=True)
class QuantizedLinear:
    """One linear layer's new weight."""

    weight: Int4Weight
    report: LinearReport


class LayerQuantizer:
    """Decoder layer `layer` of a floating-point checkpoint, on its way to INT4.

    Call `calibrate` (or not: then all is rounded to nearest), exhaust `linears`, and ask `folding`
    what else of the layer has changed.
    """

    def __init__(
        self, spec: ModelSpec, reader: CheckpointReader, layer: int, scheme: Scheme
    ) -> None:
        self._spec, self._reader, self._layer, self._scheme = spec, reader, layer, scheme
        # What cannot be rounded needs no statistics, which cost K × K numbers a token.
        self._groups = tuple(
            group
            for group in scale_groups(spec, layer)
            if group.others or any(map(self._can_round, group.linears))
        )
        self._experts = experts(spec, layer)
        self._sums: dict[str, Activations] = {}
        self._routing = Routing()
        self.folding = Folding()

    def calibrate(self, windows: NDArray[np.float32], outputs: NDArray[np.float32]) -> None:
        """Run the layer over `windows` [n, S, D] into `outputs`, and choose the channel scales."""
        prefix = f"layers.{self._layer}.mlp"
        routing = [f"{prefix}.expert_ids", f"{prefix}.expert_weights"]
        values = [group.value for group in self._groups]
        values += routing if self._experts else []
        model = LayerModel(self._spec, self._reader, self._layer, values)
        pairs = zip(windows, outputs, strict=True)
        for window, output in _progress(pairs, "windows", len(windows)):
            output[:], found = model.run(window)
            for group in self._groups:
                x = found[group.value]
                self._sums.setdefault(group.value, Activations.of_width(x.shape[1])).add(x)
            if self._experts:
                self._routing.add(found[f"{prefix}_norm"], *(found[name] for name in routing))
        flat = outputs.reshape(-1, outputs.shape[-1])
        for group in self._groups:
            sums = self._sums[group.value]
            scales = candidate_scales(sums.magnitude, group.rows)
            errors = self._scale_errors(group.linears, sums, scales)
            if group.others:
                errors = errors + self._run_experts(flat, scales)
            self._fold(group, scales[int(errors.argmin())])

    def linears(self) -> Iterator[QuantizedLinear]:
        """Yield the new weight of every linear layer whose input channels groups can fill."""
        for group in self._groups:
            for module in group.linears:
                yield from self._round(module, self._sums.get(group.value))
        experts = _progress(enumerate(self._experts), "rounding experts", len(self._experts))
        for index, expert in experts:
            yield from self._expert_linears(index, expert)

    def _run_experts(
        self, outputs: NDArray[np.float32], scales: list[NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        """Add the experts to `outputs` [T, D]; return the errors [len(scales)] of gates and ups.

        An expert counts as much as the share of the tokens that reach it.
        """
        errors = np.zeros(len(scales))
        experts = _progress(enumerate(self._experts), "scales of experts", len(self._experts))
        for index, expert in experts:
            tokens = self._routing.tokens_of(index)
            if tokens is None:
                continue
            weights = self._expert_weights(expert)
            outputs[tokens.rows] += tokens.weights * (weights.hidden(tokens.x) @ weights.down.T)
            share = len(tokens.rows) / len(outputs)
            sums = Activations.of(tokens.x)
            errors += share * self._scale_errors((expert.gate, expert.up), sums, scales)
        return errors

    def _expert_linears(self, index: int, expert: Expert) -> Iterator[QuantizedLinear]:
        inner = read = None
        tokens = self._routing.tokens_of(index)
        if tokens is not None:
            hidden = self._expert_weights(expert).hidden(tokens.x)
            read, inner = Activations.of(tokens.x), Activations.of(hidden)
            scales = candidate_scales(inner.magnitude, expert.down.rows)
            errors = self._scale_errors(expert.down.linears, inner, scales)
            self._fold(expert.down, scales[int(errors.argmin())])
        yield from self._round(expert.gate, read)
        yield from self._round(expert.up, read)
        yield from self._round(expert.down.linears[0], inner)

    def _scale_errors(
        self, modules: tuple[str, ...], sums: Activations, scales: list[NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        errors = np.zeros(len(scales))
        for module in filter(self._can_round, modules):
            errors += scale_errors(self._read(module), sums.moment, scales, self._scheme)
        return errors

    def _fold(self, group: ScaleGroup, scale: NDArray[np.float32]) -> None:
        self.folding.add(group, scale, self._reader.shape(group.maker)[0])

    def _round(self, module: str, sums: Activations | None) -> Iterator[QuantizedLinear]:
        """Yield the linear layer `module` in 4 bits; nothing if groups do not fill its channels."""
        if not self._can_round(module):
            return
        name, scheme = module + ".weight", self._scheme
        weight = folded = self._read(module)
        if self.folding.changes(name):
            folded = self.folding.apply(name, weight)
        clip = moment = folded_moment = None
        if sums is not None:
            scale = self.folding.scale_of(module)
            moment = sums.moment
            folded_moment = moment / (scale[:, None] * scale)
            clip = search_clip(folded, folded_moment, scheme)
        rounded = scheme.quantize(folded, clip)
        error = _relative_error(folded, rounded, folded_moment)
        rtn_error = error
        if clip is not None or folded is not weight:
            rtn_error = _relative_error(weight, scheme.quantize(weight), moment)
        count = sums.count if sums is not None else 0
        yield QuantizedLinear(rounded, LinearReport(module, count, rtn_error, error))

    def _expert_weights(self, expert: Expert) -> ExpertWeights:
        return ExpertWeights(*(self._read(module) for module in expert.linears))

    def _can_round(self, module: str) -> bool:
        return self._reader.shape(module + ".weight")[1] % self._scheme.group_size == 0

    def _read(self, module: str) -> NDArray[np.float32]:
        weight = np.asarray(self._reader.read(module + ".weight"), np.float32)
        if not np.isfinite(weight).all():
            raise CheckpointError(
                f"{module}.weight holds a number that is not finite: the file is damaged; "
                "fetch it again"
            )
        return weight


def _progress(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """Return `items` below a bar that goes when it is full, if there is a terminal."""
    bar: Iterable[T] = tqdm(items, desc=what, total=total, leave=False, disable=None)
    return bar


def _relative_error(
    exact: NDArray[np.float32], found: Int4Weight, moment: NDArray[np.float32] | None
) -> float:
    energy = max(output_error(exact, moment), 1e-30)
    return output_error(exact - found.dequantize(), moment) / energy
