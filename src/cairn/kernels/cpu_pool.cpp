// Threads that take the pieces of a job as they get to them.
//
// The caller takes pieces, too, and waits only for pieces that others have begun. A thread that has to wait for its core, because
// another process or the caller itself has it, holds up nothing. OpenMP's threads all meet at the end of every loop.

#include "cpu_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace cairn {

namespace {

constexpr std::chrono::microseconds kSpin(50);  // longer than what lies between the products of a layer
constexpr uint32_t kClosed = UINT32_MAX;

struct Pool {
    std::mutex callers;  // one job at a time
    // Number of the job << 32 | the next piece. A piece is taken by adding one, which fails if the job is over.
    std::atomic<uint64_t> state{kClosed};
    std::atomic<uint32_t> pieces{0}, done{0};
    std::atomic<Work> work{nullptr};
    std::atomic<const void*> context{nullptr};
    std::atomic<int> members{0};  // threads that may take pieces, without the caller
    int threads = 0;              // that have been started

    std::mutex lock;  // for those that sleep
    std::condition_variable begun, ended;
    std::atomic<int> asleep{0};
    std::atomic<bool> caller_asleep{false};
};

// It outlives all threads, because they never end.
Pool& pool() {
    static Pool* only = new Pool;
    return *only;
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether ready() became true soon.
template <typename F>
bool spun(const F& ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; i++) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// Take one piece and do it; false if none is left.
bool take(Pool& p) {
    uint64_t state = p.state.load();
    for (;;) {
        // What is read here belongs to the job of `state`, or the exchange fails.
        const uint32_t piece = (uint32_t)state, pieces = p.pieces.load();
        const Work work = p.work.load();
        const void* context = p.context.load();
        if (piece >= pieces) return false;
        if (!p.state.compare_exchange_weak(state, state + 1)) continue;
        work(context, piece);
        if (p.done.fetch_add(1) + 1 == pieces && p.caller_asleep.load()) {
            std::lock_guard<std::mutex> held(p.lock);
            p.ended.notify_one();
        }
        return true;
    }
}

void serve(Pool& p, int number) {
    uint32_t seen = 0;
    const auto changed = [&] { return (uint32_t)(p.state.load() >> 32) != seen; };
    for (;;) {
        if (!spun(changed)) {
            std::unique_lock<std::mutex> held(p.lock);
            p.asleep++;
            p.begun.wait(held, changed);
            p.asleep--;
        }
        seen = p.state.load() >> 32;
        if (number < p.members.load()) {
            while (take(p)) {}
        }
    }
}

void start_threads(Pool& p, int wanted) {
    try {
        for (; p.threads < wanted; p.threads++) std::thread(serve, std::ref(p), p.threads).detach();
    } catch (const std::system_error&) {
        // No more threads are allowed here: those that there are do the work.
    }
}

}  // namespace

void run_pieces(int threads, int pieces, Work work, const void* context) {
    Pool& p = pool();
    std::unique_lock<std::mutex> only(p.callers, std::defer_lock);
    if (threads <= 1 || pieces <= 1 || !only.try_lock()) {
        for (int piece = 0; piece < pieces; piece++) work(context, piece);
        return;
    }
    start_threads(p, threads - 1);
    const uint64_t job = (p.state.load() >> 32) + 1;
    p.state = job << 32 | kClosed;  // so that nobody takes a piece while the job is written
    p.work = work;
    p.context = context;
    p.members = threads - 1;
    p.done = 0;
    p.pieces = pieces;
    p.state = job << 32;
    if (p.asleep.load()) {
        std::lock_guard<std::mutex> held(p.lock);
        p.begun.notify_all();
    }
    while (take(p)) {}
    const auto all_done = [&] { return p.done.load() == (uint32_t)pieces; };
    if (!spun(all_done)) {
        std::unique_lock<std::mutex> held(p.lock);
        p.caller_asleep = true;
        p.ended.wait(held, all_done);
        p.caller_asleep = false;
    }
}

}  // namespace cairn
