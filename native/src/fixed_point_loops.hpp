// The loops of fixed_point.cpp over one block of float32 or int32, written so that the compiler vectorizes them. They
// are always inlined and take on the target of the function they are inlined into: one text, hence one set of bits, for
// every instruction set.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define NETSUM_LOOP static inline __attribute__((always_inline))

namespace netsum::loops {

inline constexpr std::uint32_t kMagnitudeMask = 0x7FFFFFFFu;
inline constexpr std::uint32_t kInfinityBits = 0x7F800000u;

// Element i of an array of Word at any address, as memory holds it.
template <typename Word>
NETSUM_LOOP Word load(const void* array, std::size_t i) {
    Word word;
    std::memcpy(&word, static_cast<const std::uint8_t*>(array) + sizeof(Word) * i, sizeof(Word));
    return word;
}
template <typename Word>
NETSUM_LOOP void store(void* array, std::size_t i, Word word) {
    std::memcpy(static_cast<std::uint8_t*>(array) + sizeof(Word) * i, &word, sizeof(Word));
}

// Element i of a payload: big-endian.
NETSUM_LOOP std::uint32_t load_wire(const std::uint8_t* wire, std::size_t i) {
    return __builtin_bswap32(load<std::uint32_t>(wire, i));
}
NETSUM_LOOP void store_wire(std::uint8_t* wire, std::size_t i, std::uint32_t word) {
    store(wire, i, __builtin_bswap32(word));
}

// Weight of element i of a block in the integrity sum, given that of its first element (modulo 2^32).
NETSUM_LOOP std::uint32_t weight(std::uint32_t first_weight, std::size_t i) {
    return first_weight + 2 * static_cast<std::uint32_t>(i);
}

struct BlockMax {
    std::uint32_t largest_finite_bits;
    bool non_finite;
};

// The bits of non-negative floats are ordered like the floats.
NETSUM_LOOP BlockMax block_max(const float* x, std::size_t count) {
    std::uint32_t largest = 0;
    std::uint32_t non_finite = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x[i]) & kMagnitudeMask;
        const std::uint32_t finite = magnitude < kInfinityBits ? ~0u : 0u;
        const std::uint32_t candidate = magnitude & finite;
        largest = largest > candidate ? largest : candidate;
        non_finite |= ~finite;
    }
    return {largest, non_finite != 0};
}

// A power of two as two factors that are normal floats.
struct Scale {
    float first;
    float second;
};

// Returns the weighted sum of the integers written.
NETSUM_LOOP std::uint32_t quantize(const float* x, std::size_t count, Scale scale, std::uint32_t first_weight,
                                   std::uint8_t* wire) {
    std::uint32_t weighted = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const bool finite = (std::bit_cast<std::uint32_t>(x[i]) & kMagnitudeMask) < kInfinityBits;
        const float value = finite ? x[i] : 0.0f;
        const auto q =
            static_cast<std::uint32_t>(static_cast<std::int32_t>(std::rint(value * scale.first * scale.second)));
        weighted += weight(first_weight, i) * q;
        store_wire(wire, i, q);
    }
    return weighted;
}

struct Dequantized {
    std::uint32_t weighted;
    bool overflow;
};

// `divisor` is the number of workers for an average, and not looked at otherwise: dividing by 1 would be exact, but
// slow.
template <bool average>
NETSUM_LOOP Dequantized dequantize(const std::uint8_t* wire, std::size_t count, Scale scale, float divisor,
                                   std::int32_t limit, std::uint32_t first_weight, float* x) {
    std::uint32_t weighted = 0;
    std::uint32_t overflow = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t word = load_wire(wire, i);
        const auto q = static_cast<std::int32_t>(word);
        weighted += weight(first_weight, i) * word;
        overflow |= static_cast<std::uint32_t>(q > limit) | static_cast<std::uint32_t>(q < -limit);
        const auto sum = static_cast<float>(q);
        x[i] = (average ? sum / divisor : sum) * scale.first * scale.second;
    }
    return {weighted, overflow != 0};
}

NETSUM_LOOP void add_wire(std::uint8_t* destination, const std::uint8_t* source, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        store_wire(destination, i, load_wire(destination, i) + load_wire(source, i));
    }
}

NETSUM_LOOP std::uint32_t weighted_sum(const std::uint8_t* wire, std::size_t count, std::uint32_t first_weight) {
    std::uint32_t weighted = 0;
    for (std::size_t i = 0; i < count; ++i) weighted += weight(first_weight, i) * load_wire(wire, i);
    return weighted;
}

// int32 elements to the wire, and back.
NETSUM_LOOP std::uint32_t swap_out(const std::int32_t* x, std::size_t count, std::uint32_t first_weight,
                                   std::uint8_t* wire) {
    std::uint32_t weighted = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const auto word = static_cast<std::uint32_t>(x[i]);
        weighted += weight(first_weight, i) * word;
        store_wire(wire, i, word);
    }
    return weighted;
}

NETSUM_LOOP std::uint32_t swap_in(const std::uint8_t* wire, std::size_t count, std::uint32_t first_weight,
                                  std::int32_t* x) {
    std::uint32_t weighted = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t word = load_wire(wire, i);
        weighted += weight(first_weight, i) * word;
        x[i] = static_cast<std::int32_t>(word);
    }
    return weighted;
}

}  // namespace netsum::loops
