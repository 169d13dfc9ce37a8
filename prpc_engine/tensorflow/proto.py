"""ConfigProto(tensor_fuse=...): a field of GRPC++ that the ConfigProto of stock TensorFlow lacks.
No TensorFlow in this file.

    tensor_fuse comes from                              when
    a field of ConfigProto, number 201 as in GRPC++     TensorFlow was first imported by install(),
                                                        or under `prpc run`
    the same number among ConfigProto's unknown fields  TensorFlow was there before:
                                                        tf.compat.v1.ConfigProto(tensor_fuse=True)
                                                        writes it there, but config.tensor_fuse =
                                                        True remains an AttributeError
    PRPC_TENSOR_FUSE=1                                  neither of the two says anything

TensorFlow's C++ keeps the field and passes over it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, unknown_fields

FIELD_NAME, FIELD_NUMBER = "tensor_fuse", 201
CONFIG_FILE = b"tensorflow/core/protobuf/config.proto"
_TRUE = b"\xc8\x0c\x01"  # the field as protobuf writes it: number and kind as a varint, then 1
assert int.from_bytes(_TRUE[:1], "little") & 0x7F | _TRUE[1] << 7 == FIELD_NUMBER << 3


class _Pool:
    """The pool of message types, which adds the field when TensorFlow registers the file of
    ConfigProto.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def AddSerializedFile(self, content: bytes) -> Any:  # noqa: N802
        return self._pool.AddSerializedFile(
            _with_field(content) if CONFIG_FILE in content[:100] else content
        )


def _with_field(content: bytes) -> bytes:
    file = descriptor_pb2.FileDescriptorProto.FromString(content)
    message = next(one for one in file.message_type if one.name == "ConfigProto")
    if all(field.name != FIELD_NAME for field in message.field):
        kinds = descriptor_pb2.FieldDescriptorProto
        message.field.add(
            name=FIELD_NAME,
            number=FIELD_NUMBER,
            json_name="tensorFuse",
            type=kinds.TYPE_BOOL,
            label=kinds.LABEL_OPTIONAL,
        )
    extended: bytes = file.SerializeToString()
    return extended


@contextlib.contextmanager
def with_field() -> Iterator[None]:
    """While TensorFlow is imported for the first time: its ConfigProto gets the field."""
    default = descriptor_pool.Default
    pool = _Pool(default())
    descriptor_pool.Default = lambda: pool
    try:
        yield
    finally:
        descriptor_pool.Default = default


def tensor_fuse(config: Any) -> bool | None:
    """What a ConfigProto says; None when it says nothing."""
    if FIELD_NAME in config.DESCRIPTOR.fields_by_name:
        return True if config.tensor_fuse else None
    said = [
        field.data
        for field in unknown_fields.UnknownFieldSet(config)
        if field.field_number == FIELD_NUMBER
    ]
    return bool(said[-1]) if said else None


def config_class(real: Any) -> Any:
    """What stands for a ConfigProto without the field: calls of it take tensor_fuse, all else goes
    to the class.
    """

    class _Meta(type):
        def __call__(cls, *args: Any, tensor_fuse: bool = False, **kwargs: Any) -> Any:
            config = real(*args, **kwargs)
            if tensor_fuse:
                config.MergeFromString(_TRUE)
            return config

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

    return _Meta("ConfigProto", (), {"__doc__": real.__doc__})
