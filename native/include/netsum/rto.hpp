// Retransmission timeout from measured round trips (RFC 6298, in integers of microseconds; protocol/SPEC.md section 5).
#pragma once

#include <algorithm>
#include <cstdint>

namespace netsum {

// Invariant: min_rto_us <= rto_us() <= max_rto_us / 8 once there is a sample; initial_rto_us before.
class RttEstimator {
  public:
    RttEstimator(std::int64_t initial_rto_us, std::int64_t min_rto_us, std::int64_t max_rto_us)
        : rto_us_(initial_rto_us), min_rto_us_(min_rto_us), max_rto_us_(max_rto_us / kMaxRtoShare) {}

    // `rtt_us`: from the only transmission of a packet to its result (Karn: never of a resent one).
    void sample(std::int64_t rtt_us) {
        if (!has_sample_) {
            has_sample_ = true;
            srtt_us_ = rtt_us;
            rttvar_us_ = rtt_us / 2;
        } else {
            const std::int64_t deviation_us = srtt_us_ > rtt_us ? srtt_us_ - rtt_us : rtt_us - srtt_us_;
            rttvar_us_ = (3 * rttvar_us_ + deviation_us) / 4;
            srtt_us_ = (7 * srtt_us_ + rtt_us) / 8;
        }
        rto_us_ = std::min(std::max(srtt_us_ + std::max(4 * rttvar_us_, kGranularityUs), min_rto_us_), max_rto_us_);
    }

    std::int64_t rto_us() const { return rto_us_; }
    std::int64_t srtt_us() const { return srtt_us_; }  // 0 before the first sample

  private:
    static constexpr std::int64_t kGranularityUs = 1000;
    // A round trip ends with the slowest worker. Unbounded, one rank's timeouts would lengthen every rank's.
    static constexpr std::int64_t kMaxRtoShare = 8;

    std::int64_t rto_us_;
    std::int64_t srtt_us_ = 0;
    std::int64_t rttvar_us_ = 0;
    std::int64_t min_rto_us_;
    std::int64_t max_rto_us_;
    bool has_sample_ = false;
};

}  // namespace netsum
