// Decoding: one query row per head, up to 8 query heads per key head. Pieces of the keys run in parallel and are merged
// in order. The size of a piece depends only on the number of keys: bits are equal within a chip family. D: 64 or 128.
#define TILE 64
#define STAGES 3
#define TILE_BYTES (TILE * D * 2)

DEV u32 piece_of(int row, int c) { return row * (D * 2) + ((c ^ (row & 7)) << 4); }

// Keys [first, first + size) of piece blockIdx.x. A warp takes 16 keys of a tile for all heads of the group and keeps its
// own maximum, sum and output. parts: [batch · key heads][pieces][group][D], sums: the same with 2 columns.
extern "C" __global__ void __launch_bounds__(128, 2) decode(View q, View k, View v, float* parts, float* sums, Sizes n, int size, float sl2) {
  extern __shared__ __align__(128) unsigned char raw[];
  const int tid = threadIdx.x, w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, G = n.group, hk = blockIdx.y, b = blockIdx.z;
  const int first = blockIdx.x * size, last = min(n.nk, first + size), tiles = (last - first + TILE - 1) / TILE;
  const u32 sk = smem_u32(raw), sv = sk + STAGES * TILE_BYTES;
  u32 aq[D / 16][2];
  const elem* query = row_of<elem>(q, b, hk * G + min(g, G - 1), 0);
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    aq[i][0] = g < G ? *(const u32*)(query + i * 16 + 2 * t) : 0;
    aq[i][1] = g < G ? *(const u32*)(query + i * 16 + 8 + 2 * t) : 0;
  }
  auto load = [&](int tile) {
    if (tile < tiles) {
#pragma unroll
      for (int i = 0; i < TILE * (D / 8) / 128; i++) {
        const int e = tid + i * 128, r = e / (D / 8), c = e % (D / 8), j = first + tile * TILE + r;
        const bool ok = j < last;
        const u32 at = (tile % STAGES) * TILE_BYTES + piece_of(r, c);
        copy16(sk + at, row_of<elem>(k, b, hk, ok ? j : first) + c * 8, ok);
        copy16(sv + at, row_of<elem>(v, b, hk, ok ? j : first) + c * 8, ok);
      }
    }
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);
  float o[D / 8][4], m = NEG_INF, l = 0.f;
#pragma unroll
  for (int i = 0; i < D / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  for (int it = 0; it < tiles; it++) {
    copy_wait<STAGES - 2>(); __syncthreads(); load(it + STAGES - 1);
    const u32 bk = sk + (it % STAGES) * TILE_BYTES, bv = sv + (it % STAGES) * TILE_BYTES;
    const int j0 = first + it * TILE + w * 16 + 2 * t;
    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      u32 b0, b1, b2, b3;
      load_matrix(b0, b1, b2, b3, bk + piece_of(w * 16 + (lane & 7) + ((lane >> 4) << 3), i * 2 + ((lane >> 3) & 1)));
      const u32 a[4] = {aq[i][0], 0, aq[i][1], 0};
      mma(s[0], a, b0, b1); mma(s[1], a, b2, b3);
    }
    float y[4], x = NEG_INF;
#pragma unroll
    for (int e = 0; e < 4; e++) { const int j = j0 + (e & 1) + 8 * (e >> 1); y[e] = j < last ? s[e >> 1][e & 1] * sl2 : NEG_INF; x = fmaxf(x, y[e]); }
    x = fmaxf(quad_max(x), m);
    const float z = x == NEG_INF ? 0.f : x, shrink = ex2(m - z);
    m = x;
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < 4; e++) { y[e] = ex2(y[e] - z); sum += y[e]; }
    l = l * shrink + sum;
    const u32 p[4] = {pack(y[0], y[1]), 0, pack(y[2], y[3]), 0};
#pragma unroll
    for (int i = 0; i < D / 8; i++) { o[i][0] *= shrink; o[i][1] *= shrink; }
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      u32 b0, b1, b2, b3;
      load_transposed(b0, b1, b2, b3, bv + piece_of(w * 16 + (lane & 15), i * 2 + (lane >> 4)));
      mma(o[2 * i], p, b0, b1); mma(o[2 * i + 1], p, b2, b3);
    }
  }
  l = quad_sum(l);
  copy_wait<0>(); __syncthreads();
  float *so = (float*)raw, *sm = so + 4 * 8 * D;      // [warp][head][D], [warp][head][2]
  if (g < G) {
#pragma unroll
    for (int i = 0; i < D / 8; i++) { so[(w * 8 + g) * D + i * 8 + 2 * t] = o[i][0]; so[(w * 8 + g) * D + i * 8 + 2 * t + 1] = o[i][1]; }
    if (t == 0) { sm[(w * 8 + g) * 2] = m; sm[(w * 8 + g) * 2 + 1] = l; }
  }
  __syncthreads();
  const i64 at = ((i64)(b * gridDim.y + hk) * gridDim.x + blockIdx.x) * G;
  for (int e = tid; e < G * D; e += 128) {
    const int head = e / D, c = e % D;
    float mm = NEG_INF, ll = 0.f, oo = 0.f;
    for (int i = 0; i < 4; i++) mm = fmaxf(mm, sm[(i * 8 + head) * 2]);
    const float z = mm == NEG_INF ? 0.f : mm;
    for (int i = 0; i < 4; i++) { const float f = ex2(sm[(i * 8 + head) * 2] - z); ll += f * sm[(i * 8 + head) * 2 + 1]; oo += f * so[(i * 8 + head) * D + c]; }
    parts[at * D + e] = oo;
    if (c == 0) { sums[(at + head) * 2] = mm; sums[(at + head) * 2 + 1] = ll; }
  }
}

// One block per query head: the pieces in order.
extern "C" __global__ void __launch_bounds__(D) merge_pieces(const float* __restrict__ parts, const float* __restrict__ sums, View out, float* lse, Sizes n, int pieces) {
  extern __shared__ float weight[];
  __shared__ float red[2][D / 32];
  const int h = blockIdx.x, b = blockIdx.y, G = n.group, hk = h / G, g = h % G, tid = threadIdx.x;
  const i64 at = (i64)(b * (n.heads / G) + hk) * pieces * G + g;
  const float* ml = sums + at * 2;
  float m = NEG_INF, l = 0.f;
  for (int i = tid; i < pieces; i += D) m = fmaxf(m, ml[(i64)i * G * 2]);
  m = warp_max(m);
  if ((tid & 31) == 0) red[0][tid >> 5] = m;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < D / 32; i++) m = fmaxf(m, red[0][i]);
  for (int i = tid; i < pieces; i += D) { weight[i] = ex2(ml[(i64)i * G * 2] - m); l += weight[i] * ml[(i64)i * G * 2 + 1]; }
  l = warp_sum(l);
  if ((tid & 31) == 0) red[1][tid >> 5] = l;
  __syncthreads();
  l = 0.f;
#pragma unroll
  for (int i = 0; i < D / 32; i++) l += red[1][i];
  const float* o = parts + at * D + tid;
  float x[4] = {0.f, 0.f, 0.f, 0.f};
  int i = 0;
  for (; i + 3 < pieces; i += 4)
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] += weight[i + e] * o[(i64)(i + e) * G * D];
  for (; i < pieces; i++) x[0] += weight[i] * o[(i64)i * G * D];
  row_of<elem>(out, b, h, 0)[tid] = narrow(((x[0] + x[1]) + (x[2] + x[3])) / l);
  if (lse && tid == 0) lse[(i64)b * n.heads + h] = (m + lg2(l)) * (float)LN_2;
}
