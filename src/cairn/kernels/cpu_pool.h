// Runs the pieces of a job on several threads.

#pragma once

namespace cairn {

typedef void (*Work)(const void* context, int piece);

void run_pieces(int threads, int pieces, Work work, const void* context);

// work(piece) for every piece, on up to `threads` threads. Returns when all are done.
template <typename F>
void for_pieces(int threads, int pieces, const F& work) {
    run_pieces(threads, pieces, [](const void* context, int piece) { (*(const F*)context)(piece); }, &work);
}

// The same for rows, `size` of them in a piece.
template <typename F>
void for_rows(int threads, int rows, int size, const F& work) {
    for_pieces(threads, (rows + size - 1) / size, [&](int piece) {
        for (int row = piece * size; row < rows && row < (piece + 1) * size; row++) work(row);
    });
}

}  // namespace cairn
