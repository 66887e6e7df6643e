"""Paged KV cache bookkeeping: block pool and block tables, numbers only."""
