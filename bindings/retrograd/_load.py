"""Loads the extension module, and says in one sentence what to do where that cannot work."""

from __future__ import annotations

from types import ModuleType

from retrograd._version import TORCH_VERSION


def load() -> ModuleType:
    """The module retrograd._C.

    Raises ImportError where torch is missing or of another version, or the module cannot be loaded.
    """
    try:
        import torch  # brings libtorch into the process, which _C needs
    except ImportError as error:
        raise ImportError(f"retrograd needs PyTorch: run `pip install torch=={TORCH_VERSION}`.") from error
    found = torch.__version__.partition("+")[0]
    if found != TORCH_VERSION:
        raise ImportError(
            f"retrograd is built for torch {TORCH_VERSION}, but torch {torch.__version__} is installed: "
            f"run `pip install torch=={TORCH_VERSION}`."
        )
    try:
        from retrograd import _C
    except ImportError as error:
        if "libtbb" in str(error):
            raise ImportError("retrograd needs oneTBB: run `pip install tbb`, or install libtbb12.") from error
        raise ImportError(
            f"retrograd's extension module cannot be loaded ({error}): build it again with "
            "`make build` in a checkout, or `pip install --force-reinstall retrograd`."
        ) from error
    return _C
