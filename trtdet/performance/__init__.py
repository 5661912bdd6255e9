"""How long a detector takes: latency side by side, and time by layer."""
