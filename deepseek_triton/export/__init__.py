"""ModelSpec and weights to the portable ONNX model."""
