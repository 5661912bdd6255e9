"""What trtdet raises on purpose.

    TrtdetError                    every error a user can cause or meet; the command line prints it and exits 1
    ├── ConfigError                a configuration file or an option that cannot be right; names the key path
    ├── DataError                  images or annotations
    ├── ModelError                 an ONNX model, a checkpoint or an export
    ├── CalibrationError           activations or ranges that cannot be used
    ├── BackendError               a missing, unable or failing backend
    ├── BundleError                a bundle that is incomplete, altered or of another schema
    └── OutputError                a file or folder that cannot be written

Each message is a single line: what was wrong, what was got, what is allowed, what to do next.
"""

from __future__ import annotations


class TrtdetError(Exception):
    """Base of every error that trtdet raises on purpose.

    Attributes:
        problem: what was wrong, what was got, what is allowed.
        hint: what to do next, such as the pip line of a library that is missing; empty where the problem says it.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem, hint)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}" if self.hint else self.problem


class ConfigError(TrtdetError):
    """A configuration key or an option is missing, misspelt, of the wrong type or out of range."""


class DataError(TrtdetError):
    """Images or annotations are missing, unreadable or do not fit together."""


class ModelError(TrtdetError):
    """A model file cannot be read, is not what the configuration says, or cannot be rewritten."""


class CalibrationError(TrtdetError):
    """Activations or ranges are unusable: not finite, empty, or made from another model."""


class BackendError(TrtdetError):
    """A backend is missing, cannot do what was asked, or failed while doing it.

    Attributes:
        messages: what its builder said until it failed, a line each; empty where none had begun.
    """

    def __init__(self, problem: str, hint: str = "", messages: tuple[str, ...] = ()) -> None:
        super().__init__(problem, hint)
        self.messages = messages


class BundleError(TrtdetError):
    """A bundle is incomplete, altered, or of a schema this version does not read."""


class OutputError(TrtdetError):
    """A file or folder cannot be written; what stood there before is untouched."""


def one_line(text: object, limit: int = 300) -> str:
    """Text from elsewhere as it fits into a message of one line: white space is folded, characters that a terminal
    would obey or that cannot be encoded are replaced, and what follows ``limit`` characters is left out."""
    folded = " ".join(str(text).split())
    cut = folded if len(folded) <= limit else folded[: limit - 3] + "..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


class TrtdetWarning(UserWarning):
    """Something was skipped or adjusted and the result says so; never raised for a lost accuracy."""


class ImplausibleDetections(TrtdetWarning):
    """On its images a model does not look like a working detector, or does so more with another configuration."""
