"""Runs a bundle or a model as a detector, and draws its detections."""
