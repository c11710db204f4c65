// Instead of mma/cluster.cuh, on the host: blocks of a cluster run by turns; what one stores in another's shared memory comes
// there when that one has passed the next barrier.
#pragma once

namespace emulated {
struct Letter {
    unsigned to;  // a block
    float* at;
    float v;
    Letter* next;
};
constexpr unsigned BOXES = 1024;
static Letter* letters[BOXES] OURS = {};  // by the block that they go to

UNSEEN static void deliver(unsigned block) {
    for (Letter** at = &letters[block % BOXES]; *at;) {
        Letter* const letter = *at;
        if (letter->to == block) {
            *letter->at = letter->v;
            *at = letter->next;
            free(letter);
        } else {
            at = &letter->next;
        }
    }
}
}  // namespace emulated

// Of all blocks, also of those further down.
static unsigned block_number() { return blockIdx.y * gridDim.x + blockIdx.x; }

static unsigned cluster_rank() { return blockIdx.x % emulated::cluster; }
UNSEEN static void store_to_block(float* at, unsigned rank, float v) {
    auto* const letter = static_cast<emulated::Letter*>(malloc(sizeof(emulated::Letter)));
    const unsigned to = block_number() / emulated::cluster * emulated::cluster + rank;
    emulated::Letter*& box = emulated::letters[to % emulated::BOXES];
    *letter = {to, at, v, box};
    box = letter;
}
static void store_four_to_block(float* at, unsigned rank, float4 v) {
    store_to_block(at, rank, v.x), store_to_block(at + 1, rank, v.y);
    store_to_block(at + 2, rank, v.z), store_to_block(at + 3, rank, v.w);
}
// All threads of the block that are still there, then the other blocks.
UNSEEN static void wait_for_cluster() {
    static emulated::Barrier of_block;
    const long generation = of_block.generation;
    ++of_block.arrived;
    while (of_block.generation == generation) {
        int there = 0;
        for (int thread = 0; thread < emulated::threads; ++thread) there += !emulated::now->fibers[thread].is_done;
        if (of_block.arrived == there) {
            of_block.arrived = 0;
            ++of_block.generation;
            ++emulated::moves;
            emulated::now->since = ++emulated::epoch;
            ++emulated::arrivals[block_number()];
        } else {
            emulated::pause();
        }
    }
    const unsigned me = block_number(), first = me / emulated::cluster * emulated::cluster;
    for (unsigned other = first; other < first + emulated::cluster; ++other)
        while (emulated::arrivals[other] < emulated::arrivals[me]) emulated::wait_for_others();
    emulated::deliver(me);
}
// The whole barrier at its end: what is stored between the two comes as late as it may.
static void arrive_at_cluster() {}
static void await_cluster() { wait_for_cluster(); }
