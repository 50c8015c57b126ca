"""One of several processes that want the same plan; run by test_stored_plans.py.

    python plan_process.py LIBRARY FOLDER MODE

Its compiler is a stand-in: it writes this process's id into FOLDER/compiles, waits until there is a FOLDER/go, and
hands over a copy of LIBRARY. Prints what retrograd.stats() says as JSON, when a call has run fused with the stock
engine's gradients. What it logs goes to FOLDER/log.<process id>.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograd
from retrograd import _lowering

_LIMIT = 60.0  # seconds


def net_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3), nn.Sigmoid())


def gradients(net: nn.Module, batch: int = 5) -> list[Tensor]:
    net.zero_grad()
    net(torch.linspace(-1, 1, batch * 4).view(batch, 4)).pow(2).mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def _stand_in(library: str, folder: Path) -> Any:
    def submit(graph: Any, *, threads: int, name: str, out_dir: str) -> Future[_lowering.Lowered]:
        future: Future[_lowering.Lowered] = Future()

        def compile_it() -> None:
            with (folder / "compiles").open("a") as log:
                log.write(f"{os.getpid()}\n")
            while not (folder / "go").exists():
                time.sleep(0.01)
            made, path = tempfile.mkstemp(suffix=".so", dir=out_dir)
            os.close(made)
            shutil.copyfile(library, path)
            future.set_result(_lowering.Lowered(path, 0.0, {}))

        threading.Thread(target=compile_it, daemon=True).start()
        return future

    return submit


def main() -> None:
    library, folder, mode = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    logging.basicConfig(filename=folder / f"log.{os.getpid()}", level=logging.DEBUG)
    torch.set_num_threads(1)
    _lowering.submit = _stand_in(library, folder)
    net = net_of()
    want = [g.clone() for g in gradients(net)]
    retrograd.install()
    end = time.monotonic() + _LIMIT
    with retrograd.enable("inductor", mode=mode):
        while True:
            got = gradients(net)
            torch.testing.assert_close(got, want)
            stats = retrograd.stats()
            if stats["calls"]["fused"]:
                break
            assert mode == "background" and time.monotonic() < end, stats
            time.sleep(0.01)
    print(json.dumps({"pid": os.getpid(), **{name: stats[name] for name in ("plans", "recordings", "calls")}}))


if __name__ == "__main__":
    main()
