"""Experiments: a grid of options (`sweep`) or a search over plans (`tune`) chooses variants, each built and scored.

Both write one kind of folder, in which every variant has a number that ``trtdet build --from DIR:N`` builds.
"""
