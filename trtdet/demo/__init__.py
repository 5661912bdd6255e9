"""The demo and its generated images."""
