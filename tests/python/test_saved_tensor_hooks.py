from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import pytest
import torch
from oracle import Recorder, compare, leaf, previous
from torch import Tensor
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


def test_save_on_cpu() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        with save_on_cpu():
            y = (x * w).exp().sin() * x
        for retain in (True, False):
            y.sum().backward(retain_graph=retain)
            rec.grads(x, w)

    compare(program)


def test_unpack_runs_in_the_order_of_the_nodes() -> None:
    def program(rec: Recorder) -> None:
        def pack(t: Tensor) -> tuple[int, Tensor]:
            rec.say("pack", t)
            return len(rec.log), t

        def unpack(packed: tuple[int, Tensor]) -> Tensor:
            rec.say("unpack", packed[0], rec.task(), torch._C._current_autograd_node().name())
            return packed[1]

        x, w = leaf(3), leaf(3, seed=1)
        with saved_tensors_hooks(pack, unpack):
            a = x * w
            b = a.exp()
        c = b.sin()
        with saved_tensors_hooks(pack, lambda p: unpack(p) * 2):
            d = c.pow(2) + b.cos()
        b.register_hook(rec.hook("b"))
        for retain in (True, False):
            d.sum().backward(retain_graph=retain)
            rec.grads(x, w)

    compare(program)


@pytest.mark.parametrize("result", ["raises", "other shape", "other type", "not a tensor"])
def test_unpack_that_misbehaves(result: str) -> None:
    def program(rec: Recorder) -> None:
        def unpack(t: Tensor) -> object:
            rec.say("unpack")
            match result:
                case "raises":
                    raise LookupError("in unpack")
                case "other shape":
                    return t[:2]
                case "other type":
                    return t.double()
            return "text"

        x = leaf(3)
        y = x.cos()
        with saved_tensors_hooks(lambda t: t, unpack):
            z = y.sin()
        z.register_hook(rec.hook("z"))
        with rec.catch():
            (z * 2).exp().sum().backward()
        rec.grads(x)

    compare(program)


def test_unpack_may_run_a_backward() -> None:
    def program(rec: Recorder) -> None:
        w = leaf(3, seed=1)

        def unpack(t: Tensor) -> Tensor:
            with torch.enable_grad():
                (w * 2).sin().sum().backward()
            return t

        x = leaf(3)
        with saved_tensors_hooks(lambda t: t, unpack):
            y = x.sin()
        y.sum().backward()
        rec.grads(x, w)

    compare(program)


def test_hooks_on_one_saved_tensor() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = x * w
        assert y.grad_fn is not None
        y.grad_fn._raw_saved_self.register_hooks(
            lambda t: rec.say("pack", t) or t * 2, lambda t: rec.say("unpack", t) or t / 4
        )
        z = y.exp()
        assert z.grad_fn is not None
        z.grad_fn._raw_saved_result.register_hooks(lambda t: t, lambda t: rec.say("result", t) or t)
        for retain in (True, False):
            z.sum().backward(retain_graph=retain)
            rec.grads(x, w)

    compare(program)


def test_hooks_may_be_set_inside_a_hook_and_when_disabled() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        with disable_saved_tensors_hooks("not here"):
            y = x.sin()
            with rec.catch("forward"), saved_tensors_hooks(lambda t: t, lambda t: t):
                rec.say("unreachable")
            y.exp().sum().backward()
        rec.grads(x)
        with save_on_cpu():
            z = x.sin()

        def hook(grad: Tensor) -> None:
            with disable_saved_tensors_hooks("not in the hook"), rec.catch("in hook"), save_on_cpu():
                rec.say("unreachable")

        z.register_hook(hook)
        z.sum().backward()
        rec.grads(x)

    compare(program)


def test_saved_tensors_may_be_changed_where_that_is_allowed() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        with allow_mutation_on_saved_tensors():
            y = x * 1
            z = y.sin()
            y.mul_(100)
            (z * y).sum().backward()
        rec.grads(x)

    compare(program, path=previous("dispatch_mode"))  # that is how torch does it


def test_double_backward_through_hooks() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        with saved_tensors_hooks(lambda t: rec.say("pack", t) or t, lambda t: rec.say("unpack", t) or t):
            y = x.exp().sin()
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            grad.pow(2).sum().backward()
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_hooks_and_checkpoint(reentrant: bool) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        with save_on_cpu():
            y = checkpoint(lambda t: t.sin().exp(), x * 2, use_reentrant=reentrant)
            z = y * x
        z.sum().backward()
        rec.grads(x)

    compare(program)


def _push(manager: Callable[[], AbstractContextManager[object]]) -> Callable[[ExitStack], object]:
    return lambda stack: stack.enter_context(manager())


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (
            _push(lambda: saved_tensors_hooks(lambda t: t, lambda t: t)),
            lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        ),
        (
            _push(lambda: disable_saved_tensors_hooks("no")),
            torch._C._autograd._saved_tensors_hooks_is_enabled,
        ),
        (_push(TorchFunctionMode), torch._C._len_torch_function_stack),
        (_push(torch._C.DisableTorchFunction), torch._C._is_torch_function_enabled),
        (_push(lambda: torch.autocast("cpu")), lambda: torch.is_autocast_enabled("cpu")),
        (lambda stack: torch.set_grad_enabled(True), torch.is_grad_enabled),
        (lambda stack: torch._C._stash_obj_in_tls("mine", 1), lambda: torch._C._is_key_in_tls("mine")),
    ],
    ids=["hooks", "no hooks", "function mode", "no functions", "autocast", "grad mode", "object"],
)
@pytest.mark.parametrize("put_on", ["by default", "on one tensor"])
def test_state_that_unpack_leaves_behind_does_not_reach_the_next_node(
    change: Callable[[ExitStack], object], seen: Callable[[], object], put_on: str
) -> None:
    def program(rec: Recorder) -> None:
        class Probe(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                rec.say("in the next node", seen())
                return g

        def unpack(t: Tensor) -> Tensor:
            change(left_open)
            return t

        x = leaf(3)
        y = Probe.apply(x)
        left_open = ExitStack()
        if put_on == "by default":
            with saved_tensors_hooks(lambda t: t, unpack):
                z = y.sin()
        else:
            z = y.sin()
            z.grad_fn._raw_saved_self.register_hooks(lambda t: t, unpack)
        z.sum().backward()
        rec.say("after", seen())
        with suppress(RuntimeError):  # what it would take back, the engine has taken back already
            left_open.close()
        torch._C._remove_obj_from_tls("mine")
        rec.grads(x)

    compare(program)
