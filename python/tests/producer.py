"""A DLPack producer that counts: how often it was asked, how often its tensors were given back."""

import ctypes

import numpy as np


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Plain(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype = ctypes.c_char_p
_name_of.argtypes = [ctypes.py_object]


class Producer:
    """Exports a float32 array as some producer might, as other `elements` if told so; `exported` and `deleted` count."""

    def __init__(
        self,
        array,
        *,
        version=None,
        old=False,
        strides=True,
        offset=0,
        deleter=True,
        flags=0,
        device=(1, 0),
        elements=(2, 32, 1),
    ):
        self.array, self.version, self.old, self.flags, self.device = array, version, old, flags, device
        self.strides, self.offset, self.with_deleter, self.elements = strides, offset, deleter, elements
        self.exported = self.deleted = 0
        self.alive = {}
        self.capsules = []
        self._deleter = _DELETER(self._delete)
        self.shape, self.dtype = array.shape, array.dtype

    def _delete(self, address):
        self.deleted += 1
        del self.alive[address]

    def __dlpack_device__(self):
        return self.device

    def __array_namespace__(self):
        class Namespace:
            float32 = np.float32
            empty = staticmethod(lambda shape, dtype, device: np.empty(shape, dtype))

        return Namespace

    def __dlpack__(self, **options):
        if self.old and options:
            raise TypeError(f"__dlpack__() got unexpected keyword arguments {sorted(options)}")
        self.exported += 1
        managed = _Plain() if self.version is None else _Versioned(*self.version)
        tensor = managed.tensor
        tensor.data = self.array.__array_interface__["data"][0] - self.offset
        tensor.byte_offset = self.offset
        tensor.device_type, tensor.device_id = self.device
        tensor.ndim = self.array.ndim
        tensor.code, tensor.bits, tensor.lanes = self.elements
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        strides = (ctypes.c_int64 * self.array.ndim)(*(s // 4 for s in self.array.strides))
        tensor.shape = shape
        if self.strides:
            tensor.strides = strides
        if self.with_deleter:
            managed.deleter = self._deleter
        if self.version is not None:
            managed.flags = self.flags
        address = ctypes.addressof(managed)
        self.alive[address] = (managed, shape, strides)
        self.name = b"dltensor" if self.version is None else b"dltensor_versioned"
        capsule = _new_capsule(address, self.name, None)
        self.capsules.append(capsule)
        return capsule

    def names(self):
        """The names of all capsules handed out."""
        return {_name_of(capsule) for capsule in self.capsules}

    device_name = "cpu"
