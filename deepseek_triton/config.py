"""Every setting of a running server, in one place: frozen, validated, composed.

Values come as flat strings, from the `parameters` of a config.pbtxt, and an environment variable
DEEPSEEK_TRITON_<KEY> overrides each of them. No other module parses strings.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from deepseek_triton.errors import ConfigError, InvalidRequestError

ENV_PREFIX = "DEEPSEEK_TRITON_"

# Parameters that Triton's Python backend reads itself.
_TRITON_PARAMETERS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})

_T = TypeVar("_T")


@dataclass(frozen=True)
class Setting:
    """One leaf of the configuration, as documentation and error messages need it."""

    key: str
    kind: type  # int, float or str
    default: int | float | str
    help: str
    unit: str = ""
    minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()

    @property
    def env(self) -> str:
        """Name of the environment variable that overrides it."""
        return ENV_PREFIX + self.key.upper()

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is str:
            return "any string"
        return f"{self.kind.__name__}, {self.minimum:.15g} to {self.maximum:.15g}"

    def parse(self, text: str) -> int | float | str:
        """Return the value that `text` spells; raises ConfigError."""
        try:
            value: int | float | str = self.kind(text.strip())
        except ValueError:
            raise self._error(text) from None
        return value

    def check(self, value: object) -> None:
        """Raise ConfigError unless `value` has the right type and range."""
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise self._error(value)
        if self.kind is str:
            ok = isinstance(value, str) and (not self.choices or value in self.choices)
        elif isinstance(value, str) or (self.kind is int and not isinstance(value, int)):
            ok = False
        else:
            ok = math.isfinite(value) and self.minimum <= value <= self.maximum
        if not ok:
            raise self._error(value)

    def _error(self, value: object) -> ConfigError:
        return ConfigError(
            f"{label(self.key)}: {value!r} is not allowed; it must be {self.allowed}"
        )


def label(key: str) -> str:
    """Return the setting `key` beside the environment variable that overrides it."""
    return f"{key} ({ENV_PREFIX}{key.upper()})"


def labels(*keys: str) -> str:
    """Return several settings, each with its environment variable, as a choice."""
    *first, last = map(label, keys)
    return f"{', '.join(first)} or {last}" if first else last


def _setting(key: str, default: Any, help: str, **limits: Any) -> Any:
    setting = Setting(key, type(default), default, help, **limits)
    return field(default=default, metadata={"setting": setting})


class _Checked:
    """Checks every leaf against its Setting when the dataclass is made."""

    def __post_init__(self) -> None:
        for leaf in dataclasses.fields(self):  # type: ignore[arg-type]
            if "setting" in leaf.metadata:
                leaf.metadata["setting"].check(getattr(self, leaf.name))


@dataclass(frozen=True)
class SchedulerConfig(_Checked):
    """What one step may hold, and how many requests may wait."""

    max_batch_size: int = _setting(
        "max_batch_size",
        16,
        "Requests that run at the same time; more of them wait.",
        unit="requests",
        minimum=1,
        maximum=4096,
    )
    max_tokens_per_step: int = _setting(
        "max_tokens_per_step",
        256,
        "Tokens computed in one step: one for each decoding request, the rest for prefill chunks. "
        "Lower keeps streams even while long prompts arrive; higher finishes prompts sooner. "
        "At least max_batch_size.",
        unit="tokens",
        minimum=1,
        maximum=1 << 20,
    )
    max_waiting: int = _setting(
        "max_waiting",
        1024,
        "Requests that may wait for a place in the batch; further ones are refused as UNAVAILABLE.",
        unit="requests",
        minimum=0,
        maximum=1 << 20,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens_per_step < self.max_batch_size:
            raise ConfigError(
                f"{label('max_tokens_per_step')}: {self.max_tokens_per_step} is less than "
                f"{label('max_batch_size')}, {self.max_batch_size}; each running request needs "
                "one token a step"
            )


@dataclass(frozen=True)
class CacheConfig(_Checked):
    """How large the KV pools are: by block count, by bytes, or by a share of the free memory.

    The first that is not 0 decides. kv_cache.sizing turns it into a number of blocks.
    """

    num_blocks: int = _setting(
        "kv_cache_num_blocks",
        0,
        "KV blocks in the pool; 0 = by memory.",
        unit="blocks",
        minimum=0,
        maximum=1 << 31,
    )
    memory_mb: int = _setting(
        "kv_cache_memory_mb",
        0,
        "Memory of all KV pools together; 0 = by fraction.",
        unit="MiB",
        minimum=0,
        maximum=1 << 31,
    )
    memory_fraction: float = _setting(
        "kv_cache_memory_fraction",
        0.25,
        "Share that the KV pools may take of the memory that the weights leave.",
        minimum=0.001,
        maximum=0.95,
    )


@dataclass(frozen=True)
class DeadlineConfig(_Checked):
    """How long a request may take, waiting included, before the engine ends it as cancelled."""

    default_ms: int = _setting(
        "default_deadline_ms",
        600_000,
        "Deadline of a request that names none. It also bounds the work for clients that went away "
        "unnoticed.",
        unit="ms",
        minimum=1,
        maximum=86_400_000,
    )
    max_ms: int = _setting(
        "max_deadline_ms",
        3_600_000,
        "Longest deadline that a request may ask for.",
        unit="ms",
        minimum=1,
        maximum=86_400_000,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.default_ms > self.max_ms:
            raise ConfigError(
                f"{label('default_deadline_ms')}: {self.default_ms} is more than "
                f"{label('max_deadline_ms')}, {self.max_ms}"
            )

    def deadline_ns(self, requested_ms: int | None, now_ns: int) -> int:
        """Return Request.deadline_ns for a request that came at `now_ns` (time.monotonic_ns()).

        `requested_ms` None means the default. Raises InvalidRequestError outside 1 … max_ms.
        """
        ms = self.default_ms if requested_ms is None else requested_ms
        if not 1 <= ms <= self.max_ms:
            raise InvalidRequestError(
                "deadline_ms",
                f"{ms} is not allowed; it must be from 1 to {self.max_ms} milliseconds",
            )
        return now_ns + ms * 1_000_000


@dataclass(frozen=True)
class EngineConfig(_Checked):
    """All settings of a server."""

    engine_dir: str = _setting(
        "engine_dir", "", "Engine directory to serve, made by `make engine`; required."
    )
    num_threads: int = _setting(
        "num_threads",
        0,
        "Threads that compute; 0 = one per core that the process may use.",
        unit="threads",
        minimum=0,
        maximum=4096,
    )
    max_context_len: int = _setting(
        "max_context_len",
        0,
        "Most tokens of prompt and output together; 0 = what the engine was built for.",
        unit="tokens",
        minimum=0,
        maximum=1 << 24,
    )
    engine_process: str = _setting(
        "engine_process",
        "auto",
        "Where the model runs: own, in a process of its own, so that making responses takes no "
        "time from its steps; inline, in the process that makes them; auto, own on a GPU and "
        "inline on the CPU.",
        choices=("auto", "own", "inline"),
    )
    log_level: str = _setting(
        "log_level",
        "INFO",
        "Least important log lines that are written.",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    deadline: DeadlineConfig = field(default_factory=DeadlineConfig)

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, str], environ: Mapping[str, str] = os.environ
    ) -> EngineConfig:
        """Build a config from flat strings; the environment wins over `parameters`.

        Raises ConfigError for an unknown key in either of them, a bad value, or no engine_dir. An
        empty string leaves a setting at its default.
        """
        known = {setting.key: setting for setting in settings()}
        texts = {key: text for key, text in parameters.items() if key not in _TRITON_PARAMETERS}
        for key in texts:
            if key not in known:
                raise _unknown("parameter", key, sorted(known))
        by_env = {setting.env: setting.key for setting in known.values()}
        for name, text in environ.items():
            if name.startswith(ENV_PREFIX):
                if name not in by_env:
                    raise _unknown("environment variable", name, sorted(by_env))
                texts[by_env[name]] = text
        values = {key: known[key].parse(text) for key, text in texts.items() if text.strip()}
        if not values.get("engine_dir"):
            raise ConfigError(
                f"engine_dir: missing; set the parameter or {known['engine_dir'].env} to a folder "
                "made by `make engine`"
            )
        return _compose(cls, values)


def settings(config: type = EngineConfig) -> Iterator[Setting]:
    """Yield the settings of `config` and of the configs inside it, in order of declaration."""
    hints = get_type_hints(config)
    for leaf in dataclasses.fields(config):
        if "setting" in leaf.metadata:
            yield leaf.metadata["setting"]
        else:
            yield from settings(hints[leaf.name])


def settings_markdown() -> str:
    """Return the table of all settings for the documentation."""
    lines = ["| parameter | environment | default | allowed | unit | meaning |", "|" + "---|" * 6]
    for setting in settings():
        cells = (
            f"`{setting.key}`",
            f"`{setting.env}`",
            f"`{setting.default}`" if setting.default != "" else "",
            setting.allowed,
            setting.unit,
            setting.help,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _compose(config: type[_T], values: Mapping[str, object]) -> _T:
    """Build `config`, and the configs inside it, from flat `values`; absent ones keep defaults."""
    hints = get_type_hints(config)
    arguments: dict[str, object] = {}
    for leaf in dataclasses.fields(config):  # type: ignore[arg-type]
        if "setting" not in leaf.metadata:
            arguments[leaf.name] = _compose(hints[leaf.name], values)
        elif leaf.metadata["setting"].key in values:
            arguments[leaf.name] = values[leaf.metadata["setting"].key]
    return config(**arguments)


def _unknown(what: str, name: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "known: " + ", ".join(known)
    return ConfigError(f"{what} {name} is unknown; {hint}")
