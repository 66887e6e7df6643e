"""One TensorRT build: parse, profiles, compile into a file; progress, cancelling, error messages.

The same code drives TensorRT 10 and 11 and TensorRT-RTX. Types are those of the model
(STRONGLY_TYPED where the version has to be told), so no precision flag is ever set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from deepseek_triton.errors import BuildError, ConfigError

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 6  # later ones follow from the first

_T = TypeVar("_T")

Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, usual and largest shape of an input."""


@dataclass(frozen=True)
class Profile:
    """Shapes that one optimization profile covers, by input."""

    name: str
    shapes: Mapping[str, Range]


class TensorRTBuild:
    """A parsed network and what it takes to compile it; `trt` is the module of either runtime."""

    def __init__(self, trt: Any, model_path: Path) -> None:
        """Parse `model_path`; its external weights are mapped, not copied.

        Raises:
            BuildError: TensorRT cannot parse the model; the message names the nodes.
        """
        self._trt = trt
        self._errors: list[str] = []
        trt_logger, sink = _logger_of(trt)
        sink.errors = self._errors
        self._builder = trt.Builder(trt_logger)
        strongly_typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        flags = 0 if strongly_typed is None else 1 << int(strongly_typed)
        self.network = self._builder.create_network(flags)
        # Not before: a network that inherits a recorder crashes when it is freed (RTX 1.7).
        self._recorder = _make_recorder(trt, self._errors)
        self._builder.error_recorder = self._recorder
        self._parser = trt.OnnxParser(self.network, trt_logger)
        if not self._parser.parse_from_file(str(model_path)):
            raise BuildError(_message("TensorRT cannot parse the model", self._parse_errors()))
        self._config = self._builder.create_builder_config()

    def add_profile(self, profile: Profile) -> None:
        """Add an optimization profile; they are numbered in order."""
        built = self._builder.create_optimization_profile()
        for name, (least, usual, most) in profile.shapes.items():
            built.set_shape(name, least, usual, most)
        if self._config.add_optimization_profile(built) < 0:
            raise BuildError(_message(f"profile {profile.name!r} does not fit", self._errors))

    def set_compute_capabilities(self, names: Sequence[str]) -> None:
        """Compile for the GPUs of these compute capabilities ("89" for 8.9), not for this one's.

        Raises:
            ConfigError: this TensorRT builds for the GPU at hand only, or not for one of `names`.
        """
        known = getattr(self._trt, "ComputeCapability", None)
        if known is None or not hasattr(self._config, "set_compute_capability"):
            raise ConfigError(
                "SM: TensorRT builds for the GPU of this machine; leave SM out, or use "
                "TARGET=tensorrt_rtx"
            )
        members = known.__members__
        self._config.num_compute_capabilities = len(names)
        for index, name in enumerate(names):
            if f"SM{name}" not in members:
                choices = ", ".join(m[2:] for m in members if m.startswith("SM"))
                raise ConfigError(f"SM: {name!r} is unknown; choose from {choices}")
            self._config.set_compute_capability(members[f"SM{name}"], index)

    def use_timing_cache(self, path: Path) -> None:
        """Start from the timings in `path`, if it exists, for builds of the same layers.

        Raises:
            ConfigError: this TensorRT has no timing cache, or the file is not one.
        """
        data = path.read_bytes() if path.is_file() else b""
        cache = self._config.create_timing_cache(data)
        if cache is None or not self._config.set_timing_cache(cache, False):
            raise ConfigError(f"TIMING_CACHE: {path} is not a timing cache of this TensorRT")

    def save_timing_cache(self, path: Path) -> None:
        """Write the timings, those of this build included, to `path`."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(bytes(self._config.get_timing_cache().serialize()))
        temporary.replace(path)

    def compile(self, engine_path: Path, cancelled: threading.Event) -> None:
        """Compile into the file `engine_path`; end at the next step once `cancelled` is set.

        Raises:
            BuildError: the build failed or was cancelled; there is no file then.
            OSError: the file cannot be written.
        """
        try:
            with (
                tqdm(desc="tensorrt", unit="step", disable=None) as bar,
                engine_path.open("wb") as file,
            ):
                self._config.progress_monitor = _make_monitor(self._trt, bar, cancelled)
                writer = _make_writer(self._trt, file.write)
                ok = self._build(writer)
            if writer.failure is not None:
                raise writer.failure
            if not ok:
                raise BuildError(_message("TensorRT cannot build the model", self._errors))
        except BaseException:
            engine_path.unlink(missing_ok=True)
            raise

    def _build(self, writer: Any) -> bool:
        if hasattr(self._builder, "build_serialized_network_to_stream"):
            return bool(
                self._builder.build_serialized_network_to_stream(self.network, self._config, writer)
            )
        plan = self._builder.build_serialized_network(self.network, self._config)
        return plan is not None and writer.write(memoryview(plan)) == plan.nbytes

    def _parse_errors(self) -> list[str]:
        errors = [self._parser.get_error(i) for i in range(self._parser.num_errors)]
        return [_parse_error(error) for error in errors] or self._errors


def interruptibly(work: Callable[[threading.Event], _T]) -> _T:
    """Run `work` in a thread of its own and return its result; Ctrl-C sets the event it gets.

    TensorRT calls back from C++, where the KeyboardInterrupt that Python raises in the main thread
    must not arise: it is lost or ends the process.

    Raises:
        KeyboardInterrupt: after `work` has ended, whatever its result.
    """
    cancelled = threading.Event()
    executor = ThreadPoolExecutor(1, thread_name_prefix="tensorrt-build")
    future = executor.submit(work, cancelled)
    while not future.done():
        try:
            wait([future], timeout=0.2)
        except KeyboardInterrupt:
            if not cancelled.is_set():
                logger.warning("stopping the build at its next step")
            cancelled.set()
    executor.shutdown()
    if cancelled.is_set():
        raise KeyboardInterrupt
    return future.result()


def _message(problem: str, errors: Sequence[str]) -> str:
    lines = dict.fromkeys(" ".join(error.split()) for error in errors)
    # Building needs no driver: that there is none explains no failure.
    found = [line for line in lines if "cudaError 35" not in line][:_MAX_MESSAGES]
    return "; ".join([problem, *found]) if found else f"{problem}, and gives no reason"


def _parse_error(error: Any) -> str:
    """Return one parser error with the ONNX node at fault."""
    where = ""
    if error.node_operator():
        where = f"node {error.node_name()!r} ({error.node_operator()}): "
    return where + str(error.desc()).strip()


@dataclass
class _Sink:
    """Where error messages go: the list of the latest build."""

    errors: list[str]


@cache
def _logger_of(trt: Any) -> tuple[Any, _Sink]:
    """Return the logger of a TensorRT module, which keeps the first for good, and its sink."""
    sink = _Sink([])

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                sink.errors.append(message.strip())  # raised together
            elif severity == trt.ILogger.WARNING:
                logger.warning("%s", message.strip())

    return Logger(), sink


def _make_recorder(trt: Any, errors: list[str]) -> Any:
    """Return an error recorder that adds to `errors`; TensorRT may call it from any thread."""
    records: list[tuple[Any, str]] = []

    class Recorder(trt.IErrorRecorder):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)

        def report_error(self, code: Any, description: str) -> bool:
            records.append((code, description))
            errors.append(description.strip())
            return False  # not fatal to the process

        def num_errors(self) -> int:
            return len(records)

        def get_error_code(self, index: int) -> Any:
            return records[index][0]

        def get_error_desc(self, index: int) -> str:
            return records[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            records.clear()

    return Recorder()


def _make_monitor(trt: Any, bar: Any, cancelled: threading.Event) -> Any:
    """Return a progress monitor that moves `bar` and ends the build once `cancelled` is set."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            bar.total = (bar.total or 0) + steps
            bar.set_postfix_str(name, refresh=False)

        def step_complete(self, name: str, step: int) -> bool:
            bar.update()
            return not cancelled.is_set()

        def phase_finish(self, name: str) -> None:
            bar.refresh()

    return Monitor()


def _make_writer(trt: Any, write: Callable[[Any], int]) -> Any:
    """Return a stream writer; a failed write ends the build and is kept in `failure`."""
    base = getattr(trt, "IStreamWriter", object)

    class Writer(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            base.__init__(self)
            self.failure: OSError | None = None

        def write(self, data: Any) -> int:
            try:
                return write(data)
            except OSError as error:  # must not pass through C++
                self.failure = error
                return 0

    return Writer()
