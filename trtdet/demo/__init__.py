"""The demo, its generated images and the training of its detector."""
