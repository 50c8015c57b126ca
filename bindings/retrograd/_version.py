"""The version of retrograd, and of the one torch release that it is built for."""

from __future__ import annotations

__version__ = "0.1.0"
TORCH_VERSION = "2.13.0"
