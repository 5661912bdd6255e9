"""Detections in NumPy: decoding of heads and suppression, the reference that every backend is held to."""
