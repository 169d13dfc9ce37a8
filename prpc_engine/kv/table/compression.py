"""Gradients in fewer bytes: what a worker sends in place of float32, and what the server makes of
it.

    name    travels                                                     bytes of 1 M floats
    cast    float16 or bfloat16 of the gradient's shape                 2 M
    int8    int8[n] codes; float32[blocks] scales, one for each         1 M + 4 M / block
            `block` elements: their greatest magnitude / 127
    top_k   int32[k] positions; float32[k] values: those of the         8 M * fraction
            `fraction` of elements with the greatest magnitudes

All refuse what is not finite: it would stay in what is kept for the next gradient, and no later one
would be a number again. All lose something. `Feedback` keeps what was lost and adds it to the next
gradient of the same tensor: so nothing is lost for good, and SGD converges as without compression
(Seide and others, Interspeech 2014; Stich, Cordonnier, Jaggi, NeurIPS 2018; Karimireddy and others,
ICML 2019). top_k needs it; for the others it is a matter of taste.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import BadArguments, ConfigError
from prpc_engine.kv.table.checks import check_grads, describe
from prpc_engine.kv.table.spec import build, checked_count, checked_number
from prpc_engine.kv.table.storage import storage_dtype

BLOCK_MAX = 2**20
GREATEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}  # of the finite numbers
CODE_MAX = 127
Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Sent = TypeVar("Sent")


class Compressor(ABC):
    """The settings of one way to compress:
    frozen, comparable, and back and forth to a plain dict.
    """

    name: ClassVar[str]
    needs_feedback: ClassVar[bool] = False

    @abstractmethod
    def encode(self, grads: Floats) -> tuple[Array, ...]:
        """The arrays that travel in place of `grads`, which is only read."""

    @abstractmethod
    def decode(self, parts: Sequence[Array], shape: tuple[int, ...]) -> Floats:
        """What encode() made of gradients of `shape`, back as float32. BadArguments when it cannot
        have come from there.
        """

    def to_spec(self) -> dict[str, Any]:
        """The dict from which from_spec() makes an equal compressor."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]

    def _check(
        self, parts: Sequence[Array], *wanted: tuple[npt.DTypeLike, tuple[int, ...]]
    ) -> None:
        fits = len(parts) == len(wanted) and all(
            isinstance(part, np.ndarray) and (part.dtype, part.shape) == (np.dtype(dtype), shape)
            for part, (dtype, shape) in zip(parts, wanted, strict=True)
        )
        if not fits:
            allowed = ", ".join(f"{np.dtype(dtype)}{list(shape)}" for dtype, shape in wanted)
            there = ", ".join(describe(part) for part in parts)
            raise BadArguments(
                f"gradients compressed by {self.name!r} are {there or 'nothing'}; "
                f"{allowed} is allowed"
            )


@dataclass(frozen=True)
class Cast(Compressor):
    """Rounded to the nearest finite float16 or bfloat16: of float16 that is 65504 for what is
    above.
    """

    name = "cast"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in GREATEST:
            raise ConfigError(
                f"compression 'cast': dtype is {self.dtype!r}; allowed: float16, bfloat16"
            )

    def encode(self, grads: Floats) -> tuple[Array, ...]:
        _check_finite(self.name, np.isfinite(grads))
        greatest = np.float32(GREATEST[self.dtype])
        return (np.asarray(np.clip(grads, -greatest, greatest), storage_dtype(self.dtype)),)

    def decode(self, parts: Sequence[Array], shape: tuple[int, ...]) -> Floats:
        self._check(parts, (storage_dtype(self.dtype), shape))
        return parts[0].astype(np.float32)


@dataclass(frozen=True)
class Int8(Compressor):
    """Each element within half of its block's scale: 1/254 of the greatest magnitude there."""

    name = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        checked_count("compression 'int8': block", self.block, at_least=1, at_most=BLOCK_MAX)

    def encode(self, grads: Floats) -> tuple[Array, ...]:
        blocks = self._blocks(grads.reshape(-1))
        scales = np.abs(blocks).max(axis=1, initial=0)
        _check_finite(self.name, np.isfinite(scales))
        scales /= np.float32(CODE_MAX)
        codes = blocks / np.where(scales > 0, scales, np.float32(1))[:, None]
        np.rint(codes, out=codes)
        # a scale rounded down, or too small for all its bits
        np.clip(codes, -CODE_MAX, CODE_MAX, out=codes)
        return codes.astype(np.int8).reshape(-1)[: grads.size], scales

    def decode(self, parts: Sequence[Array], shape: tuple[int, ...]) -> Floats:
        size = math.prod(shape)
        self._check(parts, (np.int8, (size,)), (np.float32, (-(-size // self.block),)))
        codes, scales = parts
        blocks = self._blocks(codes.astype(np.float32))
        values: Floats = (blocks * scales[:, None]).reshape(-1)[:size].reshape(shape)
        return values

    def _blocks(self, flat: Floats) -> Floats:
        """float32[blocks, block], the last one filled up with zeros."""
        return np.pad(flat, (0, -len(flat) % self.block)).reshape(-1, self.block)


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the largest elements of a dense gradient only; the worker adds what was left out to its
    next push.

    fraction: of the elements, above 0 and at most 1; one at least is sent. ConfigError for any
    other.
    """

    name = "top_k"
    needs_feedback = True
    fraction: float = 0.01

    def __post_init__(self) -> None:
        if checked_number("compression 'top_k': fraction", self.fraction, above=0) > 1:
            raise ConfigError(
                f"compression 'top_k': fraction is {self.fraction}; "
                "a number above 0 and at most 1 is allowed"
            )

    def encode(self, grads: Floats) -> tuple[Array, ...]:
        flat = grads.reshape(-1)
        _check_finite(self.name, np.isfinite(flat))
        count = self._count(len(flat))
        positions = (
            np.argpartition(np.abs(flat), len(flat) - count)[len(flat) - count :]
            if count
            else np.arange(0)
        )
        positions.sort()
        return positions.astype(np.int32), flat[positions]

    def decode(self, parts: Sequence[Array], shape: tuple[int, ...]) -> Floats:
        size = math.prod(shape)
        count = self._count(size)
        self._check(parts, (np.int32, (count,)), (np.float32, (count,)))
        positions, values = parts
        if count and (positions.min() < 0 or positions.max() >= size):
            reached = f"{positions.min()} to {positions.max()}"
            raise BadArguments(
                f"gradients compressed by 'top_k' have positions {reached}, of {size} elements"
            )
        flat = np.zeros(size, np.float32)
        flat[positions] = values
        return flat.reshape(shape)

    def _count(self, size: int) -> int:
        if size > np.iinfo(np.int32).max:
            raise BadArguments(
                f"top_k of {size} elements, {np.iinfo(np.int32).max} are allowed; "
                "cut the tensor over more servers"
            )
        return min(size, max(1, round(self.fraction * size)))


class Feedback:
    """What one worker has not sent yet of one tensor's gradients. Any thread may send."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        # (beginning, what was left over since), in all of them together; whoever sends takes them
        # out
        self._left: list[tuple[int, Floats]] = []

    def send(
        self, grads: Floats, push: Callable[..., Sent], beginning: int = 0
    ) -> tuple[Sent, Callable[[], None]]:
        """push(*parts) of the gradient and of what was left over since the tensor began for the
        `beginning`th time; and what is to be called if that push has not run.

        Where it raises, and so has sent nothing, or has not run, nothing of this gradient is kept:
        who pushes it again does not push it twice. What was left over before the tensor began again
        is dropped.
        """
        taken: list[tuple[int, Floats]] = []
        with suppress(IndexError):
            while True:
                taken.append(self._left.pop())  # atomic: of two threads one has it
        self._left += [each for each in taken if each[0] > beginning]
        before = [left for since, left in taken if since == beginning]
        try:
            wanted: Floats = sum(before, grads)
            parts = self._compressor.encode(wanted)
            sent = push(*parts)
        except BaseException:
            self._left += [(beginning, left) for left in before]
            raise
        left = wanted - self._compressor.decode(parts, wanted.shape)
        self._left.append((beginning, left))

        def undo() -> None:
            # the difference, as a later push may have sent what was left over
            self._left.append((beginning, sum(before, -left)))

        return sent, undo


def _check_finite(name: str, finite: npt.NDArray[np.bool_]) -> None:
    if not finite.all():
        raise BadArguments(
            f"gradients to be compressed by {name!r} hold infinity or NaN; "
            "finite numbers are allowed"
        )


COMPRESSORS: dict[str, type[Compressor]] = {"cast": Cast, "int8": Int8, "top_k": TopK}


def received(
    whose: str, compressor: Compressor | None, parts: Sequence[Array], shape: tuple[int, ...]
) -> Floats:
    """The gradients that came as `parts`: float32 of `shape`, else BadArguments. `whose` begins its
    message.
    """
    if compressor is not None:
        return compressor.decode(parts, shape)
    if len(parts) != 1:
        raise BadArguments(
            f"{whose}: {len(parts)} arrays of grads; one is allowed, "
            "as its gradients are not compressed"
        )
    return check_grads(whose, parts[0], shape)


def from_spec(spec: object) -> Compressor | None:
    """{"name": "int8", "block": 64} -> Int8(64), None -> None;
    ConfigError lists what is allowed.
    """
    return None if spec is None else build("compression", COMPRESSORS, spec)
