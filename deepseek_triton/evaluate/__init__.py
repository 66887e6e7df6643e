"""How good an engine is: perplexity of given text, agreement with another engine."""
