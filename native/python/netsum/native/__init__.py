"""The packet path in C++, and its bindings."""
