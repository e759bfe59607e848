// Weights from the checkpoint's rows into panels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "drivers.h"

namespace moebatch {

namespace {

int64_t bytes_of(DType type) { return type == DType::f32 ? 4 : 2; }

int64_t step_of(DType type) { return type == DType::bf16 ? 2 : 1; }

// fp16 pairs [inputs/2][16][2] -> [inputs][16], in place.
void split_pairs(uint16_t* panel, int64_t pairs) {
    for (int64_t p = 0; p < pairs; ++p) {
        uint16_t* at = panel + p * 2 * kPanel;
        uint16_t copy[2 * kPanel];
        std::memcpy(copy, at, sizeof copy);
        for (int j = 0; j < kPanel; ++j) {
            at[j] = copy[2 * j];
            at[kPanel + j] = copy[2 * j + 1];
        }
    }
}

// Nearest number of fp16, even on a tie; infinity beyond its range.
uint16_t to_f16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    const uint16_t sign = static_cast<uint16_t>(word >> 16 & 0x8000u);
    const float size = std::fabs(x);
    if (size >= 65520.0f) return sign | 0x7c00u;
    if (size < 0x1p-14f)  // subnormal: whole multiples of 2^-24
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f)));
    word &= 0x7fffffffu;
    word += 0xfffu + (word >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((word >> 13) - (112u << 10)));
}

float from_f16(uint16_t bits) {
    const float size = (bits & 0x7c00u) == 0 ? static_cast<float>(bits & 0x3ffu) * 0x1p-24f
                                             : std::ldexp(static_cast<float>(1024u | (bits & 0x3ffu)),
                                                          static_cast<int>(bits >> 10 & 31u) - 25);
    return bits & 0x8000u ? -size : size;
}

void widen_row(const void* from, DType type, int64_t count, float* to) {
    if (type == DType::f32) {
        std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    const uint16_t* half = static_cast<const uint16_t*>(from);
    for (int64_t k = 0; k < count; ++k) {
        if (type == DType::bf16) {
            const uint32_t word = static_cast<uint32_t>(half[k]) << 16;
            std::memcpy(to + k, &word, sizeof word);
        } else {
            to[k] = (half[k] & 0x7c00u) == 0x7c00u ? INFINITY : from_f16(half[k]);
        }
    }
}

// Scale and zero point of one output's group, from its least and its largest weight.
struct Scale {
    uint16_t bits;
    float factor, zero;

    Scale(float low, float high, int levels, bool zeros) {
        const int middle = (levels + 1) / 2;
        float wide = 0.0f;
        if (zeros) {
            wide = (high - low) / static_cast<float>(levels);
        } else if (levels > 15) {
            wide = std::max(high, -low) / static_cast<float>(middle - 1);
        } else {  // the larger side gets the one number more, which is below the middle
            wide = (high > -low ? -high : -low) / static_cast<float>(middle);
        }
        bits = to_f16(wide);
        const float size = from_f16(bits);
        factor = size != 0.0f ? 1.0f / size : 0.0f;
        zero = static_cast<float>(middle);
        if (zeros) zero = std::min(std::nearbyint(-low * factor), static_cast<float>(levels));
    }
};

// Numbers [inputs][16], a multiple of 32 inputs, as bytes side by side; see kernels.h.
void store_numbers(const int32_t* numbers, int64_t inputs, DType type, uint8_t* to) {
    const int64_t step = type == DType::i4 ? 8 : 4;
    for (int64_t k = 0; k < inputs; k += step, to += 64) {
        int32_t words[kPanel];
        for (int j = 0; j < kPanel; ++j) {
            const int32_t* at = numbers + k * kPanel + j;
            uint32_t word = 0;
            for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(at[i * kPanel]) << (8 * i);
            for (int i = 4; i < step; ++i) word |= static_cast<uint32_t>(at[i * kPanel]) << (8 * i - 28);
            words[j] = static_cast<int32_t>(word);
        }
        std::memcpy(to, words, sizeof words);
    }
}

}  // namespace

int64_t Matrix::panel_bytes() const {
    if (type == DType::i8) return inputs.header() + inputs.padded() * kPanel;
    if (type == DType::i4) return inputs.header() + inputs.padded() * kPanel / 2;
    return round_up(inputs.count, step_of(type)) * kPanel * bytes_of(type);
}

bool pack_rounded(const Kernels& kernels, const void* weights, DType type, int64_t stride, const Matrix& to,
                  void* packed) {
    const Inputs& inputs = to.inputs;
    const int levels = to.type == DType::i4 ? 15 : 255;
    const int64_t number_bytes = kPanel * (to.type == DType::i4 ? 1 : 2);  // of two inputs
    std::vector<float> rows(kPanel * kMaxGroup), values(kPanel * kMaxGroup);
    std::vector<int32_t> numbers(kPanel * kMaxGroup);
    for (int64_t p = 0; p < to.panels(); ++p) {
        uint8_t* panel = static_cast<uint8_t*>(packed) + p * to.panel_bytes();
        uint8_t* bytes = panel + inputs.header();
        std::memset(panel, 0, static_cast<size_t>(inputs.header()));
        for (int64_t group = 0; group < inputs.groups(); ++group) {
            const int64_t first = group * inputs.group, count = std::min(inputs.group, inputs.count - first);
            const int64_t padded = round_up(count, kBlockInputs);
            std::fill(rows.begin(), rows.end(), 0.0f);
            for (int64_t j = 0; j < kPanel && p * kPanel + j < to.outputs; ++j) {
                const int64_t at = (p * kPanel + j) * stride + first;
                widen_row(static_cast<const uint8_t*>(weights) + at * bytes_of(type), type, count,
                          rows.data() + j * kMaxGroup);
            }
            kernels.transpose16(reinterpret_cast<const uint32_t*>(rows.data()), kMaxGroup, padded,
                                reinterpret_cast<uint32_t*>(values.data()));
            float low[kPanel], high[kPanel], factor[kPanel], zero[kPanel];
            if (!kernels.range(values.data(), padded, low, high)) return false;
            for (int j = 0; j < kPanel; ++j) {
                const Scale scale(low[j], high[j], levels, inputs.zeros);
                if ((scale.bits & 0x7c00u) == 0x7c00u) return false;
                factor[j] = scale.factor;
                zero[j] = scale.zero;
                std::memcpy(panel + (group * kPanel + j) * 2, &scale.bits, 2);
                if (inputs.zeros)
                    panel[(inputs.groups() * 2 + group) * kPanel + j] = static_cast<uint8_t>(scale.zero);
            }
            kernels.round_to(values.data(), padded, factor, zero, static_cast<float>(levels), numbers.data());
            store_numbers(numbers.data(), padded, to.type, bytes);
            bytes += padded / 2 * number_bytes;
        }
    }
    return true;
}

void pack(const Kernels& kernels, const void* weights, DType type, int64_t outputs, int64_t inputs,
          int64_t stride, void* packed) {
    const int64_t item = bytes_of(type);
    // Rows of one panel, padded with zeros to whole words.
    const int64_t row_bytes = round_up(inputs * item, 4);
    std::unique_ptr<uint8_t[]> rows(new uint8_t[static_cast<size_t>(row_bytes * kPanel)]());
    const Matrix shape = {nullptr, type, outputs, {inputs}};
    uint8_t* to = static_cast<uint8_t*>(packed);
    const uint8_t* from = static_cast<const uint8_t*>(weights);
    const int64_t words = row_bytes / 4, real_bytes = inputs * item;
    // An odd number of fp16 inputs: the last, half empty word is not part of the panel.
    const int64_t full = type == DType::f16 ? inputs / 2 : words;
    for (int64_t p = 0; p < shape.panels(); ++p, to += shape.panel_bytes()) {
        for (int j = 0; j < kPanel; ++j) {
            const int64_t n = p * kPanel + j;
            if (n < outputs) {
                std::memcpy(rows.get() + j * row_bytes, from + n * stride * item,
                            static_cast<size_t>(real_bytes));
            } else {
                std::memset(rows.get() + j * row_bytes, 0, static_cast<size_t>(real_bytes));
            }
        }
        kernels.transpose16(reinterpret_cast<const uint32_t*>(rows.get()), words, full,
                            reinterpret_cast<uint32_t*>(to));
        if (type == DType::f16) {
            split_pairs(reinterpret_cast<uint16_t*>(to), full);
            for (int j = 0; inputs % 2 && j < kPanel; ++j) {
                std::memcpy(to + (inputs - 1) * kPanel * 2 + j * 2,
                            rows.get() + j * row_bytes + (inputs - 1) * 2, 2);
            }
        }
    }
}

}  // namespace moebatch
