// Weights from the checkpoint's rows into panels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "drivers.h"

namespace moebatch {

namespace {

int64_t bytes_of(DType type) { return type == DType::f32 ? 4 : type == DType::i8 ? 1 : 2; }

int64_t step_of(DType type) { return type == DType::bf16 ? 2 : type == DType::i8 ? 4 : 1; }

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

}  // namespace

int64_t Matrix::panel_bytes() const {
    return round_up(inputs, step_of(type)) * kPanel * bytes_of(type) +
           (type == DType::i8 ? kI8Header : 0);
}

void pack_i8(const float* weights, int64_t outputs, int64_t inputs, void* packed) {
    const Matrix shape = {nullptr, DType::i8, outputs, inputs};
    std::memset(packed, 0, static_cast<size_t>(shape.panels() * shape.panel_bytes()));
    for (int64_t n = 0; n < outputs; ++n) {
        uint8_t* panel = static_cast<uint8_t*>(packed) + n / kPanel * shape.panel_bytes();
        const int64_t lane = n % kPanel;
        const float* row = weights + n * inputs;
        float largest = 0.0f;
        for (int64_t k = 0; k < inputs; ++k) largest = std::max(largest, std::fabs(row[k]));
        const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
        int32_t sum = 0;
        int8_t* to = reinterpret_cast<int8_t*>(panel + kI8Header) + lane * 4;
        for (int64_t k = 0; k < inputs; ++k) {
            const int whole = static_cast<int>(std::rint(row[k] * factor));
            to[k / 4 * 64 + k % 4] = static_cast<int8_t>(whole);
            sum += whole;
        }
        reinterpret_cast<float*>(panel)[lane] = largest / 127.0f;
        reinterpret_cast<int32_t*>(panel)[kPanel + lane] = sum;
    }
}

int64_t packed_bytes(DType type, int64_t outputs, int64_t inputs) {
    const Matrix matrix = {nullptr, type, outputs, inputs};
    return matrix.panels() * matrix.panel_bytes();
}

void pack(const Kernels& kernels, const void* weights, DType type, int64_t outputs, int64_t inputs,
          int64_t stride, void* packed) {
    const int64_t item = bytes_of(type);
    // Rows of one panel, padded with zeros to whole words.
    const int64_t row_bytes = round_up(inputs * item, 4);
    std::unique_ptr<uint8_t[]> rows(new uint8_t[static_cast<size_t>(row_bytes * kPanel)]());
    const Matrix shape = {nullptr, type, outputs, inputs};
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
