"""What goes on the wire and what it means: layouts, messages, fixed point, and every state machine, without any I/O.

Nothing in here opens a socket, reads a clock or starts a thread. ``now_us`` is passed in, datagrams come out. The daemon, the host
agent, the simulator and the tests drive the same code. Read SPEC.md beside this package first.
"""
