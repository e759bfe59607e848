#include "pool.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moebatch {

namespace {

constexpr int kSpins = 2000;  // some tens of microseconds
constexpr uint64_t kOpen = 1u << 16, kHelpers = kOpen - 1, kRound = kOpen << 1;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) : owner_(static_cast<int>(getpid())) {
    for (int worker = 1; worker < threads; ++worker) {
        helpers_.emplace_back([this, worker] { help(worker); });
    }
}

Pool::~Pool() {
    if (owner_ != static_cast<int>(getpid())) {
        for (auto& helper : helpers_) helper.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (auto& helper : helpers_) helper.join();
}

void Pool::dispatch(int64_t tasks, Call call, const void* context) {
    if (tasks <= 0) return;
    if (tasks == 1 || helpers_.empty() || owner_ != static_cast<int>(getpid())) {
        for (int64_t task = 0; task < tasks; ++task) call(context, task, 0);
        return;
    }
    std::lock_guard<std::mutex> caller(callers_);
    bool asleep = false;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_ = tasks;
        call_ = call;
        context_ = context;
        next_.store(0, std::memory_order_relaxed);
        const uint64_t number = state_.load(std::memory_order_relaxed) / kRound;
        state_.store((number + 1) * kRound | kOpen, std::memory_order_release);
        asleep = sleeping_ > 0;
    }
    if (asleep) wake_.notify_all();
    work(0);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    // Who helps ends within one task; a preempted helper may take longer.
    for (int spins = 0; (state_.load(std::memory_order_acquire) & kHelpers) != 0; ++spins) {
        if (spins < kSpins) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

void Pool::work(int worker) {
    for (;;) {
        const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks_) return;
        call_(context_, task, worker);
    }
}

bool Pool::waits(uint64_t seen) const {
    const uint64_t state = state_.load(std::memory_order_acquire);
    return !stop_.load() && ((state & kOpen) == 0 || state / kRound == seen);
}

// Takes part in an open round other than the one seen last; its number, or 0 when the pool stops.
uint64_t Pool::wait_for_round(uint64_t seen) {
    for (;;) {
        for (int spins = 0; spins < kSpins && waits(seen); ++spins) pause();
        if (waits(seen)) {
            std::unique_lock<std::mutex> lock(mutex_);
            ++sleeping_;
            wake_.wait(lock, [&] { return !waits(seen); });
            --sleeping_;
        }
        if (stop_.load()) return 0;
        uint64_t state = state_.load(std::memory_order_acquire);
        while ((state & kOpen) != 0 && state / kRound != seen) {
            if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel))
                return state / kRound;
        }
    }
}

void Pool::help(int worker) {
    uint64_t seen = 0;
    while ((seen = wait_for_round(seen)) != 0) {
        work(worker);
        state_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace moebatch
