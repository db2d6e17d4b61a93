// 16-bit floats to float32 and back: exact widening, one rounding to nearest even, NaN becomes the quiet NaN.
// Without branches, so that loops of them vectorize, and without arithmetic on denormals, so that flush-to-zero modes
// change nothing.
#pragma once

#include <bit>
#include <cstdint>

namespace netsum {

inline float bfloat16_to_float(std::uint16_t bits) {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

inline std::uint16_t float_to_bfloat16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

inline float half_to_float(std::uint16_t half) {
    const std::uint32_t word = half;
    const std::uint32_t sign = (word & 0x8000u) << 16;
    const std::uint32_t magnitude = (word & 0x7FFFu) << 13;
    // The value of a denormal half is its fraction in units of 2^-24: a normal float.
    const float fraction = static_cast<float>(static_cast<std::int32_t>(word & 0x3FFu)) * 0x1p-24f;
    const std::uint32_t normal = magnitude + (112u << 23);
    const std::uint32_t special = magnitude | 0x7F800000u;
    const std::uint32_t finite = magnitude < (1u << 23) ? std::bit_cast<std::uint32_t>(fraction) : normal;
    return std::bit_cast<float>(sign | (magnitude >= (31u << 23) ? special : finite));
}

inline std::uint16_t float_to_half(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    // Below 2^-14 the result is a denormal: adding 0.5 makes the float unit round to multiples of 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    const std::uint32_t denormal = std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u;
    const std::uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    const std::uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
    const std::uint32_t rounded = magnitude >= 0x477FF000u ? 0x7C00u : finite;  // 65520 and above round to infinity
    return static_cast<std::uint16_t>(magnitude > 0x7F800000u ? 0x7E00u : sign | rounded);
}

}  // namespace netsum
