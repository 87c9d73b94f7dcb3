"""What torch.compile is told about functions of ours, without importing it."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_when_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Have torch.compile run `function` while it traces and keep the answer.

    It sets the mark of torch.compiler.assume_constant_result, which imports the whole compiler to do so: 1.3 s that a
    command without torch.compile need not wait.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
