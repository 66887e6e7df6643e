"""Portable ONNX to engine directories, one file per target."""
