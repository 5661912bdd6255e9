"""Builds and runs engines of TensorRT 8.6 to 11 and of TensorRT-RTX."""
