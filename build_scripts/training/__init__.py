"""Corpus, training, export and evaluation of the demo model (build_scripts/train_demo.py)."""
