"""What eviction and quantization cost in quality, on a model that is trained here or on any checkpoint."""
