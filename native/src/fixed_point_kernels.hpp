// The loops of fixed_point.cpp on float32 blocks, written so that the compiler vectorizes them. Included once for each instruction set:
// `always_inline` bodies take on the target of the function that they are inlined into, so there is one text and one set of bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#define NETSUM_INLINE static inline __attribute__((always_inline))

namespace netsum::kernels {

typedef std::uint32_t __attribute__((aligned(1), may_alias)) WireWord;  // big-endian, at any address
typedef std::uint32_t __attribute__((may_alias)) FloatBits;

inline constexpr std::uint32_t kAbsMask = 0x7FFFFFFFu;
inline constexpr std::uint32_t kInfinityBits = 0x7F800000u;

struct BlockMax {
    std::uint32_t largest_finite_bits;
    bool non_finite;
};

NETSUM_INLINE BlockMax block_max_body(const float* x, std::size_t count) {
    const auto* bits = reinterpret_cast<const FloatBits*>(x);
    std::uint32_t largest = 0;
    std::uint32_t non_finite = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t magnitude = bits[i] & kAbsMask;
        const std::uint32_t finite = magnitude < kInfinityBits ? ~0u : 0u;
        const std::uint32_t candidate = magnitude & finite;
        largest = largest > candidate ? largest : candidate;
        non_finite |= ~finite;
    }
    return {largest, non_finite != 0};
}

// Two factors of a power of two; the second is 1 where the first suffices.
struct Scale {
    float first;
    float second;
};

NETSUM_INLINE std::uint32_t quantize_body(const float* x, std::size_t count, Scale scale, std::uint32_t first_weight, std::uint8_t* wire) {
    const auto* bits = reinterpret_cast<const FloatBits*>(x);
    auto* out = reinterpret_cast<WireWord*>(wire);
    std::uint32_t weighted = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const bool finite = (bits[i] & kAbsMask) < kInfinityBits;
        const float value = finite ? x[i] : 0.0f;
        const auto q = static_cast<std::int32_t>(std::rint(value * scale.first * scale.second));
        weighted += (first_weight + 2 * static_cast<std::uint32_t>(i)) * static_cast<std::uint32_t>(q);
        out[i] = __builtin_bswap32(static_cast<std::uint32_t>(q));
    }
    return weighted;
}

struct Dequantized {
    std::uint32_t weighted;
    bool overflow;
};

NETSUM_INLINE Dequantized dequantize_body(const std::uint8_t* wire, std::size_t count, Scale scale, float divisor, std::int32_t limit,
                                          std::uint32_t first_weight, float* x) {
    const auto* in = reinterpret_cast<const WireWord*>(wire);
    std::uint32_t weighted = 0;
    std::uint32_t overflow = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t word = __builtin_bswap32(in[i]);
        const auto q = static_cast<std::int32_t>(word);
        weighted += (first_weight + 2 * static_cast<std::uint32_t>(i)) * word;
        overflow |= static_cast<std::uint32_t>(q > limit) | static_cast<std::uint32_t>(q < -limit);
        x[i] = static_cast<float>(q) / divisor * scale.first * scale.second;
    }
    return {weighted, overflow != 0};
}

// Without the division, which is exact but slow for a divisor of 1.
NETSUM_INLINE Dequantized dequantize_sum_body(const std::uint8_t* wire, std::size_t count, Scale scale, std::int32_t limit,
                                              std::uint32_t first_weight, float* x) {
    const auto* in = reinterpret_cast<const WireWord*>(wire);
    std::uint32_t weighted = 0;
    std::uint32_t overflow = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t word = __builtin_bswap32(in[i]);
        const auto q = static_cast<std::int32_t>(word);
        weighted += (first_weight + 2 * static_cast<std::uint32_t>(i)) * word;
        overflow |= static_cast<std::uint32_t>(q > limit) | static_cast<std::uint32_t>(q < -limit);
        x[i] = static_cast<float>(q) * scale.first * scale.second;
    }
    return {weighted, overflow != 0};
}

NETSUM_INLINE void add_wire_body(std::uint8_t* destination, const std::uint8_t* source, std::size_t count) {
    auto* to = reinterpret_cast<WireWord*>(destination);
    const auto* from = reinterpret_cast<const WireWord*>(source);
    for (std::size_t i = 0; i < count; ++i) {
        to[i] = __builtin_bswap32(__builtin_bswap32(to[i]) + __builtin_bswap32(from[i]));
    }
}

NETSUM_INLINE std::uint32_t weighted_sum_body(const std::uint8_t* wire, std::size_t count, std::uint32_t first_weight) {
    const auto* in = reinterpret_cast<const WireWord*>(wire);
    std::uint32_t weighted = 0;
    for (std::size_t i = 0; i < count; ++i) weighted += (first_weight + 2 * static_cast<std::uint32_t>(i)) * __builtin_bswap32(in[i]);
    return weighted;
}

// int32 elements to the wire and back.
NETSUM_INLINE std::uint32_t swap_out_body(const std::int32_t* x, std::size_t count, std::uint32_t first_weight, std::uint8_t* wire) {
    auto* out = reinterpret_cast<WireWord*>(wire);
    std::uint32_t weighted = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const auto word = static_cast<std::uint32_t>(x[i]);
        weighted += (first_weight + 2 * static_cast<std::uint32_t>(i)) * word;
        out[i] = __builtin_bswap32(word);
    }
    return weighted;
}

NETSUM_INLINE std::uint32_t swap_in_body(const std::uint8_t* wire, std::size_t count, std::uint32_t first_weight, std::int32_t* x) {
    const auto* in = reinterpret_cast<const WireWord*>(wire);
    std::uint32_t weighted = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t word = __builtin_bswap32(in[i]);
        weighted += (first_weight + 2 * static_cast<std::uint32_t>(i)) * word;
        x[i] = static_cast<std::int32_t>(word);
    }
    return weighted;
}

struct Table {
    const char* name;
    BlockMax (*block_max)(const float*, std::size_t);
    std::uint32_t (*quantize)(const float*, std::size_t, Scale, std::uint32_t, std::uint8_t*);
    Dequantized (*dequantize)(const std::uint8_t*, std::size_t, Scale, float, std::int32_t, std::uint32_t, float*);
    Dequantized (*dequantize_sum)(const std::uint8_t*, std::size_t, Scale, std::int32_t, std::uint32_t, float*);
    void (*add_wire)(std::uint8_t*, const std::uint8_t*, std::size_t);
    std::uint32_t (*weighted_sum)(const std::uint8_t*, std::size_t, std::uint32_t);
    std::uint32_t (*swap_out)(const std::int32_t*, std::size_t, std::uint32_t, std::uint8_t*);
    std::uint32_t (*swap_in)(const std::uint8_t*, std::size_t, std::uint32_t, std::int32_t*);
};

// Defines NAME, a Table whose functions are compiled for ATTRIBUTES.
#define NETSUM_KERNEL_TABLE(NAME, LABEL, ATTRIBUTES)                                                                                      \
    namespace NAME##_functions {                                                                                                          \
    ATTRIBUTES BlockMax block_max(const float* x, std::size_t n) { return block_max_body(x, n); }                                         \
    ATTRIBUTES std::uint32_t quantize(const float* x, std::size_t n, Scale s, std::uint32_t w, std::uint8_t* out) {                       \
        return quantize_body(x, n, s, w, out);                                                                                            \
    }                                                                                                                                     \
    ATTRIBUTES Dequantized dequantize(const std::uint8_t* in, std::size_t n, Scale s, float d, std::int32_t l, std::uint32_t w, float* x) { \
        return dequantize_body(in, n, s, d, l, w, x);                                                                                     \
    }                                                                                                                                     \
    ATTRIBUTES Dequantized dequantize_sum(const std::uint8_t* in, std::size_t n, Scale s, std::int32_t l, std::uint32_t w, float* x) {    \
        return dequantize_sum_body(in, n, s, l, w, x);                                                                                    \
    }                                                                                                                                     \
    ATTRIBUTES void add_wire(std::uint8_t* to, const std::uint8_t* from, std::size_t n) { add_wire_body(to, from, n); }                   \
    ATTRIBUTES std::uint32_t weighted_sum(const std::uint8_t* in, std::size_t n, std::uint32_t w) { return weighted_sum_body(in, n, w); } \
    ATTRIBUTES std::uint32_t swap_out(const std::int32_t* x, std::size_t n, std::uint32_t w, std::uint8_t* out) {                         \
        return swap_out_body(x, n, w, out);                                                                                               \
    }                                                                                                                                     \
    ATTRIBUTES std::uint32_t swap_in(const std::uint8_t* in, std::size_t n, std::uint32_t w, std::int32_t* x) {                           \
        return swap_in_body(in, n, w, x);                                                                                                 \
    }                                                                                                                                     \
    }                                                                                                                                     \
    constexpr Table NAME {                                                                                                                \
        LABEL, NAME##_functions::block_max, NAME##_functions::quantize, NAME##_functions::dequantize, NAME##_functions::dequantize_sum,   \
            NAME##_functions::add_wire, NAME##_functions::weighted_sum, NAME##_functions::swap_out, NAME##_functions::swap_in             \
    }

}  // namespace netsum::kernels
