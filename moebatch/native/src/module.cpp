// The Python face: addresses as integers, the GIL released while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <stdexcept>
#include <string>

#include "drivers.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace moebatch;

namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

const Kernels& kernels_named(const std::string& name) {
    const Kernels* kernels = choose_kernels(name.empty() ? nullptr : name.c_str());
    if (kernels == nullptr) throw std::invalid_argument("no variant " + name + " on this processor");
    return *kernels;
}

const Gemm& gemm_of(const Runner& runner, const Matrix& w, bool bf16_x) {
    const Gemm* gemm = runner.kernels().gemm(w.type, bf16_x);
    if (gemm == nullptr) throw std::invalid_argument("this variant has no kernel for these weights");
    return *gemm;
}

void advise_huge_pages(uintptr_t address, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t kPage = 2u << 20;
    const uintptr_t first = (address + kPage - 1) / kPage * kPage, last = (address + bytes) / kPage * kPage;
    if (first < last) madvise(at<void>(first), last - first, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

}  // namespace

NB_MODULE(_kernels, m) {
    nb::enum_<DType>(m, "DType")
        .value("f32", DType::f32)
        .value("bf16", DType::bf16)
        .value("f16", DType::f16)
        .value("i8", DType::i8)
        .value("i4", DType::i4);

    nb::class_<Matrix>(m, "Matrix")
        .def("__init__",
             [](Matrix* self, uintptr_t data, DType type, int64_t outputs, int64_t inputs, int64_t group,
                bool zeros) {
                 const bool whole = type == DType::i8 || type == DType::i4;
                 if (whole && (group < kBlockInputs || group > kMaxGroup || group % kBlockInputs))
                     throw std::invalid_argument("a group is a multiple of 32 inputs, 256 at most");
                 new (self) Matrix{at<const uint8_t>(data), type, outputs, {inputs, group, zeros}};
             },
             "data"_a, "type"_a, "outputs"_a, "inputs"_a, "group"_a = 0, "zeros"_a = false)
        .def_prop_ro("bytes", &Matrix::bytes);

    nb::class_<Expert>(m, "Expert")
        .def("__init__",
             [](Expert* self, const Matrix& gate, const Matrix& up, const Matrix& down,
                uintptr_t gate_bias, uintptr_t up_bias, uintptr_t down_bias) {
                 new (self) Expert{gate, up, down, at<const float>(gate_bias),
                                   at<const float>(up_bias), at<const float>(down_bias)};
             },
             "gate"_a, "up"_a, "down"_a, "gate_bias"_a = 0, "up_bias"_a = 0, "down_bias"_a = 0);

    nb::class_<Runner>(m, "Runner")
        .def("__init__",
             [](Runner* self, const std::string& variant, int threads) {
                 new (self) Runner(kernels_named(variant), threads);
             },
             "variant"_a, "threads"_a)
        .def_prop_ro("variant", [](const Runner& r) { return std::string(r.kernels().name); })
        .def_prop_ro("threads", [](Runner& r) { return r.pool().size(); })
        .def("matmul",
             [](Runner& r, const Matrix& w, uintptr_t x, DType x_type, int64_t x_stride,
                int64_t rows, uintptr_t out, int64_t out_stride, uintptr_t bias, bool bf16_x) {
                 gemm_of(r, w, bf16_x);
                 nb::gil_scoped_release free;
                 r.matmul(w, {at<const void>(x), x_type, x_stride, nullptr}, rows,
                          at<const float>(bias), bf16_x, {at<float>(out), out_stride});
             },
             "w"_a, "x"_a, "x_type"_a, "x_stride"_a, "rows"_a, "out"_a, "out_stride"_a,
             "bias"_a = 0, "bf16_x"_a = false)
        .def("ffn",
             [](Runner& r, const std::vector<const Expert*>& experts, std::vector<int64_t> starts,
                uintptr_t tokens, uintptr_t weights, uintptr_t x, DType x_type, int64_t x_stride,
                uintptr_t out, int64_t out_stride, bool bf16_x, float alpha, float shift,
                float limit) {
                 if (starts.size() != experts.size() + 1)
                     throw std::invalid_argument("starts must be one longer than experts");
                 std::vector<Expert> all;
                 for (const Expert* expert : experts) {
                     gemm_of(r, expert->gate, bf16_x), gemm_of(r, expert->down, bf16_x);
                     all.push_back(*expert);
                 }
                 nb::gil_scoped_release free;
                 r.ffn(all, {std::move(starts), at<const int64_t>(tokens), at<const float>(weights)},
                       {at<const void>(x), x_type, x_stride, nullptr}, {alpha, shift, limit},
                       bf16_x, {at<float>(out), out_stride});
             },
             "experts"_a, "starts"_a, "tokens"_a, "weights"_a, "x"_a, "x_type"_a, "x_stride"_a,
             "out"_a, "out_stride"_a, "bf16_x"_a = false, "alpha"_a = 1.0f, "shift"_a = 0.0f,
             "limit"_a = 0.0f)
        .def("attend",
             [](Runner& r, DType type, uintptr_t keys, uintptr_t values, uintptr_t key_scales,
                uintptr_t value_scales, int64_t heads,
                int64_t groups, int64_t head_dim, uintptr_t q, int64_t q_stride, uintptr_t out,
                int64_t out_stride, int64_t rows, uintptr_t sequences, uintptr_t lengths,
                uintptr_t tables, int64_t table_stride, int64_t window, uintptr_t sinks,
                float scale, bool bf16_x) {
                 if (groups < 1 || heads % groups || heads / groups > kMaxVectors)
                     throw std::invalid_argument("too many query heads for a key/value head");
                 nb::gil_scoped_release free;
                 r.attend({type, at<const uint8_t>(keys), at<const uint8_t>(values),
                           at<const float>(key_scales), at<const float>(value_scales), heads, groups,
                           head_dim, at<const float>(q), q_stride, at<float>(out), out_stride, rows,
                           at<const int64_t>(sequences), at<const int64_t>(lengths),
                           at<const int32_t>(tables), table_stride, window,
                           at<const float>(sinks), scale, bf16_x});
             },
             "type"_a, "keys"_a, "values"_a, "key_scales"_a, "value_scales"_a, "heads"_a, "groups"_a, "head_dim"_a, "q"_a,
             "q_stride"_a, "out"_a, "out_stride"_a, "rows"_a, "sequences"_a, "lengths"_a,
             "tables"_a, "table_stride"_a, "window"_a = 0, "sinks"_a = 0, "scale"_a = 1.0f,
             "bf16_x"_a = false)
        .def("pack",
             [](Runner& r, uintptr_t weights, DType type, int64_t outputs, int64_t inputs,
                int64_t stride, uintptr_t packed) {
                 nb::gil_scoped_release free;
                 pack(r.kernels(), at<const void>(weights), type, outputs, inputs, stride,
                      at<void>(packed));
             },
             "weights"_a, "type"_a, "outputs"_a, "inputs"_a, "stride"_a, "packed"_a)
        .def("pack_rounded",
             [](Runner& r, uintptr_t weights, DType type, int64_t stride, const Matrix& to) {
                 nb::gil_scoped_release free;
                 return pack_rounded(r.kernels(), at<const void>(weights), type, stride, to,
                                     const_cast<uint8_t*>(to.data));
             },
             "weights"_a, "type"_a, "stride"_a, "to"_a)
        .def("peak_flops",
             [](Runner& r, int64_t rounds, bool bf16_x) {
                 nb::gil_scoped_release free;
                 std::vector<float> sinks(static_cast<size_t>(r.pool().size()) * 16);
                 std::vector<double> done(static_cast<size_t>(r.pool().size()) * 16);
                 r.pool().run(r.pool().size(), [&](int64_t i, int) {
                     done[static_cast<size_t>(i) * 16] =
                         r.kernels().peak(rounds, bf16_x, &sinks[static_cast<size_t>(i) * 16]);
                 });
                 double all = 0.0;
                 for (double one : done) all += one;
                 return all;
             },
             "rounds"_a, "bf16_x"_a)
        .def("read_all",
             [](Runner& r, uintptr_t data, int64_t bytes) {
                 nb::gil_scoped_release free;
                 constexpr int64_t kPiece = 1 << 20;
                 std::vector<float> sums(static_cast<size_t>(bytes / kPiece + 1));
                 r.pool().run((bytes + kPiece - 1) / kPiece, [&](int64_t i, int) {
                     const int64_t first = i * kPiece, last = std::min(bytes, first + kPiece);
                     sums[static_cast<size_t>(i)] =
                         r.kernels().read_all(at<const float>(data + static_cast<uintptr_t>(first)),
                                              (last - first) / 4);
                 });
                 double all = 0.0;
                 for (float sum : sums) all += sum;
                 return all;
             },
             "data"_a, "bytes"_a);

    m.def("variants", [] {
        std::vector<std::string> names;
        for (const char* name : variant_names()) names.emplace_back(name);
        return names;
    });
    m.def("advise_huge_pages", &advise_huge_pages, "address"_a, "bytes"_a);
}
