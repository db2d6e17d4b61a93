// What both packet loops need: a mutex that is fair to the rarer user, and a way to wake a thread that sleeps in ppoll.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <span>
#include <system_error>

#include "netsum/clock.hpp"

namespace netsum {

inline constexpr std::int64_t kMaxSleepUs = 200'000;  // of a loop: bounds every wait on it, whatever else fails

// A loop that unlocks and locks again at once would starve the others on a plain mutex. Here who comes second waits
// holding `turn_`, and the loop, coming back, waits behind it.
class FairMutex {
  public:
    void lock() {
        const std::lock_guard turn(turn_);
        state_.lock();
    }
    void unlock() { state_.unlock(); }

  private:
    std::mutex turn_;
    std::mutex state_;
};

class WakeEvent {
  public:
    WakeEvent() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    ~WakeEvent() { close(fd_); }
    WakeEvent(const WakeEvent&) = delete;
    WakeEvent& operator=(const WakeEvent&) = delete;

    int fd() const { return fd_; }
    void wake() { eventfd_write(fd_, 1); }
    void clear() {
        eventfd_t ignored = 0;
        eventfd_read(fd_, &ignored);
    }

  private:
    int fd_;
};

inline void sleep_until_readable(std::span<pollfd> descriptors, std::int64_t duration_us) {
    const timespec timeout = timespec_of_us(std::clamp<std::int64_t>(duration_us, 0, kMaxSleepUs));
    ppoll(descriptors.data(), descriptors.size(), &timeout, nullptr);
}

}  // namespace netsum
