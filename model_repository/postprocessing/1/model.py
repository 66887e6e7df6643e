"""Triton loads this file; everything that it does lives in the package."""

from deepseek_triton.backend.postprocessing import Postprocessing as TritonPythonModel

__all__ = ["TritonPythonModel"]
