// The loops of fixed_point.cpp that depend on how a tensor is stored: float32, float16 or bfloat16. See
// fixed_point_loops.hpp. Where an element stays as it is, its old bits are stored again: a store on every path is what
// the compiler vectorizes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fixed_point_loops.hpp"
#include "half.hpp"
#include "netsum/fixed_point.hpp"

namespace netsum::loops {

inline constexpr std::uint32_t kPositiveInfinityCount = 1;
inline constexpr std::uint32_t kNegativeInfinityCount = 1u << 11;

// Bits of a storage format. What is above `infinity`, sign aside, is a NaN.
struct Float32Format {
    using Word = std::uint32_t;
    static constexpr Word all_ones = 0xFFFFFFFFu, sign = 0x80000000u, infinity = 0x7F800000u, quiet_nan = 0x7FC00000u;
};
struct Float16Format {
    using Word = std::uint16_t;
    static constexpr Word all_ones = 0xFFFFu, sign = 0x8000u, infinity = 0x7C00u, quiet_nan = 0x7E00u;
};
struct BFloat16Format {
    using Word = std::uint16_t;
    static constexpr Word all_ones = 0xFFFFu, sign = 0x8000u, infinity = 0x7F80u, quiet_nan = 0x7FC0u;
};

// Calls f with the format of a float `dtype`.
template <typename F>
NETSUM_LOOP auto with_format(DType dtype, F f) {
    if (dtype == DType::Float16) return f(Float16Format{});
    if (dtype == DType::BFloat16) return f(BFloat16Format{});
    return f(Float32Format{});
}

// 16-bit floats to float32.
NETSUM_LOOP void widen(const void* data, std::size_t count, DType dtype, float* x) {
    if (dtype == DType::BFloat16) {
        for (std::size_t i = 0; i < count; ++i) x[i] = bfloat16_to_float(load<std::uint16_t>(data, i));
    } else {
        for (std::size_t i = 0; i < count; ++i) x[i] = half_to_float(load<std::uint16_t>(data, i));
    }
}

// float32 to 16-bit floats.
NETSUM_LOOP void narrow(const float* x, std::size_t count, DType dtype, void* data) {
    if (dtype == DType::BFloat16) {
        for (std::size_t i = 0; i < count; ++i) store(data, i, float_to_bfloat16(x[i]));
    } else {
        for (std::size_t i = 0; i < count; ++i) store(data, i, float_to_half(x[i]));
    }
}

// Copies `source` over the finite elements of `data`, both stored as `dtype`.
NETSUM_LOOP void replace_finite(const void* source, std::size_t count, DType dtype, void* data) {
    with_format(dtype, [=]<typename F>(F) __attribute__((always_inline)) {
        using Word = typename F::Word;
        for (std::size_t i = 0; i < count; ++i) {
            const auto old = load<Word>(data, i);
            const Word finite = (old & (F::sign - 1u)) < F::infinity ? F::all_ones : 0;
            store(data, i, static_cast<Word>((load<Word>(source, i) & finite) | (old & ~finite)));
        }
    });
}

NETSUM_LOOP std::uint32_t count_non_finite(const void* data, std::size_t count, DType dtype, std::uint32_t first_weight,
                                           std::uint8_t* wire) {
    return with_format(dtype, [=]<typename F>(F) __attribute__((always_inline)) {
        std::uint32_t weighted = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t word = load<typename F::Word>(data, i);
            const bool nan = (word & (F::sign - 1u)) > F::infinity;
            const bool positive = nan | (word == F::infinity);
            const bool negative = nan | (word == (F::infinity | F::sign));
            const std::uint32_t counted =
                (positive ? kPositiveInfinityCount : 0) + (negative ? kNegativeInfinityCount : 0);
            weighted += weight(first_weight, i) * counted;
            store_wire(wire, i, counted);
        }
        return weighted;
    });
}

NETSUM_LOOP std::uint32_t apply_counts(const std::uint8_t* wire, std::size_t count, DType dtype,
                                       std::uint32_t first_weight, void* data) {
    return with_format(dtype, [=]<typename F>(F) __attribute__((always_inline)) {
        using Word = typename F::Word;
        std::uint32_t weighted = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t counted = load_wire(wire, i);
            weighted += weight(first_weight, i) * counted;
            const Word one_sign =
                counted < kNegativeInfinityCount ? F::infinity : static_cast<Word>(F::infinity | F::sign);
            const bool both = counted > kNegativeInfinityCount && counted % kNegativeInfinityCount != 0;
            const Word special = both ? F::quiet_nan : one_sign;
            const Word none = counted == 0 ? F::all_ones : 0;
            store(data, i, static_cast<Word>((load<Word>(data, i) & none) | (special & ~none)));
        }
        return weighted;
    });
}

}  // namespace netsum::loops
