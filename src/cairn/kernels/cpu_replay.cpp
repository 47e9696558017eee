// Recorded calls of the kernels, run one after the other.

#include <cstdint>
#include <cstring>

struct Matrix;
struct Floats;

extern "C" {

void cairn_product(
    const Matrix*, const float*, int64_t, int32_t, const float*, float, int32_t, float*, int64_t, int32_t, int32_t
);
void cairn_float_product(
    const Floats*, const float*, int64_t, int32_t, const float*, float, int32_t, float*, int64_t, int32_t, int32_t
);
void cairn_rotate_and_store(
    const float*, int64_t, int32_t, int32_t, const float*, const float*, const float*, const float*, float, float*, int32_t,
    int32_t, int32_t, const int32_t*, const int32_t*, float*, int32_t
);
void cairn_attend(
    const float*, int32_t, int32_t, float*, int32_t, int32_t, int32_t, const int32_t*, int64_t, const int64_t*, const int64_t*,
    float, float*, int32_t
);

}  // extern "C"

namespace {

// An argument: a constant, or one of the values that differ from run to run.
struct Word {
    int64_t value;
    int64_t input;  // which one; -1 for the constant
};

// Takes the arguments of calls from the tape, in order.
struct Reader {
    const Word* next;
    const int64_t* inputs;

    int64_t whole() {
        const Word& word = *next++;
        return word.input < 0 ? word.value : inputs[word.input];
    }

    template <typename T>
    T take() {
        const int64_t value = whole();
        T as{};
        std::memcpy(&as, &value, sizeof(T));  // little-endian: the low bytes
        return as;
    }
};

template <typename... Arguments>
void call(void (*kernel)(Arguments...), Reader& reader) {
    // Braces keep the order of the arguments.
    struct Call {
        Call(void (*kernel)(Arguments...), Arguments... arguments) { kernel(arguments...); }
    };
    Call{kernel, reader.take<Arguments>()...};
}

}  // namespace

extern "C" void cairn_replay(const int32_t* kinds, int32_t calls, const Word* words, const int64_t* inputs) {
    Reader reader{words, inputs};
    for (int i = 0; i < calls; i++) {
        switch (kinds[i]) {
            case 0: call(cairn_product, reader); break;
            case 1: call(cairn_float_product, reader); break;
            case 2: call(cairn_rotate_and_store, reader); break;
            case 3: call(cairn_attend, reader); break;
        }
    }
}
