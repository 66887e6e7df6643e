"""DeepSeek models on NVIDIA Triton Inference Server."""

import os

__version__ = "0.1.0"

# Else ONNX Runtime's wheels look up a host of their maker and keep a device id under ~/.cache as
# soon as they are imported, which is never before this module is.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
