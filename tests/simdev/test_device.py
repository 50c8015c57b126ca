"""The simulated device and its checker, without retrograd."""

from __future__ import annotations

import pytest
import simdev
import torch
from programs import current_stream, integers, new_stream, share
from torch import Tensor, nn

LONG = 300_000  # microseconds: no other thread is kept waiting for as long


def kinds() -> list[str]:
    """Of what the checker reported so far."""
    return [report.partition(":")[0] for report in simdev.seen().reports]


def test_it_is_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == simdev.DEVICES


@pytest.mark.parametrize("device", range(simdev.DEVICES))
def test_a_model_computes_what_the_cpu_computes(device: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2), nn.Tanh())
    x = torch.randn(3, 4)
    model(x).pow(2).mean().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.to(f"sim:{device}")
    simdev.reset()
    model(x.to(f"sim:{device}")).pow(2).mean().backward()
    assert not simdev.seen().reports
    assert {kernel.device for kernel in simdev.seen().kernels} <= {device}
    for parameter, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), grad)


def test_kernels_run_late() -> None:
    x = integers(0, 4)
    stream = current_stream(0)
    stream.synchronize()
    simdev.set_delay(LONG, stream)
    y = x * 2
    assert not stream.query()
    stream.synchronize()
    assert stream.query() and torch.equal(y.cpu(), x.cpu() * 2)


def test_streams_run_beside_each_other() -> None:
    streams = [new_stream(device) for device in range(simdev.DEVICES)]
    tensors = [integers(device, 4) for device in range(simdev.DEVICES)]
    simdev.synchronize()
    simdev.reset()
    simdev.set_delay(LONG)
    for stream, tensor in zip(streams, tensors, strict=True):
        with stream:
            tensor.mul_(2)
    simdev.synchronize()
    kernels = simdev.seen().kernels
    assert {kernel.device for kernel in kernels} == set(range(simdev.DEVICES))
    assert max(kernel.begin_ns for kernel in kernels) < min(kernel.end_ns for kernel in kernels)


def make(stream: torch.Stream) -> Tensor:
    with stream:
        tensor = torch.zeros(4, device=stream.device)
    tensor.record_stream(current_stream(stream.device_index))
    return tensor


def test_reading_what_another_stream_wrote() -> None:
    tensor = make(new_stream(0))
    tensor.sum()
    assert kinds() == ["read after write"]


def test_writing_what_another_stream_wrote() -> None:
    tensor = make(new_stream(0))
    tensor.zero_()
    assert kinds() == ["write after write"]


def test_writing_what_another_stream_reads() -> None:
    tensor = torch.zeros(4, device="sim:0")
    reader = new_stream(0)
    share(tensor, current_stream(0), reader)
    with reader:
        tensor.sum()
    tensor.zero_()
    assert kinds() == ["write after read"]


def test_freeing_what_another_stream_reads() -> None:
    tensor = torch.zeros(4, device="sim:0")
    reader = new_stream(0)
    reader.wait_stream(current_stream(0))
    with reader:
        tensor.sum()
    del tensor
    assert kinds() == ["free"]


def test_writing_on_another_device_without_order() -> None:
    source, target = new_stream(0), new_stream(1)
    a, b = make(source), make(target)
    with source, target:  # a copy is in order with the streams that are current, ...
        b.copy_(a)
    assert kinds() == []
    b.sum()  # ... with no others
    assert kinds() == ["read after write"]


@pytest.mark.parametrize("how", ["stream", "event", "third stream", "host", "host by event"])
def test_waiting_is_enough(how: str) -> None:
    stream, reader = new_stream(0), current_stream(0)
    tensor = make(stream)
    match how:
        case "stream":
            reader.wait_stream(stream)
        case "event":
            reader.wait_event(stream.record_event())
        case "third stream":
            third = new_stream(1)
            third.wait_stream(stream)
            reader.wait_stream(third)
        case "host":
            stream.synchronize()
        case "host by event":
            stream.record_event().synchronize()
    tensor.sum()
    tensor.zero_()
    assert kinds() == []


def test_an_event_orders_only_what_came_before_it() -> None:
    stream = new_stream(0)
    early, late = make(stream), make(stream)
    with stream:
        event = stream.record_event()
        late.zero_()
    current_stream(0).wait_event(event)
    early.sum()
    assert kinds() == []
    late.sum()
    assert kinds() == ["read after write"]


def test_a_wait_that_is_dropped_is_found_and_shows() -> None:
    stream = new_stream(0)
    simdev.set_delay(LONG, stream)
    for dropped, wanted in ((1, []), (0, ["read after write"])):  # 1: there is no such wait
        tensor = make(stream)
        simdev.drop_wait(dropped)
        current_stream(0).wait_stream(stream)
        total = tensor.sum()
        simdev.drop_wait(-1)
        assert kinds() == wanted
        assert bool(total.isnan().cpu()) == bool(wanted)  # memory is not a number until a kernel wrote to it
    assert len(simdev.seen().waits) == 2


def test_kernels_that_are_done_at_once_are_checked_all_the_same() -> None:
    stream = new_stream(0)
    simdev.set_delay(LONG, stream)
    simdev.set_synchronous(True)
    total = make(stream).sum()
    assert kinds() == ["read after write"]
    assert total.item() == 0


def test_host_synchronizations_are_counted() -> None:
    x = integers(0, 4)
    x.cpu()
    assert simdev.seen().host_syncs == 1
    x.to("cpu", non_blocking=True)
    assert simdev.seen().host_syncs == 1
