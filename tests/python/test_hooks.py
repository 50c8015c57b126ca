from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Recorder, compare, describe, leaf
from torch import Tensor, nn


def test_tensor_hooks_on_leaf_and_intermediate_run_in_order() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        for name in ("x first", "x second"):
            x.register_hook(rec.hook(name))
        for name in ("y first", "y second", "y third"):
            y.register_hook(rec.hook(name))
        (y * y).sum().backward()
        rec.grads(x)

    compare(program)


def test_values_returned_by_tensor_hooks_replace_the_gradient() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.exp()
        y.register_hook(rec.hook("doubles", lambda g: g * 2))
        y.register_hook(rec.hook("keeps"))
        y.register_hook(rec.hook("adds", lambda g: g + 1))
        x.register_hook(rec.hook("halves", lambda g: g / 2))
        (y * 3).sum().backward()
        rec.grads(x)

    compare(program)


def test_removed_hooks_do_not_run() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.exp()
        handles = [y.register_hook(rec.hook(f"y{i}")) for i in range(3)]
        handles[1].remove()
        x.register_hook(rec.hook("x")).remove()
        y.sum().backward()
        rec.grads(x)

    compare(program)


def test_retain_grad_sees_the_result_of_every_tensor_hook() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x * 2
        y.register_hook(rec.hook("before", lambda g: g * 5))
        y.retain_grad()
        y.register_hook(rec.hook("after", lambda g: g + 7))
        x.retain_grad()
        y.pow(2).sum().backward()
        rec.say("retained", y.grad)
        rec.grads(x)

    compare(program)


def test_retain_grad_accumulates_nothing_over_two_backwards() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x * 2
        y.retain_grad()
        z = y.sin()
        z.retain_grad()
        loss = z.sum()
        loss.backward(retain_graph=True)
        rec.say(y.grad, z.grad)
        loss.backward()
        rec.say(y.grad, z.grad)
        rec.grads(x)

    compare(program)


def test_retain_grad_and_hooks_follow_an_in_place_change() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x * 2
        y.retain_grad()
        y.register_hook(rec.hook("old y"))
        y.mul_(3)
        y.register_hook(rec.hook("new y"))
        y.sin().sum().backward()
        rec.say(y.grad)
        rec.grads(x)

    compare(program)


def test_node_prehooks_and_posthooks_run_around_their_node() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        z = y * x
        for name, node in (("sum", z.sum().grad_fn), ("mul", z.grad_fn), ("sin", y.grad_fn)):
            assert node is not None
            node.register_prehook(rec.hook(f"{name} pre 1"))
            node.register_prehook(rec.hook(f"{name} pre 2"))
            node.register_hook(rec.hook(f"{name} post 1"))
            node.register_hook(rec.hook(f"{name} post 2"))
        z.sum().backward()
        rec.grads(x)

    compare(program)


def test_node_hooks_on_the_accumulate_grad_node() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        assert y.grad_fn is not None
        accumulate = y.grad_fn.next_functions[0][0]
        accumulate.register_prehook(rec.hook("pre", lambda g: (g[0] * 2,)))
        accumulate.register_hook(rec.hook("post"))
        x.register_hook(rec.hook("tensor"))
        y.sum().backward()
        rec.grads(x)

    compare(program)


def test_values_returned_by_node_hooks_replace_gradients() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = x * w
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(rec.hook("pre", lambda grads: (grads[0] * 2,)))

        def post(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            rec.say("post", inputs, outputs)
            return inputs[0] + 1, inputs[1] * 3

        y.grad_fn.register_hook(post)
        y.register_hook(rec.hook("tensor", lambda g: g - 4))
        y.sum().backward()
        rec.grads(x, w)

    compare(program)


def test_prehook_may_set_a_gradient_to_none() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = (x * w).sin()
        z = y.exp()
        assert y.grad_fn is not None
        y.grad_fn.register_hook(lambda inputs, outputs: (None,))
        (z.sum() + x.sum()).backward()
        rec.grads(x, w)

    compare(program)


def test_post_accumulate_grad_hooks_see_and_may_clear_the_gradient() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)

        def step(p: Tensor) -> None:
            rec.say("step", p.grad)
            with torch.no_grad():
                p.sub_(p.grad * 0.5)
            p.grad = None

        x.register_post_accumulate_grad_hook(rec.hook("x first"))
        x.register_post_accumulate_grad_hook(step)
        x.register_post_accumulate_grad_hook(rec.hook("x last"))
        w.register_post_accumulate_grad_hook(lambda p: rec.say("w", p.grad))
        for _ in range(2):
            (x * w).sin().sum().backward()
            rec.say(x, x.grad, w.grad)

    compare(program)


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("unused", [False, True])
def test_multi_grad_hooks(mode: str, unused: bool) -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(3), leaf(3, seed=1)
        c, d = a * b, a.sin()
        watched = (a, c, d) if unused else (a, b, c)
        torch.autograd.graph.register_multi_grad_hook(watched, lambda g: rec.say(mode, g), mode=mode)
        for tensor, name in ((a, "a"), (c, "c")):
            tensor.register_hook(rec.hook(name))
        loss = (c * a).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        rec.grads(a, b)

    compare(program)


@pytest.mark.parametrize("wanted", ["a", "b", "c"])
def test_multi_grad_hook_counts_only_what_inputs_need(wanted: str) -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(3), leaf(3, seed=1)
        c, d = a * b, a.sin()
        e = c.exp()
        torch.autograd.graph.register_multi_grad_hook((a, b, c, d, e), lambda g: rec.say("all", g))
        target = {"a": a, "b": b, "c": c}[wanted]
        with rec.catch():
            (e + d).sum().backward(inputs=(target,), retain_graph=True)
        rec.grads(a, b)
        with rec.catch():
            rec.say(torch.autograd.grad((e + d).sum(), (target,)))

    compare(program)


def test_module_full_backward_hooks_and_prehooks() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        for name, module in net.named_modules():
            module.register_full_backward_pre_hook(rec.hook(f"{name} pre"))
            module.register_full_backward_hook(rec.hook(f"{name} post"))
        net[2].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,), prepend=True)
        net[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,), prepend=True)
        x = leaf(2, 3)
        net(x).sum().backward()
        rec.module(net)
        rec.grads(x)

    compare(program)


def test_module_hooks_with_an_input_that_needs_no_gradient() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Linear(3, 4)
        net.register_full_backward_hook(rec.hook("post"))
        net.register_full_backward_pre_hook(rec.hook("pre"))
        net(torch.ones(2, 3)).sum().backward()
        rec.module(net)

    compare(program)


def test_global_module_hooks() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        handles = [
            nn.modules.module.register_module_full_backward_hook(rec.hook("global post")),
            nn.modules.module.register_module_full_backward_pre_hook(rec.hook("global pre")),
        ]
        try:
            x = leaf(2, 3)
            net(x).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        rec.grads(x)

    compare(program)


def test_a_hook_may_add_hooks_to_tensors_and_nodes_still_to_come() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        z = y.exp()
        assert y.grad_fn is not None
        node = y.grad_fn

        def adds(grad: Tensor) -> None:
            rec.say("adds", grad)
            x.register_hook(rec.hook("late x", lambda g: g * 2))
            y.register_hook(rec.hook("late y"))
            z.register_hook(rec.hook("late z"))
            node.register_prehook(rec.hook("late pre"))
            node.register_hook(rec.hook("late post"))
            x.register_post_accumulate_grad_hook(rec.hook("late accumulated"))

        z.register_hook(adds)
        for _ in range(2):
            z.sum().backward(retain_graph=True)
            rec.grads(x)

    compare(program)


def test_a_hook_may_remove_hooks_still_to_come_and_itself() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        z = y.exp()
        assert y.grad_fn is not None
        handles = [
            x.register_hook(rec.hook("x", lambda g: g * 2)),
            y.register_hook(rec.hook("y")),
            y.grad_fn.register_prehook(rec.hook("pre")),
            y.grad_fn.register_hook(rec.hook("post")),
            x.register_post_accumulate_grad_hook(rec.hook("accumulated")),
        ]

        def removes(grad: Tensor) -> None:
            rec.say("removes")
            for handle in handles:
                handle.remove()
            me.remove()

        z.register_hook(rec.hook("z first"))
        me = z.register_hook(removes)
        z.register_hook(rec.hook("z last"))
        for _ in range(2):
            z.sum().backward(retain_graph=True)
            rec.grads(x)

    compare(program)


def test_a_hook_may_call_retain_grad_on_a_tensor_still_to_come() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        z = y.exp()
        z.register_hook(lambda g: y.retain_grad())
        z.sum().backward()
        rec.say(y.grad)
        rec.grads(x)

    compare(program)


def test_a_hook_on_one_output_of_a_node_sees_only_that_output() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3, 2)
        a, b, c = x.unbind(0)
        b.register_hook(rec.hook("b", lambda g: g * 10))
        c.register_hook(rec.hook("c"))
        c.retain_grad()
        (a * 2 + b * 3).sum().backward()
        rec.say(c.grad)
        rec.grads(x)

    compare(program)


def test_tensor_hooks_change_what_grad_returns() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        x.register_hook(rec.hook("x", lambda g: g * 2))
        y.register_hook(rec.hook("y", lambda g: g * 3))
        y.retain_grad()
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(rec.hook("pre", lambda g: (g[0] * 5,)))
        loss = y.exp().sum()
        rec.say(torch.autograd.grad(loss, (y,), retain_graph=True), y.grad)
        rec.say(torch.autograd.grad(loss, (x, y), retain_graph=True), y.grad)
        rec.say(torch.autograd.grad(loss, (x,)), y.grad)

    compare(program)


def switch_grad_mode() -> None:
    torch.set_grad_enabled(True)


def switch_autocast() -> None:
    torch.set_autocast_enabled("cpu", True)


def switch_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def thread_state() -> str:
    return (
        f"grad={torch.is_grad_enabled()} autocast={torch.is_autocast_enabled('cpu')} "
        f"dtype={torch.get_default_dtype()} inference={torch.is_inference_mode_enabled()}"
    )


class Stateful(torch.autograd.Function):
    """Runs a function during its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, during: Callable[[], None]) -> Tensor:
        ctx.during = during
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.during()
        return grad * 2, None


@pytest.mark.parametrize("switch", [switch_grad_mode, switch_autocast, switch_default_dtype])
@pytest.mark.parametrize("place", ["tensor", "leaf tensor", "pre", "post", "accumulated", "function"])
def test_thread_state_set_in_a_hook_reaches_as_far_as_in_the_stock_engine(
    switch: Callable[[], None], place: str
) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)

        def change(where: str) -> None:
            rec.say(where, thread_state())
            if where == place:
                switch()
                rec.say("changed", thread_state())

        y = Stateful.apply(x, lambda: change("function"))
        z = y.sin() * w
        assert z.grad_fn is not None
        z.register_hook(lambda g: change("tensor"))
        z.register_hook(lambda g: rec.say("same tensor", thread_state()))
        z.grad_fn.register_prehook(lambda g: change("pre"))
        z.grad_fn.register_hook(lambda i, o: change("post"))
        z.grad_fn.register_hook(lambda i, o: rec.say("same node", thread_state()))
        y.register_hook(lambda g: rec.say("later node", thread_state()))
        for p in (x, w):
            p.register_hook(lambda g: change("leaf tensor"))
            p.register_post_accumulate_grad_hook(lambda p: change("accumulated"))
        try:
            z.sum().backward()
            rec.say("after", thread_state())
        finally:
            torch.set_grad_enabled(True)
            torch.set_autocast_enabled("cpu", False)
            torch.set_default_dtype(torch.float32)
        rec.grads(x, w)

    compare(program)


def test_hooks_run_with_grad_mode_as_create_graph_says() -> None:
    def program(rec: Recorder) -> None:
        for create_graph in (False, True):
            x = leaf(3)
            y = x.sin()
            y.register_hook(lambda g: rec.say(thread_state()))
            x.register_hook(lambda g: rec.say(thread_state()))
            (grad,) = torch.autograd.grad(y.exp().sum(), x, create_graph=create_graph)
            rec.say(grad)

    compare(program)


def test_hooks_and_functions_see_their_own_node() -> None:
    def program(rec: Recorder) -> None:
        def node(where: str) -> None:
            current = torch._C._current_autograd_node()
            known = [name for name, n in nodes.items() if n is current]
            rec.say(where, str(current.name() if current is not None else None), known)

        x = leaf(3)
        y = Stateful.apply(x, lambda: node("function"))
        z = y.sin()
        loss = z.sum()
        nodes = {"function": y.grad_fn, "sin": z.grad_fn, "sum": loss.grad_fn}
        for name, tensor in (("x", x), ("y", y), ("z", z)):
            tensor.register_hook(lambda g, name=name: node(f"tensor {name}"))
        for name, fn in nodes.items():
            assert fn is not None
            fn.register_prehook(lambda g, name=name: node(f"pre {name}"))
            fn.register_hook(lambda i, o, name=name: node(f"post {name}"))
        x.register_post_accumulate_grad_hook(lambda p: node("accumulated"))
        loss.backward()
        node("after")

    compare(program)


def test_one_call_has_one_graph_task() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)

        def nested(grad: Tensor) -> None:
            rec.say("outer", rec.task())
            inner = leaf(2)
            inner.register_hook(lambda g: rec.say("inner", rec.task()))
            with torch.enable_grad():
                inner.sin().sum().backward()
            rec.say("outer again", rec.task())

        y = x.sin()
        y.register_hook(nested)
        y.register_hook(lambda g: rec.say("y", rec.task()))
        x.register_post_accumulate_grad_hook(lambda p: rec.say("accumulated", rec.task()))
        y.exp().sum().backward(retain_graph=True)
        rec.say("between", rec.task())
        y.exp().sum().backward()

    compare(program)


@pytest.mark.parametrize("inputs", [None, "a", "c", "d"])
@pytest.mark.parametrize("accumulate", [True, False])
def test_hooks_can_ask_which_nodes_the_engine_will_run(inputs: str | None, accumulate: bool) -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(3), leaf(3, seed=1)
        c = a * b
        d, e = c.sin(), a.exp()
        assert a.grad_fn is None and c.grad_fn is not None
        nodes = {
            "a": torch.autograd.graph.get_gradient_edge(a).node,
            "b": torch.autograd.graph.get_gradient_edge(b).node,
            **{name: t.grad_fn for name, t in (("c", c), ("d", d), ("e", e))},
        }

        def ask(grad: Tensor) -> None:
            for name, node in nodes.items():
                with rec.catch(name):
                    rec.say(torch._C._will_engine_execute_node(node))

        loss = (d + e).sum() if inputs != "e" else d.sum()
        d.register_hook(ask)
        c.register_hook(ask)
        wanted = {"a": (a,), "c": (c,), "d": (d,), None: None}[inputs]
        if accumulate:
            loss.backward(inputs=wanted)
        else:
            rec.say(torch.autograd.grad(loss, wanted or (a, b)))
        rec.grads(a, b)

    compare(program)


def test_hooks_can_ask_for_the_execution_order() -> None:
    def program(rec: Recorder) -> None:
        a, b = leaf(3), leaf(3, seed=1)
        c = a * b
        d = c.sin() + c.exp()
        loss = d.sum()
        loss.register_hook(lambda g: rec.say(*[n.name() for n in torch._C._current_graph_task_execution_order()]))
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        rec.grads(a, b)

    compare(program)


@pytest.mark.parametrize(
    "result",
    [lambda g: "text", lambda g: g[:1], lambda g: g.to(torch.float64), lambda g: (g, g)],
    ids=["text", "other shape", "other type", "pair"],
)
@pytest.mark.parametrize("place", ["tensor", "leaf", "pre", "post"])
def test_bad_return_values_of_hooks(result: Callable[[Tensor], Any], place: str) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        z = y.exp()
        assert y.grad_fn is not None
        match place:
            case "tensor":
                y.register_hook(result)
            case "leaf":
                x.register_hook(result)
            case "pre":
                y.grad_fn.register_prehook(lambda grads: result(grads[0]))
            case "post":
                y.grad_fn.register_hook(lambda inputs, outputs: result(inputs[0]))
        with rec.catch():
            z.sum().backward()
        rec.grads(x)

    compare(program)


def test_hooks_keep_their_python_state_between_calls() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        counts: list[int] = []

        def count(grad: Tensor) -> Tensor:
            counts.append(len(counts))
            return grad * len(counts)

        y.register_hook(count)
        for _ in range(3):
            y.sum().backward(retain_graph=True)
        rec.say(counts)
        rec.grads(x)

    compare(program)


def test_gradient_seen_by_a_hook_may_be_kept_and_changed_later() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        kept: list[Tensor] = []
        y = x * w
        y.register_hook(kept.append)
        x.register_hook(kept.append)
        (y + y * 2).sum().backward()
        rec.say(kept)
        for k in kept:
            k.add_(100)
        rec.grads(x, w)

    compare(program)


def test_hook_that_changes_its_gradient_in_place() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = x * w
        y.register_hook(lambda g: rec.say(describe(g.mul_(2))))
        (y + x).backward(torch.ones(3))
        rec.grads(x, w)

    compare(program)
