// Exact attention for sm_90a: the copy engine, products of warpgroups, one loading warpgroup and NWG that compute 64
// rows each. D: width of keys and values (64, 128, 256). KEYS: keys per tile. STAGES: tiles in flight. CAUSAL: row i
// sees keys up to i + offset. WINDOW: only the first `sinks` of these and the last `window`; without a causal mask
// those nearer than `window`. TABLE: rows and keys come from a table of tiles. JOIN: 1 merges rows with `out` and
// `lse`, both in single precision; 2 writes them there as the first part.
#define ROWS (64 * NWG)
#define THREADS (128 * (NWG + 1))
#define PANELS (D / 64)
#define TILE_BYTES (KEYS * D * 2)
#define MASKED (CAUSAL || WINDOW || TABLE)
#define WORDS ((KEYS + 31) / 32)
#define STRING_(x) #x
#define STRING(x) STRING_(x)
#if NWG == 3
#define LOADER_REGS 32
#define CONSUMER_REGS 160
#else
#define LOADER_REGS 24
#define CONSUMER_REGS 240
#endif

template <bool B> struct Bool { static constexpr bool value = B; };
// Consumers alternate on the tensor cores: one multiplies while another computes exponentials.
DEV void take_turn(int w) { asm volatile("bar.sync %0, 256;" ::"r"(1 + w) : "memory"); }
DEV void pass_turn(int w) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + w) : "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ TensorMap mq, const __grid_constant__ TensorMap mk, const __grid_constant__ TensorMap mv,
    View out, float* __restrict__ lse, const Tile* __restrict__ table, Sizes n, int window, int sinks, float sl2) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 bars[1 + 4 * STAGES];
#if MASKED
  __shared__ u32 bad[3][WORDS];
  if (threadIdx.x < 3 * WORDS) (&bad[0][0])[threadIdx.x] = 0;
#endif
  const u32 base = (smem_u32(raw) + 1023) & ~1023u, sq = base, sk = base + ROWS * D * 2, sv = sk + STAGES * TILE_BYTES;
  const u32 qbar = smem_u32(bars), full_k = qbar + 8, full_v = full_k + 8 * STAGES, free_k = full_v + 8 * STAGES, free_v = free_k + 8 * STAGES;
  const int wg = threadIdx.x >> 7, h = blockIdx.y, b = blockIdx.z;
  // Later rows have more keys: they start first.
  const int index = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
#if TABLE
  const Tile at = table[index];
  const int row = at.row, row_end = at.row_end, key = at.key, offset = at.offset;
  int end = at.key_end;
#else
  const int row = index * ROWS, row_end = min(n.nq, row + ROWS), key = 0, offset = n.nk - n.nq;
  int end = n.nk;
#endif
  const int last_row = row_end - 1;
#if CAUSAL
  end = min(end, last_row + offset + 1);
#elif WINDOW
  end = (int)min((i64)end, (i64)last_row + offset + window);
#endif
  // Tiles run from the last key to the first. With a window they skip the invisible keys before the sinks.
  const int top = end > key ? (end - key + KEYS - 1) / KEYS : 0;
#if WINDOW
  const int sink_tiles = min(top, (min(sinks, n.nk) + KEYS - 1) / KEYS), window_tile = (int)max((i64)0, (i64)row + offset - window + 1) / KEYS;
  const int near_tiles = max(0, top - max(sink_tiles, window_tile)), tiles = near_tiles + (CAUSAL ? sink_tiles : (min(sinks, n.nk) + KEYS - 1) / KEYS);
  const int sink_top = tiles - near_tiles;
  auto tile_of = [&](int it) { return it < near_tiles ? top - 1 - it : sink_top - 1 - (it - near_tiles); };
#else
  const int tiles = top;
  auto tile_of = [&](int it) { return top - 1 - it; };
#endif
  if (tiles == 0) {
#if !JOIN
    for (int i = threadIdx.x; i < (row_end - row) * D; i += THREADS) row_of<elem>(out, b, h, row + i / D)[i % D] = 0;
    if (lse) for (int i = row + threadIdx.x; i < row_end; i += THREADS) lse[((i64)b * n.heads + h) * n.nq + i] = NEG_INF;
#endif
    return;
  }
  if (threadIdx.x == 0) {
    mbar_init(qbar, 1);
    for (int s = 0; s < STAGES; s++) { mbar_init(full_k + 8 * s, 1); mbar_init(full_v + 8 * s, 1); mbar_init(free_k + 8 * s, NWG); mbar_init(free_v + 8 * s, NWG); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " STRING(LOADER_REGS) ";");
    if (threadIdx.x == 0) {
      const int hk = h / n.group;
      mbar_expect(qbar, ROWS * D * 2);
#pragma unroll
      for (int p = 0; p < PANELS; p++) tma_load(sq + p * ROWS * 128, &mq, p * 64, row, h, b, qbar);
      for (int it = 0; it < tiles; it++) {
        const int s = it % STAGES, phase = (it / STAGES) & 1, first = key + tile_of(it) * KEYS;
        mbar_wait(free_k + 8 * s, phase ^ 1); mbar_expect(full_k + 8 * s, TILE_BYTES);
#pragma unroll
        for (int p = 0; p < PANELS; p++) tma_load(sk + s * TILE_BYTES + p * KEYS * 128, &mk, p * 64, first, hk, b, full_k + 8 * s);
        mbar_wait(free_v + 8 * s, phase ^ 1); mbar_expect(full_v + 8 * s, TILE_BYTES);
#pragma unroll
        for (int p = 0; p < PANELS; p++) tma_load(sv + s * TILE_BYTES + p * KEYS * 128, &mv, p * 64, first, hk, b, full_v + 8 * s);
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 " STRING(CONSUMER_REGS) ";");
  const int w = wg - 1, t = threadIdx.x & 127, lane = t & 31, r0 = row + w * 64 + (t >> 5) * 16 + (lane >> 2);
  float o[D / 2], s[KEYS / 2], m0 = NEG_INF, m1 = NEG_INF, l0 = 0.f, l1 = 0.f, a0 = 1.f, a1 = 1.f;
  u32 p[KEYS / 4];
#pragma unroll
  for (int i = 0; i < D / 2; i++) o[i] = 0.f;
  const u64 query = operand(sq + w * 64 * 128, 16);
  auto score = [&](int stage) {
    const u64 k = operand(sk + stage * TILE_BYTES, 16);
#pragma unroll
    for (int i = 0; i < D / 16; i++) wg_qk(s, query + ((i / 4 * ROWS * 128 + i % 4 * 32) >> 4), k + ((i / 4 * KEYS * 128 + i % 4 * 32) >> 4), i != 0);
  };
  auto gather = [&](int stage) {
    const u64 v = operand(sv + stage * TILE_BYTES, KEYS * 128);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) wg_pv(o, p + 4 * i, v + (i * 2048 >> 4), 1);
  };
  // True if one of `rows` rows from `r` on does not see all keys of a tile.
  auto hides = [&](int tile, int r, int rows) {
    const int first = key + tile * KEYS;
    bool some = first + KEYS > end;
#if CAUSAL
    some = some || first + KEYS - 1 > r + offset;
#endif
#if WINDOW
    some = some || (i64)first < (i64)r + rows - 1 + offset - window + 1 || (!CAUSAL && (i64)first + KEYS - 1 > (i64)r + offset + window - 1);
#endif
    return some;
  };
  auto is_masked = [&](int tile) { return hides(tile, row, ROWS); };
  // The keys of row r: [from, to), and with a window also the first [0, sunk).
  auto range_of = [&](int r, int& from, int& to, int& sunk) {
    from = key; to = end; sunk = 0;
#if CAUSAL
    to = min(end, r + offset + 1);
#endif
#if WINDOW
    from = (int)max((i64)0, (i64)r + offset - window + 1);
    if (!CAUSAL) to = (int)max((i64)0, min((i64)n.nk, (i64)r + offset + window));
    sunk = CAUSAL ? min(sinks, to) : min(sinks, n.nk);
#endif
  };
  auto soften = [&](int tile, auto masked) {
    if constexpr (decltype(masked)::value) {
      const int first = key + tile * KEYS;
      if (hides(tile, row + w * 64, 64)) {
        int f0, e0, s0, f1, e1, s1;
        range_of(r0, f0, e0, s0); range_of(r0 + 8, f1, e1, s1);
        const int j0 = first + (lane & 3) * 2;
#if WINDOW
        if (first < s0 || first < s1) {
#pragma unroll
          for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int j = j0 + i * 8 + e;
              if (!((j >= f0 && j < e0) || j < s0)) s[4 * i + e] = NEG_INF;
              if (!((j >= f1 && j < e1) || j < s1)) s[4 * i + 2 + e] = NEG_INF;
            }
        } else {
          const u32 n0 = max(0, e0 - f0), n1 = max(0, e1 - f1);
          f0 = j0 - f0; f1 = j0 - f1;
#pragma unroll
          for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              if ((u32)(f0 + i * 8 + e) >= n0) s[4 * i + e] = NEG_INF;
              if ((u32)(f1 + i * 8 + e) >= n1) s[4 * i + 2 + e] = NEG_INF;
            }
        }
#else
        e0 -= j0; e1 -= j0;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            if (i * 8 + e >= e0) s[4 * i + e] = NEG_INF;
            if (i * 8 + e >= e1) s[4 * i + 2 + e] = NEG_INF;
          }
#endif
      }
    }
    float x0 = m0, x1 = m1;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) { x0 = fmaxf(x0, fmaxf(s[4 * i], s[4 * i + 1])); x1 = fmaxf(x1, fmaxf(s[4 * i + 2], s[4 * i + 3])); }
    x0 = quad_max(x0); x1 = quad_max(x1);
    const float z0 = x0 == NEG_INF ? 0.f : x0 * sl2, z1 = x1 == NEG_INF ? 0.f : x1 * sl2;
    a0 = ex2(m0 * sl2 - z0); a1 = ex2(m1 * sl2 - z1); m0 = x0; m1 = x1;
    float t0 = 0.f, t1 = 0.f, t2 = 0.f, t3 = 0.f;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
      for (int e = 0; e < 4; e++) s[4 * i + e] = ex2(fmaf(s[4 * i + e], sl2, -(e < 2 ? z0 : z1)));
      t0 += s[4 * i]; t1 += s[4 * i + 2]; t2 += s[4 * i + 1]; t3 += s[4 * i + 3];
    }
    l0 = l0 * a0 + (t0 + t2); l1 = l1 * a1 + (t1 + t3);
  };
#if MASKED
  // A masked weight is 0, but 0 · NaN is NaN: in partially masked tiles non-finite values become 0, and rows that
  // attend to such a key are set to NaN at the end.
  bool nan0 = false, nan1 = false;
  int scrubbed = 0;
  auto scrub = [&](int stage, int tile) {
    if (!is_masked(tile)) return;
    u32* bits = bad[scrubbed % 3];
    if (w == 0 && t < WORDS) bad[(scrubbed + 1) % 3][t] = 0;
    scrubbed++;
    bool hit = false;
    const u32 v0 = sv + stage * TILE_BYTES;
    for (int i = (w * 128 + t) * 16; i < TILE_BYTES; i += NWG * 128 * 16) {
      u32 x[4];
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(v0 + i));
      if (spoilt(x[0]) | spoilt(x[1]) | spoilt(x[2]) | spoilt(x[3])) {
        hit = true;
        const int j = (i % (KEYS * 128)) / 128;
        atomicOr(&bits[j >> 5], 1u << (j & 31));
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = without_spoilt(x[e]);
        asm volatile("st.shared.v4.u32 [%4], {%0,%1,%2,%3};" ::"r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(v0 + i) : "memory");
      }
    }
    if (hit) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 8, %0;" ::"n"(NWG * 128) : "memory");
    for (int i = 0; i < WORDS; i++) {
      u32 x = bits[i];
      while (x) {
        const int j = key + tile * KEYS + i * 32 + __ffs(x) - 1;
        int from, to, sunk;
        x &= x - 1;
        range_of(r0, from, to, sunk); nan0 = nan0 || (j >= from && j < to) || j < sunk;
        range_of(r0 + 8, from, to, sunk); nan1 = nan1 || (j >= from && j < to) || j < sunk;
      }
    }
  };
#endif
  auto round_weights = [&]() {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
  };
  if (w == NWG - 1) pass_turn(0);      // the first warpgroup may begin
  mbar_wait(qbar, 0); mbar_wait(full_k, 0);
  wg_fence(); score(0); wg_commit(); wg_wait<0>();
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) keep(s[i]);
  if (t == 0) mbar_arrive(free_k);
  soften(tile_of(0), Bool<true>()); round_weights();
  auto step = [&](int it, auto masked) {
    const int st = it % STAGES, phase = (it / STAGES) & 1, before = (it - 1) % STAGES, phase_before = ((it - 1) / STAGES) & 1;
#if MASKED
    if constexpr (decltype(masked)::value) { mbar_wait(full_v + 8 * before, phase_before); scrub(before, tile_of(it - 1)); }
#endif
    mbar_wait(full_k + 8 * st, phase);
    take_turn(w);
    wg_fence(); score(st); wg_commit();
    mbar_wait(full_v + 8 * before, phase_before);
    gather(before); wg_commit();
    pass_turn((w + 1) % NWG);
    wg_wait<1>();
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) keep(s[i]);
    if (t == 0) mbar_arrive(free_k + 8 * st);
    soften(tile_of(it), masked);
    wg_wait<0>();
#pragma unroll
    for (int i = 0; i < D / 2; i++) keep(o[i]);
    if (t == 0) mbar_arrive(free_v + 8 * before);
#pragma unroll
    for (int i = 0; i < D / 8; i++) { o[4 * i] *= a0; o[4 * i + 1] *= a0; o[4 * i + 2] *= a1; o[4 * i + 3] *= a1; }
    round_weights();
  };
  int it = 1;
#if MASKED
  // A step clears the values of the previous tile: the first step after the masked tiles is masked, too.
#pragma unroll 1
  for (; it < tiles && (is_masked(tile_of(it)) || is_masked(tile_of(it - 1))); it++) step(it, Bool<true>());
#endif
#if WINDOW
#pragma unroll 1
  for (; it < tiles && !is_masked(tile_of(it)); it++) step(it, Bool<false>());
#pragma unroll 1
  for (; it < tiles; it++) step(it, Bool<true>());
#else
#pragma unroll 1
  for (; it < tiles; it++) step(it, Bool<false>());
#endif
  if (w == 0) take_turn(0);            // balances the arrivals
  {
    const int st = (tiles - 1) % STAGES;
    mbar_wait(full_v + 8 * st, ((tiles - 1) / STAGES) & 1);
#if MASKED
    scrub(st, tile_of(tiles - 1));
#endif
    wg_fence(); gather(st); wg_commit(); wg_wait<0>();
#pragma unroll
    for (int i = 0; i < D / 2; i++) keep(o[i]);
  }
  l0 = quad_sum(l0); l1 = quad_sum(l1);
  float i0 = l0 == 0.f ? 0.f : 1.f / l0, i1 = l1 == 0.f ? 0.f : 1.f / l1;
#if MASKED
  if (nan0) i0 = NOT_A_NUMBER;
  if (nan1) i1 = NOT_A_NUMBER;
#endif
  const float now0 = l0 == 0.f ? NEG_INF : (m0 * sl2 + lg2(l0)) * (float)LN_2, now1 = l1 == 0.f ? NEG_INF : (m1 * sl2 + lg2(l1)) * (float)LN_2;
  const i64 rows = ((i64)b * n.heads + h) * n.nq;
#if JOIN
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int r = r0 + 8 * e;
    float keep_ = 0.f, add = 1.f, both = e ? now1 : now0;
#if JOIN == 1
    const float before = r < row_end ? lse[rows + r] : 0.f;
    __syncwarp();      // all four threads of a row have read it
    join(before, e ? now1 : now0, keep_, add, both);
#endif
    if (r >= row_end) continue;
    add *= e ? i1 : i0;
    float2* to = (float2*)(row_of<float>(out, b, h, r) + (lane & 3) * 2);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      const float2 x = JOIN == 1 ? to[4 * i] : make_float2(0.f, 0.f);
      to[4 * i] = make_float2(keep_ == 0.f ? add * o[4 * i + 2 * e] : fmaf(add, o[4 * i + 2 * e], keep_ * x.x), keep_ == 0.f ? add * o[4 * i + 2 * e + 1] : fmaf(add, o[4 * i + 2 * e + 1], keep_ * x.y));
    }
    if ((lane & 3) == 0) lse[rows + r] = both;
  }
#else
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int r = r0 + 8 * e;
    if (r >= row_end) continue;
    const float inv = e ? i1 : i0;
    u32* to = (u32*)(row_of<elem>(out, b, h, r) + (lane & 3) * 2);
#pragma unroll
    for (int i = 0; i < D / 8; i++) to[4 * i] = pack(o[4 * i + 2 * e] * inv, o[4 * i + 2 * e + 1] * inv);
    if (lse && (lane & 3) == 0) lse[rows + r] = e ? now1 : now0;
  }
#endif
}
