"""A stand-in for PyCUDA on the stand-in driver, with the names and the rules of its 2024.1."""
