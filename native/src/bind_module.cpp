#include "bind.hpp"

NB_MODULE(_native, module) {
    module.doc() = "netsum's packet path in C++";
    bind_fixed_point(module);
    bind_machines(module);
    bind_loops(module);
}
