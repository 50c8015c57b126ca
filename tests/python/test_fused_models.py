"""The zoo of models on fused plans, against the stock engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused_oracle import check_values, compare_fused, counting_fused, lowering
from oracle import Recorder, leaf
from torch import Tensor, nn
from torch.nn import functional as F

import retrograd


def train(rec: Recorder, net: nn.Module, batches: list[Callable[[], Tensor]], lr: float = 0.05) -> None:
    """One step of SGD for each batch's loss; tells the recorder losses, gradients, parameters and buffers."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        loss = batch()
        loss.backward()
        rec.say("loss", loss.detach())
        optimizer.step()
    rec.module(net)


def test_mlp() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        x, y = torch.randn(5, 8), torch.randint(3, (5,))
        train(rec, net, [lambda: F.cross_entropy(net(x), y)] * 3)

    ran = compare_fused(program)
    assert ran.compiled == ran.fused == 3 and ran.by_node == ran.recordings == 0, ran  # one group, no second recording


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish, nn.PReLU])
def test_activations(activation: Callable[[], nn.Module]) -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 2), nn.Softmax(-1))
        train(rec, net, [lambda: net(torch.randn(3, 4)).pow(2).sum()] * 2)

    compare_fused(program)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.mse_loss(y, t),
        lambda y, t: F.l1_loss(y, t),
        lambda y, t: F.smooth_l1_loss(y, t),
        lambda y, t: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
        lambda y, t: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
        lambda y, t: F.cross_entropy(y, t.softmax(-1), label_smoothing=0.1),
        lambda y, t: F.cosine_similarity(y, t).sum(),
        lambda y, t: F.nll_loss(y.log_softmax(-1), torch.tensor([0, 1, 2]), weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
    ],
    ids=["mse", "l1", "smooth l1", "bce", "kl", "soft cross entropy", "cosine", "nll"],
)
def test_losses(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    def program(rec: Recorder) -> None:
        net = nn.Linear(5, 4)
        x, target = torch.randn(3, 5), torch.randn(3, 4)
        train(rec, net, [lambda: loss(net(x), target)] * 2)

    compare_fused(program)


@pytest.mark.parametrize("training", [True, False])
def test_convolution_and_batch_norm(training: bool) -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, stride=2),
            nn.GroupNorm(2, 8),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 3),
        ).train(training)
        x, y = torch.randn(4, 1, 12, 12), torch.randint(3, (4,))
        train(rec, net, [lambda: F.cross_entropy(net(x), y)] * 3)

    ran = compare_fused(program)
    assert ran.recordings == 0 and ran.compiled == 3, ran


@pytest.mark.parametrize("dims", [1, 3])
def test_other_convolutions(dims: int) -> None:
    def program(rec: Recorder) -> None:
        first = {1: nn.Conv1d, 3: nn.Conv3d}[dims](2, 4, 3, dilation=1, groups=2)
        second = {1: nn.ConvTranspose1d, 3: nn.ConvTranspose3d}[dims](4, 2, 2, stride=2)
        net = nn.Sequential(first, nn.SiLU(), second)
        x = torch.randn(2, 2, *([6] * dims), requires_grad=True)
        train(rec, net, [lambda: net(x).pow(2).mean()] * 2)
        rec.grads(x)

    compare_fused(program)


@pytest.mark.parametrize("where", ["model", "input", "both"])
def test_channels_last(where: str) -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        x = torch.randn(2, 3, 8, 8)
        if where != "input":
            net = net.to(memory_format=torch.channels_last)
        if where != "model":
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        net(x).pow(2).sum().backward()
        rec.grads(x, *net.parameters())  # with their strides

    compare_fused(program)


def test_parameters_that_are_not_contiguous() -> None:
    def program(rec: Recorder) -> None:
        stored = torch.randn(12, 12)
        ws = [
            nn.Parameter(stored[:4, :6].t().clone(memory_format=torch.preserve_format)),
            nn.Parameter(stored[::2, ::3]),
            nn.Parameter(stored[0, :4].expand(6, 4)),
            nn.Parameter(stored.t()[:6, :4]),
        ]
        x = torch.randn(5, 6)
        for _ in range(2):
            loss = sum((x @ w).sin().sum() for w in ws)
            assert isinstance(loss, Tensor)
            loss.backward()
            rec.grads(*ws)

    compare_fused(program)


@pytest.mark.parametrize("checkpointed", [None, "reentrant", "not reentrant"])
def test_transformer_with_dropout(checkpointed: str | None) -> None:
    def program(rec: Recorder) -> None:
        layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True) for _ in range(2))
        x = torch.randn(3, 5, 16)

        def loss() -> Tensor:
            h = x.clone().requires_grad_()
            for layer in layers:
                if checkpointed is None:
                    h = layer(h)
                else:
                    h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=checkpointed == "reentrant")
            return h.pow(2).mean()

        train(rec, layers, [loss] * 3)

    path = {None: "fused", "reentrant": "mixed", "not reentrant": "mixed"}[checkpointed]
    ran = compare_fused(program, path=path, reasons=("not_fusable",))
    assert ran.recordings == 0, ran  # the seed of the dropout is no constant of the plan


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_rotary_embedding(causal: bool) -> None:
    def program(rec: Recorder) -> None:
        qkv, out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        norm = nn.RMSNorm(16)
        net = nn.ModuleList([qkv, out, norm])
        x = torch.randn(2, 7, 16)
        angle = torch.arange(7.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])

        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, dim=-1)
            return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

        def loss() -> Tensor:
            q, k, v = (t.view(2, 7, 2, 8).transpose(1, 2) for t in qkv(norm(x)).split(16, dim=-1))
            h = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=causal)
            return out(h.transpose(1, 2).reshape(2, 7, 16)).square().mean()

        train(rec, net, [loss] * 2)

    compare_fused(program)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent(kind: type[nn.RNNBase], bidirectional: bool) -> None:
    def program(rec: Recorder) -> None:
        net = nn.ModuleList([kind(4, 6, num_layers=2, dropout=0.1, bidirectional=bidirectional)])
        x = torch.randn(5, 3, 4, requires_grad=True)
        train(rec, net, [lambda: net[0](x)[0].pow(2).sum()] * 2)
        rec.grads(x)

    compare_fused(program, path="any")


def test_recurrent_cells() -> None:
    def program(rec: Recorder) -> None:
        net = nn.ModuleList([nn.LSTMCell(3, 4), nn.GRUCell(4, 4)])

        def loss() -> Tensor:
            h, c, g = torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4)
            for t in torch.randn(4, 2, 3):
                h, c = net[0](t, (h, c))
                g = net[1](h, g)
            return g.pow(2).sum()

        train(rec, net, [loss] * 2)

    compare_fused(program)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [None, 0])
def test_embedding(sparse: bool, padding: int | None) -> None:
    def program(rec: Recorder) -> None:
        table = nn.Embedding(10, 4, padding_idx=padding, sparse=sparse)
        head = nn.Linear(4, 2)
        ids = torch.tensor([[1, 2, 0], [4, 4, 9]])
        for _ in range(2):
            head(table(ids).tanh()).pow(2).sum().backward()
            rec.say(table.weight.grad)
            rec.grads(*head.parameters())

    # The node that makes a sparse gradient is found out in tracing; the call at hand runs by its nodes.
    ran = compare_fused(program, path="mixed", reasons=("not_fusable",))
    assert ran.fused == ran.compiled == 2, ran


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    def program(rec: Recorder) -> None:
        table = nn.EmbeddingBag(10, 4, mode=mode)
        for _ in range(2):
            table(torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 5])).sin().sum().backward()
            rec.grads(table.weight)

    compare_fused(program, path="any")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
def test_dtypes(dtype: torch.dtype) -> None:
    def program(rec: Recorder) -> None:
        w, v, b = leaf(4, 6, dtype=dtype), leaf(6, 3, seed=1, dtype=dtype), leaf(3, seed=2, dtype=dtype)
        x = leaf(5, 4, seed=3, dtype=dtype)
        for _ in range(2):
            y = (x @ w).tanh() @ v + b
            loss = (y.abs() if dtype.is_complex else y).square().mean()
            loss.backward()
            rec.grads(x, w, v, b)

    compare_fused(program)


def test_autocast() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        x, y = torch.randn(5, 8), torch.randint(3, (5,))

        def loss() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.cross_entropy(net(x), y)

        train(rec, net, [loss] * 3)

    ran = compare_fused(program)
    assert ran.recordings == 0, ran


def test_backward_under_autocast() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Linear(8, 4)
        for inside in (False, True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(torch.randn(3, 8)).float().pow(2).sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            rec.grads(*net.parameters())

    compare_fused(program, path="mixed", reasons=("not_fusable",))  # by its nodes, while autocast is in force


def test_mixed_dtypes() -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(4), leaf(4, seed=1, dtype=torch.float64)
        h = leaf(4, seed=2, dtype=torch.bfloat16)
        ((a.double() * b).sin().float() * h).sum().backward()
        rec.grads(a, b, h)

    compare_fused(program)


def test_complex_numbers() -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(4, dtype=torch.complex64), leaf(4, seed=1)
        x = torch.fft.ifft(torch.fft.fft(a * b).conj() * a).imag
        (x.pow(2).sum() + torch.view_as_real(a).sin().sum() + a.real.exp().sum() + (a.conj() @ a).abs()).backward()
        rec.grads(a, b)

    compare_fused(program, path="any")  # tensors saved with the conjugate bit are not for plans yet


def test_linear_algebra() -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(4, 4, dtype=torch.float64), leaf(4, 2, seed=1, dtype=torch.float64)
        spd = a @ a.T + torch.eye(4, dtype=torch.float64)
        for frozen in (False, True):  # the same graph but for what needs a gradient
            known = spd.detach() if frozen else spd
            x = torch.linalg.solve(known + 0.0, b)
            (x.sin().sum() + torch.linalg.cholesky(spd).sum() + spd.logdet() + spd.inverse().cos().sum()).backward()
            rec.grads(a, b)
            spd = a @ a.T + torch.eye(4, dtype=torch.float64)

    compare_fused(program)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_what_needs_a_gradient_is_no_constant_of_another_plan(needs: tuple[bool, bool]) -> None:
    def program(rec: Recorder) -> None:
        for first in (needs, (True, True), needs):
            a = leaf(3, 3, dtype=torch.float64).requires_grad_(first[0])
            b = leaf(3, seed=1, dtype=torch.float64).requires_grad_(first[1])
            torch.linalg.solve(a, b).sin().sum().backward()
            rec.grads(a, b)

    compare_fused(program)


def test_varying_batch_and_sequence_lengths() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        for batch, length in [(3, 5), (1, 5), (3, 1), (2, 7), (3, 5), (1, 1)]:
            net(torch.randn(batch, length, 4)).pow(2).mean().backward()
            rec.grads(*net.parameters())

    compare_fused(program, path="any")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_plan_for_all_batch_sizes_of_a_scalar_loss(dtype: torch.dtype) -> None:
    """The gradient that the group begins with has no dimensions, and no value when the group is traced."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
    inputs = [torch.randn(batch, 4, dtype=dtype) for batch in (3, 5, 7, 2, 12)]
    with counting_fused() as ran:
        for x in inputs:
            with retrograd.disable():
                want = torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters()))
            with retrograd.enable("inductor", mode="blocking"):
                net.zero_grad()
                net(x).pow(2).sum().backward()
            check_values(list(want), [p.grad for p in net.parameters()])  # type: ignore[misc]
    assert (ran.fused, ran.recordings, ran.plans) == (5, 2, 2), ran


def test_weight_sharing() -> None:
    def program(rec: Recorder) -> None:
        table, middle = nn.Embedding(10, 8), nn.Linear(8, 8)
        ids = torch.randint(10, (3, 4))
        for _ in range(2):
            h = middle(middle(table(ids)).tanh()).tanh()
            F.cross_entropy((h @ table.weight.t()).flatten(0, 1), ids.flatten()).backward()
            rec.grads(table.weight, *middle.parameters())

    compare_fused(program)


def test_gradient_accumulation() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        kept = []
        for step in range(4):
            net(torch.randn(3, 4)).pow(2).sum().backward()
            kept.append(net[0].weight.grad)
            if step == 1:
                assert net[0].bias.grad is not None
                net[0].bias.grad.mul_(2)
        rec.say([k is kept[0] for k in kept])
        rec.module(net)

    compare_fused(program)


def test_frozen_and_unused_leaves() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2), nn.Linear(2, 2))
        x = torch.randn(3, 4)
        for frozen in (None, 0, 2, 4):
            for i in (0, 2, 4):
                net[i].requires_grad_(i != frozen)
            net[:-1](x).pow(2).sum().backward()
            rec.module(net)
            net.zero_grad()

    compare_fused(program)


def test_frozen_half_way_through_a_plans_life() -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(3), leaf(3, seed=1)
        for needs in (True, False, True):
            b.requires_grad_(needs)
            ((a * b).sin() * (b * 2)).sum().backward()
            rec.grads(a, b)

    compare_fused(program)


def test_models_with_one_structure_share_a_leaf_not_their_gradients() -> None:
    def program(rec: Recorder) -> None:
        nets = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(3)]
        for net in nets:
            net(torch.ones(2, 3)).sum().backward()
        for net in nets:
            rec.module(net)

    ran = compare_fused(program)
    assert ran.compiled == 3, ran


def test_equal_groups_share_one_plan() -> None:
    retrograd.cache_clear()
    with lowering("eager"), retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
        for width in (3, 4, 3):
            net = nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, 1))
            net(torch.ones(2, width)).sum().backward()
    assert ran.fused == ran.compiled == 3 and ran.recordings == 2, ran


def test_torch_compiled_pieces_in_front() -> None:
    def program(rec: Recorder) -> None:
        front, back = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 3), nn.ReLU())
        compiled = torch.compile(front, backend="aot_eager")
        x = torch.randn(3, 4)
        train(rec, nn.ModuleList([front, back]), [lambda: back(compiled(x)).pow(2).sum()] * 2)

    try:
        ran = compare_fused(program, path="any")  # torch.compile runs a call of its own, when it traces
        assert ran.fused == ran.compiled == 2 and ran.recordings == 0, ran
    finally:
        torch._dynamo.reset()
