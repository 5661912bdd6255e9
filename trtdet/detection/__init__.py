"""Head decoding and suppression in NumPy, the reference for all backends."""
