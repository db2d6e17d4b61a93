#include "netsum/operation.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <limits>

#include "netsum/wire.hpp"

namespace netsum {

namespace {

std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) {
    return (a + b - 1) / b;
}

std::uint32_t read_word(const std::uint8_t* wire) {
    return std::uint32_t{wire[0]} << 24 | std::uint32_t{wire[1]} << 16 | std::uint32_t{wire[2]} << 8 | wire[3];
}

void write_word(std::uint32_t word, std::uint8_t* wire) {
    for (int i = 0; i < 4; ++i) wire[i] = static_cast<std::uint8_t>(word >> (24 - 8 * i));
}

ExponentPair pair_at(const std::uint8_t* exponents, std::size_t i) {
    return {static_cast<std::int8_t>(exponents[2 * i]), static_cast<std::int8_t>(exponents[2 * i + 1])};
}

}  // namespace

Operation::Operation(const OperationConfig& config)
    : config_(config),
      pairs_(exponent_pairs_of(config.chunk_elems)),
      part_elems_(std::min<std::size_t>(config.chunk_elems, kBlockElems)),
      chunks_per_block_(kBlockElems / part_elems_),
      chunks_(ceil_div(config.numel, config.chunk_elems)),
      lag_(is_float() ? std::min<std::uint64_t>(config.slots, chunks_) : 0),
      chunks_unagreed_(is_float() ? chunks_ : 0),
      chunks_unwritten_(chunks_),
      chunks_unsent_(chunks_),
      integrity_(description_crc(config.index, config.numel, config.dtype, config.op), config.world_size) {
    integrity_.grow(ceil_div(chunks_, config.slots));
    if (is_float()) {
        own_.resize(chunks_ * pairs_);
        agreed_.resize(chunks_ * pairs_);
        is_agreed_.resize(chunks_);
    } else {
        seal();
    }
}

// -- layout ----------------------------------------------------------------------------------------------------------

void Operation::seal() {
    sealed_ = true;
    if (is_float()) {
        const std::uint64_t blocks = ceil_div(config_.numel, kBlockElems);
        for (std::uint64_t block = 0; block < blocks; ++block) {
            const ExponentPair pair = block_pair(block);
            if (pair.e1 != 0) non_finite_blocks_.push_back(block);
            integrity_.add_exponents(group_of(block * kBlockElems / config_.chunk_elems), block, pair);
        }
        counts_chunks_ = ceil_div(non_finite_blocks_.size() * kBlockElems, config_.chunk_elems);
        chunks_unsent_ += counts_chunks_;
    }
    integrity_.grow(ceil_div(payload_chunks(), config_.slots));
    integrity_chunks_ = ceil_div(integrity_.groups(), config_.chunk_elems);
}

Operation::Part Operation::clamped(std::uint64_t start) const {
    if (start >= config_.numel) return {};
    return {start, static_cast<std::size_t>(std::min<std::uint64_t>(part_elems_, config_.numel - start))};
}

Operation::Part Operation::tensor_part(std::uint64_t y, std::size_t offset) const {
    return clamped(first_index(y) + offset);
}

Operation::Part Operation::counted_part(std::uint64_t y, std::size_t offset) const {
    const std::uint64_t position = first_index(y - chunks_) + offset;
    const std::uint64_t ordinal = position / kBlockElems;
    if (ordinal >= non_finite_blocks_.size()) return {};
    return clamped(non_finite_blocks_[ordinal] * kBlockElems + position % kBlockElems);
}

ExponentPair Operation::block_pair(std::uint64_t block) const {
    ExponentPair pair;
    const std::uint64_t first = block * chunks_per_block_;
    const std::uint64_t end = std::min<std::uint64_t>(first + chunks_per_block_, agreed_.size());
    for (std::uint64_t i = first; i < end; ++i) {
        pair.e0 = std::max(pair.e0, agreed_[i].e0);
        pair.e1 = std::max(pair.e1, agreed_[i].e1);
    }
    return pair;
}

bool Operation::exponents_agreed(std::uint64_t y) const {
    const std::uint64_t first = y / chunks_per_block_ * chunks_per_block_;
    const std::uint64_t end = std::min(first + chunks_per_block_, chunks_);
    for (std::uint64_t i = first; i < end; ++i) {
        if (!is_agreed_[i]) return false;
    }
    return true;
}

// -- sending ---------------------------------------------------------------------------------------------------------

bool Operation::may_send(std::uint64_t packet) const {
    if (packet < lag_) return true;
    const std::uint64_t y = packet - lag_;
    if (y < chunks_) return !is_float() || exponents_agreed(y);
    if (!sealed_) return false;
    return y < payload_chunks() ? chunks_unwritten_ == 0 : chunks_unsent_ == 0;
}

bool Operation::build(std::uint64_t packet, std::uint8_t* exponents, std::uint8_t* payload) {
    build_exponents(packet, exponents);
    if (packet < lag_) return false;
    const std::uint64_t y = packet - lag_;
    if (y >= payload_chunks()) {
        build_integrity_chunk(y - payload_chunks(), payload);
        return true;
    }
    --chunks_unsent_;
    if (y < chunks_) {
        build_tensor_chunk(y, payload);
    } else {
        build_counts_chunk(y, payload);
    }
    return true;
}

void Operation::build_exponents(std::uint64_t chunk, std::uint8_t* exponents) {
    for (std::size_t i = 0; i < pairs_; ++i) {
        ExponentPair pair;
        if (is_float() && chunk < chunks_) {
            const Part part = tensor_part(chunk, i * part_elems_);
            if (part.count > 0) pair = block_exponent(element(part.start), part.count, config_.dtype);
            own_[chunk * pairs_ + i] = pair;
        }
        exponents[2 * i] = static_cast<std::uint8_t>(pair.e0);
        exponents[2 * i + 1] = static_cast<std::uint8_t>(pair.e1);
    }
}

void Operation::build_tensor_chunk(std::uint64_t y, std::uint8_t* payload) {
    for (std::size_t offset = 0; offset < config_.chunk_elems; offset += part_elems_) {
        const Part part = tensor_part(y, offset);
        std::uint8_t* wire = payload + 4 * offset;
        std::memset(wire + 4 * part.count, 0, 4 * (part_elems_ - part.count));
        if (part.count == 0) continue;
        const int exponent = is_float() ? block_pair(part.start / kBlockElems).e0 : kNoExponent;
        quantize(element(part.start), part.count, config_.dtype, exponent, config_.world_size, first_index(y) + offset,
                 wire, &integrity_.own(group_of(y)));
    }
}

void Operation::build_counts_chunk(std::uint64_t y, std::uint8_t* payload) {
    for (std::size_t offset = 0; offset < config_.chunk_elems; offset += part_elems_) {
        const Part part = counted_part(y, offset);
        std::array<std::uint8_t, 4 * kBlockElems>
            counts{};  // count_non_finite fills a whole block; a chunk may be smaller
        if (part.count > 0) {
            count_non_finite(element(part.start), part.count, config_.dtype, first_index(y) + offset, counts.data(),
                             &integrity_.own(group_of(y)));
        }
        std::memcpy(payload + 4 * offset, counts.data(), 4 * part_elems_);
    }
}

void Operation::build_integrity_chunk(std::uint64_t i, std::uint8_t* payload) const {
    for (std::size_t position = 0; position < config_.chunk_elems; ++position) {
        const std::uint64_t group = first_index(i) + position;
        write_word(group < integrity_.groups() ? integrity_.element(group) : 0, payload + 4 * position);
    }
}

// -- results ---------------------------------------------------------------------------------------------------------

Operation::Outcome Operation::accept(std::uint64_t packet, const std::uint8_t* exponents, const std::uint8_t* payload) {
    ++answered_;
    if (is_float() && packet < chunks_ && !agree(packet, exponents)) {
        detail_ = "the agreed exponents of chunk " + std::to_string(packet) + " are below this rank's own";
        return Outcome::Integrity;
    }
    if (packet >= lag_ && payload != nullptr) {
        const std::uint64_t y = packet - lag_;
        if (y >= payload_chunks()) {
            read_integrity_chunk(y - payload_chunks(), payload);
        } else if (y >= chunks_) {
            write_counts_chunk(y, payload);
        } else if (!write_tensor_chunk(y, payload)) {
            detail_ = "a sum in chunk " + std::to_string(y) + " is larger than " + std::to_string(config_.world_size) +
                      " workers can reach";
            return Outcome::Overflow;
        }
    }
    return complete() ? check_integrity() : Outcome::Ok;
}

bool Operation::agree(std::uint64_t chunk, const std::uint8_t* exponents) {
    for (std::size_t i = 0; i < pairs_; ++i) {
        const ExponentPair pair = pair_at(exponents, i);
        const ExponentPair own = own_[chunk * pairs_ + i];
        if (pair.e0 < own.e0 || pair.e1 < own.e1) return false;
        agreed_[chunk * pairs_ + i] = pair;
    }
    is_agreed_[chunk] = 1;
    if (--chunks_unagreed_ == 0) seal();
    return true;
}

bool Operation::write_tensor_chunk(std::uint64_t y, const std::uint8_t* payload) {
    any_result_written_ = true;
    --chunks_unwritten_;
    std::uint32_t& weighted = integrity_.result(group_of(y));
    bool within_limit = true;
    for (std::size_t offset = 0; offset < config_.chunk_elems; offset += part_elems_) {
        const Part part = tensor_part(y, offset);
        const std::uint8_t* wire = payload + 4 * offset;
        const std::uint64_t first = first_index(y) + offset;
        if (part.count > 0) {
            const ExponentPair pair = is_float() ? block_pair(part.start / kBlockElems) : ExponentPair{};
            within_limit &= dequantize(wire, part.count, config_.dtype, pair.e0, config_.world_size, config_.op,
                                       pair.e1 != 0, first, element(part.start), &weighted);
        }
        // What stands past the tensor's end must be zeros; the integrity element tells.
        weighted += weighted_sum(wire + 4 * part.count, part_elems_ - part.count, first + part.count);
    }
    return within_limit;
}

void Operation::write_counts_chunk(std::uint64_t y, const std::uint8_t* payload) {
    std::uint32_t& weighted = integrity_.result(group_of(y));
    for (std::size_t offset = 0; offset < config_.chunk_elems; offset += part_elems_) {
        const Part part = counted_part(y, offset);
        const std::uint8_t* wire = payload + 4 * offset;
        const std::uint64_t first = first_index(y) + offset;
        if (part.count > 0) {
            apply_counts(wire, part.count, config_.dtype, first, element(part.start), &weighted);
        }
        weighted += weighted_sum(wire + 4 * part.count, part_elems_ - part.count, first + part.count);
    }
}

void Operation::read_integrity_chunk(std::uint64_t i, const std::uint8_t* payload) {
    for (std::size_t position = 0; position < config_.chunk_elems; ++position) {
        const std::uint64_t group = first_index(i) + position;
        if (group >= integrity_.groups()) return;
        integrity_.received(group) = read_word(payload + 4 * position);
    }
}

Operation::Outcome Operation::check_integrity() {
    const auto mismatch = integrity_.first_mismatch();
    if (!mismatch) return Outcome::Ok;
    std::array<char, 120> text{};
    std::snprintf(text.data(), text.size(), "integrity element %zu: received 0x%08x, computed 0x%08x from the result",
                  mismatch->group, mismatch->received, mismatch->computed);
    detail_ = text.data();
    return Outcome::Integrity;
}

void Operation::poison() {
    if (!any_result_written_ || !is_float()) return;
    if (config_.dtype == DType::Float32) {
        std::fill_n(static_cast<float*>(config_.data), config_.numel, std::numeric_limits<float>::quiet_NaN());
    } else {
        const std::uint16_t nan = config_.dtype == DType::Float16 ? 0x7E00 : 0x7FC0;
        std::fill_n(static_cast<std::uint16_t*>(config_.data), config_.numel, nan);
    }
}

}  // namespace netsum
