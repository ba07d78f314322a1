"""What is kept in the host's memory comes back as it was, in bounds, and is let go on every exit. Copies are made by a
lane that works on a CPU and writes down what it was asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels import offload as module
from grpo_kit.kernels.offload import LEAVING, Offload

MB = 2**20


class DiaryLane:
    """Copies at once; an event is the number of its copy."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.count = 0

    def host_memory(self, size: int) -> Tensor:
        self.log.append(("host", size))
        return torch.empty(size, dtype=torch.uint8)

    def free(self, memory: Tensor) -> None:
        self.log.append(("free", len(memory)))

    def send(self, tensor: Tensor, host: Tensor) -> int:
        host.copy_(tensor)
        return self._event("send")

    def fetch(self, host: Tensor) -> tuple[Tensor, int]:
        return host.clone(), self._event("fetch")

    def wait(self, event: int) -> None:
        self.log.append(("wait", event))

    def join(self) -> None:
        self.log.append(("join", None))

    def _event(self, what: str) -> int:
        self.count += 1
        self.log.append((what, self.count))
        return self.count

    def names(self) -> list[str]:
        return [name for name, _ in self.log]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", MB)


def layers(count: int, numbers: int = 1000, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(numbers // 10, 10, generator=g).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_tensor_comes_back_as_it_was(dtype: torch.dtype) -> None:
    given = layers(7, 999 * 10, dtype)
    with Offload(DiaryLane(), 100 * MB) as offload:
        kept = [offload.keep(tensor.clone()) for tensor in given]
        assert offload.used == sum(tensor.nbytes for tensor in given) and offload.stayed == 0
        for handle, tensor in reversed(list(zip(kept, given, strict=True))):
            back = offload.take(handle)
            assert back.dtype == dtype and back.equal(tensor)


def test_those_before_are_called_for_while_one_is_used() -> None:
    lane = DiaryLane()
    with Offload(lane, 100 * MB) as offload:
        kept = [offload.keep(tensor) for tensor in layers(4)]
        lane.log.clear()
        offload.take(kept[3])
        assert lane.names() == ["wait", "wait", "fetch", "wait", "fetch", "fetch"]  # those leaving; its own; two more
        lane.log.clear()
        offload.take(kept[2])
        assert lane.names() == ["wait", "fetch"]
        lane.log.clear()
        offload.take(kept[1]), offload.take(kept[0])
        assert lane.names() == ["wait", "wait"]


def test_a_transposed_tensor_keeps_its_layout() -> None:
    tensor = layers(1)[0].view(10, 20, 5).transpose(0, 1)
    with Offload(DiaryLane(), 100 * MB) as offload:
        back = offload.take(offload.keep(tensor))
    assert back.equal(tensor) and back.stride() == tensor.stride()


def test_few_tensors_are_on_their_way_out_at_a_time() -> None:
    lane = DiaryLane()
    with Offload(lane, 100 * MB) as offload:
        for tensor in layers(5):
            offload.keep(tensor)
            assert len(offload._leaving) <= LEAVING
        waited = [event for name, event in lane.log if name == "wait"]
    assert waited == [1, 2, 3]  # the oldest first


def test_buffers_are_used_again_and_freed_at_the_end() -> None:
    lane = DiaryLane()
    offload = Offload(lane, 100 * MB)
    for _ in range(3):
        with offload:
            for tensor in layers(30, 50_000):  # 100 kB each: ten to a chunk
                offload.keep(tensor)
    assert lane.names().count("host") == 3
    offload.close()
    assert offload._chunks == [] and lane.names().count("free") == 3


def test_a_dropped_one_frees_its_memory_as_well() -> None:
    lane = DiaryLane()
    offload = Offload(lane, 100 * MB)
    with offload:
        offload.keep(layers(1)[0])
    del offload
    assert lane.names()[-1] == "free"


def test_what_finds_no_room_on_the_host_stays_where_it_is_and_is_counted() -> None:
    given = layers(30, 50_000)
    with Offload(DiaryLane(), 2 * MB) as offload:
        kept = [offload.keep(tensor) for tensor in given]
        assert offload.used == 20 * 100_000 and offload.stayed == 10 * 100_000
        assert all(offload.take(handle).equal(tensor) for handle, tensor in zip(kept[::-1], given[::-1], strict=True))


def test_a_host_that_refuses_is_a_full_one() -> None:
    class Refusing(DiaryLane):
        def host_memory(self, size: int) -> Tensor | None:  # type: ignore[override]
            return super().host_memory(size) if self.names().count("host") < 1 else None

    given = layers(20, 50_000)
    with Offload(Refusing(), 100 * MB) as offload:
        kept = [offload.keep(tensor) for tensor in given]
        assert (offload.used, offload.stayed, offload.limit) == (10 * 100_000, 10 * 100_000, MB)
        assert all(offload.take(handle).equal(tensor) for handle, tensor in zip(kept[::-1], given[::-1], strict=True))


def test_none_is_on_its_way_out_once_one_comes_back() -> None:
    with Offload(DiaryLane(), 100 * MB) as offload:
        kept = [offload.keep(tensor) for tensor in layers(5)]
        offload.take(kept[-1])
        assert not offload._leaving


def test_whoever_holds_a_handle_after_the_block_holds_no_memory() -> None:
    with Offload(DiaryLane(), 100 * MB) as offload:
        kept = [offload.keep(tensor) for tensor in layers(3)]
        offload.take(kept[2])
    assert all(handle.host is None and handle.device is None for handle in kept)


def test_a_tensor_larger_than_a_chunk_gets_one_of_its_own() -> None:
    lane = DiaryLane()
    with Offload(lane, 100 * MB) as offload:
        (big,) = layers(1, 2_000_000, torch.float32)
        assert offload.take(offload.keep(big)).equal(big)
    assert ("host", 8_000_000) in lane.log


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_middle_lets_go_of_everything(error: type[BaseException]) -> None:
    lane = DiaryLane()
    offload = Offload(lane, 100 * MB)
    with pytest.raises(error), offload:
        for tensor in layers(4):
            kept = offload.keep(tensor)
        offload.take(kept)
        raise error
    assert lane.names()[-1] == "join"  # copies under way end before their memory is freed
    assert not offload._stack and not offload._leaving and set(offload._filled) == {0}
    with offload:  # and it is as good as new
        (tensor,) = layers(1)
        assert offload.take(offload.keep(tensor)).equal(tensor)
