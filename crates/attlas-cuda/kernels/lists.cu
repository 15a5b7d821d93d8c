// Attention of sorted query rows to a block of sorted keys and to samples that represent all keys outside it. 128 rows
// per thread block, tiles of 64 keys gathered by asynchronous copies, products by warpgroups. D is 64 or 128, NEAR and
// FAR are the largest numbers of keys of both kinds, multiples of 64. If JOIN is set, a row is merged with `out` and
// `lse`, both in single precision.
#define ROWS 128
#define KEYS 64
#define STAGES 4
#define TILE_BYTES (KEYS * D * 2)
#define LIST (NEAR + FAR)
#define OVERLAP (D == 64)

// qidx: sorted rows; qstart: offsets of blocks in it; kidx: sorted keys; samples: ranks within a part, m for each. rows
// and keys: lengths of the sorted orders; count: blocks; replaced: samples are drawn with replacement.
extern "C" __global__ void __launch_bounds__(256, 2) lists(View q, View k, View v, View out, float* lse, const u32* __restrict__ qidx, const u32* __restrict__ qstart,
    const u32* __restrict__ kidx, const Block* __restrict__ blocks, const u32* __restrict__ samples, Sizes n, int rows, int keys, int count, int m, int replaced, float sl2) {
  extern __shared__ unsigned char raw[];
  __shared__ u32 qi[ROWS], ki[LIST], hidden, found;
  __shared__ alignas(16) float bias[LIST];
  const u32 base = (smem_u32(raw) + 1023) & ~1023u, sq = base, sk = sq + ROWS * D * 2, sv = sk + STAGES * TILE_BYTES;
  const int tid = threadIdx.x, w = tid >> 7, t = tid & 127, lane = tid & 31, h = blockIdx.y, b = blockIdx.z, hk = h / n.group, kv = n.heads / n.group;
  // Block c owns the tiles from ⌊start[c] / 128⌋ + c on: those it needs, and at most one more.
  const u32* starts = qstart + ((i64)b * n.heads + h) * (count + 1);
  if (tid == 0) {
    int lo = 0, hi = count;
    while (hi - lo > 1) { const int mid = (lo + hi) >> 1; if ((int)(starts[mid] / ROWS) + mid <= (int)blockIdx.x) lo = mid; else hi = mid; }
    found = lo; hidden = 0;
  }
  __syncthreads();
  const int c = found, qs = (int)starts[c] + ((int)blockIdx.x - (int)(starts[c] / ROWS) - c) * ROWS, qe = min((int)starts[c + 1], qs + ROWS);
  if (qs >= qe) return;
  const Block block = blocks[c];
  const int near = block.near, near_tiles = (near + KEYS - 1) / KEYS, near_padded = near_tiles * KEYS, tiles = near_tiles + (m + KEYS - 1) / KEYS;
  const u32* order = kidx + ((i64)b * kv + hk) * keys;
  const u32* drawn = samples + ((i64)(b * kv + hk) * block.parts + block.part) * m;
  const u32 stride = (u32)(k.row / 8);      // in pieces of 16 bytes; keys and values have the same one
  if (tid < ROWS) qi[tid] = qidx[((i64)b * n.heads + h) * rows + min(qs + tid, qe - 1)];
  for (int i = tid; i < near_padded; i += 256) { ki[i] = order[block.first + min(i, near - 1)] * stride; bias[i] = i < near ? 0.f : NEG_INF; }
  bool outside = false;                      // one sample a thread
  for (int i = tid; i < (tiles - near_tiles) * KEYS; i += 256) {
    const int r = drawn[min(i, m - 1)];
    const bool ok = i < m && !(r >= block.rank && r < block.rank + near);
    ki[near_padded + i] = order[block.first - block.rank + r] * stride;
    bias[near_padded + i] = ok ? 0.f : NEG_INF;
    outside |= ok;
    if (!ok) atomicOr(&hidden, 1u << (near_tiles + i / KEYS));
  }
  const int seen = __syncthreads_count(outside);
  const float weight = seen == 0 ? 0.f : lg2(replaced ? (float)block.keys / (float)m : (float)(block.keys - near) / (float)seen);
  const u32 hid = hidden;
  const char *kh = (const char*)row_of<elem>(k, b, hk, 0), *vh = (const char*)row_of<elem>(v, b, hk, 0);
  for (int i = tid; i < ROWS * (D / 8); i += 256) { const int r = i / (D / 8), x = i % (D / 8); copy16(sq + piece_at(ROWS, r, x), row_of<elem>(q, b, h, qi[r]) + x * 8); }
  auto load = [&](int tile) {
    if (tile < tiles) {
      const u32 dk = sk + (tile % STAGES) * TILE_BYTES, dv = sv + (tile % STAGES) * TILE_BYTES;
#pragma unroll
      for (int i = 0; i < KEYS * (D / 8) / 256; i++) {
        const int e = tid + i * 256, r = e / (D / 8), x = e % (D / 8);
        const u64 from = (u64)(ki[tile * KEYS + r] + x) * 16;
        const u32 to = piece_at(KEYS, r, x);
        copy16(dk + to, kh + from); copy16(dv + to, vh + from);
      }
    }
    copy_commit();
  };
  float o[D / 2], s[KEYS / 2], m0 = NEG_INF, m1 = NEG_INF, l0 = 0.f, l1 = 0.f, a0 = 1.f, a1 = 1.f;
  u32 p[KEYS / 4];
#pragma unroll
  for (int i = 0; i < D / 2; i++) o[i] = 0.f;
  const u64 query = operand(sq + w * 64 * 128, 16);
  auto score = [&](int tile) {
    const u64 key = operand(sk + (tile % STAGES) * TILE_BYTES, 16);
#pragma unroll
    for (int i = 0; i < D / 16; i++) wg_qk(s, query + ((i / 4 * ROWS * 128 + i % 4 * 32) >> 4), key + ((i / 4 * KEYS * 128 + i % 4 * 32) >> 4), i != 0);
  };
  auto gather = [&](int tile) {
    const u64 value = operand(sv + (tile % STAGES) * TILE_BYTES, KEYS * 128);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) wg_pv(o, p + 4 * i, value + (i * 2048 >> 4), 1);
  };
  // Samples share one weight, which goes into the offset of the exponent; tiles with a hidden key or an unused place
  // take the slow path.
  auto soften = [&](int tile) {
    float x0 = NEG_INF, x1 = NEG_INF;
    const float add = tile < near_tiles ? 0.f : weight;
    const bool plain = tile < near_tiles ? (tile + 1) * KEYS <= near : !(hid >> tile & 1);
    if (plain) {
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) { x0 = fmaxf(x0, fmaxf(s[4 * i], s[4 * i + 1])); x1 = fmaxf(x1, fmaxf(s[4 * i + 2], s[4 * i + 3])); }
      x0 = fmaf(x0, sl2, add); x1 = fmaf(x1, sl2, add);
    } else {
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) {
        float2 y = *(const float2*)&bias[tile * KEYS + i * 8 + (lane & 3) * 2];
        y.x += add; y.y += add;
        s[4 * i] = fmaf(s[4 * i], sl2, y.x); s[4 * i + 1] = fmaf(s[4 * i + 1], sl2, y.y);
        s[4 * i + 2] = fmaf(s[4 * i + 2], sl2, y.x); s[4 * i + 3] = fmaf(s[4 * i + 3], sl2, y.y);
        x0 = fmaxf(x0, fmaxf(s[4 * i], s[4 * i + 1])); x1 = fmaxf(x1, fmaxf(s[4 * i + 2], s[4 * i + 3]));
      }
    }
    x0 = fmaxf(quad_max(x0), m0); x1 = fmaxf(quad_max(x1), m1);
    float z0 = x0 == NEG_INF ? 0.f : x0, z1 = x1 == NEG_INF ? 0.f : x1;
    a0 = ex2(m0 - z0); a1 = ex2(m1 - z1); m0 = x0; m1 = x1;
    const float f = plain ? sl2 : 1.f;
    if (plain) { z0 -= add; z1 -= add; }
    float t0 = 0.f, t1 = 0.f;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
      s[4 * i] = ex2(fmaf(s[4 * i], f, -z0)); s[4 * i + 1] = ex2(fmaf(s[4 * i + 1], f, -z0));
      s[4 * i + 2] = ex2(fmaf(s[4 * i + 2], f, -z1)); s[4 * i + 3] = ex2(fmaf(s[4 * i + 3], f, -z1));
      t0 += s[4 * i] + s[4 * i + 1]; t1 += s[4 * i + 2] + s[4 * i + 3];
    }
    l0 = l0 * a0 + t0; l1 = l1 * a1 + t1;
  };
  auto round_weights = [&]() {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
  };
  auto rescale = [&]() {
#pragma unroll
    for (int i = 0; i < D / 8; i++) { o[4 * i] *= a0; o[4 * i + 1] *= a0; o[4 * i + 2] *= a1; o[4 * i + 3] *= a1; }
  };
  auto arrive = [&]() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncthreads(); };
#if OVERLAP
#pragma unroll
  for (int i = 0; i < STAGES - 2; i++) load(i);
  copy_wait<STAGES - 3>(); arrive(); load(STAGES - 2);
  wg_fence(); score(0); wg_commit(); wg_wait<0>();
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) keep(s[i]);
  soften(0); round_weights();
  for (int it = 1; it < tiles; it++) {
    copy_wait<STAGES - 3>(); arrive(); load(it + STAGES - 2);
    wg_fence(); score(it); wg_commit(); gather(it - 1); wg_commit(); wg_wait<1>();
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) keep(s[i]);
    soften(it);
    wg_wait<0>();
#pragma unroll
    for (int i = 0; i < D / 2; i++) keep(o[i]);
    rescale(); round_weights();
  }
  wg_fence(); gather(tiles - 1); wg_commit(); wg_wait<0>();
#pragma unroll
  for (int i = 0; i < D / 2; i++) keep(o[i]);
#else
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);
  for (int it = 0; it < tiles; it++) {
    copy_wait<STAGES - 2>(); arrive(); load(it + STAGES - 1);
    wg_fence(); score(it); wg_commit(); wg_wait<0>();
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) keep(s[i]);
    soften(it); rescale(); round_weights();
    wg_fence(); gather(it); wg_commit(); wg_wait<0>();
#pragma unroll
    for (int i = 0; i < D / 2; i++) keep(o[i]);
  }
#endif
  l0 = quad_sum(l0); l1 = quad_sum(l1);
  const float i0 = 1.f / l0, i1 = 1.f / l1, now0 = (m0 + lg2(l0)) * (float)LN_2, now1 = (m1 + lg2(l1)) * (float)LN_2;
  const int r0 = w * 64 + (t >> 5) * 16 + (lane >> 2);
  const i64 at = ((i64)b * n.heads + h) * n.nq;
#if JOIN
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int r = r0 + 8 * e, row = qi[r];
    const float before = lse[at + row];
    __syncwarp();      // all four threads of a row have read it
    if (qs + r >= qe) continue;
    float keep_, add, both;
    join(before, e ? now1 : now0, keep_, add, both);
    add *= e ? i1 : i0;
    float2* to = (float2*)(row_of<float>(out, b, h, row) + (lane & 3) * 2);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      const float2 x = to[4 * i];
      to[4 * i] = make_float2(keep_ == 0.f ? add * o[4 * i + 2 * e] : fmaf(add, o[4 * i + 2 * e], keep_ * x.x), keep_ == 0.f ? add * o[4 * i + 2 * e + 1] : fmaf(add, o[4 * i + 2 * e + 1], keep_ * x.y));
    }
    if ((lane & 3) == 0) lse[at + row] = both;
  }
#else
  // Output goes through the query's shared memory, which lets a row be written as whole lines.
#pragma unroll
  for (int i = 0; i < D / 8; i++) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(sq + piece_at(ROWS, r0, i) + (lane & 3) * 4), "r"(pack(o[4 * i] * i0, o[4 * i + 1] * i0)));
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(sq + piece_at(ROWS, r0 + 8, i) + (lane & 3) * 4), "r"(pack(o[4 * i + 2] * i1, o[4 * i + 3] * i1)));
  }
  if (lse && (lane & 3) == 0) {
    if (qs + r0 < qe) lse[at + qi[r0]] = now0;
    if (qs + r0 + 8 < qe) lse[at + qi[r0 + 8]] = now1;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * (D / 8) / 32; i++) {
    const int e = lane + i * 32, r = w * 64 + (t >> 5) * 16 + e / (D / 8), x = e % (D / 8);
    u32 a, bb, cc, d;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(bb), "=r"(cc), "=r"(d) : "r"(sq + piece_at(ROWS, r, x)));
    if (qs + r < qe) *(uint4*)(row_of<elem>(out, b, h, qi[r]) + x * 8) = make_uint4(a, bb, cc, d);
  }
#endif
}
