#include "fixed_point_kernels.hpp"

#include <atomic>
#include <cstring>

namespace netsum::kernels {
namespace {

// NAME<loop>::call is the loop compiled for ATTRIBUTES.
#define NETSUM_INSTRUCTION_SET(NAME, ATTRIBUTES)                              \
    template <auto loop>                                                      \
    struct NAME;                                                              \
    template <typename Result, typename... Args, Result (*loop)(Args...)>     \
    struct NAME<loop> {                                                       \
        ATTRIBUTES static Result call(Args... args) { return loop(args...); } \
    }

template <template <auto> typename Compiled>
constexpr Table table(const char* name) {
    return {name,
            Compiled<loops::block_max>::call,
            Compiled<loops::quantize>::call,
            Compiled<loops::dequantize<false>>::call,
            Compiled<loops::dequantize<true>>::call,
            Compiled<loops::add_wire>::call,
            Compiled<loops::weighted_sum>::call,
            Compiled<loops::swap_out>::call,
            Compiled<loops::swap_in>::call,
            Compiled<loops::widen>::call,
            Compiled<loops::narrow>::call,
            Compiled<loops::replace_finite>::call,
            Compiled<loops::count_non_finite>::call,
            Compiled<loops::apply_counts>::call};
}

// On aarch64 the plain form is vectorized for NEON already.
NETSUM_INSTRUCTION_SET(Scalar, );
constexpr Table kScalar = table<Scalar>("scalar");

#if defined(__x86_64__)
NETSUM_INSTRUCTION_SET(Avx2, __attribute__((target("avx2"))));
constexpr Table kAvx2 = table<Avx2>("avx2");
#if defined(__clang__)
NETSUM_INSTRUCTION_SET(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512))));
#else
NETSUM_INSTRUCTION_SET(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))));
#endif
constexpr Table kAvx512 = table<Avx512>("avx512");
#endif

// Widest first.
constexpr const Table* kTables[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvx2,
#endif
    &kScalar};

bool supported(const Table* candidate) {
#if defined(__x86_64__)
    if (candidate == &kAvx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
    if (candidate == &kAvx2) return __builtin_cpu_supports("avx2");
#endif
    return candidate == &kScalar;
}

const Table* widest() {
    for (const Table* candidate : kTables) {
        if (supported(candidate)) return candidate;
    }
    return &kScalar;
}

std::atomic<const Table*>& current() {
    static std::atomic<const Table*> chosen{widest()};
    return chosen;
}

}  // namespace

const Table& in_use() {
    return *current().load(std::memory_order_relaxed);
}

bool select(const char* name) {
    for (const Table* candidate : kTables) {
        if (std::strcmp(candidate->name, name) == 0 && supported(candidate)) {
            current().store(candidate, std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

}  // namespace netsum::kernels
