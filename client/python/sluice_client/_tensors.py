"""Tensors of the wire and numpy arrays. Both are row-major and little-endian, as every host is that numpy wheels and
gRPC are built for here."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.v1 import tensor_pb2

from .types import BFLOAT16, FLOAT16, FLOAT32, Array

_WIRE_BY_DTYPE: dict[np.dtype[Any], tensor_pb2.Dtype] = {
    BFLOAT16: tensor_pb2.DTYPE_BF16,
    FLOAT16: tensor_pb2.DTYPE_FP16,
    FLOAT32: tensor_pb2.DTYPE_F32,
}
_DTYPE_BY_WIRE = {wire: dtype for dtype, wire in _WIRE_BY_DTYPE.items()}


def wire_dtype(dtype: npt.DTypeLike) -> tensor_pb2.Dtype:
    """The wire's name of a numpy dtype. TypeError for one that it has no name for."""
    wire = _WIRE_BY_DTYPE.get(np.dtype(dtype))
    if wire is None:
        raise TypeError(f"dtype {np.dtype(dtype)} is not one of bfloat16 (ml_dtypes), float16, float32")
    return wire


def numpy_dtype(wire: tensor_pb2.Dtype) -> np.dtype[Any]:
    """The numpy dtype of a wire dtype."""
    return _DTYPE_BY_WIRE[wire]


def to_wire(array: Array) -> tensor_pb2.Tensor:
    """An array as a Tensor with its bytes inline. Never converts elements: rounding is the caller's to choose."""
    return tensor_pb2.Tensor(dtype=wire_dtype(array.dtype), shape=array.shape, data=array.tobytes())


def from_wire(tensor: tensor_pb2.Tensor) -> Array:
    """A Tensor as a read-only array over its bytes."""
    return np.frombuffer(tensor.data, numpy_dtype(tensor.dtype)).reshape(tuple(tensor.shape))
