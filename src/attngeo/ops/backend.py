"""Which implementation of an operator runs, why, and a record of what really ran."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngeo.errors import UserError
from attngeo.ops.inputs import DTYPES
from attngeo.ops.tracing import constant_when_traced

try:
    import attngeo_ext
except ImportError as error:
    _extension: ModuleType | None = None
    _extension_problem = f"extension not installed ({error})"
else:
    _extension = attngeo_ext
    _extension_problem = attngeo_ext.problem or ""

BACKENDS = ("auto", "naive", "compiled")
COMPILED_OPERATORS = (
    "laplacian_kernel",
    "laplacian_kernel_matmul",
    "gaussian_kernel",
    "gaussian_kernel_matmul",
    "newton_schulz_inverse",
    "spd_inverse",
)
# Operators without kernels of their own, and what they are made of.
_MADE_OF_OTHERS = {
    "conjugate_gradient_inverse": "made of torch's matrix products",
    "nystrom_attention": "made of a kernel, an inverse and torch's matrix products",
    "low_rank_metric": "made of torch's matrix products and Cholesky roots",
}
OPERATORS = (*COMPILED_OPERATORS, *_MADE_OF_OTHERS)
_REMEDY = "run `make env`"

_ran: dict[str, set[str]] = {}


# Under torch.compile the two functions below run once, while tracing: their answers cannot change within a process.
@constant_when_traced
def _device_problem(device: str, index: int) -> str:
    """Why the extension has no kernel for this device, or an empty string."""
    if _extension is None or _extension_problem:
        return _extension_problem
    if device == "cpu":
        return ""
    if device == "cuda":
        return str(_extension.cuda_problem(index))
    return f"the extension has no kernels for {device}"


@constant_when_traced
def _note(op: str, choice: str, device: str, index: int, why: str) -> None:
    if choice == "compiled" and _extension is not None:
        what = f"compiled {_extension.variant(device, index)}"
    else:
        what = f"naive {device}" + (f" ({why})" if why else "")
    _ran.setdefault(op, set()).add(what)


@constant_when_traced
def forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken, by torch.func or with dual numbers."""
    return forward_ad._current_level >= 0


@constant_when_traced
def functional_derivative() -> str:
    """The kind of derivative being taken that a compiled operator would drop or refuse, or an empty string.

    torch takes no forward-mode derivative of an operator registered from outside and says nothing: it would be zero.
    """
    if forward_mode():
        return "forward-mode derivatives"
    if torch._C._functorch.peek_interpreter_stack() is None:
        return ""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    functional = any(level.key() == torch._C._functorch.TransformType.Grad for level in levels)
    return "torch.func's derivatives" if functional else ""


def why_not_compiled(op: str, tensors: Sequence[Tensor]) -> str:
    """Why `op` cannot run compiled on these tensors, which `inputs` checked; an empty string if it can."""
    if op not in COMPILED_OPERATORS:
        return f"no compiled form exists: {_MADE_OF_OTHERS[op]}"
    device = tensors[0].device
    return _device_problem(device.type, device.index or 0)


def resolve(op: str, backend: str, *tensors: Tensor, naive_only: str = "") -> str:
    """Choose "naive" or "compiled" for this call and record it; UserError if "compiled" is asked for and missing.

    "auto" takes the compiled form wherever the extension has one for the operator, type and device, unless
    `naive_only` names an option of this call that the compiled form does not have, or the call is differentiated in a
    way that torch knows for its own operators alone.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    why = ""
    if backend != "naive":
        naive_only = naive_only or (functional_derivative() if op in COMPILED_OPERATORS else "")
        why = f"no compiled form of {naive_only}" if naive_only else why_not_compiled(op, tensors)
    if backend == "compiled" and why:
        fixable = not naive_only and op in COMPILED_OPERATORS and bool(_extension_problem)
        raise UserError(
            f"{op}: backend='compiled' is not available: {why.replace(f': {_REMEDY}', '')}",
            _REMEDY if fixable else "use backend='auto' or backend='naive'",
        )
    choice = "naive" if backend == "naive" or why else "compiled"
    device = tensors[0].device
    _note(op, choice, device.type, device.index or 0, why if op in COMPILED_OPERATORS else "")
    return choice


def forget() -> None:
    """Begin the record of what ran anew, as a job does whose record must not hold what the process did before."""
    _ran.clear()


def ran() -> dict[str, str]:
    """What really ran in this process: operator -> for example "compiled cpu avx512"; several are joined by " + "."""
    return {op: " + ".join(sorted(_ran[op])) for op in sorted(_ran)}


def table() -> list[tuple[str, str, str, str, str]]:
    """Rows (operator, device, types, backend, why) of what "auto" chooses for every operator, type and device here.

    Types that are answered alike share a row.
    """
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    rows = []
    for op in OPERATORS:
        for device in devices:
            answers: dict[tuple[str, str], list[str]] = {}
            for dtype in DTYPES:
                name = str(dtype).removeprefix("torch.")
                answers.setdefault(_choice(op, device, dtype), []).append(name)
            rows += [(op, str(device), ", ".join(names), *answer) for answer, names in answers.items()]
    return rows


def _choice(op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The backend that "auto" chooses, and why."""
    if op not in COMPILED_OPERATORS:
        return "naive", f"no compiled form exists: {_MADE_OF_OTHERS[op]}"
    why = _device_problem(device.type, device.index or 0)
    if why or _extension is None:
        return "naive", why
    computed = "" if dtype in (torch.float32, torch.float64) else ", computed in float32"
    return "compiled", f"{_extension.variant(device.type, device.index or 0)}{computed}"
