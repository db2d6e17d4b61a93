// netsum.native._native.fixed_point: whole arrays, block by block, with the signatures of netsum.protocol.fixed_point.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bind.hpp"
#include "netsum/fixed_point.hpp"
#include "netsum/float_mode.hpp"

namespace nb = nanobind;

namespace {

using Array = nb::ndarray<nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>, nb::c_contig>;
using ConstInts = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Exponents = nb::ndarray<nb::numpy, std::int8_t, nb::ndim<1>, nb::c_contig>;
using ConstExponents = nb::ndarray<const std::int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

netsum::DType dtype_of(const Array& x, int code) {
    if (code < 1 || code > 4)
        throw std::invalid_argument("dtype code: 1 float32, 2 float16, 3 bfloat16 (as uint16), 4 int32");
    const auto dtype = static_cast<netsum::DType>(code);
    if (x.itemsize() != netsum::dtype_bytes(dtype))
        throw std::invalid_argument("the array's item size is not that of the dtype code");
    return dtype;
}

void check_world_size(unsigned world_size) {
    if (world_size < 1 || world_size > 1024) throw std::invalid_argument("world_size is 1..1024");
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig> owned(std::size_t size) {
    auto* data = new T[size]();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>(data, {size}, owner);
}

// Calls body(first element, count) for each block.
template <typename Body>
void for_blocks(std::size_t size, Body body) {
    for (std::size_t first = 0; first < size; first += netsum::kBlockElems)
        body(first, std::min(netsum::kBlockElems, size - first));
}

void check_exponents(const ConstExponents& e0, std::size_t numel) {
    if (e0.size() * netsum::kBlockElems < numel)
        throw std::invalid_argument("one exponent is needed for each block of 256");
}

void swap_words(const std::uint8_t* wire, std::size_t count, std::int32_t* out) {
    std::uint32_t weighted = 0;
    netsum::dequantize(wire, count, netsum::DType::Int32, 0, 1, netsum::OpCode::Sum, false, 0, out, &weighted);
}

const std::uint8_t* bytes_of(const Array& x, std::size_t first) {
    return static_cast<const std::uint8_t*>(x.data()) + first * x.itemsize();
}

std::pair<Exponents, Exponents> block_exponents(const Array& x, int code) {
    const auto dtype = dtype_of(x, code);
    const std::size_t blocks = (x.size() + netsum::kBlockElems - 1) / netsum::kBlockElems;
    auto e0 = owned<std::int8_t>(blocks);
    auto e1 = owned<std::int8_t>(blocks);
    nb::gil_scoped_release release;
    const netsum::DefaultFloatMode float_mode;
    for_blocks(x.size(), [&](std::size_t first, std::size_t count) {
        const auto pair = netsum::block_exponent(bytes_of(x, first), count, dtype);
        e0.data()[first / netsum::kBlockElems] = pair.e0;
        e1.data()[first / netsum::kBlockElems] = pair.e1;
    });
    return {e0, e1};
}

Ints quantize(const Array& x, int code, const ConstExponents& e0, unsigned world_size) {
    const auto dtype = dtype_of(x, code);
    check_exponents(e0, x.size());
    check_world_size(world_size);
    auto q = owned<std::int32_t>(x.size());
    nb::gil_scoped_release release;
    const netsum::DefaultFloatMode float_mode;
    for_blocks(x.size(), [&](std::size_t first, std::size_t count) {
        std::uint8_t wire[4 * netsum::kBlockElems];
        std::uint32_t weighted = 0;
        netsum::quantize(bytes_of(x, first), count, dtype, e0.data()[first / netsum::kBlockElems], world_size, first,
                         wire, &weighted);
        swap_words(wire, count, q.data() + first);
    });
    return q;
}

void to_wire(const std::int32_t* q, std::size_t count, std::uint8_t* wire) {
    std::uint32_t weighted = 0;
    netsum::quantize(q, count, netsum::DType::Int32, 0, 1, 0, wire, &weighted);
}

// In place: `x` keeps its non-finite elements in the blocks flagged in `keep` (one a block).
bool dequantize_into(const ConstInts& q, Array x, int code, const ConstExponents& e0, const ConstExponents& keep,
                     unsigned world_size, int op) {
    const auto dtype = dtype_of(x, code);
    check_exponents(e0, x.size());
    check_exponents(keep, x.size());
    check_world_size(world_size);
    if (op != 1 && op != 2) throw std::invalid_argument("op code: 1 sum, 2 avg");
    if (q.size() != x.size()) throw std::invalid_argument("sums and tensor differ in length");
    bool fits = true;
    nb::gil_scoped_release release;
    const netsum::DefaultFloatMode float_mode;
    for_blocks(x.size(), [&](std::size_t first, std::size_t count) {
        std::uint8_t wire[4 * netsum::kBlockElems];
        to_wire(q.data() + first, count, wire);
        std::uint32_t weighted = 0;
        const std::size_t block = first / netsum::kBlockElems;
        fits &= netsum::dequantize(wire, count, dtype, e0.data()[block], world_size, static_cast<netsum::OpCode>(op),
                                   keep.data()[block] != 0, first, const_cast<std::uint8_t*>(bytes_of(x, first)),
                                   &weighted);
    });
    return !fits;
}

Ints count_non_finite(const Array& x, int code) {
    const auto dtype = dtype_of(x, code);
    auto counts = owned<std::int32_t>(x.size());
    nb::gil_scoped_release release;
    const netsum::DefaultFloatMode float_mode;
    for_blocks(x.size(), [&](std::size_t first, std::size_t count) {
        std::uint8_t wire[4 * netsum::kBlockElems];
        std::uint32_t weighted = 0;
        netsum::count_non_finite(bytes_of(x, first), count, dtype, first, wire, &weighted);
        swap_words(wire, count, counts.data() + first);
    });
    return counts;
}

void apply_counts(Array x, const ConstInts& counts, int code) {
    const auto dtype = dtype_of(x, code);
    if (counts.size() != x.size()) throw std::invalid_argument("counts and tensor differ in length");
    nb::gil_scoped_release release;
    const netsum::DefaultFloatMode float_mode;
    for_blocks(x.size(), [&](std::size_t first, std::size_t count) {
        std::uint8_t wire[4 * netsum::kBlockElems];
        to_wire(counts.data() + first, count, wire);
        std::uint32_t weighted = 0;
        netsum::apply_counts(wire, count, dtype, first, const_cast<std::uint8_t*>(bytes_of(x, first)), &weighted);
    });
}

std::uint32_t weighted_sum(const ConstInts& q, std::uint64_t first_index) {
    std::uint32_t weighted = 0;
    for_blocks(q.size(), [&](std::size_t first, std::size_t count) {
        std::uint8_t wire[4 * netsum::kBlockElems];
        netsum::quantize(q.data() + first, count, netsum::DType::Int32, 0, 1, first_index + first, wire, &weighted);
    });
    return weighted;
}

// Big-endian int32 at any alignment, as on the wire: returns a + b.
nb::bytes add_wire(const nb::bytes& a, const nb::bytes& b) {
    if (a.size() != b.size() || a.size() % 4 != 0)
        throw std::invalid_argument("two byte strings of equal length, a multiple of 4");
    std::vector<std::uint8_t> sum(a.c_str(), a.c_str() + a.size());
    netsum::add_wire(sum.data(), reinterpret_cast<const std::uint8_t*>(b.c_str()), a.size() / 4);
    return nb::bytes(reinterpret_cast<const char*>(sum.data()), sum.size());
}

}  // namespace

void bind_fixed_point(nb::module_& module) {
    auto m = module.def_submodule("fixed_point",
                                  "Fixed point on whole arrays; netsum.protocol.fixed_point is the readable twin.");
    m.def("block_exponents", &block_exponents, nb::arg("x"), nb::arg("dtype"));
    m.def("quantize", &quantize, nb::arg("x"), nb::arg("dtype"), nb::arg("e0"), nb::arg("world_size"));
    m.def("dequantize_into", &dequantize_into, nb::arg("q"), nb::arg("x"), nb::arg("dtype"), nb::arg("e0"),
          nb::arg("keep_non_finite"), nb::arg("world_size"), nb::arg("op"),
          "Writes into x; True when some |q| exceeds the limit of honest sums.");
    m.def("count_non_finite", &count_non_finite, nb::arg("x"), nb::arg("dtype"));
    m.def("apply_counts", &apply_counts, nb::arg("x"), nb::arg("counts"), nb::arg("dtype"));
    m.def("weighted_sum", &weighted_sum, nb::arg("q"), nb::arg("first_index"));
    m.def("add_wire", &add_wire, nb::arg("a"), nb::arg("b"));
    m.def("kernels_in_use", [] { return std::string(netsum::kernels_in_use()); });
    m.def("set_kernels", [](const std::string& name) { return netsum::set_kernels(name.c_str()); }, nb::arg("name"));
}
