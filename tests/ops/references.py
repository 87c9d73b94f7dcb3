"""Direct float64 forms that the operators are compared with, and bounds that follow from rounding alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attngeo.ops import gaussian_kernel, gaussian_kernel_matmul, laplacian_kernel, laplacian_kernel_matmul
from tests.tolerances import KERNEL_ROUNDINGS

LAMBDA = 4.0
# What is asked of a pairwise kernel: its matrix, its product with values, the same with normalised rows.
FORMS = ("kernel", "matmul", "normalized")


@dataclass(frozen=True)
class Kind:
    """A pairwise kernel exp(scale * distance)."""

    name: str
    scale: float
    options: tuple[float, ...]
    # Roundings of a distance beside those of its sum: difference, square and scaling, root and square in torch's form.
    roundings: int

    def apply(self, form: str, q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
        """One of FORMS through the public functions; the kernel's matrix ignores v."""
        if self.name == "laplacian":
            if form == "kernel":
                return laplacian_kernel(q, k, LAMBDA, backend=backend)
            return laplacian_kernel_matmul(q, k, v, LAMBDA, normalize=form == "normalized", backend=backend)
        if form == "kernel":
            return gaussian_kernel(q, k, backend=backend)
        return gaussian_kernel_matmul(q, k, v, normalize=form == "normalized", backend=backend)

    def operator(self, form: str) -> str:
        """Name of the operator that gives a form."""
        return f"{self.name}_kernel" if form == "kernel" else f"{self.name}_kernel_matmul"

    def exponent(self, q: Tensor, k: Tensor) -> Tensor:
        """scale * distance by its definition, in float64: [...,N,D], [...,M,D] -> [...,N,M]."""
        difference = q.double().unsqueeze(-2) - k.double().unsqueeze(-3)
        terms = difference.abs() if self.name == "laplacian" else difference.square()
        return self.scale * terms.sum(-1)

    def reference(self, form: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The form by its definition, in float64."""
        exponent = self.exponent(q, k)
        if form == "kernel":
            return exponent.exp()
        return (exponent.softmax(-1) if form == "normalized" else exponent.exp()) @ v.double()


LAPLACIAN = Kind("laplacian", -1.0 / LAMBDA, (LAMBDA,), 2)
GAUSSIAN = Kind("gaussian", -0.5, (), 5)
KINDS = (LAPLACIAN, GAUSSIAN)


def kernel_bound(kind: Kind, exponent: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Largest error of a kernel value computed in `dtype`: its exponent is a sum of `channels` rounded terms."""
    info = torch.finfo(dtype)
    relative = torch.expm1(-exponent * (channels + kind.roundings) * info.eps)
    return exponent.exp() * (relative + KERNEL_ROUNDINGS * info.eps) + info.tiny


@dataclass(frozen=True)
class Bounds:
    """Largest errors of an output and of the gradients of q, k and v (None for the kernel's matrix)."""

    output: Tensor
    q: Tensor
    k: Tensor
    v: Tensor | None


def rounding_bounds(
    kind: Kind, form: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dtype: torch.dtype, centred: bool
) -> Bounds:
    """What rounding in `dtype` does at most to a form and its gradients for the gradient `grad`, summed in any order.

    `centred` allows differences taken as (q - c) - (k - c), the mean c of the keys, as the naive Gaussian gradient.
    """
    info = torch.finfo(dtype)
    eps = info.eps
    q, k, v, grad = (tensor.detach().double() for tensor in (q, k, v, grad))
    rows, landmarks, channels, values = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    exponent = kind.exponent(q, k)
    if form == "kernel":
        weights, weights_error = exponent.exp(), kernel_bound(kind, exponent, channels, dtype)
        output_error, v_error = weights_error, None
        score_grad = grad.abs() * weights
        score_error = grad.abs() * (weights_error + 3 * eps * weights)
    else:
        weights, weights_error = exponent.exp(), kernel_bound(kind, exponent, channels, dtype)
        if form == "normalized":
            weights = exponent.softmax(-1)
            off = -exponent * (channels + kind.roundings) * eps
            off = off + (weights * off).sum(-1, keepdim=True)
            weights_error = weights * (torch.expm1(off) + (landmarks + KERNEL_ROUNDINGS) * eps) + info.tiny
        output_error = (weights_error + (landmarks + 2) * eps * weights) @ v.abs()
        v_error = (weights_error + (rows + 2) * eps * weights).mT @ grad.abs()
        gain, gain_error = grad @ v.mT, (values + 2) * eps * (grad.abs() @ v.abs().mT)
        mean = mean_error = torch.zeros_like(gain[..., :1])
        if form == "normalized":
            output = weights @ v
            mean = (grad * output).sum(-1, keepdim=True)
            mean_error = (grad.abs() * (output_error + (values + 2) * eps * output.abs())).sum(-1, keepdim=True)
        score_grad = weights * (gain - mean).abs()
        score_error = weights_error * (gain - mean).abs() + weights * (
            gain_error + mean_error + 3 * eps * (gain.abs() + mean.abs())
        )
    sums = {axis: score_error + (summands + 6) * eps * score_grad for axis, summands in ((-1, landmarks), (-2, rows))}
    if kind.name == "laplacian":
        q_error, k_error = (abs(kind.scale) * sums[axis].sum(axis).unsqueeze(-1) for axis in (-1, -2))
    elif centred:
        centre = k.mean(-2, keepdim=True) if landmarks else 0.0
        q_size, k_size = (q - centre).abs(), (k - centre).abs()
        q_error = q_size * sums[-1].sum(-1).unsqueeze(-1) + sums[-1] @ k_size
        k_error = k_size * sums[-2].sum(-2).unsqueeze(-1) + sums[-2].mT @ q_size
    else:
        spread = (q.unsqueeze(-2) - k.unsqueeze(-3)).abs()
        q_error = (sums[-1].unsqueeze(-1) * spread).sum(-2)
        k_error = (sums[-2].unsqueeze(-1) * spread).sum(-3)
    return Bounds(output_error + info.tiny, q_error + info.tiny, k_error + info.tiny, v_error)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest deviation over the largest reference value; 0 for empty tensors."""
    if reference.numel() == 0:
        return 0.0
    return float(((value.detach().double() - reference.detach()).abs().max() / reference.detach().abs().max()).item())
