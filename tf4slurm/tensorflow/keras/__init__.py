"""Keras 3: `fit`, `evaluate` and `predict` on parameter servers."""
