// The portable form of attention: one warp per row, 32 keys at a time, any width, any element. The fast kernels are
// tested against it, and it runs if no fast one exists.

// Adds the keys [from, to).
DEV void add_range(Running& s, const acc* q, const View& k, const View& v, int b, int hk, int from, int to, acc scale, int d, int dv, int c0, int lane) {
  for (int j0 = from; j0 < to; j0 += 32) {
    const int j = j0 + lane; acc logit = NEG_INF; const elem* value = 0;
    if (j < to) {
      const elem* key = row_of<elem>(k, b, hk, j); acc x = 0;
      for (int c = 0; c < d; c++) x += q[c] * widen(key[c]);
      logit = x * scale; value = row_of<elem>(v, b, hk, j);
    }
    add(s, logit, value, c0, dv, lane);
  }
}

// Row i is aligned to key p = i + nk − nq. Its keys are the first `sinks` and those from p − window + 1 on, up to p
// with a causal mask, up to p + window − 1 without. With a table, tiles define the keys of rows.
template <int HOW> DEV void attend_rows(const View& q, const View& k, const View& v, const View& out, acc* lse, const Tile* tiles, const Sizes& n, int causal, int window, int sinks, acc scale) {
  extern __shared__ __align__(16) unsigned char raw[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z, hk = h / n.group, rows = blockDim.x >> 5;
  acc* own = (acc*)raw + warp * n.d;
  int row = blockIdx.x * rows + warp, end = min(n.nq, (int)(blockIdx.x + 1) * rows), first = 0, last = n.nk, offset = n.nk - n.nq;
  if (tiles) { const Tile t = tiles[blockIdx.x]; row = t.row + warp; end = t.row_end; first = t.key; last = t.key_end; offset = t.offset; }
  for (; row < end; row += rows) {
    const elem* query = row_of<elem>(q, b, h, row);
    __syncwarp();
    for (int c = lane; c < n.d; c += 32) own[c] = widen(query[c]);
    __syncwarp();
    const i64 p = (i64)row + offset;
    const int to = (int)min((i64)last, max((i64)first, causal ? p + 1 : p + window)), below = (int)max((i64)first, min((i64)last, p - window + 1));
    const int sunk = causal ? min(sinks, to) : min(sinks, last);
    for (int c0 = 0; c0 < n.dv; c0 += COLUMNS * 32) {
      Running s; start(s);
      if (sunk > first) add_range(s, own, k, v, b, hk, first, sunk, scale, n.d, n.dv, c0, lane);
      add_range(s, own, k, v, b, hk, max(below, sunk), to, scale, n.d, n.dv, c0, lane);
      put<HOW>(s, out, lse, ((i64)b * n.heads + h) * n.nq + row, b, h, row, c0, n.dv, lane);
    }
  }
}
extern "C" __global__ void any_attend(View q, View k, View v, View out, acc* lse, const Tile* tiles, Sizes n, int causal, int window, int sinks, acc scale) {
  attend_rows<DIRECT>(q, k, v, out, lse, tiles, n, causal, window, sinks, scale);
}
extern "C" __global__ void any_attend_join(View q, View k, View v, View out, acc* lse, const Tile* tiles, Sizes n, int causal, int window, int sinks, acc scale) {
  attend_rows<JOINED>(q, k, v, out, lse, tiles, n, causal, window, sinks, scale);
}
extern "C" __global__ void any_attend_first(View q, View k, View v, View out, acc* lse, const Tile* tiles, Sizes n, int causal, int window, int sinks, acc scale) {
  attend_rows<FIRST>(q, k, v, out, lse, tiles, n, causal, window, sinks, scale);
}

// Rows by blocks: see lists.cu for the meaning of the arguments. One warp per row of the sorted order.
template <int HOW> DEV void list_rows(const View& q, const View& k, const View& v, const View& out, acc* lse, const u32* qidx, const u32* qstart, const u32* kidx, const Block* blocks, const u32* samples, const Sizes& n, int rows, int keys, int count, int m, int replaced, acc scale) {
  extern __shared__ __align__(16) unsigned char raw[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z, hk = h / n.group, kv = n.heads / n.group;
  const int place = blockIdx.x * (blockDim.x >> 5) + warp;
  if (place >= rows) return;
  acc* own = (acc*)raw + warp * n.d;
  const u32* starts = qstart + ((i64)b * n.heads + h) * (count + 1);
  int c = 0;
  for (int lo = 0, hi = count; lo < hi;) { const int mid = (lo + hi) >> 1; if ((int)starts[mid] <= place) { c = mid; lo = mid + 1; } else hi = mid; }
  const Block block = blocks[c];
  const int row = qidx[((i64)b * n.heads + h) * rows + place];
  const u32* order = kidx + ((i64)b * kv + hk) * keys;
  const u32* drawn = samples + ((i64)(b * kv + hk) * block.parts + block.part) * m;
  const elem* query = row_of<elem>(q, b, h, row);
  for (int x = lane; x < n.d; x += 32) own[x] = widen(query[x]);
  __syncwarp();
  int outside = 0;
  for (int i = lane; i < m; i += 32) { const int r = drawn[i]; outside += !(r >= block.rank && r < block.rank + block.near); }
  outside = warp_sum(outside);
  const acc bias = log_of(replaced ? (acc)block.keys / (acc)m : (acc)(block.keys - block.near) / (acc)outside);
  for (int c0 = 0; c0 < n.dv; c0 += COLUMNS * 32) {
    Running s; start(s);
    for (int j0 = 0; j0 < block.near + m; j0 += 32) {
      const int i = j0 + lane; acc logit = NEG_INF; const elem* value = 0; bool ok = i < block.near + m; int at = block.first + i;
      if (i >= block.near && ok) { const int r = drawn[i - block.near]; ok = !(r >= block.rank && r < block.rank + block.near); at = block.first - block.rank + r; }
      if (ok) {
        const int j = order[at]; const elem* key = row_of<elem>(k, b, hk, j); acc x = 0;
        for (int e = 0; e < n.d; e++) x += own[e] * widen(key[e]);
        logit = x * scale + (i < block.near ? (acc)0 : bias); value = row_of<elem>(v, b, hk, j);
      }
      add(s, logit, value, c0, n.dv, lane);
    }
    put<HOW>(s, out, lse, ((i64)b * n.heads + h) * n.nq + row, b, h, row, c0, n.dv, lane);
  }
}
extern "C" __global__ void any_lists(View q, View k, View v, View out, acc* lse, const u32* qidx, const u32* qstart, const u32* kidx, const Block* blocks, const u32* samples, Sizes n, int rows, int keys, int count, int m, int replaced, acc scale) {
  list_rows<DIRECT>(q, k, v, out, lse, qidx, qstart, kidx, blocks, samples, n, rows, keys, count, m, replaced, scale);
}
extern "C" __global__ void any_lists_join(View q, View k, View v, View out, acc* lse, const u32* qidx, const u32* qstart, const u32* kidx, const Block* blocks, const u32* samples, Sizes n, int rows, int keys, int count, int m, int replaced, acc scale) {
  list_rows<JOINED>(q, k, v, out, lse, qidx, qstart, kidx, blocks, samples, n, rows, keys, count, m, replaced, scale);
}

// Converts rows in the type of sums to elements, four at a time if their number allows it.
extern "C" __global__ void finish_rows(const acc* from, View out, Sizes n) {
  const int h = blockIdx.y, b = blockIdx.z, each = n.dv % 4 == 0 ? 4 : 1;
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x, pieces = n.dv / each;
  if (i >= n.nq * pieces) return;
  // A 32-bit division if it suffices: a 64-bit one takes as long as the rest.
  const i64 row = i < 0x7fffffff ? (i64)((u32)i / (u32)pieces) : i / pieces;
  const int c = (int)(i - row * pieces) * each;
  const acc* x = from + (((i64)b * n.heads + h) * n.nq + row) * n.dv + c;
  elem* to = row_of<elem>(out, b, h, row) + c;
#if ELEM < 2
  if (each == 4 && (u64)to % 8 == 0) {
    const float4 y = *(const float4*)x;
    *(uint2*)to = make_uint2(pack(y.x, y.y), pack(y.z, y.w));
    return;
  }
#endif
  for (int e = 0; e < each; e++) to[e] = narrow(x[e]);
}
// Rows without a part yet: zero, log-sum-exp −∞.
extern "C" __global__ void clear_rows(acc* o, acc* lse, i64 rows, int dv) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows * dv) o[i] = 0;
  if (i < rows) lse[i] = NEG_INF;
}
// Copies rows; `order`, if given, has the source row of each. Rows go to places from `at` on; if `ring` is positive,
// modulo `ring` after the first `fixed` places.
extern "C" __global__ void copy_rows(View from, View to, const u32* order, int rows, int columns, int at, int fixed, int ring) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (i64)rows * columns) return;
  const int h = blockIdx.y, b = blockIdx.z, r = (int)(i / columns);
  int place = at + r;
  if (ring > 0 && place >= fixed) {
    if (r + ring < rows) return;      // a later row takes this place
    place = fixed + (place - fixed) % ring;
  }
  row_of<elem>(to, b, h, place)[i % columns] = row_of<elem>(from, b, h, order ? order[r] : r)[i % columns];
}
// Negates every element of rows, including NaN and infinity.
extern "C" __global__ void negate_rows(View from, View to, int rows, int columns) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (i64)rows * columns) return;
  const int h = blockIdx.y, b = blockIdx.z, r = (int)(i / columns), c = (int)(i % columns);
  const elem x = row_of<elem>(from, b, h, r)[c];
#if ELEM < 2
  row_of<elem>(to, b, h, r)[c] = x ^ 0x8000u;
#else
  row_of<elem>(to, b, h, r)[c] = -x;
#endif
}
