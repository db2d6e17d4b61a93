// Every vector form gives the bytes of the scalar form, at any length and alignment, and touches nothing beside its
// buffers. (That the scalar form is right is tested against netsum.protocol.fixed_point in
// tests/property/test_fixed_point_native.py.)
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "netsum/fixed_point.hpp"

using namespace netsum;

namespace {

constexpr DType kFloats[] = {DType::Float32, DType::Float16, DType::BFloat16};
constexpr DType kAll[] = {DType::Float32, DType::Float16, DType::BFloat16, DType::Int32};
constexpr std::size_t kLengths[] = {1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 255, 256};

// Restores the CPU's best form when it goes.
struct KernelGuard {
    std::string before = kernels_in_use();
    ~KernelGuard() { set_kernels(before.c_str()); }
};

std::vector<const char*> available_kernels() {
    const KernelGuard guard;
    std::vector<const char*> names;
    for (const char* name : {"scalar", "avx2", "avx512"}) {
        if (set_kernels(name)) names.push_back(name);
    }
    return names;
}

// `bytes` of room at an address that is `offset` past alignment, between guard bytes.
class GuardedBuffer {
  public:
    GuardedBuffer(std::size_t bytes, std::size_t offset) : bytes_(bytes), start_(kGuardBytes + offset) {
        storage_.assign(start_ + bytes + kGuardBytes, kGuard);
    }
    std::uint8_t* data() { return storage_.data() + start_; }
    std::vector<std::uint8_t> content() const {
        const auto first = storage_.begin() + static_cast<std::ptrdiff_t>(start_);
        return {first, first + static_cast<std::ptrdiff_t>(bytes_)};
    }
    bool guards_intact() const {
        for (std::size_t i = 0; i < storage_.size(); ++i) {
            if ((i < start_ || i >= start_ + bytes_) && storage_[i] != kGuard) return false;
        }
        return true;
    }

  private:
    static constexpr std::size_t kGuardBytes = 128;
    static constexpr std::uint8_t kGuard = 0xA5;
    std::size_t bytes_;
    std::size_t start_;
    std::vector<std::uint8_t> storage_;
};

// Elements of any bits, a quarter of them special.
std::vector<std::uint8_t> random_elements(std::mt19937& random, std::size_t count, DType dtype) {
    static constexpr std::array<std::uint32_t, 10> kSpecials = {0x00000000, 0x80000000, 0x00000001, 0x007FFFFF,
                                                                0x3F800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
                                                                0x7FA00001, 0xFFC00000};
    std::vector<std::uint8_t> elements(count * dtype_bytes(dtype));
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = random() % 4 == 0 ? kSpecials[random() % kSpecials.size()] : random();
        if (dtype_bytes(dtype) == 4) {
            std::memcpy(elements.data() + 4 * i, &bits, 4);
        } else {
            const auto upper = static_cast<std::uint16_t>(bits >> 16);
            std::memcpy(elements.data() + 2 * i, &upper, 2);
        }
    }
    return elements;
}

std::vector<std::uint8_t> random_bytes(std::mt19937& random, std::size_t count) {
    std::vector<std::uint8_t> bytes(count);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    return bytes;
}

// What a call left behind: bytes written, weighted sum, whether guards are whole.
struct Outcome {
    std::vector<std::uint8_t> bytes;
    std::uint32_t weighted = 0;
    bool fits = true;
    bool operator==(const Outcome&) const = default;
};

// Runs `call` (Outcome()) with every form and compares with the scalar one.
template <typename Call>
void check_all_kernels(Call call) {
    const KernelGuard guard;
    REQUIRE(set_kernels("scalar"));
    const Outcome expected = call();
    for (const char* name : available_kernels()) {
        CAPTURE(name);
        REQUIRE(set_kernels(name));
        CHECK(call() == expected);
    }
}

Outcome outcome(const GuardedBuffer& buffer, std::uint32_t weighted, bool fits = true) {
    CHECK(buffer.guards_intact());
    return {buffer.content(), weighted, fits};
}

float float_of(const std::uint8_t* element) {
    float x;
    std::memcpy(&x, element, 4);
    return x;
}

}  // namespace

TEST_CASE("kernels: scalar is always there, unknown names are refused") {
    const KernelGuard guard;
    CHECK(set_kernels("scalar"));
    CHECK(std::string(kernels_in_use()) == "scalar");
    CHECK_FALSE(set_kernels("abacus"));
    CHECK(std::string(kernels_in_use()) == "scalar");
}

TEST_CASE("quantize: all forms alike, wire unaligned, weighted sum that of the wire") {
    std::mt19937 random(1);
    for (const DType dtype : kAll) {
        for (const std::size_t count : kLengths) {
            const auto x = random_elements(random, count, dtype);
            const std::size_t offset = random() % 4;
            const std::uint64_t first_index = random();
            const unsigned world_size = 1 + random() % 1024;
            const int own = block_exponent(x.data(), count, dtype).e0;
            for (const int exponent : {own, std::min(own + 3, 127), 127}) {
                check_all_kernels([&] {
                    GuardedBuffer wire(4 * count, offset);
                    std::uint32_t weighted = 5;
                    quantize(x.data(), count, dtype, exponent, world_size, first_index, wire.data(), &weighted);
                    CHECK(weighted == 5 + weighted_sum(wire.data(), count, first_index));
                    return outcome(wire, weighted);
                });
            }
        }
    }
}

TEST_CASE("block_exponent: all forms alike") {
    std::mt19937 random(2);
    for (const DType dtype : kAll) {
        for (const std::size_t count : kLengths) {
            const auto x = random_elements(random, count, dtype);
            check_all_kernels([&] {
                const ExponentPair pair = block_exponent(x.data(), count, dtype);
                return Outcome{{static_cast<std::uint8_t>(pair.e0), static_cast<std::uint8_t>(pair.e1)}};
            });
        }
    }
}

TEST_CASE("dequantize: all forms alike, kept elements keep every bit") {
    std::mt19937 random(3);
    for (const DType dtype : kAll) {
        for (const std::size_t count : kLengths) {
            for (const OpCode op : {OpCode::Sum, OpCode::Avg}) {
                for (const bool keep : {false, true}) {
                    const auto old = random_elements(random, count, dtype);
                    const auto wire = random_bytes(random, 4 * count + 3);
                    const std::size_t offset = random() % 4;
                    const int exponent = static_cast<int>(random() % 256) - 128;
                    const unsigned world_size = 1 + random() % 1024;
                    const std::uint64_t first_index = random();
                    check_all_kernels([&] {
                        GuardedBuffer data(old.size(), 0);
                        std::copy(old.begin(), old.end(), data.data());
                        std::uint32_t weighted = 0;
                        const bool fits = dequantize(wire.data() + offset, count, dtype, exponent, world_size, op, keep,
                                                     first_index, data.data(), &weighted);
                        CHECK(weighted == weighted_sum(wire.data() + offset, count, first_index));
                        if (keep && dtype == DType::Float32) {
                            for (std::size_t i = 0; i < count; ++i) {
                                const bool finite = std::abs(float_of(&old[4 * i])) <= 3.4028235e38f;
                                if (!finite) CHECK(std::memcmp(data.data() + 4 * i, &old[4 * i], 4) == 0);
                            }
                        }
                        return outcome(data, weighted, fits);
                    });
                }
            }
        }
    }
}

TEST_CASE("dequantize: overflow is found in every position") {
    for (const char* name : available_kernels()) {
        CAPTURE(name);
        const KernelGuard guard;
        REQUIRE(set_kernels(name));
        for (const std::int64_t excess : {0, 1}) {
            for (const std::int64_t sign : {1, -1}) {
                for (std::size_t position = 0; position < 35; ++position) {
                    std::array<std::int32_t, 35> q{};
                    std::array<float, 35> x{};
                    q[position] = static_cast<std::int32_t>(sign * (sum_limit(3) + excess));
                    std::array<std::uint8_t, 4 * 35> wire{};
                    std::uint32_t weighted = 0;
                    quantize(q.data(), q.size(), DType::Int32, 0, 3, 0, wire.data(), &weighted);
                    CHECK(dequantize(wire.data(), q.size(), DType::Float32, 0, 3, OpCode::Sum, false, 0, x.data(),
                                     &weighted) == (excess == 0));
                }
            }
        }
    }
}

TEST_CASE("count_non_finite and apply_counts: all forms alike") {
    std::mt19937 random(4);
    for (const DType dtype : kFloats) {
        for (const std::size_t count : kLengths) {
            const auto x = random_elements(random, count, dtype);
            const std::uint64_t first_index = random();
            const std::size_t part_elems = count <= 64 ? 64 : kBlockElems;
            check_all_kernels([&] {
                GuardedBuffer wire(4 * part_elems, 1);
                std::uint32_t weighted = 0;
                count_non_finite(x.data(), count, dtype, first_index, wire.data(), &weighted, part_elems);
                CHECK(weighted == weighted_sum(wire.data(), part_elems, first_index));
                return outcome(wire, weighted);
            });
            GuardedBuffer wire(4 * kBlockElems, 3);
            std::uint32_t ignored = 0;
            count_non_finite(x.data(), count, dtype, first_index, wire.data(), &ignored);
            check_all_kernels([&] {
                GuardedBuffer data(x.size(), 0);
                std::uint32_t weighted = 0;
                apply_counts(wire.data(), count, dtype, first_index, data.data(), &weighted);
                CHECK(weighted == weighted_sum(wire.data(), count, first_index));
                return outcome(data, weighted);
            });
        }
    }
}

TEST_CASE("add_wire: modulo 2^32, all forms alike, both sides unaligned") {
    std::mt19937 random(5);
    for (const std::size_t count : {std::size_t{1}, std::size_t{17}, std::size_t{256}, std::size_t{2048}}) {
        const auto a = random_bytes(random, 4 * count);
        const auto b = random_bytes(random, 4 * count + 3);
        for (std::size_t offset = 0; offset < 4; ++offset) {
            check_all_kernels([&] {
                GuardedBuffer sum(a.size(), offset);
                std::copy(a.begin(), a.end(), sum.data());
                add_wire(sum.data(), b.data() + offset, count);
                std::uint32_t carry = 0;  // the first element, byte by byte
                for (std::size_t i = 4; i-- > 0;) {
                    carry += std::uint32_t{a[i]} + b[offset + i];
                    CHECK(sum.data()[i] == (carry & 0xFFu));
                    carry >>= 8;
                }
                return outcome(sum, 0);
            });
        }
    }
}

TEST_CASE("an average of equal values is that value; powers of two reach both ends of float32") {
    for (const float value : {1.0f, -0.75f, 0x1p-149f, 0x1p-126f, 0x1p127f}) {
        for (const unsigned world_size : {1u, 3u, 4u, 32u}) {
            std::array<float, 17> x;
            x.fill(value);
            const int exponent = block_exponent(x.data(), x.size(), DType::Float32).e0;
            std::array<std::uint8_t, 4 * 17> sum{};
            std::array<std::uint8_t, 4 * 17> wire{};
            std::uint32_t weighted = 0;
            for (unsigned r = 0; r < world_size; ++r) {
                quantize(x.data(), x.size(), DType::Float32, exponent, world_size, 0, wire.data(), &weighted);
                add_wire(sum.data(), wire.data(), x.size());
            }
            std::array<float, 17> average{};
            CHECK(dequantize(sum.data(), x.size(), DType::Float32, exponent, world_size, OpCode::Avg, false, 0,
                             average.data(), &weighted));
            for (const float y : average) CHECK(std::bit_cast<std::uint32_t>(y) == std::bit_cast<std::uint32_t>(value));
        }
    }
}
