"""Exceptions, raised by the native module by name."""

from __future__ import annotations


class Error(Exception):
    """Base of all errors of attlas."""


class UnsupportedError(Error, ValueError):
    """A method cannot do what the problem needs; `reasons` has every reason."""

    def __init__(self, message: str, method: str = "", reasons: list[str] | None = None) -> None:
        super().__init__(message)
        self.method = method
        self.reasons = list(reasons or [])


class ParameterError(Error, ValueError):
    """A parameter, or the name of one, that is not accepted."""

    def __init__(self, message: str, name: str = "", value: str = "", expected: str = "") -> None:
        super().__init__(message)
        self.name, self.value, self.expected = name, value, expected


class ShapeError(Error, ValueError):
    """An array that does not fit the others."""

    def __init__(self, message: str, what: str = "", expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.what, self.expected, self.found = what, expected, found


class DataError(Error, OSError):
    """A file that cannot be read or written."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RecipeError(Error, ValueError):
    """A recipe that cannot be read."""


class ModelError(Error, ValueError):
    """A model that cannot be run or changed."""


class TooLargeError(Error, MemoryError):
    """Sizes that do not fit into the memory of the machine, or into addresses."""


class ThreadsError(Error, RuntimeError):
    """Threads that could not be started."""


class NumericalError(Error, RuntimeError):
    """A computation without a result for these numbers."""


class NeedsCopy(Exception):
    """Memory that cannot be read in place; caught inside the package."""


for _class in (
    Error, UnsupportedError, ParameterError, ShapeError, DataError, RecipeError, ModelError, TooLargeError,
    ThreadsError, NumericalError,
):  # fmt: skip
    _class.__module__ = "attlas"


def missing(package: str, extra: str) -> ImportError:
    """The error for a library that is not installed."""
    return ImportError(f'{package} is needed for this and is not installed: pip install "attlas[{extra}]"', name=package)
