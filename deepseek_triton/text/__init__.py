"""Tokenizer, incremental detokenizer, stop strings."""
