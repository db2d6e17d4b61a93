// The floating-point mode that every bit of a result is defined in: round to nearest even, denormals kept.
#pragma once

#include <cfenv>

namespace netsum {

// Applications switch denormals off for a thread (torch.set_flush_denormal), which would change what a tiny block
// quantizes to.
class DefaultFloatMode {
  public:
    DefaultFloatMode() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatMode() { std::fesetenv(&before_); }
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

  private:
    std::fenv_t before_;
};

}  // namespace netsum
