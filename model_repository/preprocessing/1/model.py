"""Triton loads this file; everything that it does lives in the package."""

from deepseek_triton.backend.preprocessing import Preprocessing as TritonPythonModel

__all__ = ["TritonPythonModel"]
