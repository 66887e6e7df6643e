"""Activation-aware INT4 quantisation of a checkpoint, calibrated through the ONNX model."""
