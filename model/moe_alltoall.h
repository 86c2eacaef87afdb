// The classic expert-parallel layer: rows go to their experts' ranks by an all-to-all exchange, meet the experts in
// grouped matrix products, and come back the same way.
//
// Row orders, which fix the bits: a rank sends its rows ordered by (piece of the local experts, rank, expert, token,
// k); they arrive ordered by (piece, source rank, expert, token, k) and are computed by (expert, source rank, token,
// k), that is by (expert, token of the global batch, k) whatever the number of ranks and pieces. In a group of one rank
// the three are the same, and nothing is exchanged or reordered.
#ifndef MOK_MODEL_MOE_ALLTOALL_H
#define MOK_MODEL_MOE_ALLTOALL_H

#include "model/model.h"

// Device memory that grows when more rows arrive than ever before.
struct grown {
    void *memory;
    size_t bytes;
};

// What a block keeps from its forward to its backward pass. R rows arrive; their number is known when they do.
struct alltoall_block {
    int *slot_of_row, *row_of_slot; // [N*K] rows as they are sent
    size_t *send, *arrive;       // host [pieces * ranks + 1] first row of piece c to, and from, rank p: [c * ranks + p]
    int *offsets;                // host [experts here + 1] rows as they are computed
    struct grown arrival_of_row; // int [R]
    struct grown row_of_arrival; // int [R]
    struct grown gates;          // accum [R] as they arrive
    struct grown rows;           // real [R, H] as they are computed
    struct grown gate_up;        // real [R, 2m] as they are computed
}; // rows and gate_up are the first block's with RECOMPUTE_MOE, all is with RECOMPUTE_BLOCK or without training

// Exchanges of one piece that are under way.
struct alltoall_exchange {
    struct comm_exchange *rows, *gates;
};

struct moe_alltoall {
    struct comm *group;
    int ranks, rank;
    int experts; // here
    int pieces;  // of the experts of every rank; 1: nothing overlaps
    int *first;  // host [pieces * ranks + 1] how many experts come, in the order of sending, before piece c of rank p
    int *order;  // [E] place of each expert in the order of sending
    // of the pass under way
    int *own_offsets;                       // [E + 1] rows as they are sent
    int *offsets, *host_offsets;            // [ranks, E + 1] those of all ranks
    struct alltoall_exchange *there, *back; // host [pieces]

    int kept_routes, kept_rows;    // MoE blocks that keep their own; the others use the first one's
    struct alltoall_block *blocks; // [kept_routes]
    // used and used again by every block
    real *sent;          // [N*K, H] rows that leave; then the results, where they come back
    accum *sent_gates;   // [N*K] gates, or gradients of them, on the same ways
    struct grown moved;  // real [R, H] rows as they arrive; then the results, as they leave
    struct grown hidden; // real [R, m]
    struct grown out;    // real [R, H]
    // backward only
    struct grown d_rows;    // real [R, H]
    struct grown d_hidden;  // real [R, m]
    struct grown d_gate_up; // real [R, 2m]
    struct grown d_gates;   // accum [R] as they leave
};

// Collective over the EP group of the model, as are the passes. Buffers are made for balanced routes and an eighth more.
void moe_alltoall_open(struct model *m);
void moe_alltoall_close(struct model *m);
// As moe_forward and moe_backward of model/moe.h.
void moe_alltoall_forward(struct model *m, int block, real *y, const real *residual, int N);
void moe_alltoall_backward(struct model *m, int block, real *dx, accum *d_gates, const real *dy, int N);

// Bytes of device memory that moe_alltoall_open takes on the rank with the most experts. training false: without what
// only the backward pass needs. Ends the program (exit 2) when no memory could hold them.
size_t moe_alltoall_bytes(const struct config *c, int ep, int batch, int seq, bool training, enum recompute recompute);

#endif
