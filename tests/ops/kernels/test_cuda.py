"""Kernels compiled by NVRTC and launched through the driver, and the memory their blocks share."""

# ruff: noqa: N802 -- the names are the driver's

import ctypes
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from torchrum.ops.kernels import cuda
from torchrum.ops.kernels.cuda import MAX_CLEARED_WORDS, MIN_SHARED_WORDS, Kernel, pack, shared_mailboxes


class Driver:
    """Notes each launch: its numbers, and the first bytes at each argument's address."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.launches, self.asked, self.fails = sizes, [], [], 0
        self.context, self.streams = 1, []

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.context
        return 0

    def cuDeviceGet(self, handle: Any, device: int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = 9
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context = context.value
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        if not self.context:
            return 201
        self.asked.append(value)
        return 0

    def cuLaunchKernel(self, *args: Any) -> int:
        assert args[-1] is None  # no other form of arguments
        return self.cuLaunchCooperativeKernel(*args[:-1])

    def cuLaunchCooperativeKernel(self, function: Any, *args: Any) -> int:
        if not self.context:
            return 201
        *numbers, stream, addresses = args
        if not isinstance(addresses, ctypes.Array):  # a reference to the one address of a structure
            addresses = [ctypes.cast(addresses._obj, ctypes.c_void_p).value]
        values = [ctypes.string_at(address, size) for address, size in zip(addresses, self.sizes, strict=False)]
        self.launches.append((tuple(numbers), stream.value, values))
        return self.fails

    def cuMemsetD32Async(self, address: int, word: int, count: int, stream: int) -> int:
        if not self.context:
            return 201
        assert not self.launches, "a kernel reads what was filled before it"
        ctypes.memmove(address, struct.pack("I", word) * count, 4 * count)
        self.streams.append(stream)
        return self.fails

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver((8, 8, 8, 4, 4, 4))
    monkeypatch.setattr(cuda, "load_driver", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return found


def test_a_launch_gets_pointers_integers_and_floats(driver):
    x, empty = torch.arange(6.0), torch.empty(4, 0)
    kernel = Kernel(ctypes.c_void_p(5), 0)
    for number in (3, 2**32 - 1, -1):  # the second launch takes the memory of the first
        kernel.launch(7, 64, 1024, (x[2:], None, empty[1:], number, 0.5, 1e300))
    for (numbers, stream, values), number in zip(driver.launches, (3, 2**32 - 1, 2**32 - 1), strict=True):
        assert numbers == (7, 1, 1, 64, 1, 1, 1024)
        assert stream == 70
        expected = [struct.pack("Q", x.data_ptr() + 8), bytes(8), bytes(8), struct.pack("I", number)]
        assert values == [*expected, struct.pack("f", 0.5), struct.pack("f", float("inf"))]
    assert driver.asked == []


def test_a_structure_is_the_only_argument(driver):
    driver.sizes, structure = (24,), bytes(range(24))
    Kernel(ctypes.c_void_p(5), 0).launch(2, 32, 0, [structure], cooperative=True)
    assert driver.launches[0][2] == [structure]


def test_shared_memory_beyond_what_is_granted_is_asked_for_once(driver):
    kernel = Kernel(ctypes.c_void_p(5), 0)
    for shared in (48 * 1024, 60_000, 50_000, 60_000):
        kernel.launch(1, 32, shared, [None])
    assert driver.asked == [60_000]


@pytest.mark.parametrize("shared", [0, 60_000])
def test_a_thread_without_a_context_enters_torchs(driver, shared):
    driver.context = 0
    for _ in range(2):
        Kernel(ctypes.c_void_p(5), 0).launch(1, 32, shared, [None])
    assert driver.context == 9
    assert len(driver.launches) == 2


def test_a_failed_launch_says_so(driver):
    driver.fails = 1
    with pytest.raises(RuntimeError, match=r"launching 7 blocks of 64 threads .*: invalid argument \(1\)"):
        Kernel(ctypes.c_void_p(5), 0).launch(7, 64, 0, [None])


def test_arguments_that_are_in_use_are_not_written_to():
    """A launch lets other threads run, so each has memory of its own until it gives it back."""
    pack([0, 0]).give_back()
    first, second = pack([1, 2]), pack([3, 4])
    found = []
    thread = threading.Thread(target=lambda: found.append(pack([5, 6])))
    thread.start()
    thread.join()
    assert [list(packed.values) for packed in (first, second, *found)] == [[1, 2], [3, 4], [5, 6]]
    first.give_back()
    again = pack([7, 8])
    assert again is first
    assert list(second.values) == [3, 4]


def test_memory_is_filled_before_the_launch_and_on_its_stream(driver):
    memory = torch.zeros(8, dtype=torch.int32)
    fills = [(memory.data_ptr() + 8, 0xFFFFFFFF, 3), (memory.data_ptr(), 0, 0), (memory.data_ptr(), 7, 1)]
    Kernel(ctypes.c_void_p(5), 0).launch(1, 32, 0, [None], fills=fills)
    assert memory.tolist() == [7, 0, -1, -1, -1, 0, 0, 0]
    assert driver.streams == [70, 70]
    assert len(driver.launches) == 1


@pytest.fixture
def on_the_cpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver to which tensors on the CPU are on the current device: theirs is number -1."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    return driver


def test_a_failed_fill_says_so(on_the_cpu):
    on_the_cpu.fails, x, kernel = 1, torch.zeros(4), Kernel(ctypes.c_void_p(5), -1)
    with pytest.raises(RuntimeError, match=r"CUDA failed at filling 4 words of memory: invalid argument \(1\)"):
        kernel.launch(1, 32, 0, [None], fills=[(x.data_ptr(), 0, 4)])


def test_a_kernel_of_another_device_is_launched_there(driver, monkeypatch):
    current = [0]

    @contextmanager
    def make_current(device: int) -> Iterator[None]:
        before, current[0] = current[0], device
        yield
        current[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", make_current)
    memory = torch.zeros(2, dtype=torch.int32)
    Kernel(ctypes.c_void_p(5), 3).launch(1, 32, 0, [None], fills=[(memory.data_ptr(), 1, 2)])
    assert driver.streams == [73]
    assert driver.launches[0][1] == 73
    assert current == [0]


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current stream, and no mailboxes yet."""
    current = [0]
    monkeypatch.setattr(cuda, "_mailboxes", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: current[0], raising=False)
    return current


def test_mail_is_empty_kept_and_grows() -> None:
    x = torch.zeros(2)
    first = shared_mailboxes(x, 3)
    assert first.shape == (MIN_SHARED_WORDS,) and first.dtype is torch.int32 and (first == -1).all()
    assert shared_mailboxes(x.double(), MIN_SHARED_WORDS) is first
    larger = shared_mailboxes(x, MAX_CLEARED_WORDS)
    assert larger.shape == (MAX_CLEARED_WORDS,)
    assert shared_mailboxes(x, 3) is larger
    assert shared_mailboxes(x, MAX_CLEARED_WORDS + 1) is None


def test_only_the_default_stream_has_mail(stream: list[int]) -> None:
    """Two streams may run at once, and a CUDA graph is recorded on one that is not the default."""
    x = torch.zeros(2)
    before = shared_mailboxes(x, 3)
    stream[0] = 7
    assert shared_mailboxes(x, 3) is None
    stream[0] = 0
    assert shared_mailboxes(x, 3) is before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mail_stays_empty_under_training(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, of rows that fill no tile and of several; a second stream gives the same, without it."""
    monkeypatch.undo()
    from torchrum import RUM

    cuda._mailboxes.clear()
    layer = RUM(8, 100, form="paper", device="cuda", dtype=dtype)
    for B in (4, 21, 4):
        x = torch.randn(5, B, 8, device="cuda", dtype=dtype)

        def found() -> list[torch.Tensor]:
            output = layer(x)[0]  # noqa: B023
            return [output.detach(), *torch.autograd.grad(output.square().sum(), list(layer.parameters()))]

        first, again = found(), found()
        (kept,) = cuda._mailboxes.values()
        torch.cuda.synchronize()
        assert (kept == -1).all()
        with torch.cuda.stream(torch.cuda.Stream()):
            filled = found()
        torch.cuda.synchronize()
        assert all(map(torch.equal, first, again))
        assert all(map(torch.equal, first, filled))
