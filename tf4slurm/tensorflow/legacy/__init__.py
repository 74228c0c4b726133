"""Support sessions of TensorFlow 1 with hooks, and with queues for completion signals."""
