// Fixed point (protocol/SPEC.md section 2): block exponents, quantize, dequantize, and the addition a switch does.
// Every function has one scalar form and vector forms chosen at run time; all give the same bits
// (netsum.protocol.fixed_point is the oracle).
#pragma once

#include <cstddef>
#include <cstdint>

namespace netsum {

inline constexpr std::size_t kBlockElems = 256;
inline constexpr int kNoExponent = -128;  // a block without a non-zero finite element

enum class DType : std::uint8_t { Float32 = 1, Float16 = 2, BFloat16 = 3, Int32 = 4 };
enum class OpCode : std::uint8_t { Sum = 1, Avg = 2 };

constexpr std::size_t dtype_bytes(DType dtype) {
    return dtype == DType::Float16 || dtype == DType::BFloat16 ? 2 : 4;
}

struct ExponentPair {
    std::int8_t e0 = kNoExponent;
    std::int8_t e1 = 0;
};

// k of SPEC.md: quantized values are x * 2^(k - E).
int scale_exponent(unsigned world_size);

// Largest |Q| that honest contributions can reach: world_size * 2^(k+1).
std::int64_t sum_limit(unsigned world_size);

// The pair of `count` elements (1..256) of a float type at `data`.
ExponentPair block_exponent(const void* data, std::size_t count, DType dtype);

// Quantizes `count` elements (1..256, one block or a part of it) to big-endian int32 at `wire` (unaligned allowed).
// Adds sum((2*(first_index+i)+1) * q_i) modulo 2^32 to *weighted. Int32 is copied (swapped) as it is and ignores
// exponent and world_size.
void quantize(const void* data, std::size_t count, DType dtype, int exponent, unsigned world_size,
              std::uint64_t first_index, std::uint8_t* wire, std::uint32_t* weighted);

// The inverse for sums: reads big-endian int32 at `wire`, writes `count` elements of `dtype`. Adds to *weighted like
// quantize. `keep_non_finite`: elements of `data` that are not finite are left as they are (SPEC.md, counts). Returns
// false when some |Q| exceeds sum_limit.
bool dequantize(const std::uint8_t* wire, std::size_t count, DType dtype, int exponent, unsigned world_size, OpCode op,
                bool keep_non_finite, std::uint64_t first_index, void* data, std::uint32_t* weighted);

// Counts of non-finite elements (SPEC.md): +Inf 1, -Inf 2^11, NaN both, big-endian; the places from `count` up to
// `part_elems` are written as 0. `part_elems` is what one packet takes of a block: 64 where chunks have 64 elements,
// else 256.
void count_non_finite(const void* data, std::size_t count, DType dtype, std::uint64_t first_index, std::uint8_t* wire,
                      std::uint32_t* weighted, std::size_t part_elems = kBlockElems);

// Reads 256 summed counts (any part of it: `count` elements) and overwrites the elements whose counts are not 0.
void apply_counts(const std::uint8_t* wire, std::size_t count, DType dtype, std::uint64_t first_index, void* data,
                  std::uint32_t* weighted);

// destination[i] += source[i] modulo 2^32, both big-endian int32, unaligned allowed.
void add_wire(std::uint8_t* destination, const std::uint8_t* source, std::size_t count);

// sum((2*(first_index+i)+1) * v_i) modulo 2^32 over big-endian int32 at `wire`.
std::uint32_t weighted_sum(const std::uint8_t* wire, std::size_t count, std::uint64_t first_index);

// Name of the vector form in use: "avx512", "avx2" or "scalar". set_kernels("scalar") etc. forces one (tests);
// false if the CPU lacks it.
const char* kernels_in_use();
bool set_kernels(const char* name);

}  // namespace netsum
