// Attention over the paged cache: which query vectors meet which chunk of context on which thread.
#include <algorithm>
#include <cmath>
#include <limits>

#include "drivers.h"

namespace moebatch {

namespace {

// Neighbouring queries of one sequence, for some key/value heads side by side.
struct QueryTile {
    int64_t first;
    int rows;
    int64_t first_group;
    int groups;
    int64_t first_chunk, last_chunk;
    int64_t offset;  // chunks of the tiles before it

    int64_t chunks() const { return last_chunk - first_chunk; }
};

int64_t share_of(const Attention& a) { return a.heads / a.groups; }

int64_t vectors_of(const Attention& a, const QueryTile& tile) { return tile.rows * tile.groups * share_of(a); }

std::vector<QueryTile> query_tiles(const Attention& a) {
    const int64_t most = std::max<int64_t>(1, kMaxVectors / share_of(a));
    std::vector<QueryTile> tiles;
    int64_t offset = 0;
    for (int64_t r = 0; r < a.rows;) {
        int64_t end = r + 1;
        while (end < a.rows && end - r < most && a.sequences[end] == a.sequences[r] &&
               a.lengths[end] == a.lengths[end - 1] + 1)
            ++end;
        const int64_t seen = a.window > 0 ? std::max<int64_t>(0, a.lengths[r] - a.window) : 0;
        const int64_t together = std::max<int64_t>(1, most / (end - r));
        for (int64_t group = 0; group < a.groups; group += together) {
            const QueryTile tile = {r, static_cast<int>(end - r), group,
                                    static_cast<int>(std::min(together, a.groups - group)), seen / kChunk,
                                    (a.lengths[end - 1] + kChunk - 1) / kChunk, offset};
            offset += tile.chunks();
            tiles.push_back(tile);
        }
        r = end;
    }
    return tiles;
}

// A tile's query vectors, scaled: [groups][rows][heads of a group].
void gather_queries(const Attention& a, const QueryTile& tile, float* queries) {
    const int64_t numbers = share_of(a) * a.head_dim;
    for (int g = 0; g < tile.groups; ++g) {
        for (int r = 0; r < tile.rows; ++r) {
            const float* from = a.q + (tile.first + r) * a.q_stride + (tile.first_group + g) * numbers;
            for (int64_t k = 0; k < numbers; ++k) *queries++ = from[k] * a.scale;
        }
    }
}

int64_t item_bytes(DType type) { return type == DType::f32 ? 4 : type == DType::i8 ? 1 : 2; }

// A chunk of one tile's context.
struct Place {
    const QueryTile* tile;
    int64_t index;
};

// Block numbers of a place.
int chunk_blocks(const Attention& a, const Place& place, const int32_t** numbers) {
    const QueryTile& tile = *place.tile;
    const int64_t start = place.index * kChunk, longest = a.lengths[tile.first + tile.rows - 1];
    *numbers = a.tables + a.sequences[tile.first] * a.table_stride + start / kPanel;
    return static_cast<int>((std::min<int64_t>(kChunk, longest - start) + kPanel - 1) / kPanel);
}

void fill_chunk(const Attention& a, const Place& place, const Place* next, Chunk& chunk) {
    const QueryTile& tile = *place.tile;
    const int share = static_cast<int>(share_of(a));
    const int64_t start = place.index * kChunk, head_bytes = kPanel * a.head_dim * item_bytes(a.type);
    chunk.type = a.type;
    chunk.round_x = a.round_x;
    chunk.head_dim = static_cast<int>(a.head_dim);
    chunk.groups = tile.groups;
    chunk.vectors = tile.rows * share;
    const int32_t* numbers;
    chunk.blocks = chunk_blocks(a, place, &numbers);
    for (int b = 0; b < chunk.blocks; ++b) {
        const int64_t at = numbers[b] * a.groups + tile.first_group;
        chunk.keys[b] = a.keys + at * head_bytes;
        chunk.values[b] = a.values + at * head_bytes;
        if (a.key_scales == nullptr) continue;
        chunk.key_scales[b] = a.key_scales + at * kPanel;
        chunk.value_scales[b] = a.value_scales + at * kPanel;
    }
    chunk.num_next = 0;
    if (next != nullptr) {
        const int blocks = chunk_blocks(a, *next, &numbers);
        chunk.num_next = 2 * blocks;
        for (int b = 0; b < blocks; ++b) {
            const int64_t at = (numbers[b] * a.groups + next->tile->first_group) * head_bytes;
            chunk.next[b] = a.keys + at;
            chunk.next[blocks + b] = a.values + at;
        }
    }
    for (int r = 0; r < tile.rows; ++r) {
        const int64_t length = a.lengths[tile.first + r];
        const int64_t from = a.window > 0 ? std::max<int64_t>(0, length - a.window) : 0;
        const int last = static_cast<int>(std::clamp<int64_t>(length - start, 0, kChunk));
        const int first = static_cast<int>(std::clamp<int64_t>(from - start, 0, last));
        for (int h = 0; h < share; ++h) {
            chunk.first[r * share + h] = first;
            chunk.last[r * share + h] = last;
        }
    }
}

// Largest scores, sums of weights, weighted values of a tile's vectors.
struct Result {
    float* largest;
    float* sum;
    float* values;

    Result(float* memory, int64_t vectors) : largest(memory), sum(memory + vectors), values(memory + 2 * vectors) {}
};

void clear(const Result& all, int64_t vectors, int64_t head_dim) {
    std::fill(all.largest, all.largest + vectors, -std::numeric_limits<float>::infinity());
    std::fill(all.sum, all.sum + vectors, 0.0f);
    std::fill(all.values, all.values + vectors * head_dim, 0.0f);
}

void finish(const Attention& a, const QueryTile& tile, const Result& all) {
    const int64_t share = share_of(a), d = a.head_dim;
    for (int64_t v = 0; v < vectors_of(a, tile); ++v) {
        const int64_t group = v / (tile.rows * share), row = v / share % tile.rows;
        const int64_t head = (tile.first_group + group) * share + v % share;
        float factor = 1.0f, sum = all.sum[v];
        if (a.sinks != nullptr) {  // a score of its own per head, with no value
            const float top = std::max(all.largest[v], a.sinks[head]);
            factor = std::exp(all.largest[v] - top);
            sum = sum * factor + std::exp(a.sinks[head] - top);
        }
        float* to = a.out + (tile.first + row) * a.out_stride + head * d;
        for (int64_t k = 0; k < d; ++k) to[k] = all.values[v * d + k] * factor / sum;
    }
}

}  // namespace

void Runner::attend(const Attention& a) {
    std::lock_guard<std::mutex> lock(calls_);
    const std::vector<QueryTile> tiles = query_tiles(a);
    if (tiles.empty()) return;
    const int64_t units = static_cast<int64_t>(tiles.size()), d = a.head_dim;
    const int64_t chunks = tiles.back().offset + tiles.back().chunks();
    int64_t vectors = 0;  // of the largest tile
    for (const auto& tile : tiles) vectors = std::max(vectors, vectors_of(a, tile));
    // With few tiles the chunks of one go to several threads; the arithmetic is the same.
    const bool split = pool_.size() > 1 && units < 4 * pool_.size() && chunks > units;

    const int64_t part = vectors * (d + 2);  // floats of one chunk's result
    const size_t scratch = (attend_scratch(static_cast<int>(d)) + 63) / 64 * 64;
    const size_t own = (scratch + sizeof(float) * static_cast<size_t>(vectors * d + 2 * part) + 63) / 64 * 64;
    uint8_t* workers = x_.get(own * static_cast<size_t>(pool_.size()));
    float* parts = split ? reinterpret_cast<float*>(h_.get(sizeof(float) * static_cast<size_t>(chunks * part)))
                         : nullptr;
    const auto compute = [&](const Place& place, const Place* next, uint8_t* memory, float* to) {
        Chunk chunk;
        fill_chunk(a, place, next, chunk);
        chunk.queries = reinterpret_cast<float*>(memory + scratch);
        const Result result(to, vectors);
        kernels_.attend(chunk, memory, {result.largest, result.sum, result.values});
    };
    const auto merge_into = [&](const QueryTile& tile, float* from, float* to) {
        const Result one(from, vectors), all(to, vectors);
        for (int64_t v = 0; v < vectors_of(a, tile); ++v)
            kernels_.merge(all.largest + v, all.sum + v, all.values + v * d, one.largest[v], one.sum[v],
                           one.values + v * d, static_cast<int>(d));
    };
    // A thread takes neighbours, so that it knows what comes next.
    const auto in_runs = [&](int64_t count, const auto& work) {
        const int64_t run = std::max<int64_t>(1, count / (8 * pool_.size()));
        pool_.run((count + run - 1) / run, [&](int64_t i, int worker) {
            work(i * run, std::min(count, (i + 1) * run), workers + own * static_cast<size_t>(worker));
        });
    };

    if (!split) {
        in_runs(units, [&](int64_t first, int64_t last, uint8_t* memory) {
            float* all = reinterpret_cast<float*>(memory + scratch) + vectors * d;
            for (int64_t unit = first; unit < last; ++unit) {
                const QueryTile& tile = tiles[static_cast<size_t>(unit)];
                gather_queries(a, tile, reinterpret_cast<float*>(memory + scratch));
                clear(Result(all, vectors), vectors, d);
                for (int64_t index = tile.first_chunk; index < tile.last_chunk; ++index) {
                    const QueryTile& after = tiles[static_cast<size_t>(std::min(unit + 1, units - 1))];
                    const Place same = {&tile, index + 1}, other = {&after, after.first_chunk};
                    const Place* next = index + 1 < tile.last_chunk ? &same : unit + 1 < last ? &other : nullptr;
                    compute({&tile, index}, next, memory, all + part);
                    merge_into(tile, all + part, all);
                }
                finish(a, tile, Result(all, vectors));
            }
        });
        return;
    }
    std::vector<Place> places;
    for (const auto& tile : tiles)
        for (int64_t index = tile.first_chunk; index < tile.last_chunk; ++index) places.push_back({&tile, index});
    in_runs(static_cast<int64_t>(places.size()), [&](int64_t first, int64_t last, uint8_t* memory) {
        for (int64_t task = first; task < last; ++task) {
            const Place& place = places[static_cast<size_t>(task)];
            gather_queries(a, *place.tile, reinterpret_cast<float*>(memory + scratch));
            compute(place, task + 1 < last ? &place + 1 : nullptr, memory, parts + task * part);
        }
    });
    pool_.run(units, [&](int64_t unit, int worker) {
        const QueryTile& tile = tiles[static_cast<size_t>(unit)];
        float* all = reinterpret_cast<float*>(workers + own * static_cast<size_t>(worker) + scratch) + vectors * d;
        clear(Result(all, vectors), vectors, d);
        for (int64_t i = 0; i < tile.chunks(); ++i) merge_into(tile, parts + (tile.offset + i) * part, all);
        finish(a, tile, Result(all, vectors));
    });
}

}  // namespace moebatch
