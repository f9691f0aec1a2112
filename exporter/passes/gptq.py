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


def factorize_inverse(hessian: Array) -> Array:
    """Return U, upper triangular, with U^T U the inverse of a symmetric matrix (K, K).

    The Cholesky factor of the matrix in reverse is a triangle R with R R^T the matrix, so U is its inverse:
    a factorization less than inverting first. A diagonal of ones keeps it sound in float32.
    """
    import torch  # whose factorizations take half as long

    root = np.sqrt(np.diag(hessian))
    even = torch.from_numpy(hessian / np.outer(root, root)).flip(0, 1)
    lower, failed = torch.linalg.cholesky_ex(even)
    if failed:
        lower = torch.linalg.cholesky(even.double())
    identity = torch.eye(len(even), dtype=lower.dtype)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    upper: Array = (inverse.flip(0, 1).numpy() / root).astype(np.float32)
    return upper


def round_with_gptq(weight: Array, scale: Array, low: int, top: int, x: Array) -> npt.NDArray[np.int8]:
    """Return `weight` (K, N) as integers whose products with rows like x (M, K), float32, stay closest.

    A row's error goes into later rows; each row of `scale` (G, N), float32, is that of K / G rows. Frantar
    et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
    """
    K = len(weight)
    shared = K // len(scale)
    hessian = x.T @ x
    hessian[np.diag_indices(K)] += DAMPING * np.trace(hessian) / K + 1e-12
    order = np.argsort(-np.diag(hessian), kind="stable")
    rest = weight[order].astype(np.float32)
    upper = factorize_inverse(hessian[np.ix_(order, order)])
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
