"""A detector that runs: a bundle or a model, and its pictures."""
