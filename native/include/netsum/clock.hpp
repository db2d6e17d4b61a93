// Time of the packet path: CLOCK_MONOTONIC in microseconds. The machines never read it; loops and sockets do.
#pragma once

#include <time.h>

#include <cstdint>

namespace netsum {

inline std::int64_t monotonic_us() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000 + now.tv_nsec / 1'000;
}

inline timespec timespec_of_us(std::int64_t duration_us) {
    return {static_cast<time_t>(duration_us / 1'000'000), static_cast<long>(duration_us % 1'000'000) * 1'000};
}

}  // namespace netsum
