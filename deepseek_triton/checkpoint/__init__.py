"""Hugging Face checkpoint folders: config.json to ModelSpec, safetensors by mmap, weight names."""
