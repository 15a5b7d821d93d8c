// Linear attention with features elu + 1 on tensor cores; keys and values have 64 columns. Three launches: states of
// segments of 1024 tokens, their prefix sums, and the segments in parallel, 64 tokens at a time.
#define SEGMENT 1024
#define CHUNK 64
#define TILE_BYTES 8192
// Columns of a state: 64 of values, one for the normaliser, and padding between rows in shared memory.
#define WIDTH 72

DEV u32 piece(int row, int c) { return row * 128 + ((c ^ (row & 7)) << 4); }
DEV float feature(float x) { return x > 0.f ? x + 1.f : ex2(x * 1.4426950409f); }
DEV u32 features(u32 x) { return pack(feature(low(x)), feature(high(x))); }
DEV void load_column(u32& a, u32& b, u32 p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(p));
}
// Loads 64 rows, with zeros after the last.
DEV void load_rows(u32 to, const View& x, int b, int h, int first, int n) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int e = threadIdx.x + i * 128, r = e >> 3, c = e & 7;
    const bool ok = first + r < n;
    copy16(to + piece(r, c), row_of<elem>(x, b, h, ok ? first + r : 0) + c * 8, ok);
  }
}
// state += features(K)ᵀ [V | 1] of one chunk; this warp has features 16 w and up.
DEV void update(float state[9][4], u32 sk, u32 sv, int w, int lane, int valid) {
  const u32 ones = lane >> 2 == 0 ? ONES : 0u;
#pragma unroll
  for (int i = 0; i < CHUNK / 16; i++) {
    u32 a[4], r[4];
    load_transposed(r[0], r[1], r[2], r[3], sk + piece(i * 16 + (lane & 7) + ((lane >> 4) << 3), w * 2 + ((lane >> 3) & 1)));
#pragma unroll
    for (int e = 0; e < 4; e++) a[e] = features(r[e]);
    if (valid < CHUNK) {      // the feature of a missing key is not 0
      const int t = i * 16 + (lane & 3) * 2;
      const u32 near = (t < valid ? 0xffffu : 0) | (t + 1 < valid ? 0xffff0000u : 0), far = (t + 8 < valid ? 0xffffu : 0) | (t + 9 < valid ? 0xffff0000u : 0);
      a[0] &= near; a[1] &= near; a[2] &= far; a[3] &= far;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 b0, b1, b2, b3;
      load_transposed(b0, b1, b2, b3, sv + piece(i * 16 + (lane & 15), j * 2 + (lane >> 4)));
      mma(state[2 * j], a, b0, b1); mma(state[2 * j + 1], a, b2, b3);
    }
    mma(state[8], a, ones, ones);
  }
}

// States: [batch · key heads][segments][64][WIDTH].
extern "C" __global__ void __launch_bounds__(128) segment_states(View k, View v, float* __restrict__ states, Sizes n) {
  __shared__ __align__(128) unsigned char raw[4 * TILE_BYTES];
  const u32 s0 = smem_u32(raw);
  const int h = blockIdx.y, b = blockIdx.z, w = threadIdx.x >> 5, lane = threadIdx.x & 31, first = blockIdx.x * SEGMENT;
  const int chunks = (min(SEGMENT, n.nk - first) + CHUNK - 1) / CHUNK;
  float state[9][4] = {};
  load_rows(s0, k, b, h, first, n.nk); load_rows(s0 + TILE_BYTES, v, b, h, first, n.nk); copy_commit();
  for (int t = 0; t < chunks; t++) {
    const u32 next = s0 + ((t + 1) & 1) * 2 * TILE_BYTES, now = s0 + (t & 1) * 2 * TILE_BYTES;
    if (t + 1 < chunks) { load_rows(next, k, b, h, first + (t + 1) * CHUNK, n.nk); load_rows(next + TILE_BYTES, v, b, h, first + (t + 1) * CHUNK, n.nk); }
    copy_commit(); copy_wait<1>(); __syncthreads();
    update(state, now, now + TILE_BYTES, w, lane, min(CHUNK, n.nk - first - t * CHUNK));
    __syncthreads();
  }
  float* out = states + ((i64)(b * gridDim.y + h) * gridDim.x + blockIdx.x) * 64 * WIDTH;
#pragma unroll
  for (int j = 0; j < 9; j++) {
    const int f = w * 16 + (lane >> 2), c = j * 8 + (lane & 3) * 2;
    *(float2*)(out + f * WIDTH + c) = make_float2(state[j][0], state[j][1]);
    *(float2*)(out + (f + 8) * WIDTH + c) = make_float2(state[j][2], state[j][3]);
  }
}

// In order over segments: a segment gets the sum of those before it; with `whole`, every segment gets the sum of all.
extern "C" __global__ void __launch_bounds__(128) prefix_states(float* __restrict__ states, int segments, int whole) {
  const int e = blockIdx.x * 128 + threadIdx.x;
  float* p = states + (i64)blockIdx.y * segments * 64 * WIDTH + e;
  float sum = 0.f;
  for (int s = 0; s < segments; s += 8) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = s + i < segments ? p[(i64)(s + i) * 64 * WIDTH] : 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) { if (s + i < segments && !whole) p[(i64)(s + i) * 64 * WIDTH] = sum; sum += x[i]; }
  }
  if (whole) p[0] = sum;
}

// One segment of the queries of one head. Causal: the state before the segment, then chunk after chunk; otherwise the
// state of all keys, which is that of segment 0.
template <bool CAUSAL> DEV void answer(const View& q, const View& k, const View& v, const float* states, const View& out, float* lse, const Sizes& n, int segments) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ u32 bad[3][2];
  const u32 s0 = smem_u32(dynamic), hi = s0 + 6 * TILE_BYTES, lo = hi + 64 * WIDTH * 2;
  const int h = blockIdx.y, b = blockIdx.z, hk = h / n.group, w = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t4 = lane & 3;
  const int first = blockIdx.x * SEGMENT, chunks = (min(SEGMENT, n.nq - first) + CHUNK - 1) / CHUNK;
  const u32 ones = g == 0 ? ONES : 0u;
  if (threadIdx.x < 6) (&bad[0][0])[threadIdx.x] = 0;
  bool spoilt_before = false;      // a value that is not finite lies in an earlier chunk
  float state[9][4];
  const float* from = states + ((i64)(b * (n.heads / n.group) + hk) * segments + (CAUSAL ? blockIdx.x : 0)) * 64 * WIDTH;
  auto fetch = [&](int t) {
    const u32 to = s0 + (t & 1) * 3 * TILE_BYTES;
    load_rows(to, q, b, h, first + t * CHUNK, n.nq);
    if (CAUSAL) { load_rows(to + TILE_BYTES, k, b, hk, first + t * CHUNK, n.nk); load_rows(to + 2 * TILE_BYTES, v, b, hk, first + t * CHUNK, n.nk); }
  };
  fetch(0); copy_commit();
#pragma unroll
  for (int j = 0; j < 9; j++) {
    const int f = w * 16 + g, c = j * 8 + t4 * 2;
    const float2 x = *(const float2*)(from + f * WIDTH + c), y = *(const float2*)(from + (f + 8) * WIDTH + c);
    state[j][0] = x.x; state[j][1] = x.y; state[j][2] = y.x; state[j][3] = y.y;
  }
  for (int t = 0; t < chunks; t++) {
    // The state is stored as value and remainder: otherwise long sums would lose digits.
    if (CAUSAL || t == 0) {
#pragma unroll
      for (int j = 0; j < 9; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const u32 p = pack(state[j][2 * e], state[j][2 * e + 1]), r = pack(state[j][2 * e] - low(p), state[j][2 * e + 1] - high(p));
          const u32 at = ((w * 16 + g + 8 * e) * WIDTH + j * 8 + t4 * 2) * 2;
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(hi + at), "r"(p));
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(lo + at), "r"(r));
        }
    }
    if (t + 1 < chunks) fetch(t + 1);
    copy_commit(); copy_wait<1>(); __syncthreads();
    const u32 now = s0 + (t & 1) * 3 * TILE_BYTES;
    bool nan0 = false, nan1 = false;
    if (CAUSAL) {
      // 0 · NaN is NaN: non-finite values become 0 inside their chunk; rows that attend to them are set to NaN at the
      // end.
      u32* bits = bad[t % 3];
      if (threadIdx.x < 2) bad[(t + 1) % 3][threadIdx.x] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = threadIdx.x + i * 128, r = e >> 3;
        uint4* at = (uint4*)(dynamic + (t & 1) * 3 * TILE_BYTES + 2 * TILE_BYTES + piece(r, e & 7));
        const uint4 x = *at;
        if (spoilt(x.x) | spoilt(x.y) | spoilt(x.z) | spoilt(x.w)) {
          atomicOr(&bits[r >> 5], 1u << (r & 31));
          *at = make_uint4(without_spoilt(x.x), without_spoilt(x.y), without_spoilt(x.z), without_spoilt(x.w));
        }
      }
      __syncthreads();
      nan0 = nan1 = spoilt_before;
      for (int i = 0; i < 2; i++)
        for (u32 x = bits[i]; x; x &= x - 1) { const int j = i * 32 + __ffs(x) - 1; nan0 = nan0 || j <= w * 16 + g; nan1 = nan1 || j <= w * 16 + g + 8; spoilt_before = true; }
    }
    u32 a[4][4];
    float o[9][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      load_matrix(a[i][0], a[i][1], a[i][2], a[i][3], now + piece(w * 16 + (lane & 15), i * 2 + (lane >> 4)));
#pragma unroll
      for (int e = 0; e < 4; e++) a[i][e] = features(a[i][e]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int term = 0; term < 2; term++) {
        const u32 base = (term ? lo : hi) + (i * 16 + (lane & 15)) * WIDTH * 2;
        u32 b0, b1, b2, b3;
#pragma unroll
        for (int j = 0; j < 4; j++) { load_transposed(b0, b1, b2, b3, base + (j * 2 + (lane >> 4)) * 16); mma(o[2 * j], a[i], b0, b1); mma(o[2 * j + 1], a[i], b2, b3); }
        load_column(b0, b1, base + 128); mma(o[8], a[i], b0, b1);
      }
    // Inside the chunk: keys up to the row's own position.
    if (CAUSAL) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (j <= w) {
          float s[2][4] = {};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            u32 b0, b1, b2, b3;
            load_matrix(b0, b1, b2, b3, now + TILE_BYTES + piece(j * 16 + (lane & 7) + ((lane >> 4) << 3), i * 2 + ((lane >> 3) & 1)));
            mma(s[0], a[i], features(b0), features(b1)); mma(s[1], a[i], features(b2), features(b3));
          }
          if (j == w) {
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
              for (int e = 0; e < 2; e++) { const int c = x * 8 + t4 * 2 + e; if (c > g) s[x][e] = 0.f; if (c > g + 8) s[x][2 + e] = 0.f; }
          }
          const u32 p[4] = {pack(s[0][0], s[0][1]), pack(s[0][2], s[0][3]), pack(s[1][0], s[1][1]), pack(s[1][2], s[1][3])};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            u32 b0, b1, b2, b3;
            load_transposed(b0, b1, b2, b3, now + 2 * TILE_BYTES + piece(j * 16 + (lane & 15), i * 2 + (lane >> 4)));
            mma(o[2 * i], p, b0, b1); mma(o[2 * i + 1], p, b2, b3);
          }
          mma(o[8], p, ones, ones);
        }
    }
    const float z0 = __shfl_sync(FULL, o[8][0], lane & ~3), z1 = __shfl_sync(FULL, o[8][2], lane & ~3);
    const float d0 = nan0 ? NOT_A_NUMBER : 1.f / z0, d1 = nan1 ? NOT_A_NUMBER : 1.f / z1;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = first + t * CHUNK + w * 16 + g + 8 * e;
      if (row >= n.nq) continue;
      const float inv = e ? d1 : d0;
      u32* to = (u32*)(row_of<elem>(out, b, h, row) + t4 * 2);
#pragma unroll
      for (int i = 0; i < 8; i++) to[4 * i] = pack(o[i][2 * e] * inv, o[i][2 * e + 1] * inv);
      if (lse && t4 == 0) lse[((i64)b * n.heads + h) * n.nq + row] = lg2(e ? z1 : z0) * (float)LN_2;
    }
    if (CAUSAL) update(state, now + TILE_BYTES, now + 2 * TILE_BYTES, w, lane, min(CHUNK, n.nk - first - t * CHUNK));
    __syncthreads();
  }
}
extern "C" __global__ void __launch_bounds__(128) answer_causal(View q, View k, View v, const float* states, View out, float* lse, Sizes n, int segments) {
  answer<true>(q, k, v, states, out, lse, n, segments);
}
extern "C" __global__ void __launch_bounds__(128) answer_whole(View q, View k, View v, const float* states, View out, float* lse, Sizes n, int segments) {
  answer<false>(q, k, v, states, out, lse, n, segments);
}
