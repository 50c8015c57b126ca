"""Loads torch and the extension module, and says in one sentence what to do where that cannot work.

Imported before anything else of the package; the other modules take `torch` and `C` (retrograd._C) from here.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

from retrograd._version import TORCH_VERSION

__all__ = ["C", "torch"]


def _is_main_interpreter() -> bool:
    api = ctypes.pythonapi
    api.PyInterpreterState_Main.restype = api.PyInterpreterState_Get.restype = ctypes.c_void_p
    return bool(api.PyInterpreterState_Get() == api.PyInterpreterState_Main())


# Before PyTorch is imported: the attempt alone makes the process crash later.
if not _is_main_interpreter():
    raise ImportError(
        "retrograd cannot be imported in a subinterpreter, because PyTorch works in a process's main interpreter only: "
        "use threads or processes."
    )

try:
    import torch  # brings libtorch into the process, which _C needs
except ImportError as error:
    raise ImportError(
        f"retrograd needs PyTorch, which cannot be imported ({error}): run `pip install torch=={TORCH_VERSION}`."
    ) from error

if torch.__version__.partition("+")[0] != TORCH_VERSION:
    raise ImportError(
        f"retrograd is built for torch {TORCH_VERSION}, but torch {torch.__version__} is installed: "
        f"run `pip install torch=={TORCH_VERSION}`."
    )

if find_spec("retrograd._C") is None:
    raise ImportError(
        "retrograd's extension module is not built here: run `make build` in the checkout and use its "
        ".venv/bin/python, or `pip install .` there."
    )
try:
    from retrograd import _C as C
except ImportError as error:
    if "libtbb" in str(error):
        raise ImportError("retrograd needs oneTBB: run `pip install tbb`, or install libtbb12.") from error
    raise ImportError(
        f"retrograd's extension module cannot be loaded ({error}): build it again, with `make build` in the checkout "
        "or `pip install .` there."
    ) from error
