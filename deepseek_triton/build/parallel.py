"""How ranks share a model, for targets that run it on several GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_triton.checkpoint.spec import ModelSpec
from deepseek_triton.errors import ConfigError


@dataclass(frozen=True)
class Parallel:
    """How ranks share a model: rank = pipeline stage · tp + tensor-parallel rank."""

    tp: int = 1  # ranks that share every layer
    pp: int = 1  # stages that share the layers
    ep: int = 1  # of the tp ranks, how many share the experts by number; the rest share each expert

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.upper()}: {getattr(self, name)}; at least 1 is needed")
        if self.tp % self.ep:
            raise ConfigError(f"EP: {self.ep} does not divide TP {self.tp}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    def layers(self, stage: int, num_layers: int) -> range:
        """Layers of a stage; the first stages take one more when they do not divide evenly."""
        each, more = divmod(num_layers, self.pp)
        begin = stage * each + min(stage, more)
        return range(begin, begin + each + (stage < more))

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError unless the model can be shared like this."""
        sizes = {"attention heads": spec.attention.num_heads, "MLP units": spec.intermediate_size}
        if spec.moe is not None:
            sizes["shared expert units"] = spec.moe.shared_intermediate_size
        for what, size in sizes.items():
            if size % self.tp:
                raise ConfigError(f"TP: {self.tp} does not divide the model's {size} {what}")
        if spec.moe is not None:
            experts, units = spec.moe.routing.num_experts, spec.moe.expert_intermediate_size
            if experts % self.ep:
                raise ConfigError(f"EP: {self.ep} does not divide the model's {experts} experts")
            if units % (self.tp // self.ep):
                raise ConfigError(
                    f"TP: TP / EP, {self.tp // self.ep}, does not divide an expert's {units} units"
                )
        if self.pp > spec.num_layers:
            raise ConfigError(f"PP: {self.pp} is more than the model's {spec.num_layers} layers")
        heads = spec.attention.num_kv_heads
        if heads % self.tp and self.tp % heads:
            raise ConfigError(f"TP: {self.tp} and the model's {heads} KV heads do not divide")
