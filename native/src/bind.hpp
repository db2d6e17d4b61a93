// The parts of the Python module, a file each.
#pragma once

#include <nanobind/nanobind.h>

void bind_fixed_point(nanobind::module_& module);
void bind_loops(nanobind::module_& module);
void bind_machines(nanobind::module_& module);
