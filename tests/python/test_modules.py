from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import Recorder, compare
from torch import Tensor, nn


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.recurrent = kind(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.ReLU())], nn.Linear(8, 3)), (8,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(8, 3),
    )  # fmt: skip
    return net, (1, 12, 12)


def lstm() -> tuple[nn.Module, tuple[int, ...]]:
    return Recurrent(nn.LSTM), (5, 8)


def gru() -> tuple[nn.Module, tuple[int, ...]]:
    return Recurrent(nn.GRU), (5, 8)


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    return Transformer(), (5, 8)


def tied() -> tuple[nn.Module, tuple[int, ...]]:
    first = nn.Linear(8, 8)
    second = nn.Linear(8, 8)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, first, nn.Linear(8, 3)), (8,)


def weight_norm() -> tuple[nn.Module, tuple[int, ...]]:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(linear, nn.LayerNorm(8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))), (8,)


MODELS = [mlp, cnn, lstm, gru, transformer, tied, weight_norm]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
    ids=["SGD", "AdamW"],
)
def test_training(
    model: Callable[[], tuple[nn.Module, tuple[int, ...]]], optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    def program(rec: Recorder) -> None:
        net, shape = model()
        opt = optimizer(net.parameters())
        for _ in range(5):
            opt.zero_grad()
            loss = F.cross_entropy(net(torch.randn(4, *shape)), torch.randint(0, 3, (4,)))
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            rec.say("loss", loss)
        rec.module(net)

    compare(program)


def test_batch_size_may_change_from_step_to_step() -> None:
    def program(rec: Recorder) -> None:
        net, shape = cnn()
        for batch in (4, 7, 2, 4):
            x = torch.randn(batch, *shape, requires_grad=True)
            net(x).pow(2).sum().backward()
            rec.grads(x)
        rec.module(net)

    compare(program)


def test_frozen_layers_and_evaluation_mode() -> None:
    def program(rec: Recorder) -> None:
        net, shape = cnn()
        assert isinstance(net, nn.Sequential)
        net[0].requires_grad_(False)
        net.eval()
        for _ in range(2):
            net(torch.randn(4, *shape)).sum().backward()
            rec.module(net)
            net[0].requires_grad_(True)

    compare(program)


def test_lbfgs_calls_backward_from_its_closure() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Linear(8, 3)
        x, y = torch.randn(6, 8), torch.randn(6, 3)
        opt = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            rec.say(loss)
            return loss

        opt.step(closure)
        rec.module(net)

    compare(program)


def test_optimizer_in_backward() -> None:
    def program(rec: Recorder) -> None:
        net, shape = mlp()
        for p in net.parameters():
            opt = torch.optim.SGD([p], lr=0.1)

            def step(p: Tensor, opt: torch.optim.Optimizer = opt) -> None:
                opt.step()
                opt.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss = net(torch.randn(4, *shape)).pow(2).sum()
            loss.backward()
            rec.say(loss)
        rec.module(net)

    compare(program)


def test_many_kinds_of_nodes() -> None:
    def program(rec: Recorder) -> None:
        x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
        index = torch.randint(0, 8, (4, 16))
        losses = [
            torch.einsum("bi,ij->bj", x, w).logsumexp(1).sum(),
            x.cumsum(0).sort(1)[0].pow(2).sum(),
            F.pad(x, (1, 2)).roll(1, 0).flip(1).pow(2).sum(),
            x.gather(0, index).sum() + x.scatter_add(0, index, w[:4]).pow(2).sum(),
            torch.cdist(x, w).sum() + F.pdist(x).sum(),
            F.ctc_loss(
                (x @ w).view(8, 1, 16).log_softmax(2),
                torch.tensor([[1, 2]]),
                torch.tensor([8]),
                torch.tensor([2]),
            ),
            F.interpolate(x.view(1, 2, 8, 8), scale_factor=2, mode="bilinear").pow(2).sum(),
            F.scaled_dot_product_attention(*(x.view(8, 2, 2, 4),) * 3, is_causal=True).sum(),
            F.embedding_bag(torch.randint(0, 16, (4, 3)), w).pow(2).sum(),
            torch.stft(x.reshape(-1), 16, window=torch.hann_window(16), return_complex=True).abs().sum(),
            sum(t.sum() for t in torch._foreach_mul([x, w], 2.0)),
            x.quantile(0.3) + x.prod(1).sum() + x.norm() + x.var(),
            F.grid_sample(x.view(1, 2, 8, 8), torch.rand(1, 4, 4, 2), align_corners=False).sum(),
            x.masked_select(x > 0).sum() + torch.segment_reduce(x, "sum", lengths=torch.tensor([3, 5])).sum(),
        ]
        for loss in losses:
            assert isinstance(loss, Tensor)
            rec.say(torch.autograd.grad(loss, (x, w), retain_graph=True, allow_unused=True))
        torch.autograd.backward(losses)
        rec.grads(x, w)

    compare(program)


def test_scripted_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.manual_seed(0)
        net = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.ones(2, 4)

    def program(rec: Recorder) -> None:
        net.zero_grad()
        y = x.clone().requires_grad_()
        for _ in range(2):
            net(y).sin().sum().backward()
        rec.module(net)
        rec.grads(y)

    for _ in range(3):  # TorchScript's executor runs other code in the first calls
        program(Recorder())
    compare(program)


def test_other_layouts_on_the_way() -> None:
    def program(rec: Recorder) -> None:
        x = torch.randn(4, 3, requires_grad=True)
        nested = torch.nested.as_nested_tensor([x[:1] * 2, x[1:].sin()])
        (nested * 3).to_padded_tensor(0.0).pow(2).sum().backward()
        rec.grads(x)
        if torch.backends.mkldnn.is_available():
            x.to_mkldnn().relu().to_dense().sum().backward()
            rec.grads(x)
        x.to_sparse().mul(2).to_dense().sum().backward()
        rec.grads(x)

    compare(program)


def test_meta_tensors() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(3, 4, device="meta"), nn.ReLU(), nn.Linear(4, 2, device="meta"))
        net(torch.ones(2, 3, device="meta")).sum().backward()
        for p in net.parameters():
            assert p.grad is not None
            rec.say(str(p.grad.device), tuple(p.grad.shape), p.grad.stride())

    compare(program)
