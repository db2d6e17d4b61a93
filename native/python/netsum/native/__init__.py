"""The packet path in C++, and its bindings."""

from netsum.native._native import NativeAgent, NativeSwitch

__all__ = ["NativeAgent", "NativeSwitch"]
