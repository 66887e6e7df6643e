"""Triton-language GPU kernels, each with a plain torch reference beside it. Needs torch."""
