"""Train Keras 3 models on parameter servers, and evaluate them: `fit`, `evaluate` and `predict`."""
