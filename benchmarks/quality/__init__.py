"""What eviction and quantization cost in quality: a small model is trained, then asked with shorter caches."""
