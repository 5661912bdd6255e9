"""TensorRT 8.6 to 11 and TensorRT-RTX: building engines and running them."""
