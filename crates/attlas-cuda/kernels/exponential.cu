// Linear attention with exponential features on tensor cores, bf16, keys and values of 64 columns. With features
// exp(c_l ± ⟨ω_l, x⟩ − h(x)), h(x) = norm · ‖x‖²/2, the sums over keys for a feature are attention with the direction
// as the query, and a row is attention with directions as keys, sums as values and their logarithms as biases. Every
// state is therefore a mean of values (bf16) and a logarithm, and nothing overflows. Three launches: states of
// segments, their prefixes, rows; a row attends to the keys of its own segment by the logarithms of their kernel.
// Logarithms are to base 2. Directions come as two bf16 terms, [maps][2][TILES · 16][64]; SIGNS is 2 if every direction
// counts with both signs. A product of features smaller than 2^−126 of the largest of its row and key counts as 0.
#define SEGMENT 128
#define CHUNK 64
#define TILE_BYTES 8192
#define MP (TILES * 16)
// Elements of a row of key features in shared memory.
#define STRIDE (SIGNS * MP + 8)
#define LOG2E 1.4426950408889634f

DEV u32 piece(int row, int c) { return row * 128 + ((c ^ (row & 7)) << 4); }
// Loads 64 rows, with zeros after the last.
DEV void load_rows(u32 to, const View& x, int b, int h, int first, int n) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int e = threadIdx.x + i * 128, r = e >> 3, c = e & 7;
    const bool ok = first + r < n;
    copy16(to + piece(r, c), row_of<elem>(x, b, h, ok ? first + r : 0) + c * 8, ok);
  }
}
DEV const unsigned char* shared_at(const unsigned char* raw, u32 base, u32 at) { return raw + (at - base); }
// Half the squared norm of a row of a tile times `norm` and log2 e, by two threads per row, 32 columns apart.
DEV float half_norm(const unsigned char* tile, int row, float norm) {
  float s = 0.f;
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const uint4 y = *(const uint4*)(tile + piece(row, c));
    const u32 words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; e++) { const float a = low(words[e]), z = high(words[e]); s += a * a + z * z; }
  }
  return 0.5f * LOG2E * norm * s;
}
// The factor of the projections, and the constant of feature l.
struct Fitted { float factor, square, constant; };
DEV Fitted fitted_of(const float* fitted, i64 map) {
  Fitted f = {LOG2E, 0.f, 0.f};
  if (fitted) { f.factor = fitted[3 * map] * LOG2E; f.square = fitted[3 * map + 1] * LOG2E; f.constant = fitted[3 * map + 2] * LOG2E; }
  return f;
}
DEV float constant_of(const Fitted& f, const float* constants, const float* lengths, i64 at) {
  return constants[at] * LOG2E + (lengths ? f.square * lengths[at] + f.constant : 0.f);
}

// Means: [heads][segments][SIGNS][MP][64], logs: the same without columns. grid: segments, direction tiles / 4, batch · key heads.
extern "C" __global__ void __launch_bounds__(128) feature_states(View k, View v, const elem* __restrict__ omega, const float* __restrict__ constants, const float* __restrict__ fitted, const float* __restrict__ lengths, elem* __restrict__ means, float* __restrict__ logs, Sizes n, int directions, float norm) {
  extern __shared__ __align__(128) unsigned char raw[];
  float* half = (float*)(raw + 4 * TILE_BYTES);      // [SEGMENT]
  const u32 sk = smem_u32(raw), sv = sk + 2 * TILE_BYTES;
  const int kv = n.heads / n.group, hk = blockIdx.z % kv, b = blockIdx.z / kv, w = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first = blockIdx.x * SEGMENT, tile = blockIdx.y * 4 + w;
#pragma unroll
  for (int i = 0; i < 2; i++) { load_rows(sk + i * TILE_BYTES, k, b, hk, first + i * CHUNK, n.nk); load_rows(sv + i * TILE_BYTES, v, b, hk, first + i * CHUNK, n.nk); }
  copy_commit(); copy_wait<0>(); __syncthreads();
  half[threadIdx.x] = half_norm(raw + (threadIdx.x >> 6) * TILE_BYTES, threadIdx.x & 63, norm);
  __syncthreads();
  if (tile >= TILES) return;
  const Fitted fit = fitted_of(fitted, blockIdx.z);
  const elem* rows = omega + (i64)blockIdx.z * 2 * MP * 64 + tile * 16 * 64;
  float p[16][4] = {};
#pragma unroll
  for (int term = 0; term < 2; term++) {
    u32 a[4][4];
    const elem *r0 = rows + term * MP * 64 + g * 64 + 2 * t, *r1 = r0 + 8 * 64;
#pragma unroll
    for (int i = 0; i < 4; i++) { a[i][0] = *(const u32*)(r0 + i * 16); a[i][1] = *(const u32*)(r1 + i * 16); a[i][2] = *(const u32*)(r0 + i * 16 + 8); a[i][3] = *(const u32*)(r1 + i * 16 + 8); }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 b0, b1, b2, b3;
        load_matrix(b0, b1, b2, b3, sk + (j >> 2) * TILE_BYTES + piece((j & 3) * 16 + (lane & 7) + ((lane >> 4) << 3), i * 2 + ((lane >> 3) & 1)));
        mma(p[2 * j], a[i], b0, b1); mma(p[2 * j + 1], a[i], b2, b3);
      }
  }
  float c[2];
#pragma unroll
  for (int e = 0; e < 2; e++) { const int l = tile * 16 + g + 8 * e; c[e] = l < directions ? constant_of(fit, constants, fitted ? lengths : 0, (i64)blockIdx.z * directions + l) : NEG_INF; }
#pragma unroll
  for (int sign = 0; sign < SIGNS; sign++) {
    const float factor = sign ? -fit.factor : fit.factor;
    float m[2] = {NEG_INF, NEG_INF}, l[2] = {0.f, 0.f}, o[8][4] = {};
    auto logit = [&](int j, int e) {
      const int key = j * 8 + 2 * t + (e & 1);
      return first + key < n.nk ? c[e >> 1] + factor * p[j][e] - half[key] : NEG_INF;
    };
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) m[e >> 1] = fmaxf(m[e >> 1], logit(j, e));
    m[0] = quad_max(m[0]); m[1] = quad_max(m[1]);
    const float z[2] = {m[0] == NEG_INF ? 0.f : m[0], m[1] == NEG_INF ? 0.f : m[1]};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float y[8];
#pragma unroll
      for (int e = 0; e < 8; e++) { y[e] = ex2(logit(2 * j + (e >> 2), e & 3) - z[(e >> 1) & 1]); l[(e >> 1) & 1] += y[e]; }
      const u32 a[4] = {pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7])};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 b0, b1, b2, b3;
        load_transposed(b0, b1, b2, b3, sv + (j >> 2) * TILE_BYTES + piece((j & 3) * 16 + (lane & 15), i * 2 + (lane >> 4)));
        mma(o[2 * i], a, b0, b1); mma(o[2 * i + 1], a, b2, b3);
      }
    }
    l[0] = quad_sum(l[0]); l[1] = quad_sum(l[1]);
    const i64 at = (((i64)blockIdx.z * gridDim.x + blockIdx.x) * SIGNS + sign) * MP + tile * 16 + g;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float inv = l[e] == 0.f ? 0.f : 1.f / l[e];
      u32* to = (u32*)(means + (at + 8 * e) * 64 + 2 * t);
#pragma unroll
      for (int i = 0; i < 8; i++) to[4 * i] = l[e] == 0.f ? 0u : pack(o[i][2 * e] * inv, o[i][2 * e + 1] * inv);
      if (t == 0) logs[at + 8 * e] = l[e] == 0.f ? NEG_INF : m[e] == NEG_INF ? NOT_A_NUMBER : m[e] + lg2(l[e]);
    }
  }
}

// In order over segments: a segment gets the sum of those before it; with `whole`, the first gets the sum of all. One
// warp per feature. grid: features / 4, batch · key heads.
extern "C" __global__ void __launch_bounds__(128) prefix_means(elem* __restrict__ means, float* __restrict__ logs, int segments, int whole) {
  const int r = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (r >= SIGNS * MP) return;
  const i64 step = SIGNS * MP, base = (i64)blockIdx.y * segments * step + r;
  float m = NEG_INF, l = 0.f, x = 0.f, y = 0.f;
  auto write = [&](int s) {
    const float inv = l == 0.f ? 0.f : 1.f / l;
    ((u32*)(means + (base + s * step) * 64))[lane] = l == 0.f ? 0u : pack(x * inv, y * inv);
    __syncwarp();
    if (lane == 0) logs[base + s * step] = l == 0.f ? NEG_INF : m + lg2(l);
  };
  for (int s0 = 0; s0 < segments; s0 += 8) {
    u32 word[8]; float log[8];
#pragma unroll
    for (int i = 0; i < 8; i++) { const bool ok = s0 + i < segments; word[i] = ok ? ((const u32*)(means + (base + (s0 + i) * step) * 64))[lane] : 0u; log[i] = ok ? logs[base + (s0 + i) * step] : NEG_INF; }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (s0 + i >= segments) break;
      if (!whole) write(s0 + i);
      if (log[i] == NEG_INF) continue;
      const float top = larger(m, log[i]), keep = m == NEG_INF ? 0.f : ex2(m - top), gain = ex2(log[i] - top);
      x = x * keep + low(word[i]) * gain; y = y * keep + high(word[i]) * gain; l = l * keep + gain; m = top;
    }
  }
  if (whole) write(0);
}

// 64 rows of one head. Dynamic shared memory: both terms of the directions, means or key features, keys, values, logarithms and
// constants.
extern "C" __global__ void __launch_bounds__(128) feature_rows(View q, View k, View v, const elem* __restrict__ omega, const float* __restrict__ constants, const float* __restrict__ fitted, const float* __restrict__ lengths, const elem* __restrict__ means, const float* __restrict__ logs, View out, float* lse, Sizes n, int segments, int directions, float norm) {
  extern __shared__ __align__(128) unsigned char raw[];
  __shared__ float norms[CHUNK], most[CHUNK];
  __shared__ int spoilt_from;
  const u32 so = smem_u32(raw), sf = so + 2 * MP * 128, sk = sf + (CHUNK * STRIDE * 2 > SIGNS * MP * 128 ? CHUNK * STRIDE * 2 : SIGNS * MP * 128), sv = sk + TILE_BYTES;
  float *cs = (float*)(raw + (sv - so) + TILE_BYTES), *ls = cs + MP;      // [MP], [SIGNS · MP]
  const int h = blockIdx.y, b = blockIdx.z, hk = h / n.group, w = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const i64 map = (i64)b * (n.heads / n.group) + hk;
  const int first = blockIdx.x * CHUNK, slot = CAUSAL ? first / SEGMENT : 0;
  const Fitted fit = fitted_of(fitted, map);
  const elem* from = means + (map * segments + slot) * SIGNS * MP * 64;
  for (int e = threadIdx.x; e < 2 * MP * 8; e += 128) copy16(so + piece(e >> 3, e & 7), omega + map * 2 * MP * 64 + (i64)e * 8);
  for (int e = threadIdx.x; e < SIGNS * MP * 8; e += 128) copy16(sf + piece(e >> 3, e & 7), from + (i64)e * 8);
  load_rows(sk, q, b, h, first, n.nq);
  copy_commit();
  for (int l = threadIdx.x; l < MP; l += 128) cs[l] = l < directions ? constant_of(fit, constants, fitted ? lengths : 0, map * directions + l) : NEG_INF;
  for (int l = threadIdx.x; l < SIGNS * MP; l += 128) ls[l] = logs[(map * segments + slot) * SIGNS * MP + l];
  if (threadIdx.x == 0) spoilt_from = CHUNK;
  copy_wait<0>(); __syncthreads();
  if (threadIdx.x < CHUNK) norms[threadIdx.x] = half_norm(raw + (sk - so), threadIdx.x, norm);
  // 16 rows of a tile, and their projections on 16 directions by one term or both.
  u32 a[4][4];
  auto fetch = [&]() {
#pragma unroll
    for (int i = 0; i < 4; i++) load_matrix(a[i][0], a[i][1], a[i][2], a[i][3], sk + piece(w * 16 + (lane & 15), i * 2 + (lane >> 4)));
  };
  auto project = [&](int j, int terms, float x[4], float y[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = y[e] = 0.f;
#pragma unroll
    for (int term = 0; term < 2; term++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (term < terms) {
          u32 b0, b1, b2, b3;
          load_matrix(b0, b1, b2, b3, so + term * MP * 128 + piece(j * 16 + (lane & 7) + ((lane >> 4) << 3), i * 2 + ((lane >> 3) & 1)));
          mma(x, a[i], b0, b1); mma(y, a[i], b2, b3);
        }
  };
  fetch();
  __syncthreads();
  float m[2] = {NEG_INF, NEG_INF}, sum[2] = {0.f, 0.f}, o[8][4] = {};
  // The feature of column e of eight directions, of one sign, without the norm of the row; x: their projection.
  auto feature = [&](int j, int e, int sign, float x) { return cs[j * 8 + 2 * t + (e & 1)] + (sign ? -fit.factor : fit.factor) * x; };
  auto scale = [&](const float top[2]) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float x = larger(m[e], top[e]), z = x == NEG_INF ? 0.f : x, shrink = m[e] == NEG_INF ? 0.f : ex2(m[e] - z);
      m[e] = x; sum[e] *= shrink;
#pragma unroll
      for (int i = 0; i < 8; i++) { o[i][2 * e] *= shrink; o[i][2 * e + 1] *= shrink; }
    }
  };
  // Approximate largest feature of a row, and the largest with the sums before the segment, by one term of the
  // directions.
  const bool before = !CAUSAL || slot > 0;
  float beta[2] = {NEG_INF, NEG_INF}, top[2] = {NEG_INF, NEG_INF};
#pragma unroll 1
  for (int j = 0; j < TILES; j++) {
    float x[2][4];
    project(j, 1, x[0], x[1]);
#pragma unroll
    for (int e = 0; e < 8; e++)
#pragma unroll
      for (int sign = 0; sign < SIGNS; sign++) {
        const int c = 2 * j + (e >> 2), r = (e >> 1) & 1;
        const float y = feature(c, e & 3, sign, x[e >> 2][e & 3]);
        beta[r] = fmaxf(beta[r], y);
        if (before) top[r] = larger(top[r], y + ls[sign * MP + c * 8 + 2 * t + (e & 1)]);
      }
  }
  beta[0] = quad_max(beta[0]); beta[1] = quad_max(beta[1]);
#pragma unroll
  for (int e = 0; e < 2; e++) { top[e] = larger(top[e], __shfl_xor_sync(FULL, top[e], 1)); top[e] = larger(top[e], __shfl_xor_sync(FULL, top[e], 2)); }
  scale(top);
  const float zero[2] = {beta[0] == NEG_INF ? 0.f : beta[0], beta[1] == NEG_INF ? 0.f : beta[1]}, z[2] = {m[0] == NEG_INF ? 0.f : m[0], m[1] == NEG_INF ? 0.f : m[1]};
  // The result of the sums before the segment, and the features of the rows relative to `zero`.
  u32 weights[CAUSAL ? SIGNS * TILES : 1][4];
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    float x[2][4];
    project(j, 2, x[0], x[1]);
#pragma unroll
    for (int sign = 0; sign < SIGNS; sign++) {
      float f[8];
#pragma unroll
      for (int e = 0; e < 8; e++) f[e] = feature(2 * j + (e >> 2), e & 3, sign, x[e >> 2][e & 3]);
      if (before) {
        float y[8];
#pragma unroll
        for (int e = 0; e < 8; e++) { y[e] = ex2(f[e] + ls[sign * MP + (2 * j + (e >> 2)) * 8 + 2 * t + (e & 1)] - z[(e >> 1) & 1]); sum[(e >> 1) & 1] += y[e]; }
        const u32 y16[4] = {pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7])};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 b0, b1, b2, b3;
          load_transposed(b0, b1, b2, b3, sf + piece(sign * MP + j * 16 + (lane & 15), i * 2 + (lane >> 4)));
          mma(o[2 * i], y16, b0, b1); mma(o[2 * i + 1], y16, b2, b3);
        }
      }
      if (CAUSAL)
#pragma unroll
        for (int e = 0; e < 4; e++) weights[sign * TILES + j][e] = pack(ex2(f[2 * e] - zero[e & 1]), ex2(f[2 * e + 1] - zero[e & 1]));
    }
  }
  if (CAUSAL) {
    for (int start = slot * SEGMENT; start <= first; start += CHUNK) {
      __syncthreads();
      load_rows(sk, k, b, hk, start, n.nk); load_rows(sv, v, b, hk, start, n.nk);
      copy_commit(); copy_wait<0>(); __syncthreads();
      // Features of the keys relative to the approximate largest of each, by one term of the directions; 16 keys per
      // warp.
      {
        fetch();
        float alpha[2] = {NEG_INF, NEG_INF};
#pragma unroll 1
        for (int j = 0; j < TILES; j++) {
          float x[2][4];
          project(j, 1, x[0], x[1]);
#pragma unroll
          for (int e = 0; e < 8; e++)
#pragma unroll
            for (int sign = 0; sign < SIGNS; sign++) alpha[(e >> 1) & 1] = fmaxf(alpha[(e >> 1) & 1], feature(2 * j + (e >> 2), e & 3, sign, x[e >> 2][e & 3]));
        }
        alpha[0] = quad_max(alpha[0]); alpha[1] = quad_max(alpha[1]);
        const float z[2] = {alpha[0] == NEG_INF ? 0.f : alpha[0], alpha[1] == NEG_INF ? 0.f : alpha[1]};
#pragma unroll 1
        for (int j = 0; j < TILES; j++) {
          float x[2][4];
          project(j, 2, x[0], x[1]);
#pragma unroll
          for (int sign = 0; sign < SIGNS; sign++)
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
              for (int r = 0; r < 2; r++)
                *(u32*)(raw + (sf - so) + ((w * 16 + g + 8 * r) * STRIDE + sign * MP + (2 * j + e) * 8 + 2 * t) * 2) = pack(ex2(feature(2 * j + e, 2 * r, sign, x[e][2 * r]) - z[r]), ex2(feature(2 * j + e, 2 * r + 1, sign, x[e][2 * r + 1]) - z[r]));
        }
#pragma unroll
        for (int r = 0; r < 2; r++) if (t == 0) { const int row = w * 16 + g + 8 * r; most[row] = z[r] - half_norm(raw + (sk - so), row, norm); }
        // Non-finite values in the partially visible chunk are cleared, and the rows that attend to them are marked.
        if (start == first)
          for (int e = threadIdx.x; e < CHUNK * 32; e += 128) {
            u32* word = (u32*)(raw + (sv - so) + piece(e >> 5, (e & 31) >> 2) + (e & 3) * 4);
            if (spoilt(*word)) { atomicMin(&spoilt_from, e >> 5); *word = without_spoilt(*word); }
          }
      }
      __syncthreads();
      float s[8][4] = {};
#pragma unroll
      for (int i = 0; i < SIGNS * TILES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          u32 b0, b1, b2, b3;
          load_matrix(b0, b1, b2, b3, sf + ((j * 16 + (lane & 7) + ((lane >> 4) << 3)) * STRIDE + i * 16 + ((lane >> 3) & 1) * 8) * 2);
          mma(s[2 * j], weights[i], b0, b1); mma(s[2 * j + 1], weights[i], b2, b3);
        }
      float top[2] = {NEG_INF, NEG_INF};
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int key = j * 8 + 2 * t + (e & 1), row = w * 16 + g + 8 * (e >> 1);
          const bool seen = (start < first || key <= row) && start + key < n.nk;
          s[j][e] = seen ? lg2(s[j][e]) + most[key] + zero[e >> 1] : NEG_INF;
          top[e >> 1] = larger(top[e >> 1], s[j][e]);
        }
#pragma unroll
      for (int e = 0; e < 2; e++) { top[e] = larger(top[e], __shfl_xor_sync(FULL, top[e], 1)); top[e] = larger(top[e], __shfl_xor_sync(FULL, top[e], 2)); }
      scale(top);
      const float z[2] = {m[0] == NEG_INF ? 0.f : m[0], m[1] == NEG_INF ? 0.f : m[1]};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float y[8];
#pragma unroll
        for (int e = 0; e < 8; e++) { y[e] = ex2(s[2 * j + (e >> 2)][e & 3] - z[(e >> 1) & 1]); sum[(e >> 1) & 1] += y[e]; }
        const u32 a[4] = {pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7])};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 b0, b1, b2, b3;
          load_transposed(b0, b1, b2, b3, sv + piece(j * 16 + (lane & 15), i * 2 + (lane >> 4)));
          mma(o[2 * i], a, b0, b1); mma(o[2 * i + 1], a, b2, b3);
        }
      }
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int row = w * 16 + g + 8 * e;
    if (first + row >= n.nq) continue;
    const float all = quad_sum(sum[e]), inv = CAUSAL && row >= spoilt_from ? NOT_A_NUMBER : 1.f / all;
    u32* to = (u32*)(row_of<elem>(out, b, h, first + row) + 2 * t);
#pragma unroll
    for (int i = 0; i < 8; i++) to[4 * i] = all == 0.f ? 0u : pack(o[i][2 * e] * inv, o[i][2 * e + 1] * inv);
    if (lse && t == 0) lse[((i64)b * n.heads + h) * n.nq + first + row] = all == 0.f ? NEG_INF : (m[e] + lg2(all) - norms[row]) * (float)LN_2;
  }
}
