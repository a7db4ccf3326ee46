// Working memory that a thread keeps from call to call, so that kernels do not allocate it each time.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

// One growing block of floats on a cache line's boundary. What is in it is left over from earlier use.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(block); }

    float* floats(size_t count) {
        if (count > capacity) grow(count);
        return block;
    }

  private:
    static constexpr size_t LINE = 64;

    void grow(size_t count) {
        const size_t bytes = (count * sizeof(float) + LINE - 1) / LINE * LINE;
        std::free(block);
        block = static_cast<float*>(std::aligned_alloc(LINE, bytes));
        capacity = block ? bytes / sizeof(float) : 0;
        if (!block) throw std::bad_alloc();
    }

    float* block = nullptr;
    size_t capacity = 0;
};

// `count` zeros for reads beyond an edge. Never write to them.
static inline const float* zeros(size_t count) {
    static thread_local Scratch memory;
    static thread_local size_t filled = 0;
    float* block = memory.floats(count);
    if (count > filled) {
        std::memset(block, 0, count * sizeof(float));
        filled = count;
    }
    return block;
}
