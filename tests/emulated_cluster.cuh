// Host version of mma/cluster.cuh: blocks of a cluster alternate; a DSMEM store takes effect when the target block
// passes its next barrier.
#pragma once

namespace emulated {
struct PendingStore {
    unsigned to;  // target block
    float* at;
    float v;
    PendingStore* next;
};
constexpr unsigned BUCKETS = 1024;
static PendingStore* pending[BUCKETS] HOST_DATA = {};  // by target block

NO_TSAN static void apply_stores(unsigned block) {
    for (PendingStore** at = &pending[block % BUCKETS]; *at;) {
        PendingStore* const store = *at;
        if (store->to == block) {
            *store->at = store->v;
            *at = store->next;
            free(store);
        } else {
            at = &store->next;
        }
    }
}
}  // namespace emulated

// Linear block index.
static unsigned block_index() { return blockIdx.y * gridDim.x + blockIdx.x; }

static unsigned cluster_rank() { return blockIdx.x % emulated::cluster_size; }
NO_TSAN static void dsmem_store(float* at, unsigned rank, float v) {
    auto* const store = static_cast<emulated::PendingStore*>(malloc(sizeof(emulated::PendingStore)));
    const unsigned to = block_index() / emulated::cluster_size * emulated::cluster_size + rank;
    emulated::PendingStore*& bucket = emulated::pending[to % emulated::BUCKETS];
    *store = {to, at, v, bucket};
    bucket = store;
}
static void dsmem_store4(float* at, unsigned rank, float4 v) {
    dsmem_store(at, rank, v.x), dsmem_store(at + 1, rank, v.y);
    dsmem_store(at + 2, rank, v.z), dsmem_store(at + 3, rank, v.w);
}
// All running threads of the block arrive first, then the other blocks.
NO_TSAN static void cluster_sync() {
    static emulated::Barrier block_barrier;
    const long generation = block_barrier.generation;
    ++block_barrier.arrived;
    while (block_barrier.generation == generation) {
        int running = 0;
        for (int i = 0; i < emulated::threads; ++i) running += !emulated::current->fibers[i].is_done;
        if (block_barrier.arrived == running) {
            block_barrier.arrived = 0;
            ++block_barrier.generation;
            ++emulated::progress;
            emulated::current->last_barrier = ++emulated::epoch;
            ++emulated::arrivals[block_index()];
        } else {
            emulated::pause();
        }
    }
    const unsigned block = block_index(), first = block / emulated::cluster_size * emulated::cluster_size;
    for (unsigned other = first; other < first + emulated::cluster_size; ++other)
        while (emulated::arrivals[other] < emulated::arrivals[block]) emulated::wait_for_others();
    emulated::apply_stores(block);
}
// The whole barrier is at the wait: stores between arrive and wait take effect as late as possible.
static void cluster_arrive() {}
static void cluster_wait() { cluster_sync(); }
