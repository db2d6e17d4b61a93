// Minimal until the bindings are written.
#include <nanobind/nanobind.h>
NB_MODULE(_native, m) { m.doc() = "netsum native code"; }
