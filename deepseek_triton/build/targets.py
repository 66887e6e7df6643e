"""What an engine can be built for. A target rewrites the portable model in its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deepseek_triton.build import cuda, onnxruntime, ort_int4, tensorrt, tensorrt_llm
from deepseek_triton.build.limits import CallLimits
from deepseek_triton.errors import ConfigError

ONNXRUNTIME_GPU = "1.31.1"
"""The release of onnxruntime-gpu that engines for CUDA are built for, whatever is installed."""


@dataclass(frozen=True)
class Target:
    """How to build for one runtime."""

    precisions: tuple[str, ...]
    runtime: str  # the distribution that runs the engine; its version is kept in the manifest
    # Rewrites the portable model at this path in place; takes an INT4 accuracy level if it has any.
    build: Callable[..., None]
    drafts: bool = False  # whether its runner can use a draft model
    block_size: int = 16  # tokens in a KV block unless the caller says otherwise
    kv_precision: str | None = None  # of KV rows; None: the engine's
    # Turns the rewritten model into a file of its own, given limits and a timing cache.
    compile: Callable[[Path, CallLimits, Path | None], Path] | None = None
    runtime_version: Callable[[], str] | None = None  # for a runtime that may be missing
    int4_accuracy_levels: tuple[int, ...] = ()  # that can be chosen, the default first
    provider: str | None = None  # of ONNX Runtime
    # Writes the engine from the checkpoint itself; then there is no portable model.
    write: Callable[..., Path] | None = None

    @property
    def has_limits(self) -> bool:
        """Whether its engines are made for a largest call."""
        return self.compile is not None or self.write is not None

    def versions(self) -> dict[str, str]:
        """Return the versions that shape an engine, by distribution."""
        versions = {name: version(name) for name in ("deepseek-triton", "onnx")}
        find = self.runtime_version or partial(version, self.runtime)
        return versions | {self.runtime: find()}


def _onnxruntime_version() -> str:
    """Return the version of the wheel that is installed; both have the CPU provider."""
    try:
        return version("onnxruntime")
    except PackageNotFoundError:
        return version("onnxruntime-gpu")


_ONNXRUNTIME_CUDA = Target(
    ("fp32", "fp16", "bf16"),
    "onnxruntime-gpu",
    onnxruntime.build_cuda,
    runtime_version=lambda: ONNXRUNTIME_GPU,
    provider="cuda",
)
TARGETS = {
    "onnxruntime": Target(
        ("fp32", "fp16", "bf16"),
        "onnxruntime",
        onnxruntime.build,
        drafts=True,
        kv_precision="fp32",
        runtime_version=_onnxruntime_version,
        int4_accuracy_levels=ort_int4.ACCURACY_LEVELS,
        provider="cpu",
    ),
    # The engine is the portable model itself: no version of PyTorch shapes it.
    "cuda": Target(
        ("fp32", "fp16", "bf16"), "onnx", cuda.build, drafts=True, block_size=cuda.BLOCK_SIZE
    ),
    "tensorrt_llm": Target(
        ("fp16", "bf16"),
        "tensorrt-llm",
        build=lambda model_path: None,
        runtime_version=lambda: tensorrt_llm.RELEASE,
        write=tensorrt_llm.write_checkpoint,
    ),
    **{
        flavor.module: Target(
            ("fp32", "fp16", "bf16"),
            flavor.module.replace("_", "-"),
            tensorrt.build,
            compile=partial(tensorrt.compile_engine, flavor),
            runtime_version=flavor.version,
        )
        for flavor in tensorrt.FLAVORS.values()
    },
}


def find_target(name: str, precision: str, provider: str | None = None) -> Target:
    """Return the target `name` after checking that it runs `precision` and can be built here.

    `provider` is ONNX Runtime's, None the default one.

    Raises:
        ConfigError: it does not exist (the message lists what does), or what builds it is missing.
    """
    if name not in TARGETS:
        raise ConfigError(f"TARGET: {name!r} is unknown; choose one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    choices = [target, _ONNXRUNTIME_CUDA] if target.provider else []
    if provider is not None:
        names = [str(choice.provider) for choice in choices]
        if provider not in names:
            way_out = f"choose {' or '.join(names)}" if names else "leave it out"
            raise ConfigError(f"PROVIDER: {name} has no provider {provider!r}; {way_out}")
        target = choices[names.index(provider)]
    if precision not in target.precisions:
        raise ConfigError(
            f"PRECISION: {precision!r} is not available for {name}; "
            f"choose one of {', '.join(target.precisions)}"
        )
    if target.runtime_version is not None:
        target.runtime_version()
    return target
