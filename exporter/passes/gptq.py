"""Rounds weights with GPTQ, so that their products, not they themselves, stay close."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

DAMPING = 0.01  # of the mean of the diagonal of x^T x, added to it
COLUMNS = 64  # that are rounded before the error moves on to all later ones


def round_to_nearest(weight: Array, scale: Array, low: int, top: int) -> npt.NDArray[np.int8]:
    """Return `weight` / `scale`, rounded to integers from `low` to `top`."""
    rounded: npt.NDArray[np.int8] = np.clip(np.rint(weight / scale), low, top).astype(np.int8)
    return rounded


def round_with_gptq(weight: Array, scale: Array, low: int, top: int, x: Array) -> npt.NDArray[np.int8]:
    """Return `weight` (K, N) as integers whose products with rows like x (M, K), float32, stay closest.

    A row's error goes into later rows; each row of `scale` (G, N), float32, is that of K / G rows. Frantar
    et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
    """
    import torch  # whose factorizations take half as long

    K = len(weight)
    shared = K // len(scale)
    hessian = (x.T @ x).astype(np.float64)
    hessian[np.diag_indices(K)] += DAMPING * np.trace(hessian) / K + 1e-12
    order = np.argsort(-np.diag(hessian), kind="stable")
    rest = weight[order].astype(np.float32)
    lower = torch.linalg.cholesky(torch.from_numpy(hessian[np.ix_(order, order)]))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).numpy().astype(np.float32)
    rounded = np.empty(weight.shape, np.int8)
    for begin in range(0, K, COLUMNS):
        end = min(begin + COLUMNS, K)
        errors = np.empty((end - begin, weight.shape[1]), np.float32)
        for i in range(begin, end):
            own = scale[order[i] // shared]
            q = round_to_nearest(rest[i], own, low, top)
            rounded[order[i]] = q
            errors[i - begin] = (rest[i] - q * own) / upper[i, i]
            rest[i:end] -= np.outer(upper[i, i:end], errors[i - begin])
        rest[end:] -= upper[begin:end, end:].T @ errors
    return rounded
