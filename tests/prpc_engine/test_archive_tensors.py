"""Tensors of torch, TensorFlow and JAX arrive as such where that library is imported, and as numpy
arrays elsewhere.

What a process without the library receives is looked at in this one with the library hidden.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from prpc_engine.archive import ArchiveError, Decoder, encode
from prpc_engine.errors import BadArguments
from tests.prpc_engine.archives import same, there_and_back

TORCH_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
TORCH_DTYPES += ["bfloat16", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_tensors_of_every_dtype_come_back(torch: Any, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    for shape in ((), (0,), (7,), (3, 0, 2), (2, 3, 4)):
        tensor = torch.ones(shape).to(dtype)
        back = there_and_back(tensor)
        assert (type(back), back.dtype, back.shape) == (torch.Tensor, dtype, tensor.shape)
        assert bytes(back.reshape(-1).view(torch.uint8).tolist() if back.numel() else []) == bytes(
            tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
        )


def test_the_memory_of_a_torch_tensor_is_the_block_itself_and_what_arrives_is_the_receivers(
    torch: Any,
) -> None:
    tensor = torch.arange(1000)
    body, (block,) = encode([tensor])
    assert block.ctypes.data == tensor.data_ptr()
    block.flags.writeable = False
    (back,) = Decoder().decode(body, [block])
    back += 1
    assert torch.equal(tensor, torch.arange(1000))
    assert torch.equal(back, tensor + 1)


def test_views_gradients_conjugates_and_parameters_arrive_as_plain_tensors(torch: Any) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (
        base.transpose(0, 2),
        base[:, ::2],
        base.expand(5, 2, 3, 4),
        base.clone().requires_grad_(),
        torch.nn.Parameter(base),
        torch.view_as_complex(base.reshape(-1, 2)).conj(),
        torch.view_as_complex(base.reshape(-1, 2)).conj().imag,
    ):
        back = there_and_back(tensor)
        assert type(back) is torch.Tensor
        assert not back.requires_grad
        assert torch.equal(back, tensor.detach())


def test_torch_tensors_that_are_not_in_plain_memory_are_refused_with_what_to_do(torch: Any) -> None:
    with pytest.raises(
        BadArguments,
        match=r"the value\[0\] cannot be sent: it is a torch tensor on meta: send value.cpu",
    ):
        encode([torch.empty(3, device="meta")])
    with pytest.raises(BadArguments, match=r"layout torch.sparse_coo: send value.to_dense"):
        encode(torch.eye(3).to_sparse())


def test_a_process_without_torch_gets_a_numpy_array(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [torch.arange(6).reshape(2, 3), torch.ones(3, dtype=torch.bool)]
    body, blocks = encode(sent)
    monkeypatch.delitem(sys.modules, "torch")
    back = Decoder().decode(body, blocks)
    assert same(back, [np.arange(6).reshape(2, 3), np.ones(3, bool)])
    assert "torch" not in sys.modules, "it is never imported for a peer"


def test_a_tensor_that_does_not_fit_its_block_is_refused(torch: Any) -> None:
    body, (block,) = encode(torch.arange(6))
    for wrong in (block[:-8], np.zeros(56, np.uint8), block[:0]):
        with pytest.raises(ArchiveError):
            Decoder().decode(body, [wrong])
    body, _ = encode(torch.ones(4, dtype=torch.bool))
    with pytest.raises(ArchiveError, match="neither 0 nor 1"):
        Decoder().decode(body, [np.full(4, 9, np.uint8)])


def test_jax_arrays_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    jax = pytest.importorskip("jax")
    for array in (
        jax.numpy.arange(6.0).reshape(2, 3),
        jax.numpy.ones((2, 2), jax.numpy.bfloat16),
        jax.numpy.zeros((0, 3)),
        jax.numpy.int32(5),
    ):
        back = there_and_back(array)
        assert isinstance(back, jax.Array)
        assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
    with jax.enable_x64(True):
        body, blocks = encode(jax.numpy.arange(3, dtype="int64"))
    back = Decoder().decode(body, blocks)
    assert same(back, np.arange(3)), "JAX would have made 32 bits of it"
    with pytest.raises(BadArguments, match="cannot be sent"):
        jax.jit(encode)(jax.numpy.arange(3))
    with pytest.raises(BadArguments, match="cannot be sent"):
        encode(jax.random.key(0))


@pytest.fixture(scope="module")
def tensorflow() -> Any:
    """TensorFlow, with what it keeps for ever opened before the leak fixture looks."""
    module = pytest.importorskip("tensorflow")
    module.constant(0)
    return module


def test_tensorflow_tensors_come_back(tensorflow: Any) -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.zeros((0, 3), np.int32), np.array(True)):
        back = there_and_back(tensorflow.constant(array))
        assert isinstance(back, tensorflow.Tensor)
        assert same(np.asarray(back), array)
    with pytest.raises(BadArguments, match="no plain bytes"):
        encode(tensorflow.constant(["text"]))
