"""The features of torch's compiled autograd, one by one, against torch's own and against eager."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import subprocess
import sys
import textwrap
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from callable_oracle import (
    Recorder,
    Run,
    check_against_eager,
    check_against_stock,
    check_path,
    compare,
    describe,
    run,
)
from oracle import leaf
from torch import Tensor, nn
from torch._dynamo import compiled_autograd as front_end
from torch._library import opaque_object
from torch._opaque_base import OpaqueBase
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import cpp_extension
from torch.utils.checkpoint import checkpoint

import retrograd


def net(*, batch_norm: bool = False, dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(4, 6)]
    if batch_norm:
        layers.append(nn.BatchNorm1d(6))
    layers += [nn.ReLU(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(6, 2)]
    return nn.Sequential(*layers)


class Scale(torch.autograd.Function):
    """A Python function with a saved tensor, an attribute, and an input without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return grad * w * ctx.factor, grad * x * ctx.factor, None


# --- Capturing ---


@pytest.mark.parametrize("mixed", ["module", "views", "function", "packed"])
def test_the_two_passes_leave_the_live_graph_as_it_was(mixed: str) -> None:
    """Capturing puts symbolic values into the nodes and takes them out again: eager then runs the very same graph."""

    def graph() -> tuple[Tensor, list[Tensor]]:
        x, w = leaf(3, 4), leaf(3, 4, seed=1)
        if mixed == "module":
            model = nn.Sequential(nn.Conv1d(3, 2, 2), nn.LayerNorm(3), nn.Tanh())
            return model(x * w).sum(), [x, w, *model.parameters()]
        if mixed == "views":
            base = x * 1
            base[1:, ::2].mul_(w[1:, ::2])
            base[0].exp_()
            return base[[0, 2]].pow(2).sum(), [x, w]
        if mixed == "function":
            return Scale.apply(x, w, 3.0).sin().sum(), [x, w]
        with saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            return (x.sin() * w).exp().sum(), [x, w]

    def program(rec: Recorder) -> None:
        loss, leaves = graph()
        for compiled in (True, False, True, False):
            if compiled:
                loss.backward(retain_graph=True)
            else:
                with rec.off():
                    loss.backward(retain_graph=True)
            rec.grads(*leaves)
            for tensor in leaves:
                tensor.grad = None

    compare(program, captures=1, dynamic=True)
    compare(program, captures=1)


def case(build: Callable[..., Tensor], *shapes: tuple[int, ...]) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    return build, shapes


def lstm(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return nn.LSTM(4, 3, num_layers=2, bidirectional=True, bias=False)(x)[0]


def attention(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)(x)


def index_with_gaps(x: Tensor, w: Tensor) -> Tensor:
    rows, columns = torch.tensor([0, 2, 0]), torch.tensor([1, 1, 3])
    y = (x * 1).index_put((rows, columns), w[0, :3], accumulate=True)
    z = y[:, columns] + y.unsqueeze(1)[:, :, columns].squeeze(1)  # leading Nones in the list of indices
    return z[rows]


# Backward functions whose arguments are of every kind there is: optional tensors and sizes, lists of tensors with gaps,
# TensorOptions, Scalars, symbolic ints and lists of them, arrays of bools, strings, dtypes, layouts, generators.
OPS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "add with alpha": case(lambda x, w: torch.add(x, w, alpha=2.5), (3, 4), (4,)),
    "mul and div": case(lambda x, w: x * w / (w * w + 1) / 2, (3, 4), (3, 1)),
    "pow": case(lambda x, w: (x.abs() + 1).pow(w) + x.pow(3) + 2**w, (3, 4), (3, 4)),
    "addmm": case(lambda x, w: torch.addmm(x[0], w, x.t(), beta=2, alpha=3)[:, :2], (3, 3), (4, 3)),
    "matmul": case(lambda x, w: x @ w, (2, 3, 4), (4, 5)),
    "bmm and einsum": case(lambda x, w: torch.einsum("bij,bjk->bk", x, w), (2, 3, 4), (2, 4, 2)),
    "index": case(index_with_gaps, (3, 4), (3, 4)),
    "gather and scatter": case(
        lambda x: x.gather(1, torch.tensor([[0, 2]] * 3)).scatter_add(1, torch.tensor([[0, 0]] * 3), x[:, :2]), (3, 4)
    ),
    "masked": case(lambda x: x.masked_fill(x > 0, 2.0).masked_select(torch.tensor([True, False, True, True])), (3, 4)),
    "cat": case(lambda x, w: torch.cat([x, w, x[:, :1], torch.ones(3, 1)], 1), (3, 4), (3, 2)),
    "stack": case(lambda x, w: torch.stack([x, w, torch.zeros(3, 4), x], -1), (3, 4), (3, 4)),
    "split and chunk": case(lambda x: x.split([1, 3], 1)[1] * x.chunk(2, 0)[0].sum(), (4, 4)),
    "unbind with unused": case(lambda x: x.unbind(0)[1] + x.unbind(1)[0].sum(), (3, 4)),
    "conv1d": case(lambda x, w: F.conv1d(x, w, stride=2, padding=1), (2, 3, 8), (4, 3, 3)),
    "conv2d with bias": case(lambda x, w: F.conv2d(x, w, w.sum((1, 2, 3)), groups=2), (1, 4, 5, 5), (4, 2, 2, 2)),
    "conv_transpose2d": case(
        lambda x, w: F.conv_transpose2d(x, w, output_padding=1, stride=2), (1, 2, 3, 3), (2, 3, 2, 2)
    ),
    "max_pool2d": case(lambda x: F.max_pool2d(x, 2, ceil_mode=True), (1, 2, 5, 5)),
    "avg_pool2d": case(lambda x: F.avg_pool2d(x, 2, divisor_override=3) + F.adaptive_avg_pool2d(x, 2), (1, 2, 4, 4)),
    "interpolate": case(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (1, 2, 3, 3)),
    "interpolate nearest": case(lambda x: F.interpolate(x, size=(7, 5)), (1, 2, 3, 3)),
    "layer_norm": case(lambda x, w: F.layer_norm(x, (4,), w), (3, 4), (4,)),
    "layer_norm without weight": case(lambda x: F.layer_norm(x, (3, 4)), (2, 3, 4)),
    "group_norm": case(lambda x, w: F.group_norm(x, 2, w, None), (2, 4, 3), (4,)),
    "batch_norm in evaluation": case(
        lambda x, w: F.batch_norm(x, torch.zeros(4), torch.ones(4), w, None, training=False), (3, 4), (4,)
    ),
    "embedding": case(
        lambda w: F.embedding(torch.tensor([0, 2, 0]), w, padding_idx=2, scale_grad_by_freq=True), (5, 4)
    ),
    "embedding_bag": case(lambda w: F.embedding_bag(torch.tensor([0, 2, 1]), w, torch.tensor([0, 2])), (5, 4)),
    "var": case(lambda x: x.var() + x.var(1, correction=0).sum() + x.var((0, 1), unbiased=False, keepdim=True), (3, 4)),
    "std": case(lambda x: x.std(0, correction=0.5) + torch.var_mean(x, 0)[1], (3, 4)),
    "to dtype": case(lambda x: x.to(torch.float64).sin().to(torch.bfloat16).float(), (3, 4)),
    "complex": case(lambda x, w: torch.view_as_real(torch.complex(x, w).exp().conj() * 1j).abs(), (3, 4), (3, 4)),
    "expand and repeat": case(lambda x: x.expand(2, 3, 4).repeat(1, 2, 1).flatten(0, 1), (3, 1)),
    "sum and mean": case(lambda x: x.sum() + x.sum(0, dtype=torch.float64).float() + x.mean(-1, keepdim=True), (3, 4)),
    "prod": case(lambda x: x.prod() + x.prod(1, keepdim=True), (3, 4)),
    "clamp": case(lambda x, w: x.clamp(min=0.1) + x.clamp(max=w) + x.clamp(-1, 1) + x.clamp_min(w), (3, 4), (3, 4)),
    "norm": case(lambda x: x.norm() + x.norm(3, dim=1).sum() + torch.linalg.vector_norm(x, dim=0), (3, 4)),
    "cumsum and cumprod": case(lambda x: x.cumsum(1) + x.cumprod(0) + x.logcumsumexp(1), (3, 4)),
    "sort and topk": case(lambda x: x.sort(1, descending=True)[0][:, :2] + x.topk(2, 1)[0], (3, 4)),
    "max and min": case(lambda x, w: x.max(1)[0] + x.amax() + torch.maximum(x, w).min(), (3, 4), (3, 4)),
    "where": case(lambda x, w: torch.where(x > 0, w, x.detach() * w), (3, 4), (3, 4)),
    "softmax": case(lambda x: F.softmax(x, 1) * F.log_softmax(x, 0), (3, 4)),
    "cross entropy": case(
        lambda x, w: w.sum() + F.cross_entropy(x, torch.tensor([0, 3, -100]), w.detach().abs(), label_smoothing=0.1),
        (3, 4),
        (4,),
    ),
    "losses": case(
        lambda x, w: F.huber_loss(x, w, delta=0.5) + F.binary_cross_entropy_with_logits(x, w.sigmoid().detach()),
        (3, 4),
        (3, 4),
    ),
    "activations": case(
        lambda x: F.gelu(x, approximate="tanh") + F.leaky_relu(x, 0.2) + F.elu(x) + F.softplus(x) + F.hardtanh(x),
        (3, 4),
    ),
    "as_strided and unfold": case(lambda x: x.as_strided((2, 2), (4, 1), 1).sum() + x.unfold(1, 2, 1).sum(-1), (3, 4)),
    "views": case(lambda x: x.t().reshape(2, 6)[:, 1:].unsqueeze(0).transpose(1, 2).narrow(1, 1, 3).squeeze(0), (3, 4)),
    "pad": case(lambda x: F.pad(x, (1, 2), value=3.0) + F.pad(x[None], (2, 1), mode="reflect")[0], (3, 4)),
    "roll and flip": case(lambda x: x.roll((1, 2), (0, 1)) + x.flip(1) + x.tril(1), (3, 4)),
    "linalg": case(lambda x: torch.linalg.solve(x @ x.t() + torch.eye(3), x) + torch.linalg.qr(x)[0][:, :1], (3, 4)),
    "fft": case(lambda x: torch.fft.rfft(x, n=5, norm="ortho").abs(), (3, 4)),
    "cdist and trapezoid": case(lambda x, w: torch.cdist(x, w).sum() + torch.trapezoid(x, dx=0.5), (3, 4), (2, 4)),
    "lstm": case(lstm, (5, 2, 4)),
    "attention": case(attention, (2, 3, 4)),
    "scaled dot product": case(
        lambda x, w: F.scaled_dot_product_attention(x, w, w, is_causal=True), (1, 2, 3, 4), (1, 2, 3, 4)
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_bind_function_and_call_function(name: str) -> None:
    """Undefined tensors become None, lists may have gaps, every argument takes the way of its schema and back."""
    build, shapes = OPS[name]

    def program(rec: Recorder) -> None:
        for step in range(2):
            inputs = [leaf(*shape, seed=step + i) for i, shape in enumerate(shapes)]
            build(*inputs).sum().backward()
            rec.grads(*inputs)

    for dynamic in (False, True):
        compare(program, captures=1, dynamic=dynamic)


def test_undefined_gradients_are_none_in_the_graph() -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w = leaf(3, 4, seed=step), leaf(3, 4, seed=1)
            first, second, third = (x * w).unbind(0)
            values, _ = x.sort(1)
            (second * 2 + values[0] * w[1]).sum().backward()
            rec.grads(x, w)
            del first, third

    runs = compare(program, captures=1)
    unbind = next(line for line in runs.retrograd.graphs[0] if "UnbindBackward0" in line)
    assert re.search(r"\(\[None, %\d+, None\]", unbind), unbind


def test_a_backward_function_gets_the_same_op_in_every_graph() -> None:
    """libtorch hands a function over once for the whole process; graphs captured later must find it again."""

    def program(rec: Recorder) -> None:
        for count in (1, 2, 3):
            x = leaf(3)
            y = x
            for _ in range(count):
                y = torch.addcmul(y, x, x, value=0.5).sinc()
            y.sum().backward()
            rec.grads(x)

    runs = compare(program, captures=3)
    assert [run_graph.count("SincBackward0") for run_graph in map(runs.retrograd.targets, range(3))] == [1, 2, 3]


# --- Inputs of a graph ---


@pytest.mark.parametrize("dynamic", [False, True])
def test_copy_slices_prologue_and_epilogue(dynamic: bool) -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w = leaf(4, 6, seed=step), leaf(4, 6, seed=7)
            base = x * 2
            base[1:3].mul_(w[1:3])
            base[:, ::2].add_(w[:, ::2])
            base.t()[1].copy_(w[0, :4])
            base.view(-1)[3:9].neg_().add_(w.view(-1)[3:9])
            base.diagonal().zero_()
            base[0, 1:4] = torch.arange(3.0)
            (base * base).sum().backward()
            rec.grads(x, w)

    runs = compare(program, captures=1, dynamic=dynamic)
    targets = runs.retrograd.targets()
    assert targets.count("copy_slices_prologue") == targets.count("copy_slices_epilogue") > 3


def test_copy_slices_into_a_base_that_needs_no_gradient() -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            w = leaf(3, seed=step)
            base = torch.ones(2, 3)
            base[1] = w
            base[0].mul_(w)
            base.pow(2).sum().backward()
            rec.grads(w)

    assert "copy_slices_prologue" in compare(program, captures=1).retrograd.targets()


def test_equal_tensors_are_one_input() -> None:
    """A tensor that several nodes saved is one input; a second graph, where they are two, is another graph."""

    def program(rec: Recorder) -> None:
        for tied in (True, False, True, False):
            x, w = leaf(3, 3), leaf(3, 3, seed=1)
            v = w if tied else leaf(3, 3, seed=1)
            h = (x @ w).tanh()
            (h * h * h @ v).sum().backward()
            rec.grads(x, w, v)

    runs = compare(program, captures=2)
    inputs = [call.split(" sizes=")[0].count("crc=") for call in runs.retrograd.calls]
    # The gradient, x, w, h, h * h, h * h * h, the view w.t(); v beside them in the second graph.
    assert inputs == [7, 8, 7, 8]


def test_sizes_are_static_first_and_dynamic_when_seen_to_change() -> None:
    shapes = [(3, 4), (3, 4), (5, 4), (6, 4), (3, 4), (3, 7), (5, 9), (5, 4), (3, 4)]

    def program(rec: Recorder) -> None:
        for rows, columns in shapes:
            x, w = leaf(rows, columns), leaf(columns, seed=1)
            y = (x * w).sum(1).expand(2, rows).reshape(-1)
            (torch.cat([y, y[:rows]]).view(3, rows) / columns).pow(2).sum().backward()
            rec.grads(x, w)

    runs = compare(program, captures=3)
    sizes = [len(re.search(r"sizes=\[(.*?)\]", call)[1].split()) for call in runs.retrograd.calls]  # type: ignore[index]
    assert sizes[0] == sizes[1] == 0
    assert 0 < sizes[2] == sizes[3] == sizes[4] < sizes[5]
    assert len(set(sizes[5:])) == 1


def test_every_size_that_changes_costs_one_capture() -> None:
    def program(rec: Recorder) -> None:
        for shape in [(2, 3, 4), (3, 3, 4), (4, 4, 4), (5, 5, 5), (2, 7, 9)]:
            x = leaf(*shape)
            x.sum(0).sum(0).sum(0).backward()
            rec.grads(x)

    compare(program, captures=4)


@pytest.mark.parametrize("dynamic", [True, None])
def test_all_sizes_are_dynamic_on_request(dynamic: bool | None) -> None:
    def program(rec: Recorder) -> None:
        for rows, columns in [(3, 4), (5, 4), (5, 9), (1, 1), (2, 0), (3, 4)]:
            x, w = leaf(rows, columns), leaf(columns, seed=1)
            (x * w).expand(2, rows, columns).sum(0).pow(2).sum().backward()
            rec.grads(x, w)

    compare(program, captures=1 if dynamic else 3, dynamic=dynamic)


def test_sizes_that_the_graph_does_not_use_are_left_out() -> None:
    def program(rec: Recorder) -> None:
        for rows in (3, 5, 6):
            x = leaf(rows, 4)
            x[:, 1].sin().sum().backward()
            rec.grads(x)

    runs = compare(program, captures=2)
    assert runs.retrograd.calls[1] != runs.retrograd.calls[2]


def test_static_and_dynamic_graphs_are_kept_apart() -> None:
    def program(rec: Recorder) -> None:
        for rows in (3, 4):
            x = leaf(rows)
            (x * x).sum().backward()
            rec.grads(x)

    compare(program, captures=2, dynamic=False)
    compare(program, captures=1, dynamic=True)


CPP_FUNCTIONS = r"""
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using namespace torch::autograd;

// Saves scalars of all kinds that compiled autograd lifts into inputs, and some that it does not.
template <bool kTraceable>
struct Scale : Function<Scale<kTraceable>> {
  static constexpr bool is_traceable = kTraceable;
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w, int64_t i, double d,
                            bool flag) {
    ctx->saved_data["int"] = i;
    ctx->saved_data["double"] = d;
    ctx->saved_data["symint"] = c10::SymInt(i + 1);
    ctx->saved_data["symfloat"] = c10::SymFloat(d / 2);
    ctx->saved_data["flag"] = flag;
    ctx->saved_data["list"] = c10::List<int64_t>({1, 2});
    ctx->saved_data["tensor"] = x.detach().add(1);
    ctx->save_for_backward({x, w});
    return x.mul(w).mul(d).mul(i);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto& data = ctx->saved_data;
    const auto saved = ctx->get_saved_variables();
    at::Tensor scaled = grads[0].mul(data["double"].toSymFloat()).mul(data["int"].toSymInt());
    if (data["flag"].toBool()) {
      scaled = scaled.mul(data["symint"].toSymInt()).mul(data["symfloat"].toSymFloat());
      scaled = scaled.mul(data["tensor"].toTensor()).mul(data["list"].toIntVector()[1]);
    }
    return {scaled.mul(saved[1]), scaled.mul(saved[0]), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct ScaleBy : torch::autograd::Function<ScaleBy> {
  static constexpr bool is_traceable = true;
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Scalar& scalar, bool flag) {
    if (scalar.isIntegral(false)) {
      ctx->saved_data["scalar"] = scalar.toLong();
    } else {
      ctx->saved_data["scalar"] = scalar.toDouble();
    }
    ctx->saved_data["flag"] = flag;
    return x.mul(scalar);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto& scalar = ctx->saved_data["scalar"];
    if (scalar.isDouble() || scalar.isSymFloat()) return {grads[0].mul(scalar.toSymFloat()), {}, {}};
    return {grads[0].mul(scalar.toSymInt()), {}, {}};
  }
};

TORCH_LIBRARY(retrograd_features, library) {
  library.def("scale_by", [](const at::Tensor& x, const at::Scalar& scalar, bool flag) {
    return ScaleBy::apply(x, scalar, flag);
  });
  library.def("scale", [](const at::Tensor& x, const at::Tensor& w, int64_t i, double d, bool flag) {
    return Scale<true>::apply(x, w, i, d, flag);
  });
  library.def("scale_opaquely", [](const at::Tensor& x, const at::Tensor& w, int64_t i, double d, bool flag) {
    return Scale<false>::apply(x, w, i, d, flag);
  });
}
"""


@pytest.fixture(scope="module")
def cpp_functions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """C++ autograd functions, built in about ten seconds."""
    folder = tmp_path_factory.mktemp("cpp_functions")
    source, library = folder / "functions.cpp", folder / "functions.so"
    source.write_text(CPP_FUNCTIONS)
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-fPIC", "-shared", str(source), "-o", str(library)]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    torch.ops.load_library(str(library))
    return torch.ops.retrograd_features


@pytest.mark.parametrize("traceable", [True, False])
def test_scalars_of_cpp_functions_are_lifted_into_inputs(cpp_functions: Any, traceable: bool) -> None:
    """An int, a double, a SymInt and a SymFloat may change without a capture; a flag may not."""
    scale = cpp_functions.scale if traceable else cpp_functions.scale_opaquely

    def program(rec: Recorder) -> None:
        for flag in (True, False):
            for i, d in ((2, 1.5), (3, -0.25), (0, 7.0)):
                x, w = leaf(3), leaf(3, seed=1)
                scale(x, w, i, d, flag).sin().sum().backward()
                rec.grads(x, w)

    runs = compare(program, captures=2)
    name = next(target for target in runs.retrograd.targets() if target.startswith("CppNode") or "cpp" in target)
    assert traceable == name.startswith("CppNode")
    assert "scalars=[" in runs.retrograd.calls[0] and "scalars=[]" not in runs.retrograd.calls[0]
    assert len({re.search(r"scalars=\[.*?\]", call)[0] for call in runs.retrograd.calls}) == 3  # type: ignore[index]


def test_two_cpp_functions_in_one_graph(cpp_functions: Any) -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w = leaf(3, seed=step), leaf(3, seed=1)
            y = cpp_functions.scale(x, w, 2, 1.5, True)
            cpp_functions.scale_opaquely(y, w, step, 0.5, False).sum().backward()
            rec.grads(x, w)

    compare(program, captures=1, dynamic=True)


def test_packed_inputs_and_unpack_hooks() -> None:
    """What pack returned goes in as it is; unpack is called in the graph, as late as the tensor is needed."""

    class Packed:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def __repr__(self) -> str:
            return f"Packed({self.tensor.tolist()})"

    def program(rec: Recorder) -> None:
        def unpack(packed: Packed) -> Tensor:
            rec.say("unpack", packed.tensor)
            return packed.tensor

        for step in range(3):
            x, w = leaf(3, seed=step), leaf(3, seed=1)
            with saved_tensors_hooks(Packed, unpack):
                y = (x * w).exp()
            (y.sin() * x).sum().backward()
            rec.grads(x, w)

    runs = compare(program, captures=1)
    unpacks = [line for line in runs.retrograd.graphs[0] if "unpack_hook" in line]
    assert len(unpacks) == 3
    assert runs.retrograd.calls[0].count("Packed(") == 3


def test_packed_data_that_is_a_tensor_or_a_plain_value() -> None:
    def program(rec: Recorder) -> None:
        store: list[Tensor] = []

        def pack(tensor: Tensor) -> Any:
            store.append(tensor.detach())
            return len(store) - 1 if len(store) % 2 else tensor.detach() * 2

        def unpack(packed: Any) -> Tensor:
            return packed / 2 if isinstance(packed, Tensor) else store[packed]

        for step in range(2):
            x, w = leaf(3, seed=step), leaf(3, seed=1)
            with saved_tensors_hooks(pack, unpack):
                (x * w).exp().sum().backward()
            rec.grads(x, w)

    compare(program, captures=1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_save_on_cpu(dynamic: bool) -> None:
    def program(rec: Recorder) -> None:
        model = net()
        for _ in range(3):
            model.zero_grad()
            with save_on_cpu():
                loss = model(torch.randn(3, 4)).pow(2).sum()
            loss.backward()
            rec.module(model)

    assert "call_hook" in compare(program, captures=1, dynamic=dynamic).retrograd.targets()


def test_checkpoint_recomputes_inside_the_graph() -> None:
    def program(rec: Recorder) -> None:
        model = net(dropout=0.5)
        for _ in range(3):
            model.zero_grad()
            y = checkpoint(model, torch.randn(3, 4), use_reentrant=False)
            y.pow(2).sum().backward()
            rec.module(model)

    compare(program, captures=1)


class Factor(OpaqueBase):
    """What a custom operator takes beside tensors; torch.compile passes it through without looking inside."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value


@pytest.fixture
def mul_by_factor() -> Iterator[Any]:
    """A custom operator that takes a Factor."""
    opaque_object.register_opaque_type(Factor, typ="reference")
    library = torch.library.Library("retrograd_opaque", "FRAGMENT")
    library.define(f"mul(Tensor x, {opaque_object.get_opaque_type_name(Factor)} factor) -> Tensor")
    library.impl("mul", lambda x, factor: x * factor.value, "CompositeExplicitAutograd")
    torch.library.register_fake("retrograd_opaque::mul", lambda x, factor: torch.empty_like(x), lib=library)
    mul = torch.ops.retrograd_opaque.mul

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    torch.library.register_autograd(
        "retrograd_opaque::mul", lambda ctx, g: (mul(g, ctx.factor), None), setup_context=setup, lib=library
    )
    yield mul
    library._destroy()


def test_opaque_objects(mul_by_factor: Any) -> None:
    """What an AOT-compiled function saved beside tensors: an object of a registered type, another at each call."""

    def program(rec: Recorder) -> None:
        function = torch.compile(lambda x, factor: mul_by_factor(x, factor).sin(), backend="aot_eager")
        for value in (2.0, 3.0, -1.0):
            x = leaf(3)
            function(x, Factor(value)).sum().backward()
            rec.grads(x)

    runs = compare(program, captures=1, dynamo=True)
    assert "hooks=['CompiledFunctionBackward', 'Factor']" in runs.retrograd.calls[0]
    assert "retrograd_opaque.mul.default" in runs.retrograd.targets()


# --- Hooks ---


def test_tensor_pre_hooks() -> None:
    def program(rec: Recorder) -> None:
        for step in range(3):
            x = leaf(3, seed=step)
            y = x.exp()
            z = y * 2
            y.register_hook(rec.hook("doubles", lambda g: g * 2))
            y.register_hook(rec.hook("keeps"))
            z.register_hook(rec.hook("z"))
            x.register_hook(rec.hook("leaf", lambda g: g + 1))
            (z.sin() + y).sum().backward()
            rec.grads(x)

    runs = compare(program, captures=1)
    assert sum("'tensor_pre_hook'" in line for line in runs.retrograd.graphs[0]) == 4


def test_tensor_pre_hooks_on_several_outputs_of_a_node() -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x = leaf(4, 3, seed=step)
            a, b, c = x.unbind(1)
            a.register_hook(rec.hook("a", lambda g: g * 2))
            c.register_hook(rec.hook("c", lambda g: g * 3))
            (a * b + c).sum().backward()
            rec.grads(x)

    compare(program, captures=1)


def test_cpp_tensor_pre_hooks() -> None:
    """retain_grad() is a hook of libtorch's own: the graph calls it by its number in the call."""

    def program(rec: Recorder) -> None:
        for step in range(3):
            x = leaf(3, seed=step)
            y = x.exp()
            y.register_hook(rec.hook("before", lambda g: g * 5))
            y.retain_grad()
            y.register_hook(rec.hook("after", lambda g: g + 7))
            z = y.sin()
            z.retain_grad()
            (z * y).sum().backward()
            rec.grads(x, y, z)

    runs = compare(program, captures=1)
    assert runs.retrograd.targets().count("call_cpp_tensor_pre_hooks") == 2


def test_retain_grad_where_nothing_uses_the_gradient() -> None:
    """The root is not on the way to what is asked for; the stock engine fills its `.grad` all the same."""

    def program(rec: Recorder) -> None:
        for step in range(3):
            x, elsewhere = leaf(3, seed=step), leaf(3, seed=9)
            y = x * 2
            y.retain_grad()
            rec.say("grad()", torch.autograd.grad([y], [elsewhere], [torch.full((3,), 5.0)], allow_unused=True))
            rec.grads(x, y)

    # torch's own leaves it out.
    check_against_eager(run("eager", program), run("retrograd", program))


def test_retain_grad_where_no_gradient_comes() -> None:
    """The hook from C++ gets an undefined gradient, as from the stock engine."""

    class Second(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a + b

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
            return None, grads[0]

    def program(rec: Recorder) -> None:
        for step in range(3):
            x, y = leaf(2, 3, seed=step), leaf(3, seed=9)
            first, second = x.unbind()
            second.retain_grad()
            left = y * 2
            left.retain_grad()
            Second.apply(left, first).sum().backward()  # type: ignore[no-untyped-call]
            rec.grads(x, y, second, left)

    # torch's own does not survive it.
    check_against_eager(run("eager", program), run("retrograd", program))


def test_pre_hooks() -> None:
    def program(rec: Recorder) -> None:
        for step in range(3):
            x, w = leaf(3, seed=step), leaf(3, seed=1)
            y = x * w
            z = y.exp()
            for name, node in (("exp", z.grad_fn), ("mul", y.grad_fn)):
                assert node is not None
                node.register_prehook(rec.hook(f"{name} 1", lambda g: (g[0] * 2,)))
                node.register_prehook(rec.hook(f"{name} 2"))
            z.sum().backward()
            rec.grads(x, w)

    runs = compare(program, captures=1)
    assert sum("'pre_hook'" in line for line in runs.retrograd.graphs[0]) == 4


def test_post_hooks() -> None:
    def program(rec: Recorder) -> None:
        for step in range(3):
            x, w = leaf(3, seed=step), leaf(3, seed=1)
            y = x * w
            z = y.exp()
            for name, node in (("exp", z.grad_fn), ("mul", y.grad_fn)):
                assert node is not None
                node.register_hook(rec.hook(f"{name} 1"))
                node.register_hook(lambda grads, _: tuple(g * 2 for g in grads))
                node.register_hook(rec.hook(f"{name} 2"))
            z.sum().backward()
            rec.grads(x, w)

    runs = compare(program, captures=1)
    assert sum("'post_hook'" in line for line in runs.retrograd.graphs[0]) == 6


def test_hooks_of_the_accumulate_grad_node() -> None:
    def program(rec: Recorder) -> None:
        for step in range(3):
            x = leaf(3, seed=step)
            y = x.exp()
            node = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            x.register_hook(rec.hook("tensor", lambda g: g * 2))
            node.register_prehook(rec.hook("pre", lambda g: (g[0] + 1,)))
            node.register_hook(lambda outputs, inputs: rec.say("post", len(outputs), *inputs, x.grad))
            y.sum().backward()
            rec.grads(x)

    compare(program, captures=1)


def test_post_accumulate_grad_hooks() -> None:
    def program(rec: Recorder) -> None:
        for step in range(3):
            x, w = leaf(3, seed=step), leaf(3, seed=1)

            def update(parameter: Tensor) -> None:
                rec.say("update", parameter, parameter.grad)
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None

            x.register_post_accumulate_grad_hook(update)
            w.register_post_accumulate_grad_hook(lambda p: rec.say("first", p.grad))
            w.register_post_accumulate_grad_hook(lambda p: rec.say("second", p.grad))
            (x * w).exp().sum().backward()
            rec.say("after", x, w)
            rec.grads(x, w)

    runs = compare(program, captures=1)
    assert sum("'post_acc_grad_hook'" in line for line in runs.retrograd.graphs[0]) == 3


def test_post_accumulate_grad_hook_with_gradients_present() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        x.register_post_accumulate_grad_hook(lambda p: rec.say("hook", p.grad))
        for _ in range(4):
            (x * x).sum().backward()
            rec.grads(x)

    compare(program, captures=2)  # as in torch's own, the graph sees whether there is one


def raises(*ignored: Any) -> None:
    raise LookupError("in the hook")


HOOKS: dict[str, Callable[[Tensor, Tensor, Callable[..., Any]], Any]] = {
    "tensor": lambda x, y, hook: y.register_hook(hook),
    "leaf": lambda x, y, hook: x.register_hook(hook),
    "pre": lambda x, y, hook: y.grad_fn.register_prehook(hook),  # type: ignore[union-attr]
    "post": lambda x, y, hook: y.grad_fn.register_hook(hook),  # type: ignore[union-attr]
    "post accumulate": lambda x, y, hook: x.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_raises(kind: str) -> None:
    def program(rec: Recorder) -> None:
        for _ in range(2):
            x = leaf(3)
            y = x.exp()
            HOOKS[kind](x, y, raises)
            with rec.catch():
                y.sum().backward()

    runs = compare(program, captures=1)
    assert runs.retrograd.said("error")[1] == ["LookupError: in the hook"]


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_returns_something_wrong(kind: str) -> None:
    """Where eager has an error of its own, a compiled graph may have none, or another: torch's own has the say."""

    def program(rec: Recorder) -> None:
        for _ in range(2):
            x = leaf(3)
            y = x.exp()
            HOOKS[kind](x, y, lambda *args: 3)
            with rec.catch():
                y.sum().backward()

    runs = compare(program, captures=1, against_eager=False)
    assert runs.retrograd.said("error") != [["none"]] * 2


def test_hooks_that_come_and_go_make_other_graphs() -> None:
    def program(rec: Recorder) -> None:
        for hooks in (0, 1, 2, 1, 0, 2):
            x = leaf(3)
            y = x.exp()
            for i in range(hooks):
                y.register_hook(rec.hook(f"hook {i}", lambda g: g * 2))
            y.sum().backward()
            rec.grads(x)

    compare(program, captures=3)


def test_a_hook_inside_a_compiled_function() -> None:
    """Dynamo keeps it in a BackwardState, which the graph gets among its hooks."""

    def program(rec: Recorder) -> None:
        def function(x: Tensor) -> Tensor:
            y = x.sin()
            y.register_hook(lambda g: g * 3)
            return y * x

        compiled = torch.compile(function, backend="aot_eager")
        for step in range(2):
            x = leaf(3, seed=step)
            compiled(x).sum().backward()
            rec.grads(x)

    runs = compare(program, captures=1, dynamo=True)
    assert "'BackwardState'" in runs.retrograd.calls[0]


# --- What nodes and graphs put out ---


def test_validate_outputs_is_emitted_once_for_each_node_and_bound_once() -> None:
    def program(rec: Recorder) -> None:
        for count in (1, 3):
            x, w = leaf(3, 4), leaf(4, seed=1)
            y = x
            for _ in range(count):
                y = (y * w).sin()
            y.sum().backward()
            rec.grads(x, w)

    runs = compare(program, captures=2)
    ours = runs.retrograd
    for graph, count in enumerate((1, 3)):
        # GraphRoot, sum, and a mul and a sin for each round; not the leaves.
        assert ours.targets(graph).count("validate_outputs") == 2 + 2 * count
    ops = {
        node.target
        for compiled in ours.compiled
        for node in compiled.module.graph.nodes
        if "validate_outputs" in str(node.target)
    }
    assert len(ops) == 1


def test_validate_outputs_reduces_and_casts() -> None:
    class Sloppy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x + w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad.double(), grad  # another dtype; a shape that broadcasts

    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w = leaf(3, 4, seed=step), leaf(4)
            Sloppy.apply(x, w).exp().sum().backward()
            rec.grads(x, w)

    compare(program, captures=1)


def test_validate_outputs_rejects_a_wrong_shape() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.ones(7)

    def program(rec: Recorder) -> None:
        for _ in range(2):
            x = leaf(3)
            with rec.catch():
                Wrong.apply(x).sum().backward()
            rec.grads(x)

    runs = compare(program, captures=1, against_eager=False)
    assert "invalid gradient at index 0" in runs.retrograd.said("error")[0][0]


def test_validate_outputs_is_skipped_after_an_aot_backward() -> None:
    def program(rec: Recorder) -> None:
        model = net()
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            compiled(torch.randn(3, 4)).pow(2).sum().backward()
            rec.module(model)

    runs = compare(program, captures=1, dynamo=True)
    assert runs.retrograd.targets().count("validate_outputs") == 3  # GraphRoot, sum, pow
    assert "call_aot_bwd_prologue" in runs.retrograd.targets()


def test_an_aot_backward_with_symbolic_sizes() -> None:
    def program(rec: Recorder) -> None:
        model = net()
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        for rows in (3, 3, 5, 6):
            model.zero_grad()
            compiled(torch.randn(rows, 4)).pow(2).sum().backward()
            rec.module(model)

    compare(program, captures=2, dynamo=True)
    compare(program, captures=1, dynamic=True, dynamo=True)


def test_the_same_aot_backward_twice_in_one_graph() -> None:
    def program(rec: Recorder) -> None:
        compiled = torch.compile(lambda x, w: (x * w).sin(), backend="aot_eager")
        for step in range(2):
            x, w = leaf(3, seed=step), leaf(3, seed=1)
            compiled(compiled(x, w) * 2, w).sum().backward()
            rec.grads(x, w)

    compare(program, captures=1, dynamo=True)


def test_graph_outputs_and_nodes_that_are_not_needed() -> None:
    def program(rec: Recorder) -> None:
        for step in range(3):
            x, w, v = leaf(3, seed=step), leaf(3, seed=1), leaf(3, seed=2)
            y = (x * w).exp()
            z = (y * v).sin() + w
            rec.say("grad", *torch.autograd.grad(z.sum(), (x, y, w)))
            rec.grads(x, w, v)

    runs = compare(program, captures=1)
    assert "call_accumulate_grad" not in runs.retrograd.targets()


@pytest.mark.parametrize("which", ["leaf", "intermediate", "both", "root"])
def test_graph_outputs_of_every_kind(which: str) -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w = leaf(3, seed=step), leaf(3, seed=1)
            y = x * w
            root = y.exp().sum()
            inputs = {"leaf": (x,), "intermediate": (y,), "both": (w, y, x), "root": (root, y)}[which]
            rec.say("grad", *torch.autograd.grad(root, inputs))

    compare(program, captures=1)


def test_graph_outputs_that_are_unused_or_repeated() -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w, unused = leaf(3, seed=step), leaf(3, seed=1), leaf(3, seed=2)
            loss = (x * w).exp().sum()
            rec.say("grad", *torch.autograd.grad(loss, (x, unused, w), allow_unused=True, retain_graph=True))
            with rec.catch():
                torch.autograd.grad(loss, (x, unused))

    runs = compare(program, captures=2)
    assert "appears to not have been used in the graph" in runs.retrograd.said("error")[0][0]


def test_backward_with_inputs_accumulates_into_them_only() -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w, v = leaf(3, seed=step), leaf(3, seed=1), leaf(3, seed=2)
            loss = ((x * w).exp() * v).sum()
            loss.backward(inputs=[x, v], retain_graph=True)
            rec.grads(x, w, v)
            x.grad = v.grad = None
            loss.backward(inputs=[w])
            rec.grads(x, w, v)

    compare(program, captures=2)


def test_several_roots() -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w = leaf(3, seed=step), leaf(3, seed=1)
            y, z = x.exp(), x * w
            torch.autograd.backward([y, z, y], [torch.ones(3), w.detach() + 1, torch.full((3,), 2.0)])
            rec.grads(x, w)

    compare(program, captures=1)


def test_fan_in_through_accumulate() -> None:
    def program(rec: Recorder) -> None:
        for step in range(3):
            x = leaf(3, seed=step)
            y = x.exp()
            a, b, c = y * 2, y.sin(), y * y
            (a + b + c + x).sum().backward()
            rec.grads(x)

    runs = compare(program, captures=1)
    adds = runs.retrograd.targets().count("add")
    assert adds == 4  # y has four uses (two of them in y * y), x two


def test_a_leaf_as_the_root() -> None:
    def program(rec: Recorder) -> None:
        for step in range(2):
            x = leaf(3, seed=step)
            x.backward(torch.ones(3))
            rec.grads(x)

    compare(program, captures=1)


# --- What a captured graph tells ---


def test_node_origins_and_names() -> None:
    def program(rec: Recorder) -> None:
        model = net()
        model(torch.randn(3, 4)).pow(2).sum().backward()
        rec.module(model)

    runs = compare(program, captures=1)
    origins = {line[line.rindex("[") + 1 : -1] for line in runs.retrograd.graphs[0]}
    assert {
        "torch::autograd::GraphRoot (NodeCall 0)",
        "SumBackward0 (NodeCall 1)",
        "AddmmBackward0 (NodeCall 3)",
    } <= origins
    module = runs.retrograd.compiled[0].module
    names = [node.name for node in module.graph.nodes]
    assert names == [node.name for node in runs.stock.compiled[0].module.graph.nodes]
    assert "addmm_backward0_1" in names
    assert re.fullmatch(r"CompiledAutograd\d+", type(module).__name__)
    assert module.meta["locals_to_steal"] == ["inputs"]


class Logger:
    """A verbose logger that keeps what it was told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def debug(self, message: str, *args: Any) -> None:
        self.messages.append(message % args if args else message)


@contextlib.contextmanager
def logging_misses() -> Iterator[Logger]:
    logger = Logger()
    torch._C._dynamo.compiled_autograd.set_verbose_logger(logger)
    try:
        yield logger
    finally:
        torch._C._dynamo.compiled_autograd.set_verbose_logger(None)


def logged(body: Callable[[], None], *, dynamic: bool = False) -> tuple[list[list[str]], list[Run]]:
    """What stock and retrograd tell the verbose logger while `body` runs, and the runs."""
    told, results = [], []

    def program(rec: Recorder) -> None:
        with logging_misses() as logger:
            body()
        told.append(logger.messages)

    for engine in ("stock", "retrograd"):
        results.append(run(engine, program, dynamic=dynamic))
    return told, results


def test_verbose_log_of_a_node_miss_tells_the_sizes_of_previous_keys() -> None:
    def body() -> None:
        for width in (2, 2, 3, 1):
            x = leaf(3)
            torch.cat([x] * width).sum().backward()

    (stock, ours), _ = logged(body)
    # torch lists the sizes in the order of a hash table, with a comma for every other key.
    assert [sorted(re.findall(r"[\w:]+", message)) for message in ours] == [
        sorted(re.findall(r"[\w:]+", message)) for message in stock
    ]
    assert len(ours) == 3
    assert re.fullmatch(
        r"Cache miss due to new autograd node: torch::autograd::GraphRoot \(NodeCall 0\) with key size \d+, "
        r"previous key sizes=\[\]",
        ours[0],
    )
    assert "CatBackward0 (NodeCall 2)" in ours[1] and re.search(r"previous key sizes=\[\d+\]", ours[1])


def test_verbose_log_of_a_shape_miss_tells_which_sizes() -> None:
    def body() -> None:
        for rows, columns in [(3, 4), (3, 4), (5, 4), (5, 7), (3, 9)]:
            leaf(rows, columns).sum(1).exp().sum().backward()

    (stock, ours), _ = logged(body)
    assert ours == stock
    assert len(ours) == 3
    assert ours[1].startswith("Cache miss due to") and "changed tensor shapes" in ours[1]


class FrontEnd(front_end.AutogradCompilerInstance):
    """torch's front end, telling what is asked of it."""

    def __init__(self, compiler_fn: Callable[..., Any], say: Callable[..., None]) -> None:
        super().__init__(compiler_fn)
        self.say = say
        self.begun = False
        self.say("made")
        close = self.close

        def told_close() -> None:
            self.say("closed")
            close()

        self.close = told_close

    def begin_capture(
        self, inputs: list[Tensor], sizes: Any, scalars: Any, origins: Any, accumulate_grad: bool, check_nans: bool
    ) -> Any:
        # Origins come with every capture, but are empty without a verbose logger.
        self.say("begin_capture", describe(inputs), [list(sizes), list(scalars)], accumulate_grad, check_nans)
        self.say("origins", origins)
        answer = super().begin_capture(inputs, sizes, scalars, origins, accumulate_grad, check_nans)
        self.begun = True
        return answer

    def set_node_origin(self, node_name: str, nodecall_index: int, pyobj: Any) -> None:
        if self.begun:  # else it is about an input
            self.say("node", nodecall_index, node_name)
        super().set_node_origin(node_name, nodecall_index, pyobj)

    def log_compile_reasons(self, compile_reasons: list[str]) -> None:
        self.say("log_compile_reasons", list(compile_reasons))
        super().log_compile_reasons(compile_reasons)


def with_front_end(compiler_fn: Callable[..., Any], body: Callable[[], None], say: Callable[..., None]) -> None:
    """Runs `body` with a FrontEnd in the place of torch's."""
    factory = functools.partial(FrontEnd, compiler_fn, say)
    prior = torch._C._dynamo.compiled_autograd.set_autograd_compiler(factory, False)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            body()
    finally:
        torch._C._dynamo.compiled_autograd.set_autograd_compiler(*prior)


@pytest.mark.parametrize("verbose", [True, False])
def test_input_origins_are_told_with_a_verbose_logger(cpp_functions: Any, verbose: bool) -> None:
    """Which node brought each tensor, size and scalar, and why there was a capture."""

    def body() -> None:
        for rows in (3, 5):
            x, w, v = leaf(rows, 4), leaf(4, 2, seed=1), leaf(2, seed=2)
            y = F.linear(x, w.t(), w[0]).relu()
            cpp_functions.scale(y, v.expand(rows, 2), 2, 0.5, False).sum().backward()

    def program(rec: Recorder) -> None:
        with logging_misses() if verbose else contextlib.nullcontext():
            with_front_end(lambda module: module, body, rec.say)

    stock, ours = (run(engine, program) for engine in ("stock", "retrograd"))
    for label in ("made", "begin_capture", "node", "log_compile_reasons", "closed"):
        assert ours.said(label) == stock.said(label)
    assert len(ours.said("origins")) == 2
    assert len(ours.said("log_compile_reasons")) == (2 if verbose else 0)
    names = dict(ours.said("node"))
    for (want,), (got,) in zip(stock.said("origins"), ours.said("origins"), strict=True):
        # torch tells the right number with, at times, the name of another node.
        assert [[k for k, _ in kind] for kind in got] == [[k for k, _ in kind] for kind in want]
        assert all(name == names[k] for kind in got for k, name in kind)
    inputs, sizes, scalars = ([name for _, name in kind] for kind in ours.said("origins")[1][0])
    assert bool(inputs) == bool(sizes) == bool(scalars) == verbose
    if verbose:
        assert inputs[0] == "torch::autograd::GraphRoot"
        assert {name[:24] for name in scalars} == {"torch::autograd::CppNode"}
        assert "SumBackward0" in sizes


# --- How a call ends ---


def test_variables_are_released_unless_the_graph_is_kept() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        for keeps in (1, 0, 2):
            loss = (x * w).exp().sum()
            for _ in range(keeps):
                loss.backward(retain_graph=True)
                rec.grads(x, w)
                x.grad = w.grad = None
            loss.backward()
            rec.grads(x, w)
            x.grad = w.grad = None
            with rec.catch():
                loss.backward()
            rec.grads(x, w)

    runs = compare(program, captures=1)
    assert runs.retrograd.said("error")[0][0].startswith(
        "RuntimeError: Trying to backward through the graph a second time"
    )


@pytest.mark.parametrize("keep", [True, False])
def test_released_variables_are_freed_by_the_call(keep: bool) -> None:
    def program(rec: Recorder) -> None:
        for _ in range(2):
            x = leaf(100)
            loss = x.exp().sin().sum()
            node = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            storage = StorageWeakRef(node._saved_self.untyped_storage())
            loss.backward(retain_graph=keep)
            rec.say("freed", storage.expired())
            with rec.catch("saved"):
                rec.say("kept", node._saved_self.shape)

    runs = compare(program, captures=1)
    assert runs.retrograd.said("freed") == [[not keep]] * 2


def nan_program(*, anomaly: bool, where: str) -> Callable[[Recorder], None]:
    def program(rec: Recorder) -> None:
        for nan in (False, True, False):
            x, w = leaf(3), leaf(3, seed=1)
            y = x * w
            if nan and where == "grad":
                x.grad = torch.full((3,), float("nan"))
            z = (y * (0.0 if nan else 1.0)).abs().sqrt() if where != "grad" else y
            with rec.catch(), torch.autograd.set_detect_anomaly(anomaly):
                if where == "output":
                    rec.say("returned", *torch.autograd.grad((z * z.detach()).sum() + z.sum() * 0, (x, w)))
                else:
                    ((z * z.detach()).sum() + z.sum() * 0).backward()
            rec.grads(x, w)

    return program


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("where", ["leaf", "output"])
def test_nan_checks_under_anomaly_mode(where: str) -> None:
    runs = compare(nan_program(anomaly=True, where=where), captures=1, against_eager=False)
    errors = [error for (error,) in runs.retrograd.said("error")]
    assert errors[0] == errors[2] == "none"
    assert errors[1].startswith("RuntimeError: Compiled Autograd returned NaN gradients for")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_nan_that_was_there_before_is_an_error_under_anomaly_mode() -> None:
    stock, ours = (run(engine, nan_program(anomaly=True, where="grad")) for engine in ("stock", "retrograd"))
    check_against_stock(stock, ours)
    # Such a graph does see whether there is a gradient. The second call fails before the compiled graph is called.
    check_path(ours, calls=3, captures=2)
    assert len(ours.calls) == 2
    assert "already having NaN gradient" in ours.said("error")[1][0]


def test_nan_is_no_error_without_anomaly_mode() -> None:
    runs = compare(nan_program(anomaly=False, where="leaf"), captures=1)
    assert runs.retrograd.said("error") == [["none"]] * 3


def refuses(module: torch.fx.GraphModule) -> Any:
    raise LookupError("the compiler gives up")


class Untraceable(torch.autograd.Function):
    """Fails in the middle of a capture: torch's front end refuses functions that want their gradients boxed."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grads: list[Tensor]) -> Tensor:
        return grads[0] * 2


@pytest.mark.parametrize("end", ["well", "compiler raises", "capture raises", "compiled raises", "not callable"])
def test_close_on_every_exit(end: str) -> None:
    compilers = {"compiler raises": refuses, "compiled raises": lambda module: raises, "not callable": lambda module: 3}

    def program(rec: Recorder) -> None:
        def body() -> None:
            for _ in range(2):
                x = leaf(3)
                y = Untraceable.apply(x) if end == "capture raises" else x * 2
                try:
                    y.exp().sum().backward()
                except Exception as error:
                    rec.say("end", type(error).__name__)
                else:
                    rec.say("end", "done")

        with_front_end(compilers.get(end, lambda module: module), body, rec.say)
        if rec.engine == "retrograd":  # torch leaves it open after a failed capture
            assert torch._guards.CompileContext.try_get() is None
        assert torch._C._len_torch_dispatch_stack() == 0

    stock, ours = (run(engine, program) for engine in ("stock", "retrograd"))
    assert ours.said("end") == stock.said("end") or end == "not callable"  # which torch keeps and calls
    for result in (stock, ours):
        assert len(result.said("made")) == len(result.said("closed")) == result.captures
    assert ours.captures == (1 if end in ("well", "compiled raises") else 2)


# --- Errors ---


ERRORS: dict[str, tuple[type[Exception], str]] = {
    "compiler": (LookupError, "the compiler gives up"),
    "compiled": (LookupError, "in the hook"),
    "function": (ZeroDivisionError, "division by zero"),
    "capture": (RuntimeError, "boxed_grads_call=True on Untraceable is not supported with compiled autograd."),
}


class Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 / 0)


@pytest.mark.parametrize("where", ERRORS)
def test_errors_keep_their_python_type_and_traceback(where: str) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        function: Any = {"function": Divides, "capture": Untraceable}.get(where)
        y = function.apply(x) if function else x * 2
        try:
            y.exp().sum().backward()
        except Exception as error:
            rec.say("error", type(error).__name__, str(error).strip())
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            rec.say("raised in", frames[-1])

    transform: Callable[[torch.fx.GraphModule], Any] = {"compiler": refuses, "compiled": lambda module: raises}.get(
        where, lambda module: module
    )
    stock, ours = (run(engine, program, transform=transform) for engine in ("stock", "retrograd"))
    assert ours.log == stock.log
    kind, message = ERRORS[where]
    assert ours.said("error") == [[kind.__name__, message]]


def test_the_live_graph_survives_a_failed_capture() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3, 4), leaf(4, seed=1)
        base = x * w
        base[1].mul_(w)
        loss = F.layer_norm(Untraceable.apply(base.exp().sum(0)), (4,), w).exp().sum()
        with (
            contextlib.nullcontext() if rec.engine == "eager" else pytest.raises(RuntimeError, match="boxed_grads_call")
        ):
            loss.backward(retain_graph=True)
        x.grad = w.grad = None
        with rec.off():
            loss.backward()
        rec.grads(x, w)

    eager, ours = run("eager", program), run("retrograd", program)
    assert [describe(values) for _, values in ours.log] == [describe(values) for _, values in eager.log]


def test_a_compiler_that_fails_is_asked_again_three_times_and_after_cache_clear() -> None:
    asked = []

    def compiler(module: torch.fx.GraphModule) -> Any:
        asked.append(module)
        raise LookupError("the compiler gives up")

    def backward() -> None:
        x = leaf(3)
        (x * 2).exp().sum().backward()

    retrograd.cache_clear()
    with retrograd.enable(backend=compiler):
        for _ in range(3):
            with pytest.raises(LookupError, match="the compiler gives up"):
                backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="is not asked again") as raised:
                backward()
            assert isinstance(raised.value.__cause__, LookupError)
        assert len(asked) == 3
        retrograd.cache_clear()
        with pytest.raises(LookupError, match="the compiler gives up"):
            backward()


# --- Whole programs ---


def train(
    build: Callable[[], nn.Module], inputs: Callable[[int], Tensor], steps: int = 3
) -> Callable[[Recorder], None]:
    def program(rec: Recorder) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            model(inputs(step)).pow(2).mean().backward()
            rec.module(model)
            optimizer.step()

    return program


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "batch norm": (lambda: net(batch_norm=True), lambda step: torch.randn(5, 4)),
    "dropout": (lambda: net(dropout=0.5), lambda step: torch.randn(5, 4)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        lambda step: torch.randn(2, 1, 8, 8),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda step: torch.randn(2, 3, 8),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2)),
        lambda step: torch.tensor([[0, 1, 2], [2, step, 6]]),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    build, inputs = MODELS[name]
    compare(train(build, inputs), captures=1)
    compare(train(build, inputs), captures=1, dynamic=True)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_training_with_dynamo_compiling_the_graphs() -> None:
    def program(rec: Recorder) -> None:
        model = net(batch_norm=True)
        model[0].weight.register_hook(rec.hook("tensor", lambda g: g * 2))
        model[-1].bias.register_post_accumulate_grad_hook(rec.hook("post accumulate"))
        for rows in (3, 3, 5, 7, 3):
            model.zero_grad()
            y = model(torch.randn(rows, 4))
            y.retain_grad()
            y.grad_fn.register_prehook(rec.hook("pre"))
            Scale.apply(y, y, 0.5).sum().backward()
            rec.module(model)
            rec.grads(y)

    compare(program, captures=2, transform=lambda module: torch.compile(module, backend="eager"), dynamo=True)


def test_training_with_changing_batches() -> None:
    compare(train(lambda: net(batch_norm=True), lambda step: torch.randn(3 + step % 3, 4), steps=7), captures=2)


def test_custom_functions() -> None:
    def program(rec: Recorder) -> None:
        for factor in (2.0, 3.0, 4.0):
            x, w = leaf(3), leaf(3, seed=1)
            y = Scale.apply(x, w, factor)
            Scale.apply(y, w.detach(), 0.5).exp().sum().backward()
            rec.grads(x, w)

    runs = compare(program, captures=1)
    assert runs.retrograd.targets().count("call_backward") == 2


def test_custom_function_with_several_outputs_and_materialized_gradients() -> None:
    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            counts = torch.arange(3)
            ctx.mark_non_differentiable(counts)
            return x * 2, x * 3, counts

        @staticmethod
        def backward(ctx: Any, a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
            return a * 2 + b * 3

    def program(rec: Recorder) -> None:
        for step in range(2):
            x = leaf(3, seed=step)
            a, b, _ = Split.apply(x)
            a.exp().sum().backward(retain_graph=True)
            rec.grads(x)
            x.grad = None
            (a * b).sum().backward()
            rec.grads(x)

    compare(program, captures=2)


def test_mutable_state_of_a_custom_function_is_not_baked_in() -> None:
    def program(rec: Recorder) -> None:
        factors = iter((1.0, 5.0, 7.0))

        class Stateful(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * next(factors)

        for _ in range(3):
            x = leaf(3)
            Stateful.apply(x).sum().backward()
            rec.grads(x)

    compare(program, captures=1)


def test_callbacks_of_the_engine_run_at_the_end() -> None:
    """torch's own compiled autograd forgets them, unless Dynamo compiles the graph."""

    def program(rec: Recorder) -> None:
        for step in range(2):
            x = leaf(3, seed=step)
            y = x.exp()

            def queue(grad: Tensor) -> None:
                torch.autograd.Variable._execution_engine.queue_callback(
                    lambda: rec.say("callback", x.grad is not None)
                )
                rec.say("hook", grad)

            y.register_hook(queue)
            y.sum().backward()
            rec.say("done")

    eager, ours = run("eager", program), run("retrograd", program)
    assert [describe(line) for line in ours.log] == [describe(line) for line in eager.log]
    check_path(ours, calls=2, captures=1)


def test_hooks_on_several_tensors_at_once() -> None:
    """They ask the graph task for the nodes that will run. torch's own compiled autograd has none to ask."""

    def program(rec: Recorder) -> None:
        for step in range(2):
            x, w, unused = leaf(3, seed=step), leaf(3, seed=1), leaf(3)
            y = x.exp()
            tensors = (y, w, unused * 2)
            torch.autograd.graph.register_multi_grad_hook(tensors, rec.hook("all"))
            torch.autograd.graph.register_multi_grad_hook(tensors, lambda grad: rec.say("any"), mode="any")
            (y * w).sum().backward()
            rec.grads(x, w)

    eager, ours = run("eager", program), run("retrograd", program)
    check_against_eager(eager, ours)
    check_path(ours, calls=2, captures=1)


def test_use_after_cache_clear() -> None:
    def program(rec: Recorder) -> None:
        for clear in (False, False, True, False):
            if clear and rec.engine != "eager":
                torch._C._dynamo.compiled_autograd.clear_cache()
            x = leaf(3)
            (x * x).exp().sum().backward()
            rec.grads(x)

    compare(program, captures=2)


def test_gradients_that_are_present_need_no_other_graph() -> None:
    """On purpose not as in torch's own, which captures once more."""

    def program(rec: Recorder) -> None:
        model = net()
        for _ in range(4):
            model(torch.randn(3, 4)).pow(2).sum().backward()
            rec.module(model)

    eager, stock, ours = (run(engine, program) for engine in ("eager", "stock", "retrograd"))
    assert (stock.captures, ours.captures) == (2, 1)
    assert ours.graphs == stock.graphs[:1]
    assert ours.stats["hits"] == 3
    assert [describe(values) for _, values in ours.log] == [describe(values) for _, values in stock.log]
    for (_, (a,)), (_, (b,)) in zip(eager.log, ours.log, strict=True):
        torch.testing.assert_close(b, a)


def two_leaves_get_one_gradient(rec: Recorder) -> None:
    x, w = leaf(2, 3), leaf(6, seed=1)
    for _ in range(3):
        (x.view(-1) + w).backward(torch.ones(6))
        x.grad.mul_(2)  # type: ignore[union-attr]
        rec.grads(x, w)


def root_gradient_is_not_taken(rec: Recorder) -> None:
    x, gradient = leaf(3), torch.ones(3)
    for _ in range(3):
        x.backward(gradient)
        x.grad.mul_(3)  # type: ignore[union-attr]
        rec.say("given", gradient)
        rec.grads(x)


def sparse_and_dense(rec: Recorder) -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    for dense in (0.0, 0.0, 1.0, 0.0):
        loss = embedding(torch.tensor([0, 2, 0])).sum()
        if dense:
            loss = loss + embedding.weight.pow(2).sum()
        loss.backward()
        rec.say("sparse", embedding.weight.grad.is_sparse, embedding.weight.grad.to_dense())  # type: ignore[union-attr]


def layouts(rec: Recorder) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    w = torch.randn(4, 3).t().requires_grad_()
    for _ in range(3):
        (model(torch.randn(2, 3, 5, 5)).sum() * (torch.ones(2, 3) @ w).sin().sum()).backward()
        rec.grads(model.weight, w)
        rec.say("strides", model.weight.grad.stride(), w.grad.stride())  # type: ignore[union-attr]


def tied_weights(rec: Recorder) -> None:
    embedding, linear = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    linear.weight = embedding.weight
    for _ in range(3):
        linear(embedding(torch.tensor([0, 1, 2]))).pow(2).sum().backward()
        rec.grads(embedding.weight)


def hook_accumulates_meanwhile(rec: Recorder) -> None:
    x, w = leaf(3), leaf(3, seed=1)

    def accumulate(grad: Tensor) -> None:
        x.grad = torch.full((3,), 10.0)

    for _ in range(3):
        y = x * w
        y.register_hook(accumulate)
        y.sum().backward()
        rec.grads(x, w)


@pytest.mark.parametrize(
    "program",
    [
        two_leaves_get_one_gradient,
        root_gradient_is_not_taken,
        sparse_and_dense,
        layouts,
        tied_weights,
        hook_accumulates_meanwhile,
    ],
)
def test_leaves_accumulate_as_in_eager(program: Callable[[Recorder], None]) -> None:
    """The graph hands each finished gradient to the real leaf, which copies, takes or adds it by its own rules."""
    eager, ours = run("eager", program), run("retrograd", program)
    check_against_eager(eager, ours)
    check_path(ours, calls=len(ours.calls), captures=2 if program is sparse_and_dense else 1)
    assert len(ours.calls) >= 3


# --- Other processes ---

PROCESS = """
import torch
from torch._dynamo import compiled_autograd as front_end
import retrograd

def backward(count):
    x = torch.linspace(0, 1, 4).requires_grad_()
    w = torch.nn.Parameter(torch.eye(4))
    y = torch.addmv(x, w, x).sinh()
    for _ in range(count):
        y = y * x
    base = y * 1
    base[1:].mul_(2)
    base.pow(2).sum().backward()
    return x.grad, w.grad

def check(count, want):
    for a, b in zip(backward(count), want, strict=True):
        torch.testing.assert_close(a, b)

graphs = []

def compiler(module):
    graphs.append(module.code)
    return module

wants = [backward(count) for count in range(4)]

def stock(count):
    front_end.reset()
    graphs.clear()
    with front_end._enable(compiler, dynamic=False):
        check(count, wants[count])
        check(count, wants[count])
    assert len(graphs) == 1, len(graphs)
    return graphs[0]

def ours(count):
    retrograd.install()
    retrograd.cache_clear()
    retrograd.reset_stats()
    graphs.clear()
    with retrograd.enable(backend=compiler):
        check(count, wants[count])
        check(count, wants[count])
    stats = retrograd.stats()
    assert stats["calls"]["callable"] == 2 and stats["captures"] == stats["hits"] == len(graphs) == 1, stats
    retrograd.uninstall()
    return graphs[0]
"""


def run_process(script: str, timeout: float = 120.0) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS + textwrap.dedent(script)], capture_output=True, text=True, timeout=timeout
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("first", ["stock", "retrograd"])
def test_stock_and_retrograd_in_one_process_whichever_captures_first(first: str) -> None:
    """libtorch hands each backward function over once, to whoever captures first."""
    order = "stock, ours" if first == "stock" else "ours, stock"
    run_process(f"""
    first, second = {order}
    for count in (1, 2):
        a, b, c = first(count), second(count), first(count)
        assert a == b == c, (a, b, c)
    """)


def test_nothing_is_freed_after_the_interpreter_is_gone() -> None:
    run_process("""
    import atexit, threading
    ours(1)
    retrograd.install()
    retrograd.set_default(backend=compiler)
    check(1, wants[1])  # captured for the default; both plans live on
    thread = threading.Thread(target=lambda: check(2, wants[2]))
    thread.start()
    thread.join()
    assert retrograd.stats()["cache"]["leaves"] >= 2
    x = torch.ones(3, requires_grad=True)
    kept = (x * x).sum()  # a graph with hooks that lives on as well
    kept.register_hook(lambda g: g)
    kept.backward(retain_graph=True)
    atexit.register(check, 3, wants[3])  # and one more call while the interpreter goes
    """)


# --- What one graph must not be used for ---


def test_retain_grad_on_another_output_of_the_node() -> None:
    def program(rec: Recorder) -> None:
        for which in (0, 1, 2):
            x = leaf(3, 4)
            parts = x.unbind()
            parts[which].retain_grad()
            sum((part * (i + 2)).sin().sum() for i, part in enumerate(parts)).backward()
            rec.grads(x, parts[which])

    # torch's own uses the first graph for all three.
    check_against_eager(run("eager", program), run("retrograd", program))


@pytest.mark.parametrize("keep", [False, True])
def test_hooks_on_another_saved_tensor_of_the_node(keep: bool) -> None:
    """Hooks that SavedTensor.register_hooks puts on, past the engine."""

    def program(rec: Recorder) -> None:
        for step, which in enumerate(("self", "other", "both", "none", "self", "other", "both", "none")):
            x, w = leaf(3, seed=step), leaf(3, seed=9)
            y = torch.atan2(x * 2 + 5, w * 3 + 5)
            for name in ("self", "other") if which == "both" else (which,):
                if name != "none":
                    getattr(y.grad_fn, f"_raw_saved_{name}").register_hooks(lambda t: t * 1, lambda t: t)
            for _ in range(2 if keep else 1):
                y.exp().sum().backward(retain_graph=keep)
            rec.grads(x, w)

    ours = run("retrograd", program)
    check_against_eager(run("eager", program), ours)
    check_path(ours, calls=16 if keep else 8, captures=4)


def test_hooks_on_another_saved_tensor_of_a_function_or_a_list() -> None:
    def program(rec: Recorder) -> None:
        def hooked(which: int, count: int) -> Iterator[contextlib.AbstractContextManager[None]]:
            hooks = saved_tensors_hooks(lambda t: t * 1, lambda t: t)
            return iter([hooks if i == which else contextlib.nullcontext() for i in range(count)])

        for which in (0, 1):
            x, w = leaf(3, seed=which), leaf(3, seed=9)
            y = Scale.apply(x, w, 2.0)
            y.grad_fn._raw_saved_tensors[which].register_hooks(lambda t: t * 1, lambda t: t)
            y.sum().backward()
            rec.grads(x, w)
            x, rows, columns = leaf(4, 4), torch.tensor([1, 2]), torch.tensor([3, 0])
            y = x.sin()[rows, columns]
            y.grad_fn._raw_saved_indices[which].register_hooks(lambda t: t * 1, lambda t: t)
            y.sum().backward()
            rec.grads(x)

    ours = run("retrograd", program)
    check_against_eager(run("eager", program), ours)
    check_path(ours, calls=4, captures=4)


def test_a_capture_with_hooks_after_accumulation_keeps_no_tensors() -> None:
    """torch's own keeps one for each hook."""

    def stand_ins() -> int:
        torch._dynamo.reset()
        torch._subclasses.FakeTensorMode.cache_clear()
        gc.collect()
        return sum(type(kept) is torch._subclasses.FakeTensor for kept in gc.get_objects())

    def program(rec: Recorder) -> None:
        x = leaf(3)
        x.register_post_accumulate_grad_hook(rec.hook("done"))
        x.sin().sum().backward()

    run("retrograd", program)
    retrograd.cache_clear()
    before = stand_ins()
    ours = run("retrograd", program)
    check_path(ours, calls=1, captures=1)
    del ours
    retrograd.cache_clear()
    assert stand_ins() == before


def test_grad_dtype_of_a_leaf() -> None:
    def program(rec: Recorder) -> None:
        for dtype in (None, torch.float32, torch.bfloat16, None, torch.float32, "default"):
            w = torch.arange(4.0).to(torch.bfloat16).requires_grad_()
            if dtype != "default":
                w.grad_dtype = dtype
            for _ in range(2):
                (w.float() * 1.001 + w.to(torch.float64).float()).sum().backward()
            rec.grads(w)

    # torch's own captures cannot assign a gradient of a type that is not the leaf's.
    ours = run("retrograd", program)
    check_against_eager(run("eager", program), ours)
    assert ours.stats["schedule_reasons"]["not_capturable"] == 8
    assert ours.stats["calls"]["callable"] == 4


def test_a_table_that_is_looked_up_and_multiplied() -> None:
    """Its sparse gradient meets a dense one, in either order."""

    def program(rec: Recorder) -> None:
        rows = torch.tensor([1, 4, 1])
        for lookup_first in (True, False):
            table, w = leaf(5, 4), leaf(4, 2, seed=1)
            parts = [lambda t=table: F.embedding(rows, t, sparse=True).sum(), lambda t=table, w=w: (t @ w).sum()]
            if not lookup_first:
                parts.reverse()
            (parts[0]() + parts[1]()).backward()
            rec.grads(table, w)

    # torch's own graphs raise: "add(sparse, dense) is not supported".
    ours = run("retrograd", program)
    check_against_eager(run("eager", program), ours)
    check_path(ours, calls=2, captures=2)


def test_several_roots_that_reach_nothing_of_inputs() -> None:
    def program(rec: Recorder) -> None:
        x, other = leaf(3), leaf(3, seed=1)
        y = x.sin()
        torch.autograd.backward([y.sum(), y.sum()], inputs=[other])
        rec.grads(x, other)

    # torch's captures need an input, and nothing is needed here that has one.
    ours = run("retrograd", program)
    check_against_eager(run("eager", program), ours)
    assert ours.stats["schedule_reasons"]["not_capturable"] == ours.stats["calls"]["schedule"] == 1


def test_a_scalar_of_another_type(cpp_functions: Any) -> None:
    def program(rec: Recorder) -> None:
        for flag in (True, False):
            for scalar in (2, 2.5, 3, 0.5):
                x = leaf(3, seed=1)
                cpp_functions.scale_by(x, scalar, flag).sum().backward()
                rec.grads(x)

    ours = run("retrograd", program)
    check_against_eager(run("eager", program), ours)
    check_path(ours, calls=8, captures=4)


# --- Leaves that a custom function saved ---


class IntoMainGrad(torch.autograd.Function):
    """As fused optimizers have it: looks at the parameter itself, and accumulates into an attribute of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rec: Recorder) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rec, ctx.w = rec, w
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        ctx.rec.say("w", w is ctx.w, type(w).__name__, w.grad)
        w.main_grad.add_(grad * x)
        w.data = w.data + 1
        return grad * w, grad * x, None


@pytest.mark.parametrize("earlier", ["function", "product"])
@pytest.mark.parametrize("compiler", ["raw", "dynamo"])
def test_a_custom_function_gets_the_parameter_itself(compiler: str, earlier: str) -> None:
    """Also where another node has brought the parameter before."""

    def program(rec: Recorder) -> None:
        w = nn.Parameter(torch.arange(1.0, 4.0))
        w.main_grad = torch.zeros(3)
        for step in range(3):
            x = leaf(3, seed=step)
            y = IntoMainGrad.apply(x, w, rec)
            if earlier == "product":
                y = y.sin() * w
            y.sum().backward()
            rec.grads(x, w)
            rec.say("after", w, w.main_grad)

    transform = functools.partial(torch.compile, backend="eager") if compiler == "dynamo" else lambda module: module
    ours = run("retrograd", program, transform=transform, dynamo=True)
    check_against_eager(run("eager", program), ours)
    check_path(ours, calls=3, captures=1)


def test_only_leaves_that_a_custom_function_saved_have_an_input_of_their_own() -> None:
    def program(rec: Recorder) -> None:
        for saved in (True, False, True):
            model, x, w = net(), leaf(2, seed=1), leaf(2, seed=2)
            y = model(torch.ones(1, 4))[0]
            (Scale.apply(x, w, 2.0) * y if saved else x * w * 2.0 * y).sum().backward()
            rec.grads(x, w, *model.parameters())

    compare(program, captures=2)
    seen = []

    def count(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        def run_graph(inputs: list[Tensor], *args: Any) -> Any:
            seen.append(sum(value.is_leaf and value.requires_grad for value in inputs))
            return graph(inputs, *args)

        return run_graph

    with retrograd.enable(backend=count):
        program(Recorder("retrograd", contextlib.nullcontext))
    assert seen == [8, 6, 8]


# --- Unpack hooks of custom functions ---


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_reentrant_checkpoint_inside_a_non_reentrant_one(blocks: int) -> None:
    def program(rec: Recorder) -> None:
        torch.manual_seed(0)
        linear = nn.Linear(3, 3)

        def inner(x: Tensor) -> Tensor:
            return linear(x).sin()

        def outer(x: Tensor) -> Tensor:
            return checkpoint(inner, x.tanh(), use_reentrant=True) * 2

        for step in range(2):
            x = leaf(2, 3, seed=step)
            y = x * 1.5
            for _ in range(blocks):
                y = checkpoint(outer, y, use_reentrant=False)
            y.sum().backward()
            rec.grads(x)
            rec.module(linear)

    # torch's own loses the gradient of x, and raises for several blocks.
    ours = run("retrograd", program)
    check_against_eager(run("eager", program), ours)
    assert ours.stats["calls"]["schedule"] == 0


@pytest.mark.parametrize("compiler", ["raw", "dynamo"])
def test_what_an_unpack_hook_returns_to_a_custom_function(compiler: str) -> None:
    """Requires a gradient where what was packed did. Graphs are the same as torch's, and Dynamo compiles them whole."""

    def program(rec: Recorder) -> None:
        for step in range(3):
            x, w = leaf(3, seed=step), torch.ones(3) + step
            with saved_tensors_hooks(lambda t: t.detach() * 2, lambda t: t / 2):
                y = Asking.apply(x.sin(), w, rec if compiler == "raw" else None)
            y.sum().backward()
            rec.grads(x)

    def transform(module: torch.fx.GraphModule) -> Any:
        return torch.compile(module, backend=kept, fullgraph=True) if compiler == "dynamo" else module

    compiled = []

    def kept(module: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(module)
        return module

    eager, ours = run("eager", program), run("retrograd", program, transform=transform, dynamo=True)
    check_against_eager(eager, ours)
    check_path(ours, calls=3, captures=1)
    assert len(compiled) <= 1
    if compiler == "raw":
        assert ours.said("saved") == [[True, False]] * 3
        assert ours.graphs == run("stock", program).graphs


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rec: Recorder | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rec = rec
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, w = ctx.saved_tensors
        if ctx.rec is not None:
            ctx.rec.say("saved", x.requires_grad, w.requires_grad)
        return grad * w + x.detach() - x.detach(), None, None


# --- How long what was made for a compiler function is kept ---


class Compiling:
    def __call__(self, graph: torch.fx.GraphModule) -> Any:
        return graph

    def method(self, graph: torch.fx.GraphModule) -> Any:
        return graph


def compiler_functions(kind: str, count: int) -> list[Any]:
    def function(i: int) -> Callable[..., Any]:
        return lambda graph: graph if i >= 0 else None

    if kind == "functions":
        return [function(i) for i in range(count)]
    if kind == "objects":
        return [Compiling() for _ in range(count)]
    return [functools.partial(lambda graph, i: graph, i=i) for i in range(count)]


def use(function: Any) -> None:
    x = leaf(3)
    with retrograd.enable(backend=function):
        x.sin().sum().backward()


@pytest.mark.parametrize("kind", ["functions", "objects", "partials", "methods"])
def test_graphs_are_kept_while_the_program_holds_the_compiler_function(kind: str) -> None:
    held = compiler_functions("objects" if kind == "methods" else kind, 50)
    retrograd.cache_clear()
    retrograd.reset_stats()
    for _ in range(3):
        for function in held:
            use(function.method if kind == "methods" else function)
    assert retrograd.stats()["captures"] == 50


def test_an_equal_function_that_the_program_holds_keeps_the_graphs() -> None:
    held = compiler_functions("partials", 50)
    retrograd.cache_clear()
    retrograd.reset_stats()
    use(functools.partial(held[0].func, **held[0].keywords))  # not held
    for function in held:
        use(function)
    use(held[0])
    captures = retrograd.stats()["captures"]
    for function in compiler_functions("objects", 40):
        use(function)
    use(held[0])
    assert captures == 50
    assert retrograd.stats()["captures"] == captures + 40


@pytest.mark.parametrize("kind", ["functions", "objects", "partials", "methods"])
def test_graphs_of_functions_that_the_program_let_go_of_are_not_piled_up(kind: str) -> None:
    class Big:
        pass

    alive: list[weakref.ref[Any]] = []
    retrograd.cache_clear()
    for _ in range(60):
        (function,) = compiler_functions("objects" if kind == "methods" else kind, 1)
        big = Big()
        alive.append(weakref.ref(big))
        if kind in ("objects", "methods"):
            function.big = big
            use(function.method if kind == "methods" else function)
        elif kind == "functions":
            use(lambda graph, big=big: graph)
        else:
            use(functools.partial(lambda graph, big: graph, big=big))
    del function, big
    assert sum(reference() is not None for reference in alive) <= 33


def test_functions_that_only_seem_to_be_held_are_limited_in_number() -> None:
    class Cyclic(Compiling):
        def __init__(self) -> None:
            self.me = self

    retrograd.cache_clear()
    alive = []
    for _ in range(150):
        function = Cyclic()
        alive.append(weakref.ref(function))
        use(function)
    del function
    gc.collect()
    assert 33 < sum(reference() is not None for reference in alive) <= 129
