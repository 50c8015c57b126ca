"""The plan store from Python, and the command line that looks after it (the store: tests/cpp/plan_store_test.cpp)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from retrograd import _cli
from retrograd._load import C

KEY = b"addmm\0relu"
ENVIRONMENT = "torch 2.13.0, avx512, 1 thread"
METADATA = b"name mlp\ninputs 0 1\n"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return C.PlanStore(tmp_path / "store")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "model.wrapper.so"
    path.write_bytes(os.urandom(100_000))
    return path


def publish(store: Any, library: Path, key: bytes = KEY, metadata: bytes = METADATA) -> Path:
    plan, added, reason = store.publish(key, ENVIRONMENT, library, metadata)
    assert added, reason
    plan.release()
    return plan.library


def test_a_published_plan_is_found(store: Any, library: Path) -> None:
    assert store.find(KEY, ENVIRONMENT) == (None, "")
    path = publish(store, library)
    plan, reason = store.find(KEY, ENVIRONMENT)
    assert reason == ""
    assert (plan.library, plan.metadata) == (path, METADATA)
    assert path.read_bytes() == library.read_bytes()
    assert store.publish(KEY, ENVIRONMENT, library, b"")[1] is False


def test_what_is_wrong_is_said(store: Any, library: Path, tmp_path: Path) -> None:
    plan, added, reason = store.publish(KEY, ENVIRONMENT, tmp_path / "none.so", METADATA)
    assert (plan, added) == (None, False)
    assert "none.so cannot be opened: No such file or directory" in reason
    publish(store, library).write_bytes(b"garbage")
    assert store.find(KEY, ENVIRONMENT) == (None, "plan.so has a wrong length")
    store.folder.chmod(0o777)
    assert "others may write to" in store.problem()
    assert store.find(KEY, ENVIRONMENT) == (None, store.problem())


def test_a_leased_plan_is_not_removed(store: Any, library: Path) -> None:
    publish(store, library)
    plan, _ = store.find(KEY, ENVIRONMENT)
    assert store.clear()["leased"] == 1
    plan.release()
    assert store.clear()["plans"] == 1


def test_waiting_for_a_reservation_lets_other_threads_run_and_ends_with_ctrl_c(store: Any) -> None:
    first = store.reserve(KEY, ENVIRONMENT)
    assert first.held
    assert not store.reserve(KEY, ENVIRONMENT).held
    timer = threading.Timer(0.2, first.release)
    timer.start()
    second = store.reserve(KEY, ENVIRONMENT, timeout=60)
    assert second.held

    threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        store.reserve(KEY, ENVIRONMENT, timeout=60)
    assert time.monotonic() - start < 30


def test_the_limit_from_the_environment_counts(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_CACHE_LIMIT", "250K")
    store = C.PlanStore(tmp_path / "store")
    assert store.max_bytes == 250_000
    for key in (b"1", b"2", b"3"):
        publish(store, library, key)
    assert len(store.list()[0]) == 2


# The command line ---------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RETROGRAD_CACHE", raising=False)
    monkeypatch.delenv("RETROGRAD_CACHE_LIMIT", raising=False)
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(store.folder))


@pytest.mark.usefixtures("environment")
class TestCommandLine:
    def test_ls(self, store: Any, library: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _cli.main(["cache", "ls"]) == 0
        total, limits = capsys.readouterr().out.splitlines()
        assert total == f"0 plans, 0 B, in {store.folder}"
        assert limits == "at most 2.1 GB and 2000 plans; the least recently used ones go first"
        publish(store, library)
        publish(store, library, b"nameless", b"\xff\x1b[2J")
        os.utime(publish(store, library, b"damaged").with_name("record"), (1, 1))
        (store.folder / "plans" / store.list()[0][-1]["name"] / "plan.so").unlink()

        assert _cli.main(["cache", "ls"]) == 0
        header, first, second, damaged, total, _ = capsys.readouterr().out.splitlines()
        assert header.split() == ["PLAN", "SIZE", "LAST", "USED", "NAME", "ENVIRONMENT"]
        assert {line.split("just now")[1].split()[0] for line in (first, second)} == {"mlp", "-"}
        assert all(ENVIRONMENT in line and "100." in line for line in (first, second))
        assert "(unusable: plan.so cannot be opened" in damaged
        assert "days ago" in damaged
        assert total.startswith("3 plans, 200.")

    def test_ls_shows_the_limit_from_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RETROGRAD_CACHE_LIMIT", "750M")
        assert _cli.main(["cache", "ls"]) == 0
        assert "at most 750.0 MB and 2000 plans" in capsys.readouterr().out
        monkeypatch.setenv("RETROGRAD_CACHE_LIMIT", "lots")
        assert _cli.main(["cache", "ls"]) == 0
        shown = capsys.readouterr()
        assert "at most 2.1 GB" in shown.out
        assert "RETROGRAD_CACHE_LIMIT=lots is no size" in shown.err

    def test_clear(self, store: Any, library: Path, capsys: pytest.CaptureFixture[str]) -> None:
        publish(store, library)
        publish(store, library, b"other")
        leased, _ = store.find(KEY, ENVIRONMENT)
        assert _cli.main(["cache", "clear"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"removed 1 plan, 100.2 KB, from {store.folder}",
            "left 1 plan that running programs are loading: try again",
        ]
        leased.release()
        assert _cli.main(["cache", "clear"]) == 0
        assert list((store.folder / "plans").iterdir()) == []

    def test_verify(self, store: Any, library: Path, capsys: pytest.CaptureFixture[str]) -> None:
        publish(store, library)
        bad = publish(store, library, b"other")
        assert _cli.main(["cache", "verify"]) == 0
        bad.write_bytes(bytes(100_000))
        capsys.readouterr()
        assert _cli.main(["cache", "verify"]) == 1
        line, total, hint = capsys.readouterr().out.splitlines()
        assert line == f"{bad.parent.name}: plan.so is damaged"
        assert total == f"1 good, 1 damaged, in {store.folder}"
        assert "--remove" in hint
        assert _cli.main(["cache", "verify", "--remove"]) == 0
        assert "(removed)" in capsys.readouterr().out
        assert not bad.parent.exists()
        assert _cli.main(["cache", "verify"]) == 0

    @pytest.mark.parametrize("command", ["ls", "clear", "verify"])
    def test_a_refused_folder(self, command: str, store: Any, capsys: pytest.CaptureFixture[str]) -> None:
        store.folder.mkdir(mode=0o700)
        store.folder.chmod(0o777)
        assert _cli.main(["cache", command]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err == f"retrograd: {store.problem()}\n"

    @pytest.mark.parametrize("command", ["ls", "clear", "verify"])
    def test_a_folder_that_is_not_there_is_not_made(self, command: str, store: Any) -> None:
        assert _cli.main(["cache", command]) == 0
        assert not store.folder.exists()

    def test_turned_off(self, store: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("RETROGRAD_CACHE", "0")
        assert _cli.main(["cache", "ls"]) == 1
        assert "turned off" in capsys.readouterr().err
        assert _cli.main(["cache", "ls", "--folder", str(store.folder)]) == 0

    @pytest.mark.parametrize("arguments", [[], ["cache"], ["cache", "burn"], ["cache", "ls", "--remove"]])
    def test_wrong_arguments(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_info:
            _cli.main(arguments)
        assert exit_info.value.code == 2
        assert "usage: retrograd" in capsys.readouterr().err

    def test_as_a_module(self, store: Any, library: Path) -> None:
        publish(store, library)
        paths = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run(
            [sys.executable, "-m", "retrograd", "cache", "verify"],
            capture_output=True, text=True, timeout=120, env={**os.environ, **paths}, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, f"1 good, 0 damaged, in {store.folder}\n"), done.stderr
