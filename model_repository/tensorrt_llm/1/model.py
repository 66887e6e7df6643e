"""Triton loads this file; everything that it does lives in the package."""

from deepseek_triton.backend.engine_stage import EngineStage as TritonPythonModel

__all__ = ["TritonPythonModel"]
