#include "netsum/fixed_point.hpp"

#include <bit>
#include <cstring>

#include "fixed_point_kernels.hpp"

namespace netsum {

namespace {

using loops::Scale;

// For -126..127.
float power_of_two(int exponent) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// 2^exponent as half and the rest (SPEC.md section 2): the first product is exact wherever the result is not rounded to
// 0 anyway.
Scale scale_of(int exponent) {
    const int half = exponent / 2;
    return {power_of_two(half), power_of_two(exponent - half)};
}

std::uint32_t weight_of(std::uint64_t index) {
    return static_cast<std::uint32_t>(2 * index + 1);
}

// The block as float32: itself, or widened into `buffer`.
const float* as_float32(const void* data, std::size_t count, DType dtype, float* buffer) {
    if (dtype == DType::Float32) return static_cast<const float*>(data);
    kernels::in_use().widen(data, count, dtype, buffer);
    return buffer;
}

}  // namespace

int scale_exponent(unsigned world_size) {
    return 29 - static_cast<int>(std::bit_width(world_size - 1));
}

std::int64_t sum_limit(unsigned world_size) {
    return std::int64_t{world_size} << (scale_exponent(world_size) + 1);
}

ExponentPair block_exponent(const void* data, std::size_t count, DType dtype) {
    ExponentPair pair;
    if (dtype == DType::Int32) return pair;
    float buffer[kBlockElems];
    const auto found = kernels::in_use().block_max(as_float32(data, count, dtype, buffer), count);
    if (found.largest_finite_bits != 0) {
        pair.e0 = static_cast<std::int8_t>(static_cast<int>(found.largest_finite_bits >> 23) - 127);
    }
    pair.e1 = found.non_finite ? 1 : 0;
    return pair;
}

void quantize(const void* data, std::size_t count, DType dtype, int exponent, unsigned world_size,
              std::uint64_t first_index, std::uint8_t* wire, std::uint32_t* weighted) {
    const auto& table = kernels::in_use();
    const std::uint32_t weight = weight_of(first_index);
    if (dtype == DType::Int32) {
        *weighted += table.swap_out(static_cast<const std::int32_t*>(data), count, weight, wire);
        return;
    }
    if (exponent == kNoExponent) {
        std::memset(wire, 0, 4 * count);
        return;
    }
    float buffer[kBlockElems];
    const float* x = as_float32(data, count, dtype, buffer);
    *weighted += table.quantize(x, count, scale_of(scale_exponent(world_size) - exponent), weight, wire);
}

bool dequantize(const std::uint8_t* wire, std::size_t count, DType dtype, int exponent, unsigned world_size, OpCode op,
                bool keep_non_finite, std::uint64_t first_index, void* data, std::uint32_t* weighted) {
    const auto& table = kernels::in_use();
    const std::uint32_t weight = weight_of(first_index);
    if (dtype == DType::Int32) {
        *weighted += table.swap_in(wire, count, weight, static_cast<std::int32_t*>(data));
        return true;
    }
    float values[kBlockElems];
    float* x = dtype == DType::Float32 && !keep_non_finite ? static_cast<float*>(data) : values;
    const auto loop = op == OpCode::Avg ? table.dequantize_average : table.dequantize_sum;
    const auto done = loop(wire, count, scale_of(exponent - scale_exponent(world_size)), static_cast<float>(world_size),
                           static_cast<std::int32_t>(sum_limit(world_size)), weight, x);
    if (exponent == kNoExponent) std::memset(x, 0, 4 * count);  // +0 whatever came: the integrity element tells
    *weighted += done.weighted;

    const void* result = values;
    std::uint16_t narrow[kBlockElems];
    if (dtype != DType::Float32) {
        void* to = keep_non_finite ? narrow : data;
        table.narrow(values, count, dtype, to);
        result = to;
    }
    if (keep_non_finite) table.replace_finite(result, count, dtype, data);
    return !done.overflow;
}

void count_non_finite(const void* data, std::size_t count, DType dtype, std::uint64_t first_index, std::uint8_t* wire,
                      std::uint32_t* weighted, std::size_t part_elems) {
    *weighted += kernels::in_use().count_non_finite(data, count, dtype, weight_of(first_index), wire);
    std::memset(wire + 4 * count, 0, 4 * (part_elems - count));
}

void apply_counts(const std::uint8_t* wire, std::size_t count, DType dtype, std::uint64_t first_index, void* data,
                  std::uint32_t* weighted) {
    *weighted += kernels::in_use().apply_counts(wire, count, dtype, weight_of(first_index), data);
}

void add_wire(std::uint8_t* destination, const std::uint8_t* source, std::size_t count) {
    kernels::in_use().add_wire(destination, source, count);
}

std::uint32_t weighted_sum(const std::uint8_t* wire, std::size_t count, std::uint64_t first_index) {
    return kernels::in_use().weighted_sum(wire, count, weight_of(first_index));
}

const char* kernels_in_use() {
    return kernels::in_use().name;
}

bool set_kernels(const char* name) {
    return kernels::select(name);
}

}  // namespace netsum
