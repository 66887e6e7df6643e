"""ModelRunner implementations and the sampler."""
