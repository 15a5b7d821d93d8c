// Exact attention with mma.sync, for sm_80 and later: 128 rows per block, 16 per warp, tiles of 64 keys loaded in turn
// by asynchronous copies. D: 64 or 128. CAUSAL: row i sees keys up to i + nk − nq.
#define ROWS 128
#define KEYS 64
#define THREADS 256
#define PIECES (D / 8)
#define TILE_BYTES (KEYS * D * 2)

template <int N> struct Count { static constexpr int value = N; };
DEV u32 piece(int row, int c) { return row * (D * 2) + ((c ^ (row & 7)) << 4); }

extern "C" __global__ void __launch_bounds__(THREADS, D == 64 ? 2 : 1) attend(View q, View k, View v, View out, float* __restrict__ lse, Sizes n, float sl2) {
  extern __shared__ __align__(128) unsigned char raw[];
#if CAUSAL
  __shared__ u32 bad[2];
#endif
  const u32 sq = smem_u32(raw), sk = sq + ROWS * D * 2, sv = sk + 2 * TILE_BYTES;
  const int h = blockIdx.y, b = blockIdx.z, hk = h / n.group, tid = threadIdx.x, w = tid >> 5, lane = tid & 31, offset = n.nk - n.nq;
  const int tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x, row = tile * ROWS;
  const int end = CAUSAL ? min(n.nk, min(row + ROWS, n.nq) + offset) : n.nk, tiles = end > 0 ? (end + KEYS - 1) / KEYS : 0;
  const i64 rows = ((i64)b * n.heads + h) * n.nq;
  if (tiles == 0) {
    for (int i = tid; i < min(ROWS, n.nq - row) * D; i += THREADS) row_of<elem>(out, b, h, row + i / D)[i % D] = 0;
    if (lse && tid < min(ROWS, n.nq - row)) lse[rows + row + tid] = NEG_INF;
    return;
  }
  // A thread copies one piece of every STEP-th row.
  constexpr int STEP = THREADS / PIECES;
  const int copied = tid / PIECES, column = tid % PIECES;
  auto load = [&](u32 to, const View& x, int head, int first, auto count, int limit) {
    const elem* from = row_of<elem>(x, b, head, first + copied) + column * 8;
    const i64 step = x.row * STEP;
#pragma unroll
    for (int r = 0; r < decltype(count)::value; r += STEP, from += step) {
      const bool ok = first + copied + r < limit;
      copy16(to + piece(copied + r, column), ok ? from : (const elem*)x.p, ok);
    }
  };
  load(sq, q, h, row, Count<ROWS>(), n.nq); load(sk, k, hk, (tiles - 1) * KEYS, Count<KEYS>(), n.nk); copy_commit();
  load(sv, v, hk, (tiles - 1) * KEYS, Count<KEYS>(), n.nk); copy_commit();
  u32 aq[D / 16][4];
  float o[D / 8][4], m0 = NEG_INF, m1 = NEG_INF, l0 = 0.f, l1 = 0.f;
#pragma unroll
  for (int i = 0; i < D / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  const int r0 = row + w * 16 + (lane >> 2), to0 = CAUSAL ? min(n.nk, r0 + offset + 1) : n.nk, to1 = CAUSAL ? min(n.nk, r0 + 8 + offset + 1) : n.nk;
  bool nan0 = false, nan1 = false;
  for (int it = 0; it < tiles; it++) {
    const int first = (tiles - 1 - it) * KEYS, st = it & 1;
    copy_wait<1>(); __syncthreads();      // keys are there
    if (it == 0) {
#pragma unroll
      for (int i = 0; i < D / 16; i++) load_matrix(aq[i][0], aq[i][1], aq[i][2], aq[i][3], sq + piece(w * 16 + (lane & 15), i * 2 + (lane >> 4)));
    }
    if (it + 1 < tiles) load(sk + (st ^ 1) * TILE_BYTES, k, hk, first - KEYS, Count<KEYS>(), n.nk);
    copy_commit();
    float s[KEYS / 8][4];
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
      for (int j = 0; j < KEYS / 16; j++) {
        u32 b0, b1, b2, b3;
        load_matrix(b0, b1, b2, b3, sk + st * TILE_BYTES + piece(j * 16 + (lane & 7) + ((lane >> 4) << 3), i * 2 + ((lane >> 3) & 1)));
        mma(s[2 * j], aq[i], b0, b1); mma(s[2 * j + 1], aq[i], b2, b3);
      }
    if (first + KEYS > n.nk || (CAUSAL && first + KEYS - 1 > row + w * 16 + offset)) {
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int c = first + j * 8 + (lane & 3) * 2 + e;
          if (c >= to0) s[j][e] = NEG_INF;
          if (c >= to1) s[j][2 + e] = NEG_INF;
        }
    }
    float x0 = m0, x1 = m1;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) { x0 = fmaxf(x0, fmaxf(s[j][0], s[j][1])); x1 = fmaxf(x1, fmaxf(s[j][2], s[j][3])); }
    x0 = quad_max(x0); x1 = quad_max(x1);
    const float z0 = x0 == NEG_INF ? 0.f : x0 * sl2, z1 = x1 == NEG_INF ? 0.f : x1 * sl2, a0 = ex2(m0 * sl2 - z0), a1 = ex2(m1 * sl2 - z1);
    m0 = x0; m1 = x1;
    float t0 = 0.f, t1 = 0.f;
    u32 p[KEYS / 16][4];
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) {
      const float y0 = ex2(fmaf(s[j][0], sl2, -z0)), y1 = ex2(fmaf(s[j][1], sl2, -z0)), y2 = ex2(fmaf(s[j][2], sl2, -z1)), y3 = ex2(fmaf(s[j][3], sl2, -z1));
      t0 += y0 + y1; t1 += y2 + y3;
      p[j / 2][(j & 1) * 2] = pack(y0, y1); p[j / 2][(j & 1) * 2 + 1] = pack(y2, y3);
    }
    l0 = l0 * a0 + t0; l1 = l1 * a1 + t1;
#pragma unroll
    for (int i = 0; i < D / 8; i++) { o[i][0] *= a0; o[i][1] *= a0; o[i][2] *= a1; o[i][3] *= a1; }
    copy_wait<1>();
#if CAUSAL
    if (tid < 2) bad[tid] = 0;
#endif
    __syncthreads();                      // values are there
    if (it + 1 < tiles) load(sv + (st ^ 1) * TILE_BYTES, v, hk, first - KEYS, Count<KEYS>(), n.nk);
    copy_commit();
#if CAUSAL
    // A masked weight is 0, but 0 · NaN is NaN: in partially masked tiles non-finite values become 0, and rows that
    // attend to such a key are set to NaN at the end.
    if (first + KEYS - 1 > row + offset) {
      for (int i = tid; i < KEYS * PIECES; i += THREADS) {
        const int r = i / PIECES;
        uint4* at = (uint4*)(raw + (sv - sq) + st * TILE_BYTES + piece(r, i % PIECES));
        const uint4 x = *at;
        if (spoilt(x.x) | spoilt(x.y) | spoilt(x.z) | spoilt(x.w)) {
          atomicOr(&bad[r >> 5], 1u << (r & 31));
          *at = make_uint4(without_spoilt(x.x), without_spoilt(x.y), without_spoilt(x.z), without_spoilt(x.w));
        }
      }
      __syncthreads();
      for (int i = 0; i < 2; i++)
        for (u32 x = bad[i]; x; x &= x - 1) { const int j = first + i * 32 + __ffs(x) - 1; nan0 = nan0 || j < to0; nan1 = nan1 || j < to1; }
    }
#endif
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        u32 b0, b1, b2, b3;
        load_transposed(b0, b1, b2, b3, sv + st * TILE_BYTES + piece(j * 16 + (lane & 15), i * 2 + (lane >> 4)));
        mma(o[2 * i], p[j], b0, b1); mma(o[2 * i + 1], p[j], b2, b3);
      }
  }
  l0 = quad_sum(l0); l1 = quad_sum(l1);
  const float i0 = nan0 ? NOT_A_NUMBER : l0 == 0.f ? 0.f : 1.f / l0, i1 = nan1 ? NOT_A_NUMBER : l1 == 0.f ? 0.f : 1.f / l1;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int r = r0 + 8 * e;
    if (r >= n.nq) continue;
    const float inv = e ? i1 : i0;
    u32* to = (u32*)(row_of<elem>(out, b, h, r) + (lane & 3) * 2);
#pragma unroll
    for (int i = 0; i < D / 8; i++) to[4 * i] = pack(o[i][2 * e] * inv, o[i][2 * e + 1] * inv);
    const float l = e ? l1 : l0, m = e ? m1 : m0;
    if (lse && (lane & 3) == 0) lse[rows + r] = l == 0.f ? NEG_INF : (m * sl2 + lg2(l)) * (float)LN_2;
  }
}
