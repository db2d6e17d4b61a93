// The loops of fixed_point_loops.hpp and format_loops.hpp, compiled for each instruction set and chosen at run time.
#pragma once

#include "fixed_point_loops.hpp"
#include "format_loops.hpp"

namespace netsum::kernels {

struct Table {
    const char* name;
    decltype(&loops::block_max) block_max;
    decltype(&loops::quantize) quantize;
    decltype(&loops::dequantize<false>) dequantize_sum;
    decltype(&loops::dequantize<true>) dequantize_average;
    decltype(&loops::add_wire) add_wire;
    decltype(&loops::weighted_sum) weighted_sum;
    decltype(&loops::swap_out) swap_out;
    decltype(&loops::swap_in) swap_in;
    decltype(&loops::widen) widen;
    decltype(&loops::narrow) narrow;
    decltype(&loops::replace_finite) replace_finite;
    decltype(&loops::count_non_finite) count_non_finite;
    decltype(&loops::apply_counts) apply_counts;
};

const Table& in_use();  // at first, the widest the CPU has
bool select(const char* name);

}  // namespace netsum::kernels
