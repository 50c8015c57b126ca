"""What test_distributed.py runs in each of its two processes: programs of users who train on more than one process.

`serve` is the process. A program runs on both of them at once, on the stock engine and then on retrograd, as in
oracle.py; the two processes' parameters meet in the collectives only.
"""

import contextlib
import faulthandler
import os
import resource
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import callable_oracle
import pytest
import torch
import torch.distributed as dist
from fused_oracle import Ran, Values, check_values, compare_fused, counting_fused, first_difference, lowering
from oracle import Program, Recorder, compare, observe
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import retrograd

STEPS = 4
SMALL_BUCKETS = 0.0005  # MiB: the largest weight of layers() fills one

PROGRAMS: dict[str, Program] = {}


def program(make: Program) -> Program:
    PROGRAMS[make.__name__] = make
    return make


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This process's input, 6 x 8, and target, 6 x 4, of one step."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def mse(net: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return F.mse_loss(net(x), y)


def train(rec: Recorder, net: nn.Module, loss_of: Callable[[nn.Module, int], Tensor] = mse) -> None:
    """Steps of SGD with momentum; tells the recorder the losses and, in each step, gradients and parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()
        rec.say("loss", loss.detach())
        tell(rec, net)
        optimizer.step()
    tell(rec, net)


def tell(rec: Recorder, net: nn.Module) -> None:
    """Parameters, their gradients and buffers; of what is sharded, the part that this process has."""

    def local(tensor: Tensor | None) -> Tensor | None:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    for name, parameter in net.named_parameters():
        rec.say(f"{name}:", local(parameter.detach()), "grad:", local(parameter.grad))
    for name, buffer in net.named_buffers():
        rec.say(f"{name}:", buffer)


PARAMETERS = 8  # of layers()


def layers() -> list[nn.Module]:
    """Parameters of several sizes, and buffers, which DDP broadcasts."""
    return [nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]


# DistributedDataParallel --------------------------------------------------------------------------------------------


def ddp(rec: Recorder, net: nn.Module, log_buckets: bool = True, **options: Any) -> DistributedDataParallel:
    """In buckets smaller than the model. Logs when gradients reach parameters and, between these, buckets are full."""
    for name, parameter in net.named_parameters():
        parameter.register_hook(rec.hook(name))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS, **options)

    def reduce(ignored: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        rec.say("bucket", bucket.index(), bucket.is_last(), [tuple(p.shape) for p in bucket.parameters()], rec.task())
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

    if log_buckets:
        wrapped.register_comm_hook(None, reduce)
    return wrapped


@program
def small_buckets(rec: Recorder) -> None:
    net = ddp(rec, nn.Sequential(*layers()), log_buckets=False)
    train(rec, net)
    data = net._get_ddp_logging_data()
    rec.say("buckets", data["bucket_sizes"], "then", data["rebuilt_bucket_sizes"])


@program
def one_bucket(rec: Recorder) -> None:
    train(rec, DistributedDataParallel(nn.Sequential(*layers())))


@program
def comm_hook(rec: Recorder) -> None:
    train(rec, ddp(rec, nn.Sequential(*layers())))


@program
def static_graph(rec: Recorder) -> None:
    train(rec, ddp(rec, nn.Sequential(*layers()), static_graph=True))


@program
def gradient_as_bucket_view(rec: Recorder) -> None:
    train(rec, ddp(rec, nn.Sequential(*layers()), gradient_as_bucket_view=True))


@program
def no_sync(rec: Recorder) -> None:
    def accumulate(net: nn.Module, step: int) -> Tensor:
        assert isinstance(net, DistributedDataParallel)
        with net.no_sync():
            mse(net, step + STEPS).backward()
        rec.say("no sync")
        return mse(net, step)

    for as_view in (False, True):
        train(rec, ddp(rec, nn.Sequential(*layers()), gradient_as_bucket_view=as_view), accumulate)


class Branches(nn.Module):
    """Uses one of two branches, not the same in each process and step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.heads = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
        self.calls = dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.heads[self.calls // 2 % 2](self.stem(x).tanh()).sin()


@program
def find_unused_parameters(rec: Recorder) -> None:
    train(rec, ddp(rec, Branches(), find_unused_parameters=True))


@program
def parameters_that_get_no_gradient(rec: Recorder) -> None:
    with rec.catch():
        train(rec, ddp(rec, Branches()))


@program
def growing_batches(rec: Recorder) -> None:
    def larger(net: nn.Module, step: int) -> Tensor:
        return F.mse_loss(net(torch.randn(4 + step, 8)), torch.randn(4 + step, 4))

    train(rec, ddp(rec, nn.Sequential(*layers())), larger)


@program
def hook_that_raises(rec: Recorder) -> None:
    net = ddp(rec, nn.Sequential(*layers()))
    steps = iter(range(STEPS))

    def fail_once(ignored: Tensor) -> None:
        if next(steps) == 1:
            raise LookupError("in the hook")

    net.module[3].weight.register_hook(fail_once)
    for step in range(3):
        with rec.catch():
            mse(net, step).backward()
        tell(rec, net)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x.tanh())


@program
def checkpoints(rec: Recorder) -> None:
    train(rec, ddp(rec, Checkpointed(use_reentrant=False)))


@program
def reentrant_checkpoints(rec: Recorder) -> None:
    train(rec, ddp(rec, Checkpointed(use_reentrant=True), static_graph=True))


@program
def uneven_inputs(rec: Recorder) -> None:
    net = ddp(rec, nn.Sequential(*layers()), log_buckets=False)
    with net.join():
        for step in range(2 + dist.get_rank()):
            loss = mse(net, step)
            loss.backward()
            rec.say("loss", loss.detach())
            rec.module(net)


@program
def python_reducer(rec: Recorder) -> None:
    """How users of torch's compiled autograd have to use DDP: a hook in Python on every parameter."""
    # DDP sets both of the latter for good.
    inductor = torch._inductor.config.patch(_fuse_ddp_communication=False, _fuse_ddp_bucket_size=25)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), inductor:
        train(rec, DistributedDataParallel(nn.Sequential(*layers())))


# fully_shard --------------------------------------------------------------------------------------------------------


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.SiLU())


class Residual(nn.Module):
    """Blocks around which the input goes too, so that backward has two ways at each."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(3)), nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.blocks:
            if self.use_reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x.cos())


def sharded(rec: Recorder, net: Residual, **options: Any) -> FSDPModule:
    """Every block and the rest are a unit of their own. Logs when gradients have reached parameters' shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.blocks:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: rec.say(name, rec.task()))
    return net


@contextlib.contextmanager
def collectives_logged(rec: Recorder) -> Iterator[None]:
    """Tells the recorder when parameters are gathered and gradients reduced, and how much at once."""

    def logged(name: str) -> Any:
        collective = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = [value.numel() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            rec.say(name, sizes, rec.task())
            return collective(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with logged("all_gather_single"), logged("reduce_scatter_single"):
        yield


def shard_and_train(
    rec: Recorder, net: Residual, loss_of: Callable[[nn.Module, int], Tensor] = mse, **options: Any
) -> None:
    with collectives_logged(rec):
        train(rec, sharded(rec, net, **options), loss_of)


@program
def reshard_after_forward(rec: Recorder) -> None:
    shard_and_train(rec, Residual(), reshard_after_forward=True)


@program
def keep_after_forward(rec: Recorder) -> None:
    shard_and_train(rec, Residual(), reshard_after_forward=False)


@program
def accumulate_before_reducing(rec: Recorder) -> None:
    def accumulate(net: nn.Module, step: int) -> Tensor:
        assert isinstance(net, FSDPModule)
        net.set_requires_gradient_sync(False)
        mse(net, step + STEPS).backward()
        rec.say("not reduced")
        net.set_requires_gradient_sync(True)
        return mse(net, step)

    shard_and_train(rec, Residual(), accumulate)


@program
def mixed_precision(rec: Recorder) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_and_train(rec, Residual(), mp_policy=policy)


@program
def frozen_block(rec: Recorder) -> None:
    net = Residual()
    net.blocks[1].requires_grad_(False)
    shard_and_train(rec, net)


@program
def sharded_checkpoints(rec: Recorder) -> None:
    for use_reentrant in (False, True):
        shard_and_train(rec, Residual(use_reentrant))


@program
def tensor_parallel(rec: Recorder) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(6, 8)  # the same in both processes
    train(rec, net, lambda net, step: net(x).pow(2).mean())


# The process --------------------------------------------------------------------------------------------------------


def ran_on(backend: str, name: str, arguments: dict[str, Any]) -> Any:
    if backend == "refused":
        return refused_captures()
    make = PROGRAMS[name]
    if backend == "schedule":
        return compare(make, **arguments)
    if backend == "inductor":
        return compare_fused(make, **arguments)
    if backend == "function":
        return callable_oracle.compare(make, **arguments).retrograd.calls
    if backend == "compiled":
        return compare_in(make, ranks=(0, 1), kind=None)
    assert backend == "one process only"
    return compare_in(make, ranks=(1,), kind="eager")


def compare_in(make: Program, ranks: tuple[int, ...], kind: str | None) -> Ran:
    """As compare_fused, but in some processes, the others staying on the stock engine; `kind` is for lowering()."""
    retrograd.cache_clear()
    want, got = Values(), Values()
    with retrograd.disable():
        stock = observe(make, want)
    joins = dist.get_rank() in ranks
    with lowering(kind), retrograd.enable("inductor", mode="blocking") if joins else retrograd.disable():
        first = observe(make, Values())
        with counting_fused() as ran:
            second = observe(make, got)
    for run in (first, second):
        difference = first_difference(stock, run)
        assert difference is None, difference
    check_values(want.tensors, got.tensors)
    return ran


def refused_captures() -> list[str]:
    """What a compiler function's backward says of the C++ reducer's hooks: torch's, retrograd's. Graphs live on."""
    errors = []

    def gradients(attempt: contextlib.AbstractContextManager[None] | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.Tanh()))
        loss = mse(net, 0)
        if attempt is not None:
            with attempt, pytest.raises(RuntimeError) as caught:
                loss.backward()
            errors.append(str(caught.value))
        if attempt is None or len(errors) == 2:  # torch leaves nothing to go backward through
            loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    def compiler(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        return module

    with callable_oracle.stock_compiled_autograd():
        gradients(torch._dynamo.compiled_autograd._enable(compiler))
    got, want = gradients(retrograd.enable(compiler)), gradients(None)
    assert all(a is not None and a.equal(b) for a, b in zip(got, want, strict=True)), (got, want)
    return errors


def serve(rank: int, store: str, pipe: Connection) -> None:
    """Runs what comes through the pipe, (backend, program, arguments), and answers with (error's text, what it did)."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what does not end is aborted
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    retrograd.install()
    with contextlib.suppress(EOFError, OSError):
        while True:
            backend, name, arguments = pipe.recv()
            try:
                pipe.send((None, ran_on(backend, name, arguments)))
            except BaseException:
                pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
