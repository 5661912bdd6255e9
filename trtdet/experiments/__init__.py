"""Experiments: `sweep` measures a grid of options, `tune` searches precision plans.

``trtdet build --from DIR:N`` builds variant N of the folder that either of them wrote.
"""
