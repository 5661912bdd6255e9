"""Chooses the convolutions that stay out of INT8, by the accuracy that each costs."""
