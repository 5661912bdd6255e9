"""Errors and warnings.

    TrtdetError                    every expected error; the command line prints it and exits with 1
    ├── ConfigError                a wrong configuration key or option; names the key path
    ├── DataError                  images or annotations
    ├── ModelError                 an ONNX model, a checkpoint or an export
    ├── CalibrationError           activations or ranges that cannot be used
    ├── BackendError               a missing, unable or failing backend
    ├── BundleError                a bundle that is incomplete, altered or of another schema
    └── OutputError                a file or folder that cannot be written

Each message is a single line: the problem, the actual value, the allowed values, the next step.
"""

from __future__ import annotations


class TrtdetError(Exception):
    """Base of all expected errors.

    ``hint`` is the next step, such as the pip command for a missing library; empty where ``problem`` says it. Both are
    one line without control characters, together under 1500 characters, as they may name what a file holds.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        problem = one_line(problem, 1000)
        hint = one_line(hint, 1490 - len(problem))
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
    """A backend is missing, cannot do the task, or failed; ``messages`` are the lines of its builder's log."""

    def __init__(self, problem: str, hint: str = "", messages: tuple[str, ...] = ()) -> None:
        super().__init__(problem, hint)
        self.messages = messages


class BundleError(TrtdetError):
    """A bundle is incomplete, altered, or of an unsupported schema."""


class OutputError(TrtdetError):
    """A file or folder cannot be written; an existing one is unchanged."""


def one_line(text: object, limit: int = 300) -> str:
    """Foreign text for a one-line message: white space folded, control characters and characters that cannot be
    encoded replaced, cut to ``limit`` characters."""
    folded = " ".join(str(text).split())
    cut = folded if len(folded) <= limit else folded[: limit - 3] + "..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


class TrtdetWarning(UserWarning):
    """Something was skipped or adjusted, which the result also records; never raised for lost accuracy."""


class ImplausibleDetections(TrtdetWarning):
    """On the given images a model finds nothing plausible, or works better with another configuration."""
