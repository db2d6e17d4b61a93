// The integrity elements of one operation (protocol/SPEC.md section 3): what each group of payload chunks must sum up
// to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "netsum/fixed_point.hpp"

namespace netsum {

// h of SPEC.md: ranks that disagree on the operation fail its integrity check.
std::uint32_t description_crc(std::uint64_t index, std::uint64_t numel, DType dtype, OpCode op);

// All sums are modulo 2^32, one for each group.
class IntegritySums {
  public:
    struct Mismatch {
        std::size_t group = 0;
        std::uint32_t received = 0;
        std::uint32_t computed = 0;
    };

    IntegritySums(std::uint32_t crc, std::uint32_t world_size) : crc_(crc), world_size_(world_size) {}

    void grow(std::size_t groups) { groups_.resize(groups); }
    std::size_t groups() const { return groups_.size(); }

    std::uint32_t& own(std::size_t group) { return groups_[group].own; }            // integers that this worker put in
    std::uint32_t& result(std::size_t group) { return groups_[group].result; }      // integers that came back
    std::uint32_t& received(std::size_t group) { return groups_[group].received; }  // the element that came back
    void add_exponents(std::size_t group, std::uint64_t block, ExponentPair agreed);

    std::uint32_t element(std::size_t group) const {  // I_g, what this worker sends
        return groups_[group].own + groups_[group].exponents + crc_;
    }
    std::optional<Mismatch> first_mismatch() const;

  private:
    struct Group {
        std::uint32_t own = 0;
        std::uint32_t result = 0;
        std::uint32_t exponents = 0;
        std::uint32_t received = 0;
    };

    std::vector<Group> groups_;
    std::uint32_t crc_;
    std::uint32_t world_size_;
};

}  // namespace netsum
