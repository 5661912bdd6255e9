"""A detector that runs: a bundle or a model, its pictures and its recordings."""
