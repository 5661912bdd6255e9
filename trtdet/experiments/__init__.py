"""Experiments: `sweep` measures a grid of options, `tune` searches precision plans, `image_counts` compares numbers of
calibration images.

``trtdet build --from DIR:N`` builds variant N of the folder that either of them wrote.
"""
