"""Converts arrays to Triton's tensors and back, with numpy 1 and 2.

The Python stub of Triton 2.51 was built for numpy 1. With numpy 2 its `as_numpy` repeats the first number of a tensor,
tensors made of arrays have a wrong size, and a tensor of strings ends the stub's process. DLPack is right with numpy 2,
and with numpy 1 it is not.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

NUMPY_2 = int(np.__version__.split(".")[0]) >= 2
USED = ctypes.c_char_p(b"used_dltensor")  # the name of a consumed capsule, as numpy expects it; it must stay alive

name_of = ctypes.pythonapi.PyCapsule_GetName
name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
rename = ctypes.pythonapi.PyCapsule_SetName
rename.restype, rename.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class Exported:
    """An array as DLPack, which keeps the capsule that was made of it."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.capsule: Any = None

    def __dlpack__(self, stream: object = None) -> Any:
        self.capsule = self.array.__dlpack__()
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def tensor_of(name: str, array: np.ndarray) -> Any:
    array = np.ascontiguousarray(array)
    if not NUMPY_2:
        return pb_utils.Tensor(name, array)
    exported = Exported(array)
    tensor = pb_utils.Tensor.from_dlpack(name, exported)
    if exported.capsule is not None and name_of(exported.capsule) == b"used_dlpack":
        rename(exported.capsule, USED)  # numpy prints an error into the log for every capsule of another name
    return tensor


def array_of(tensor: Any, strings: bool = False) -> np.ndarray:
    """An input as an array; strings as an array of bytes, which DLPack does not support."""
    return np.from_dlpack(tensor) if NUMPY_2 and not strings else np.asarray(tensor.as_numpy())


def string_tensor(name: str, text: str) -> Any:
    """Only for environments in which the stub takes strings."""
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))
