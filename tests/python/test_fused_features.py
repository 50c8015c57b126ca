"""Features of autograd on fused plans: hooks and their order, errors, threads, modes. Against the stock engine."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from fused_oracle import Ran, check_values, compare_fused, counting_fused, lowering
from oracle import Recorder, leaf, run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd import _fused, _group_trace


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with lowering("eager"):
        yield
        retrograd.wait(60)  # what is still to be traced would be compiled outside of this


def net_of(depth: int = 3, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())))


class Scale(torch.autograd.Function):
    """Multiplies; its backward may run something first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float, during: Callable[[], None] | None = None) -> Tensor:
        ctx.by, ctx.during = by, during
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.during is not None:
            ctx.during()
        return grad * ctx.by, None, None


def test_hooks_of_every_kind_everywhere_run_in_the_stock_order() -> None:
    def program(rec: Recorder) -> None:
        net = net_of()
        x = leaf(2, 4)
        h, kept = x, []
        for number, layer in enumerate(net):
            h = layer(h)
            kept.append(h)
            h.register_hook(rec.hook(f"tensor {number}"))
            if number % 2:
                h.retain_grad()
                assert h.grad_fn is not None
                h.grad_fn.register_prehook(rec.hook(f"pre {number}"))
            else:
                assert h.grad_fn is not None
                h.grad_fn.register_hook(rec.hook(f"post {number}"))
        for name, p in net.named_parameters():
            p.register_hook(rec.hook(name))
            p.register_post_accumulate_grad_hook(lambda p, name=name: rec.say(name, "accumulated", p.grad))
        torch.autograd.graph.register_multi_grad_hook([*net.parameters()], lambda g: rec.say("all", g))
        torch.autograd.graph.register_multi_grad_hook(kept[:3], lambda g: rec.say("any", g), mode="any")
        for retain in (True, False):
            h.pow(2).sum().mul(0.5).backward(retain_graph=retain)
        rec.say([k.grad for k in kept])
        rec.grads(x, *net.parameters())

    compare_fused(program, path="any")


@pytest.mark.parametrize("every", [1, 2, 5])
def test_side_effects_keep_their_order_around_groups(every: int) -> None:
    def program(rec: Recorder) -> None:
        net = net_of(6)
        for number, (name, p) in enumerate(net.named_parameters()):
            if number % every == 0:
                p.register_post_accumulate_grad_hook(lambda p, name=name: rec.say(name, p.grad))
        h = leaf(2, 4)
        for number, layer in enumerate(net):
            h = layer(h)
            if number % (2 * every) == 1:
                h = Scale.apply(h, 1.5, lambda number=number: rec.say("function", number))
            if number % (3 * every) == 2:
                h.register_hook(rec.hook(f"tensor {number}"))
        h.sum().mul(1).backward()
        rec.module(net)

    ran = compare_fused(program)
    assert ran.by_node == 0, ran


def test_optimizer_step_in_a_post_accumulate_hook() -> None:
    def program(rec: Recorder) -> None:
        net = net_of()
        optimizers = {p: torch.optim.Adam([p]) for p in net.parameters()}

        def step(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            net(torch.randn(2, 4)).pow(2).mean().backward()
            rec.module(net)

    ran = compare_fused(program, path="any")
    assert ran.previous == 0, ran


@pytest.mark.parametrize("share", [False, True])
def test_optimizer_step_in_a_hook_of_a_shared_weight(share: bool) -> None:
    """The stock engine updates the weight when it has run all that lead to it, and what uses it later fails."""

    def program(rec: Recorder) -> None:
        w, v = leaf(3, 3), leaf(3, 3, seed=1)
        h = (leaf(2, 3, seed=2) @ v).tanh()
        y = (h @ w).tanh() @ (w if share else v)

        def step(p: Tensor) -> None:
            rec.say("step")
            with torch.no_grad():
                p -= 0.1 * p.grad  # type: ignore[operator]

        w.register_post_accumulate_grad_hook(step)
        with rec.catch():
            y.pow(2).sum().backward()
        rec.grads(w, v)
        rec.say(w, v)

    compare_fused(program, path="any")


def test_saved_tensor_modified_by_a_hook_half_way() -> None:
    def program(rec: Recorder) -> None:
        x, w, u = leaf(3), leaf(3, seed=1), leaf(3, seed=2)
        saved = w * 1
        a = (x * saved).sin()
        b = (a * u).exp()
        b.register_hook(lambda g: rec.say("hook", saved.detach().add_(1)))
        with rec.catch():
            b.sum().mul(2).backward()
        rec.grads(x, w, u)

    compare_fused(program, path="any")


@pytest.mark.parametrize("where", [0, 1, 2])
def test_saved_tensor_modified_in_place_is_stocks_error_at_stocks_point(where: int) -> None:
    def program(rec: Recorder) -> None:
        leaves = [leaf(3, seed=i) for i in range(4)]
        for p in leaves:
            p.register_post_accumulate_grad_hook(lambda p: rec.say("accumulated", p.grad))
        scales = [p * 1 for p in leaves[1:]]
        h = leaves[0] * 1
        for scale in scales:
            h = Scale.apply((h * scale).sin(), 2.0, lambda: rec.say("function"))
        with torch.no_grad():
            scales[where].add_(1)
        with rec.catch():
            h.sum().backward()
        rec.grads(*leaves)
        with rec.catch("again"):
            h.sum().backward()
        rec.grads(*leaves)

    compare_fused(program, path="any")


@pytest.mark.parametrize("through", ["backward", "grad", "part"])
def test_freed_graph(through: str) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = (x * w).sin()
        z = (y * w).exp()
        z.sum().backward()
        with rec.catch():
            if through == "backward":
                z.sum().backward()
            elif through == "grad":
                torch.autograd.grad(z.sum(), (x, y))
            else:
                (y * 2).sum().backward()
        rec.grads(x, w)

    compare_fused(program, path="any")


@pytest.mark.parametrize("place", ["tensor", "leaf", "pre", "post", "accumulated", "function"])
def test_errors_in_the_middle_leave_stocks_partial_effects(place: str) -> None:
    def program(rec: Recorder) -> None:
        armed = True

        def explode(*args: Any) -> None:
            rec.say("explodes", armed)
            if armed:
                raise LookupError(place)

        net = net_of()
        for name, p in net.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: rec.say(name))
        h = net[1](net[0](leaf(2, 4)))
        h = Scale.apply(h, 2.0, explode if place == "function" else None)
        m = net[3](net[2](h))
        assert m.grad_fn is not None
        match place:
            case "tensor":
                m.register_hook(explode)
            case "leaf":
                net[2].weight.register_hook(explode)
            case "pre":
                m.grad_fn.register_prehook(explode)
            case "post":
                m.grad_fn.register_hook(explode)
            case "accumulated":
                net[2].bias.register_post_accumulate_grad_hook(explode)
        loss = net[5](net[4](m)).pow(2).sum()
        with rec.catch():
            loss.backward(retain_graph=True)
        rec.module(net)
        armed = False
        with rec.catch():
            loss.backward()
        rec.module(net)

    compare_fused(program)


def test_inputs_grad_and_captures_in_the_middle() -> None:
    def program(rec: Recorder) -> None:
        net = net_of()
        x = leaf(2, 4)
        middle = net[:3](x)
        loss = net[3:](middle).pow(2).sum()
        kw = {"retain_graph": True, "allow_unused": True}
        rec.say(torch.autograd.grad(loss, (x, middle, net[0].weight, leaf(1)), **kw))
        rec.say(torch.autograd.grad(loss, (middle,), **kw))
        rec.say(torch.autograd.grad((loss, middle), (x, net[2].bias), (torch.ones(()), torch.ones(2, 4)), **kw))
        loss.backward(inputs=[x, net[4].weight], retain_graph=True)
        rec.module(net)
        rec.grads(x)
        loss.backward(inputs=[net[0].weight])
        rec.module(net)

    compare_fused(program)


def test_several_roots_and_gradient_arguments() -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(3), leaf(3, seed=1)
        for _ in range(2):
            y, z = (a * b).sin(), (a * 2).exp()
            torch.autograd.backward([y, z, y], [torch.ones(3), torch.arange(3.0), torch.ones(()).expand(3)])
            rec.grads(a, b)

    compare_fused(program)


def test_create_graph_runs_on_the_schedule_and_its_graph_on_plans() -> None:
    def program(rec: Recorder) -> None:
        a = leaf(3)
        (first,) = torch.autograd.grad((a.sin() * a).sum(), a, create_graph=True)
        first.pow(2).sum().backward()
        rec.grads(a)

    compare_fused(program, path="mixed", reasons=("create_graph",))


def test_undefined_gradients() -> None:
    def program(rec: Recorder) -> None:
        class Half(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                ctx.set_materialize_grads(False)
                return x * 2, y * 2

            @staticmethod
            def backward(ctx: Any, gx: Tensor | None, gy: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
                rec.say("came", gx, gy)
                return None, gy

        a, b = leaf(3), leaf(3, seed=1)
        for use in (0, 1, 0):
            p, q = Half.apply(a.sin().exp(), (b * a).cos().exp())
            ((p, q)[use] * 3).sin().sum().backward()
            rec.grads(a, b)
        lu = a.view(3, 1).expand(3, 3).sin().svd()
        (lu[1] * 2).sum().backward()
        rec.grads(a)

    compare_fused(program, path="any")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_checkpoint(reentrant: bool, nested: bool) -> None:
    def program(rec: Recorder) -> None:
        net = net_of(4)

        def inner(x: Tensor) -> Tensor:
            rec.say("inner")
            return net[2:4](x)

        def block(x: Tensor) -> Tensor:
            rec.say("block")
            h = net[:2](x)
            return checkpoint(inner, h, use_reentrant=reentrant) if nested else inner(h)

        x = leaf(2, 4)
        for _ in range(3):
            h = checkpoint(block, x.exp(), use_reentrant=reentrant)
            net[4:](h).pow(2).sum().backward()
            rec.grads(x, *net.parameters())

    ran = compare_fused(program, path="mixed", reasons=("not_fusable",))
    assert ran.recordings == 0, ran


@pytest.mark.parametrize("kind", ["save_on_cpu", "hooks"])
def test_saved_tensor_hooks_are_found_at_once_and_unpacked_in_order(kind: str) -> None:
    def program(rec: Recorder) -> None:
        def unpack(t: Tensor) -> Tensor:
            rec.say("unpack", t)
            return t

        net = net_of(4)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack)
        for _ in range(3):
            h = net[:2](leaf(2, 4))
            with torch.autograd.graph.save_on_cpu() if kind == "save_on_cpu" else hooks:
                h = net[2:6](h)
            net[6:](h).pow(2).sum().backward()
            rec.module(net)

    ran = compare_fused(program, path="mixed", reasons=("not_fusable",))
    assert ran.fused == 3 and ran.recordings == ran.by_node == 0, ran


def test_an_unpack_hook_keeps_its_place_among_functions_and_hooks() -> None:
    """On the first call too, when nobody knows yet that a node in a group's way has one."""

    def program(rec: Recorder) -> None:
        class Says(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                rec.say("function", grad)
                return grad * 2

        def unpack(t: Tensor) -> Tensor:
            rec.say("unpack", t)
            return t

        x, w = leaf(3, 4), leaf(3, 4, seed=1)
        early = Says.apply(x.sin().exp())
        w.register_hook(rec.hook("leaf"))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            late = w.cos().relu()  # made after `early`, so its turn comes before
        (early + late).exp().sum().backward()
        rec.grads(x, w)

    ran = compare_fused(program, path="mixed", reasons=("not_fusable",))
    assert ran.fused == 1, ran


def test_views_and_in_place() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(4, 6), leaf(6, seed=1)
        for _ in range(2):
            base = x * 2
            first, second = base[1:3], base.t()[2]
            base[0] *= w
            first[:, ::2].mul_(3)
            second.add_(w[:4])
            base.view(-1)[5:9] = w[2:].exp()
            copy = torch.zeros(4, 6)
            copy[:, 1:] = base[:, :5]
            copy[0].copy_(w)
            base.relu_()
            (base.sin() * copy + first.sum() + second.sum()).sum().backward()
            rec.grads(x, w)

    ran = compare_fused(program)
    assert ran.by_node == 0, ran


def test_nested_backward_from_a_hook() -> None:
    def program(rec: Recorder) -> None:
        net, other = net_of(), net_of(2)

        def nested(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                other(grad.detach()).sum().backward()
            rec.say("nested", [p.grad for p in other.parameters()])
            return grad * 2

        h = net[:3](leaf(2, 4))
        h.register_hook(nested)
        for _ in range(2):
            net[3:](h).sum().backward(retain_graph=True)
            rec.module(net)

    ran = compare_fused(program)
    assert ran.fused == 4 and ran.recordings == 0, ran


def test_anomaly_mode_and_dispatch_modes_are_the_stock_engines() -> None:
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self, rec: Recorder) -> None:
            super().__init__()
            self.rec = rec

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.rec.say(func.name())
            return func(*args, **(kwargs or {}))

    def program(rec: Recorder) -> None:
        x = leaf(3)
        loss = (x.sin() * x).exp().sum()
        with Count(rec):
            loss.backward(retain_graph=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            loss.backward(retain_graph=True)
            with rec.catch():
                (x * 0).sqrt().mul(0).sum().backward()
        rec.grads(x)

    compare_fused(program, path="any")


class Tracked(torch.Tensor):
    """A subclass that does nothing but be one."""


def test_tensor_subclasses_and_other_kinds_run_by_their_nodes() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        (x.as_subclass(Tracked) * x).sin().as_subclass(torch.Tensor).sum().backward()
        rec.grads(x)
        y = leaf(4, 3)
        nested = torch.nested.as_nested_tensor([y[:1] * 2, y[1:].sin()])
        (nested * 3).to_padded_tensor(0.0).pow(2).sum().backward()
        rec.grads(y)
        y.to_sparse().mul(2).to_dense().sin().sum().backward()
        rec.grads(y)
        torch.sparse.mm(torch.eye(4).to_sparse(), y).sin().sum().backward()
        rec.grads(y)

    compare_fused(program, path="any")


def one_step(net: nn.Module, seed: int) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    net(x).pow(2).sum().backward()


@pytest.mark.parametrize("mode", ["blocking", "background"])
def test_threads_with_models_of_their_own(mode: str) -> None:
    def steps(net: nn.Module) -> list[Tensor]:
        for step in range(20):
            one_step(net, step)
        return [p.grad for p in net.parameters() if p.grad is not None]

    torch.manual_seed(0)
    nets = [net_of() for _ in range(8)]
    want = []
    for net in nets:
        want += [g.clone() for g in steps(net)]
        net.zero_grad()
    got: dict[int, list[Tensor]] = {}

    def work(k: int) -> None:
        with retrograd.enable("inductor", mode=mode):
            got[k] = steps(nets[k])

    retrograd.cache_clear()
    with counting_fused() as ran:
        run_threads([lambda k=k: work(k) for k in range(8)])
    check_values(want, [g for k in range(8) for g in got[k]])
    assert ran.previous == 0 and ran.fused + ran.schedule == 160, ran
    if mode == "blocking":
        assert (ran.fused, ran.recordings) == (160, 1), ran  # the others wait for the one that records


def test_threads_on_one_model_give_exact_sums() -> None:
    net = net_of()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    x = torch.randint(-2, 3, (2, 4)).float()

    def loss() -> Tensor:
        h = x
        for layer in net[::2]:
            h = layer(h).relu()
        return h.sum()

    loss().backward()
    want = [p.grad.clone() * 800 for p in net.parameters() if p.grad is not None]
    net.zero_grad()

    def work() -> None:
        with retrograd.enable("inductor", mode="blocking"):
            for _ in range(100):
                loss().backward()

    retrograd.cache_clear()
    with retrograd.enable("inductor", mode="blocking"):
        loss().backward()  # threads do not wait for a plan that another one makes
    net.zero_grad()
    with counting_fused() as ran:
        run_threads([work] * 8)
    got = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert ran.fused == ran.compiled == 800, ran


def test_cache_cleared_and_engine_uninstalled_meanwhile() -> None:
    net, want = net_of(), net_of()
    want.load_state_dict(net.state_dict())
    for step in range(60):
        one_step(want, step)
    entered, stop = threading.Event(), threading.Event()

    def disturb() -> None:
        entered.wait(60)
        while not stop.is_set():
            retrograd.cache_clear()
            retrograd.uninstall()
            retrograd.install()

    def work() -> None:
        try:
            with retrograd.enable("inductor", mode="blocking"):
                entered.set()
                for step in range(60):
                    one_step(net, step)
        finally:
            stop.set()

    run_threads([work, disturb])
    check_values([p.grad for p in want.parameters()], [p.grad for p in net.parameters()])  # type: ignore[misc]


@pytest.mark.parametrize("what", ["clear", "uninstall"])
def test_cache_cleared_or_uninstalled_by_a_hook(what: str) -> None:
    def program(rec: Recorder) -> None:
        net = net_of()
        h = net[:3](leaf(2, 4))
        h.register_hook(lambda g: retrograd.cache_clear() if what == "clear" else retrograd.uninstall())
        try:
            net[3:](h).sum().backward()
        finally:
            retrograd.install()
        rec.module(net)

    compare_fused(program, path="any")


def test_background_mode_warms_up_then_fuses_and_changes_no_gradient() -> None:
    retrograd.cache_clear()
    torch.manual_seed(0)
    net, want = net_of(9), net_of(9)  # no other test's: its plan would be used at once
    want.load_state_dict(net.state_dict())
    paths = []
    with retrograd.enable("inductor", mode="background"):
        for step in range(30):
            with counting_fused() as ran:
                one_step(net, step)
            assert ran.previous == 0
            paths.append("fused" if ran.fused else ",".join(ran.fallbacks))
            with retrograd.disable():
                one_step(want, step)
            check_values([p.grad for p in want.parameters()], [p.grad for p in net.parameters()])  # type: ignore[misc]
            if step > 3:
                assert retrograd.wait(60)
    assert paths[:2] == ["warming_up"] * 2 and paths[-1] == "fused", paths
    assert set(paths[2:]) <= {"compiling", "fused"}, paths
    assert paths.index("fused") <= 6 and set(paths[paths.index("fused") :]) == {"fused"}, paths


def test_background_is_the_default_mode() -> None:
    retrograd.cache_clear()
    net = net_of(5)  # no other test's
    with retrograd.enable("inductor"), counting_fused() as ran:
        one_step(net, 0)
    assert ran.fallbacks == {"warming_up": 1} and ran.recordings == 0, ran


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.sum())  # reads data: no graph holds it


def test_what_reads_data_runs_by_itself() -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(3), leaf(3, seed=1)
        for retain in (True, False):
            loss = (Reads.apply((a * b).sin()) * b).exp().sum()
            loss.backward(retain_graph=retain)
            if retain:
                with retrograd.disable():
                    loss.backward()
            rec.grads(a, b)
        mask = a.detach() > 0
        for _ in range(3):
            (a[mask] * 2).sin().sum().backward()
            (torch.masked_select(b, mask) * a.detach()[mask]).sum().backward()
            rec.grads(a, b)

    compare_fused(program, path="any")


def test_no_memory_is_kept_of_a_call() -> None:
    """Neither a plan nor a recording holds the graph's tensors."""
    import weakref

    retrograd.cache_clear()
    with retrograd.enable("inductor", mode="blocking"):
        for _ in range(3):
            x = leaf(3)
            y = x.sin()
            z = (y * y.exp()).sum()
            seen = [weakref.ref(t) for t in (x, y, z)]
            z.backward()
            del x, y, z
            assert [ref() for ref in seen] == [None] * 3


def peak_bytes(run: Callable[[], None]) -> int:
    """How much more CPU memory of tensors was in use at the highest point of `run` than at its start."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def backward_peak(scope: Any, make_loss: Callable[[], Tensor]) -> tuple[int, Ran]:
    """The peak of a backward, and which path it took, when the graph has been seen twice."""
    with scope:
        for _ in range(3):
            loss = make_loss()
            with counting_fused() as ran:
                peak = peak_bytes(loss.backward)
            del loss
    return peak, ran


def test_saved_tensors_die_with_the_call() -> None:
    """Storage that only the graph holds is let go of when its group runs, not at the end of the program's frame."""
    retrograd.cache_clear()

    def loss() -> Tensor:
        return net_of(8, 64)(torch.randn(512, 64)).pow(2).sum()

    stock, _ = backward_peak(retrograd.disable(), loss)
    ours, ran = backward_peak(retrograd.enable("inductor", mode="blocking"), loss)
    assert ran.fused == ran.compiled == 1, ran
    assert ours <= 1.1 * stock + 4096, (ours, stock)


def powers(exponents: Iterable[float]) -> None:
    with retrograd.enable("inductor", mode="blocking"):
        for exponent in exponents:
            x = torch.full((3,), 2.0, requires_grad=True)
            (x.sin() ** exponent).cos().sum().backward()


def test_a_constant_that_keeps_changing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    retrograd.cache_clear()
    with counting_fused() as ran:
        powers(1.5 + i for i in range(20))
    assert ran.recordings == 8 and ran.fused == 8 and ran.fallbacks == {"too_many_keys": 12}, ran
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "constants of PowBackward0 (exponent=10.5)" in warning
    assert warning.endswith("pass a value that changes as a tensor.")


def test_sizes_that_keep_changing_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    retrograd.cache_clear()
    with counting_fused() as ran, retrograd.enable("inductor", mode="blocking"):
        for i in range(12):
            sizes = [2 if k == i else 1 for k in range(12)]
            x = torch.ones(sizes, requires_grad=True)
            (x.sin() * 2).cos().sum().backward()
    assert ran.recordings == 8 and ran.fallbacks == {"too_many_keys": 4}, ran
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "several sizes of tensors at" in warning and warning.endswith("pad to a few sizes.")


def test_settings_that_keep_changing_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    retrograd.cache_clear()
    try:
        with counting_fused() as ran, retrograd.enable("inductor", mode="blocking"):
            for threads in range(1, 13):
                torch.set_num_threads(threads)
                x = torch.ones(3, requires_grad=True)
                (x.sin() * 2).cos().sum().backward()
    finally:
        torch.set_num_threads(1)
    assert ran.recordings == 8 and ran.fallbacks == {"too_many_keys": 4}, ran
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "several settings that a plan depends on (intra-op threads" in warning


@pytest.mark.parametrize("fails", [False, True])
def test_equal_groups_of_one_graph_are_traced_once(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And traced again where that has failed for want of something."""
    traced: list[Any] = []
    trace = _group_trace.trace

    def counting(recording: Any) -> Any:
        traced.append(recording.name)
        if fails and len(traced) == 1:
            raise MemoryError
        return trace(recording)

    monkeypatch.setattr(_group_trace, "trace", counting)
    monkeypatch.setattr(_fused, "_warned", {MemoryError})
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]

    def gradients() -> list[Tensor]:
        x = torch.ones(2, 4, requires_grad=True)
        for layer in layers:
            x = Scale.apply(layer(x).tanh(), 2.0)
        parameters = [p for layer in layers for p in layer.parameters()]
        return list(torch.autograd.grad(x.sum(), parameters))

    with retrograd.disable():
        want = gradients()
    retrograd.cache_clear()
    with retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
        check_values(want, gradients())
    assert (ran.fused, ran.recordings, ran.compiled) == (1, 4, 4 - fails), ran
    assert len(traced) == 2 + fails, traced


def test_the_default_backend_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RETROGRAD_BACKEND")
    retrograd.cache_clear()
    net = net_of(4)
    for on in (retrograd.enable, retrograd.set_default):
        scope = on(mode="blocking")
        with scope or contextlib.nullcontext(), counting_fused() as ran:
            one_step(net, 0)
        assert ran.fused == 1, ran


def test_the_environment_names_the_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_of(4)
    with retrograd.enable(mode="blocking"), counting_fused() as ran:  # "schedule", see conftest.py
        one_step(net, 0)
    assert ran.schedule == 1 and not ran.fallbacks, ran
    with retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
        one_step(net, 0)
    assert ran.fused == 1, ran
    monkeypatch.setenv("RETROGRAD_BACKEND", "fast")
    with pytest.raises(ValueError, match="RETROGRAD_BACKEND must be 'inductor' or 'schedule', not 'fast'"):
        retrograd.enable()


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "save_on_cpu"])
def test_peak_memory_under_checkpoint_and_save_on_cpu(kind: str) -> None:
    retrograd.cache_clear()
    blocks = nn.ModuleList(net_of(3, 64) for _ in range(4))
    front, back = net_of(2, 64), net_of(2, 64)

    def loss() -> Tensor:
        for module in (front, blocks, back):
            module.zero_grad()
        h = front(torch.randn(512, 64))
        for block in blocks:
            if kind == "save_on_cpu":
                with torch.autograd.graph.save_on_cpu():
                    h = block(h)
            else:
                h = checkpoint(block, h, use_reentrant=kind == "reentrant")
        return back(h).pow(2).sum()

    stock, _ = backward_peak(retrograd.disable(), loss)
    ours, ran = backward_peak(retrograd.enable("inductor", mode="blocking"), loss)
    nested = len(blocks) if kind == "reentrant" else 0
    assert ran.fused == 1 + nested and ran.compiled == 2 + nested, ran
    assert ran.schedule == ran.by_node == ran.recordings == ran.previous == 0, ran
    assert ours <= 1.1 * stock + 4096, (ours, stock)


def mlp_step(net: nn.Module, batch: int) -> None:
    net(torch.randn(batch, 4)).pow(2).mean().backward()


def scaled_step(net: nn.Module, batch: int) -> None:
    (net(torch.randn(batch, 4)) * 0.7).pow(2).mean().mul(batch / 3).backward()


def encoder_step(net: nn.Module, batch: int) -> None:
    net(torch.randn(batch, 5, 16)).pow(2).mean().backward()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["mlp", "scaled", "encoder"])
def test_ten_batch_sizes_in_any_order_take_two_plans(model: str, seed: int) -> None:
    retrograd.cache_clear()
    net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    step = scaled_step if model == "scaled" else mlp_step
    if model == "encoder":
        net, step = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), encoder_step
    batches = random.Random(seed).sample(range(2, 20), 10)
    grads: list[list[Tensor]] = []
    for scope in (retrograd.disable(), retrograd.enable("inductor", mode="blocking")):
        net.zero_grad()
        torch.manual_seed(seed)
        with scope, counting_fused() as ran:
            for batch in batches:
                step(net, batch)
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    check_values(*grads)
    assert ran.fused == 10 and ran.recordings == ran.plans == 2, (batches, ran)


SCALED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "times": lambda y, by: y.mean() * by,
    "from the left": lambda y, by: by * y.mean(),
    "divided": lambda y, by: y.mean() / by,
    "in place": lambda y, by: y.mean().mul_(by),
    "before the sum": lambda y, by: (y * by).sum(),
    "a part": lambda y, by: y.mean() + by * y.square().mean(),
}


@pytest.mark.parametrize("how", SCALED)
def test_a_loss_scaled_by_a_new_number_at_each_step_compiles_once(how: str) -> None:
    retrograd.cache_clear()
    net = net_of(2)
    grads: list[list[Tensor]] = []
    for scope in (retrograd.disable(), retrograd.enable("inductor", mode="blocking")):
        net.zero_grad()
        with scope, counting_fused() as ran:
            for step in range(20):
                SCALED[how](net(torch.ones(2, 4)), 1.5 + 0.1 * step).backward()
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    check_values(*grads)
    assert ran.fused == 20 and ran.recordings == ran.plans == 1, ran
