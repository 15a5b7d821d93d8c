// A stable sort of rows by 32-bit keys, segment by segment, 8 bits per pass: counts of chunks, places, scatter.
// Integers only: the result never depends on the order of blocks.
#define BINS 256

DEV u32 digit_of(const u32* key, const u32* order, i64 base, i64 places, const Chunk& c, int place, int shift, u32& row) {
  row = order ? order[places + place] : (u32)(c.row + place - c.place);
  return key[base + row] >> shift & (BINS - 1);
}

// n rows per head; `total` places per head in all segments.
extern "C" __global__ void __launch_bounds__(256) sort_count(const u32* key, const u32* order, u32* counts, const Chunk* chunks, int n, int total, int shift) {
  __shared__ u32 bins[BINS];
  const Chunk c = chunks[blockIdx.x];
  const i64 h = blockIdx.y;
  bins[threadIdx.x] = 0;
  __syncthreads();
  for (int p = c.place + threadIdx.x; p < c.end; p += 256) { u32 row; atomicAdd(&bins[digit_of(key, order, h * n, h * total, c, p, shift, row)], 1u); }
  __syncthreads();
  counts[(h * gridDim.x + blockIdx.x) * BINS + threadIdx.x] = bins[threadIdx.x];
}

// One block per segment: counts become places, bins first, chunks second. Segment s has the chunks [first[s], first[s +
// 1]).
extern "C" __global__ void __launch_bounds__(1024) sort_scan(u32* counts, const Chunk* chunks, const u32* first, int all) {
  __shared__ u32 part[4][BINS], start[BINS];
  const int c0 = first[blockIdx.x], c1 = first[blockIdx.x + 1], bin = threadIdx.x % BINS, p = threadIdx.x / BINS, each = (c1 - c0 + 3) / 4;
  if (c0 == c1) return;
  u32* own = counts + ((i64)blockIdx.y * all) * BINS;
  const int from = min(c1, c0 + p * each), to = min(c1, c0 + (p + 1) * each);
  u32 s = 0;
  for (int c = from; c < to; c++) s += own[(i64)c * BINS + bin];
  part[p][bin] = s;
  __syncthreads();
  if (p == 0) { u32 a = 0; for (int i = 0; i < 4; i++) { const u32 x = part[i][bin]; part[i][bin] = a; a += x; } start[bin] = a; }
  __syncthreads();
  if (threadIdx.x < 32) {
    u32 before[8], sum = 0;
    for (int i = 0; i < 8; i++) { before[i] = sum; sum += start[threadIdx.x * 8 + i]; }
    u32 through = sum;
    for (int o = 1; o < 32; o <<= 1) { const u32 y = __shfl_up_sync(FULL, through, o); if (threadIdx.x >= o) through += y; }
    for (int i = 0; i < 8; i++) start[threadIdx.x * 8 + i] = through - sum + before[i];
  }
  __syncthreads();
  u32 a = chunks[c0].place + start[bin] + part[p][bin];
  for (int c = from; c < to; c++) { const u32 x = own[(i64)c * BINS + bin]; own[(i64)c * BINS + bin] = a; a += x; }
}

// A warp takes 256 consecutive places of a chunk of at most 2048. Keys in sorted order are also written if requested.
extern "C" __global__ void __launch_bounds__(256) sort_scatter(const u32* key, const u32* order, const u32* counts, u32* sorted, u32* sorted_keys, const Chunk* chunks, int n, int total, int shift) {
  __shared__ u32 bins[8][BINS];
  const Chunk c = chunks[blockIdx.x];
  const i64 h = blockIdx.y;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = threadIdx.x; i < 8 * BINS; i += 256) (&bins[0][0])[i] = 0;
  __syncthreads();
  u32 digit[8], rank[8], row[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int p = c.place + warp * 256 + i * 32 + lane;
    row[i] = 0;
    digit[i] = p < c.end ? digit_of(key, order, h * n, h * total, c, p, shift, row[i]) : BINS;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 same = __match_any_sync(FULL, digit[i]);
    const int leader = __ffs(same) - 1;
    u32 old = 0;
    if (lane == leader && digit[i] < BINS) { old = bins[warp][digit[i]]; bins[warp][digit[i]] = old + __popc(same); }
    rank[i] = __shfl_sync(FULL, old, leader) + __popc(same & ((1u << lane) - 1));
    __syncwarp();
  }
  __syncthreads();
  { u32 a = counts[(h * gridDim.x + blockIdx.x) * BINS + threadIdx.x];
    for (int i = 0; i < 8; i++) { const u32 x = bins[i][threadIdx.x]; bins[i][threadIdx.x] = a; a += x; } }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (digit[i] < BINS) {
      const i64 to = h * total + bins[warp][digit[i]] + rank[i];
      sorted[to] = row[i];
      if (sorted_keys) sorted_keys[to] = key[h * n + row[i]];
    }
}

// First place in [lo, hi) of a sorted array whose value is at least x.
DEV int lower_bound(const u32* a, int lo, int hi, u32 x) {
  while (lo < hi) { const int mid = (lo + hi) >> 1; if (a[mid] < x) lo = mid + 1; else hi = mid; }
  return lo;
}

// The block of keys of a query of a causal part, by its own rank among the keys: rows of equal rank are distributed
// over the keys of that rank in order of position. key_ranks: ranks of keys in sorted order.
extern "C" __global__ void assign_blocks(const u32* rank, const u32* key_ranks, u32* block, const Chunk* chunks, const Part* parts, int n, int keys, int heads, int group) {
  const Chunk c = chunks[blockIdx.x];
  const Part part = parts[c.segment];
  const i64 h = blockIdx.y;      // batch and head
  const i64 hk = h / heads * (heads / group) + h % heads / group;
  const u32* own = key_ranks + hk * keys + part.key_place;
  for (int p = c.place + threadIdx.x; p < c.end; p += blockDim.x) {
    const int i = p - part.row_place, row = part.row + i;
    const u32 r = rank[h * n + row];
    const int from = lower_bound(own, 0, part.keys, r), to = lower_bound(own, from, part.keys, r + 1);
    const i64 place = min((i64)part.keys - 1, from + (i64)i * (to - from) / part.rows);
    block[h * n + row] = (u32)(((place + 1) * part.blocks - 1) / part.keys);
  }
}

// Offsets of each block's rows in the sorted order, counted over all parts; sorted_blocks holds the blocks of rows,
// counted within their part, in sorted order.
extern "C" __global__ void block_starts(const u32* sorted_blocks, u32* starts, const Block* blocks, const Part* parts, int count, int total) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  const i64 h = blockIdx.y;
  if (c > count) return;
  int at = total;
  if (c < count) {
    const Part part = parts[blocks[c].part];
    at = lower_bound(sorted_blocks + h * total, part.row_place, part.row_place + part.rows, (u32)(c - part.block));
  }
  starts[h * (count + 1) + c] = at;
}
