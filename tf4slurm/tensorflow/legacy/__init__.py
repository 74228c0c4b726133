"""Sessions of TensorFlow 1: hooks and queues for completion signals."""
