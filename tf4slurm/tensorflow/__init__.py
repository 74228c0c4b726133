"""What works inside TensorFlow. The only room that imports it."""
