"""The transport as Ray knows it (ray.experimental.rdt.TensorTransportManager), for each type of
data.

    Ray, in the process    calls
    that made the result   extract_tensor_transport_metadata: it is held (held_arrays.py), and what
                           travels by Ray says where, and of which dtypes and shapes
    that wants it          fetch_multiple_tensors, wait_fetch_complete or recv_multiple_tensors;
                           abort_transport when the other actor has failed
    that made it           garbage_collect, once no reference is left

Imported where Ray is. One-sided: nobody in the process that made the result does anything for a
fetch, but for its engine.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayDirectTransportError
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)
from ray.util import get_node_ip_address

from prpc_engine import errors
from prpc_engine.archive import DECODE_ERRORS
from prpc_engine.archive.dtypes import Spec, dtype_of
from prpc_engine.archive.tensors import make_torch, plain_bytes, take_apart
from prpc_engine.ray.held_arrays import Fetch, HeldArrays, HolderProcess
from prpc_engine.settings.address import Address
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.user_secret import UserSecret
from shard import CancelledError, ShardError, runtime

LOOPBACK = Address("127.0.0.1", 0)  # what a node listens at unless it is told


@dataclass
class PrpcMetadata(TensorTransportMetadata):  # type: ignore[misc]  # Ray has no types here
    """What the receiver is told by way of Ray. tensor_meta: shape and dtype of each tensor.

    specs   the dtypes, as the archive writes them
    holder  the process that holds them; None: there are none
    """

    specs: tuple[Spec, ...] = ()
    holder: HolderProcess | None = None


@dataclass
class PrpcFetch(FetchRequest):  # type: ignore[misc]  # as above
    """A fetch under way; `under_way` is None where there is nothing to fetch."""

    metadata: PrpcMetadata
    targets: list[Any] | None
    under_way: Fetch | None
    received: list[Any] | None = None


class PrpcTransport(TensorTransportManager):  # type: ignore[misc]  # as above
    """Of one type of data. Made by Ray, once in each process that needs it; all of a process hold
    and fetch by one HeldArrays.
    """

    # Of _made and _under_way: Ray calls from the threads of several concurrency groups.
    _guard: ClassVar = runtime.Lock()
    _made: ClassVar[HeldArrays | None] = None
    _under_way: ClassVar[weakref.WeakSet[Fetch]] = weakref.WeakSet()

    @property
    def held(self) -> HeldArrays:
        """Made when it is first needed: a driver only hands on what actors made."""
        with self._guard:
            if PrpcTransport._made is None:
                PrpcTransport._made = HeldArrays(_config())
            return PrpcTransport._made

    # -- of a type of data -------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def data_type() -> type[Any]:
        """What Ray takes out of a result for this transport."""

    @abstractmethod
    def take_apart(self, value: Any) -> tuple[NDArray[np.uint8], Spec, tuple[Any, Any]]:
        """Its memory, the name of its dtype, and its shape and dtype. Raises ValueError with the
        reason.
        """

    @abstractmethod
    def put_together(
        self, block: NDArray[np.uint8], spec: Spec, shape: tuple[int, ...], target: Any
    ) -> Any:
        """A value of that type; `target` filled where it is not None. Raises ValueError."""

    # -- what Ray asks -----------------------------------------------------------------------------

    def tensor_transport_backend(self) -> str:
        """Its name in Ray's messages."""
        return "PRPC"

    @staticmethod
    def is_one_sided() -> bool:
        """Only the receiver acts."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """No actor need be killed because another has died."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Ray has imported this class there by then, or has failed to and said so. To ask the actor
        would make each call wait for it.
        """
        return True

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Nothing: what is held says where."""
        return CommunicatorMetadata()

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> PrpcMetadata:
        """Hold them for receivers: their one copy is made here, so the actor may go on to change
        what it returned. Raises ValueError for what cannot travel so, with the reason.
        """
        blocks: list[NDArray[np.uint8]] = []
        specs: list[Spec] = []
        described: list[Any] = []
        for number, value in enumerate(rdt_object):
            try:
                block, spec, what = self.take_apart(value)
            except ValueError as error:
                raise ValueError(
                    f"tensor {number} of the result cannot travel by tensor_transport='prpc': "
                    f"{error}; tensors on a GPU have Ray's own transports, nixl and cuda_ipc"
                ) from error
            blocks.append(block)
            specs.append(spec)
            described.append(what)
        if not blocks:
            return PrpcMetadata(tensor_meta=[], tensor_device="cpu")
        self.held.hold(obj_id, blocks)
        return PrpcMetadata(
            tensor_meta=described,
            tensor_device="cpu",
            specs=tuple(specs),
            holder=self.held.holder,
        )

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> PrpcFetch:
        """Ask for them. Raises RayDirectTransportError."""
        metadata = tensor_transport_metadata
        assert isinstance(metadata, PrpcMetadata), "Ray pairs a transport with its own metadata"
        fetch = PrpcFetch(obj_id, [], metadata, target_buffers, None)
        if metadata.holder is not None:
            try:
                under_way = self.held.fetch(metadata.holder, obj_id)
            except (errors.RpcError, ShardError) as error:
                raise _failed(obj_id, metadata.holder, error) from error
            fetch.under_way = under_way
            with self._guard:
                self._under_way.add(under_way)
        return fetch

    def wait_fetch_complete(self, fetch_request: PrpcFetch, timeout: float = -1) -> list[Any]:
        """The tensors, in the targets where there are such. timeout: in seconds; less than 0:
        without an end. Raises TimeoutError, RayDirectTransportError.
        """
        fetch, under_way = fetch_request, fetch_request.under_way
        if under_way is None:
            return []
        if fetch.received is not None:
            return fetch.received
        metadata = fetch.metadata
        try:
            blocks = self.held.wait(under_way, None if timeout < 0 else timeout)
            targets = fetch.targets or [None] * len(blocks)
            fetch.received = fetch.tensors = [
                self.put_together(block, spec, tuple(shape), target)
                for block, spec, (shape, _), target in zip(
                    blocks, metadata.specs, metadata.tensor_meta, targets, strict=True
                )
            ]
        except errors.DeadlineExceeded as error:
            raise TimeoutError(str(error)) from error  # it may be waited for again
        except (errors.RpcError, ShardError, CancelledError, *DECODE_ERRORS) as error:
            raise _failed(fetch.obj_id, under_way.holder, error) from error
        return fetch.received

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Fetch them and wait. Raises RayDirectTransportError."""
        return self.wait_fetch_complete(
            self.fetch_multiple_tensors(
                obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
            )
        )

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Never called: see is_one_sided()."""
        raise NotImplementedError("tensor_transport='prpc' is one-sided: its receivers fetch")

    def garbage_collect(
        self,
        obj_id: str,
        tensor_transport_meta: TensorTransportMetadata,
        tensors: list[Any],
    ) -> None:
        """Hold them no more; who has fetched them keeps them. Without the lock: a reference that
        the garbage collector finds calls it anywhere, in a section that holds that, too.
        """
        made = self._made
        if made is not None:
            made.let_go(obj_id)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """End the fetches of that object that are under way here."""
        with self._guard:
            fetches = [one for one in self._under_way if one.name == obj_id]
        for fetch in fetches:
            self.held.cancel(fetch)


class TorchTransport(PrpcTransport):
    """Tensors of torch on the CPU. They arrive as the receiver's own."""

    @staticmethod
    def data_type() -> type[Any]:
        """torch.Tensor."""
        import torch

        tensor: type[Any] = torch.Tensor
        return tensor

    def take_apart(self, value: Any) -> tuple[NDArray[np.uint8], Spec, tuple[Any, Any]]:
        """See PrpcTransport."""
        block, spec, _ = take_apart("torch", value)
        return block, spec, (value.shape, value.dtype)

    def put_together(
        self, block: NDArray[np.uint8], spec: Spec, shape: tuple[int, ...], target: Any
    ) -> Any:
        """See PrpcTransport."""
        import torch

        if target is None:
            return make_torch(block, spec, shape)
        with torch.no_grad():
            if target.device.type == "cpu" and target.is_contiguous() and target.numel():
                room = plain_bytes(target.detach()).numpy()
                if room.nbytes != block.nbytes:
                    raise ValueError(
                        f"a target of shape {tuple(target.shape)} and {target.dtype} for a tensor "
                        f"of shape {shape} and dtype {spec}"
                    )
                np.copyto(room, block)
            else:
                target.copy_(make_torch(block, spec, shape))
        return target


class NumpyTransport(PrpcTransport):
    """numpy's arrays. They arrive read-only: on the same host they are the memory that is held."""

    @staticmethod
    def data_type() -> type[Any]:
        """numpy.ndarray."""
        return np.ndarray

    def take_apart(self, value: Any) -> tuple[NDArray[np.uint8], Spec, tuple[Any, Any]]:
        """See PrpcTransport."""
        block, spec, shape = take_apart("numpy", value)
        return block, spec, (shape, value.dtype)

    def put_together(
        self, block: NDArray[np.uint8], spec: Spec, shape: tuple[int, ...], target: Any
    ) -> Any:
        """See PrpcTransport."""
        array = block.view(dtype_of(spec)).reshape(shape)
        if target is None:
            array.flags.writeable = False
            return array
        if target.shape != array.shape or target.dtype != array.dtype:
            raise ValueError(
                f"a target of shape {target.shape} and dtype {target.dtype} for an array of shape "
                f"{shape} and dtype {array.dtype}"
            )
        np.copyto(target, array)
        return target


TRANSPORTS: dict[str, type[PrpcTransport]] = {
    "torch.Tensor": TorchTransport,
    "numpy.ndarray": NumpyTransport,
}


def data_type_name(data_type: type[Any]) -> str:
    """As TRANSPORTS has it."""
    return f"{data_type.__module__.partition('.')[0]}.{data_type.__qualname__}"


def _config() -> NodeConfig:
    """Where the job has a secret and no address is set, it listens at the address that Ray uses."""
    config = NodeConfig.load()
    is_for_others = bool(config.secret) and not isinstance(config.secret, UserSecret)
    if is_for_others and config.node.bind == LOOPBACK:
        address = Address(str(get_node_ip_address()), 0)
        return config.listening_at(address, config.node.transports)
    return config


def _failed(obj_id: str, holder: HolderProcess, error: BaseException) -> RayDirectTransportError:
    return RayDirectTransportError(
        f"object {obj_id} could not be fetched from {holder.process} at "
        f"{', '.join(holder.addresses)}: {errors.text_of(error)}"
    )
