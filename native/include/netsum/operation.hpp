// One operation as a stream of packets (protocol/SPEC.md section 3): what packet p carries, and what its result means.
// Everything here is about one tensor. Slots, numbers and times are the window's and the worker machine's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "netsum/fixed_point.hpp"
#include "netsum/integrity.hpp"

namespace netsum {

struct OperationConfig {
    std::uint64_t index = 0;
    void* data = nullptr;     // the tensor, contiguous; accessed in place
    std::uint64_t numel = 0;  // at least 1
    DType dtype = DType::Float32;
    OpCode op = OpCode::Sum;
    std::uint32_t slots = 0;
    std::uint32_t chunk_elems = 0;
    std::uint32_t world_size = 0;
};

// Invariants: chunk y of the tensor holds this worker's input until the result of payload chunk y is written, once;
// exponents are agreed for a chunk exactly when the result of the packet that carried them is in. Memory is allocated
// by the constructor and when it is sealed.
class Operation {
  public:
    enum class Outcome : std::uint8_t { Ok, Integrity, Overflow };

    explicit Operation(const OperationConfig& config);

    std::uint64_t index() const { return config_.index; }
    // P once sealed; before, the packets that are certain.
    std::uint64_t packets() const { return lag_ + chunks_ + counts_chunks_ + integrity_chunks_; }
    bool sealed() const { return sealed_; }
    bool complete() const { return sealed_ && answered_ == packets(); }
    std::uint64_t non_finite_blocks() const { return non_finite_blocks_.size(); }

    // Are all results in that packet `packet` is made from? (Whether its slot is free is the caller's question.)
    bool may_send(std::uint64_t packet) const;
    // Writes exponents and payload, as on the wire, for the first and only time. False: it has no payload, `payload` is
    // untouched.
    bool build(std::uint64_t packet, std::uint8_t* exponents, std::uint8_t* payload);
    // The result of `packet`; `payload` is null when it has none. Unless Ok, the operation is lost and detail() says
    // why.
    Outcome accept(std::uint64_t packet, const std::uint8_t* exponents, const std::uint8_t* payload);
    const std::string& detail() const { return detail_; }

    // Fills a float tensor that has had results written with NaN: a half-written tensor must never look like a result.
    void poison();

    std::optional<std::uint64_t>
        base;  // running number of packet 0; known when the operation before is sealed. The owner's.

  private:
    struct Part {  // elements of the tensor that stand together in a chunk: of one block
        std::uint64_t start = 0;
        std::size_t count = 0;
    };

    bool is_float() const { return config_.dtype != DType::Int32; }
    std::uint8_t* element(std::uint64_t i) const {
        return static_cast<std::uint8_t*>(config_.data) + i * dtype_bytes(config_.dtype);
    }
    std::uint64_t payload_chunks() const { return chunks_ + counts_chunks_; }
    std::uint64_t first_index(std::uint64_t y) const { return y * config_.chunk_elems; }
    std::size_t group_of(std::uint64_t y) const { return static_cast<std::size_t>(y / config_.slots); }
    Part clamped(std::uint64_t start) const;                       // up to part_elems_ elements from `start`
    Part tensor_part(std::uint64_t y, std::size_t offset) const;   // of tensor chunk y, from position `offset`
    Part counted_part(std::uint64_t y, std::size_t offset) const;  // of counts chunk y
    ExponentPair block_pair(std::uint64_t block) const;            // agreed
    bool exponents_agreed(std::uint64_t y) const;                  // of all blocks of tensor chunk y
    void seal();

    void build_exponents(std::uint64_t chunk, std::uint8_t* exponents);
    void build_tensor_chunk(std::uint64_t y, std::uint8_t* payload);
    void build_counts_chunk(std::uint64_t y, std::uint8_t* payload);
    void build_integrity_chunk(std::uint64_t i, std::uint8_t* payload) const;
    bool agree(std::uint64_t chunk, const std::uint8_t* exponents);
    bool write_tensor_chunk(std::uint64_t y, const std::uint8_t* payload);
    void write_counts_chunk(std::uint64_t y, const std::uint8_t* payload);
    void read_integrity_chunk(std::uint64_t i, const std::uint8_t* payload);
    Outcome check_integrity();

    OperationConfig config_;
    std::size_t pairs_;       // exponent pairs in a packet
    std::size_t part_elems_;  // elements that share a pair in a packet: a block, or a chunk where that is smaller
    std::uint64_t chunks_per_block_;      // 1, or 4 for chunks of 64
    std::uint64_t chunks_;                // C
    std::uint64_t lag_;                   // L
    std::uint64_t counts_chunks_ = 0;     // K', once sealed
    std::uint64_t integrity_chunks_ = 0;  // I, once sealed
    bool sealed_ = false;

    std::vector<ExponentPair> own_;                 // by chunk and pair
    std::vector<ExponentPair> agreed_;              // by chunk and pair
    std::vector<std::uint8_t> is_agreed_;           // by chunk
    std::vector<std::uint64_t> non_finite_blocks_;  // ascending; once sealed
    std::uint64_t chunks_unagreed_;
    std::uint64_t chunks_unwritten_;
    std::uint64_t chunks_unsent_;  // payload and counts chunks; grows when sealed
    std::uint64_t answered_ = 0;   // packets
    bool any_result_written_ = false;
    IntegritySums integrity_;
    std::string detail_;
};

}  // namespace netsum
