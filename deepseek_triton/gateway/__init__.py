"""OpenAI's HTTP API in front of Triton servers."""
