#include "netsum/fixed_point.hpp"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "fixed_point_kernels.hpp"
#include "half.hpp"

namespace netsum {

namespace kernels {
namespace {

NETSUM_KERNEL_TABLE(scalar, "scalar", );
#if defined(__x86_64__)
NETSUM_KERNEL_TABLE(avx2, "avx2", __attribute__((target("avx2"))));
NETSUM_KERNEL_TABLE(avx512, "avx512", __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))));
#endif

bool supported(const Table& table) {
#if defined(__x86_64__)
    if (&table == &avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    }
    if (&table == &avx2) return __builtin_cpu_supports("avx2");
#endif
    return &table == &scalar;
}

constexpr const Table* kTables[] = {
#if defined(__x86_64__)
    &avx512, &avx2,
#endif
    &scalar};

const Table* best() {
    for (const Table* table : kTables) {
        if (supported(*table)) return table;
    }
    return &scalar;
}

std::atomic<const Table*>& current() {
    static std::atomic<const Table*> table{best()};
    return table;
}

const Table& use() { return *current().load(std::memory_order_relaxed); }

}  // namespace
}  // namespace kernels

namespace {

using kernels::Scale;

constexpr std::uint32_t kPositiveInfinityCount = 1;
constexpr std::uint32_t kNegativeInfinityCount = 1u << 11;

float power_of_two(int exponent) { return std::ldexp(1.0f, exponent); }

// 2^exponent as factors that are normal numbers: half and the rest where it is not one itself (SPEC.md section 2).
Scale scale_of(int exponent) {
    if (exponent >= -126 && exponent <= 127) return {power_of_two(exponent), 1.0f};
    const int half = exponent / 2;
    return {power_of_two(half), power_of_two(exponent - half)};
}

std::uint32_t weight_of(std::uint64_t index) { return static_cast<std::uint32_t>(2 * index + 1); }

// The block as float32: itself, or widened into `buffer`.
const float* as_float32(const void* data, std::size_t count, DType dtype, float* buffer) {
    if (dtype == DType::Float32) return static_cast<const float*>(data);
    const auto* bits = static_cast<const std::uint16_t*>(data);
    if (dtype == DType::BFloat16) {
        for (std::size_t i = 0; i < count; ++i) buffer[i] = bfloat16_to_float(bits[i]);
    } else {
        for (std::size_t i = 0; i < count; ++i) buffer[i] = half_to_float(bits[i]);
    }
    return buffer;
}

bool is_finite(float x) { return (std::bit_cast<std::uint32_t>(x) & kernels::kAbsMask) < kernels::kInfinityBits; }

// Stores x[i] to element i of `data`, rounded once, except where `keep` finds the old element not finite.
void store(const float* x, std::size_t count, DType dtype, bool keep_non_finite, void* data) {
    float widened[kBlockElems];
    const float* old = keep_non_finite ? as_float32(data, count, dtype, widened) : nullptr;
    for (std::size_t i = 0; i < count; ++i) {
        if (old != nullptr && !is_finite(old[i])) continue;
        switch (dtype) {
            case DType::BFloat16: static_cast<std::uint16_t*>(data)[i] = float_to_bfloat16(x[i]); break;
            case DType::Float16: static_cast<std::uint16_t*>(data)[i] = float_to_half(x[i]); break;
            default: static_cast<float*>(data)[i] = x[i];
        }
    }
}

std::uint32_t read_wire(const std::uint8_t* wire) {
    std::uint32_t word;
    std::memcpy(&word, wire, 4);
    return __builtin_bswap32(word);
}

void write_wire(std::uint32_t word, std::uint8_t* wire) {
    word = __builtin_bswap32(word);
    std::memcpy(wire, &word, 4);
}

}  // namespace

int scale_exponent(unsigned world_size) { return 29 - static_cast<int>(std::bit_width(world_size - 1)); }

std::int64_t sum_limit(unsigned world_size) { return std::int64_t{world_size} << (scale_exponent(world_size) + 1); }

ExponentPair block_exponent(const void* data, std::size_t count, DType dtype) {
    if (dtype == DType::Int32) return {};
    float buffer[kBlockElems];
    const auto found = kernels::use().block_max(as_float32(data, count, dtype, buffer), count);
    ExponentPair pair;
    if (found.largest_finite_bits != 0) pair.e0 = static_cast<std::int8_t>(static_cast<int>(found.largest_finite_bits >> 23) - 127);
    pair.e1 = found.non_finite ? 1 : 0;
    return pair;
}

void quantize(const void* data, std::size_t count, DType dtype, int exponent, unsigned world_size, std::uint64_t first_index,
              std::uint8_t* wire, std::uint32_t* weighted) {
    const std::uint32_t weight = weight_of(first_index);
    if (dtype == DType::Int32) {
        *weighted += kernels::use().swap_out(static_cast<const std::int32_t*>(data), count, weight, wire);
        return;
    }
    if (exponent == kNoExponent) {
        std::memset(wire, 0, 4 * count);
        return;
    }
    float buffer[kBlockElems];
    const float* x = as_float32(data, count, dtype, buffer);
    *weighted += kernels::use().quantize(x, count, scale_of(scale_exponent(world_size) - exponent), weight, wire);
}

bool dequantize(const std::uint8_t* wire, std::size_t count, DType dtype, int exponent, unsigned world_size, OpCode op,
                bool keep_non_finite, std::uint64_t first_index, void* data, std::uint32_t* weighted) {
    const std::uint32_t weight = weight_of(first_index);
    const auto& table = kernels::use();
    if (dtype == DType::Int32) {
        *weighted += table.swap_in(wire, count, weight, static_cast<std::int32_t*>(data));
        return true;
    }
    const auto limit = static_cast<std::int32_t>(sum_limit(world_size));
    const bool no_exponent = exponent == kNoExponent;
    const Scale scale = no_exponent ? Scale{0.0f, 0.0f} : scale_of(exponent - scale_exponent(world_size));
    float buffer[kBlockElems];
    const bool direct = dtype == DType::Float32 && !keep_non_finite;
    float* out = direct ? static_cast<float*>(data) : buffer;
    const auto done = op == OpCode::Avg
                          ? table.dequantize(wire, count, scale, static_cast<float>(world_size), limit, weight, out)
                          : table.dequantize_sum(wire, count, scale, limit, weight, out);
    if (no_exponent) std::memset(out, 0, 4 * count);  // +0, whatever the sign of a sum that should be 0
    if (!direct) store(buffer, count, dtype, keep_non_finite, data);
    *weighted += done.weighted;
    return !done.overflow;
}

void count_non_finite(const void* data, std::size_t count, DType dtype, std::uint64_t first_index, std::uint8_t* wire,
                      std::uint32_t* weighted) {
    float buffer[kBlockElems];
    const float* x = as_float32(data, count, dtype, buffer);
    std::memset(wire + 4 * count, 0, 4 * (kBlockElems - count));
    for (std::size_t i = 0; i < count; ++i) {
        std::uint32_t counted = 0;
        if (!is_finite(x[i])) {
            if (!(x[i] < 0.0f)) counted += kPositiveInfinityCount;  // +Inf and NaN
            if (!(x[i] > 0.0f)) counted += kNegativeInfinityCount;  // -Inf and NaN
        }
        *weighted += weight_of(first_index + i) * counted;
        write_wire(counted, wire + 4 * i);
    }
}

void apply_counts(const std::uint8_t* wire, std::size_t count, DType dtype, std::uint64_t first_index, void* data,
                  std::uint32_t* weighted) {
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t counted = read_wire(wire + 4 * i);
        *weighted += weight_of(first_index + i) * counted;
        const bool positive = counted % kNegativeInfinityCount != 0;
        const bool negative = counted / kNegativeInfinityCount != 0;
        if (!positive && !negative) continue;
        const std::uint32_t special = positive && negative ? 0x7FC00000u : positive ? 0x7F800000u : 0xFF800000u;
        const auto value = std::bit_cast<float>(special);
        store(&value, 1, dtype, false, static_cast<std::uint8_t*>(data) + i * dtype_bytes(dtype));
    }
}

void add_wire(std::uint8_t* destination, const std::uint8_t* source, std::size_t count) {
    kernels::use().add_wire(destination, source, count);
}

std::uint32_t weighted_sum(const std::uint8_t* wire, std::size_t count, std::uint64_t first_index) {
    return kernels::use().weighted_sum(wire, count, weight_of(first_index));
}

const char* kernels_in_use() { return kernels::use().name; }

bool set_kernels(const char* name) {
    for (const auto* table : kernels::kTables) {
        if (std::strcmp(table->name, name) == 0 && kernels::supported(*table)) {
            kernels::current().store(table);
            return true;
        }
    }
    return false;
}

}  // namespace netsum
