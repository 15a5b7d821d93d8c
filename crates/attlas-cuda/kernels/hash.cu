// Sign hashes: bit t of a row's code is [w_t · x > 0]; the output is the rank of the code in the Gray sequence.
DEV u32 gray_rank(u32 r) { r ^= r >> 1; r ^= r >> 2; r ^= r >> 4; r ^= r >> 8; return r ^ r >> 16; }

// One warp per row, one lane per bit. w: [batch · key heads][d][32], zeros after the last bit.
extern "C" __global__ void any_hash(View x, const acc* w, u32* rank, int n, int d, int heads, int group) {
  const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z;
  if (row >= n) return;
  const elem* r = row_of<elem>(x, b, h, row);
  const acc* own = w + (i64)(b * (heads / group) + h / group) * d * 32 + lane;
  acc s = 0;
  for (int c = 0; c < d; c++) s += widen(r[c]) * own[c * 32];
  const u32 code = __ballot_sync(FULL, s > 0);
  if (lane == 0) rank[((i64)b * heads + h) * n + row] = gray_rank(code);
}

#if ELEM < 2 && defined(D)
// At most 8 bits and rows of 64 or 128 columns: projections on tensor cores. A thread reads 8 columns of two rows at a
// time; the order of columns in the sum is free, and directions have the same permutation. Directions come as three
// terms, which give projections single-precision accuracy.
extern "C" __global__ void __launch_bounds__(256) hash_rows(View x, const acc* w, u32* rank, int n, int d, int heads, int group) {
  const int h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u32 dir[D / 16][3][2];
  const float* own = w + (i64)(b * (heads / group) + h / group) * D * 32 + g;
#pragma unroll
  for (int s = 0; s < D / 16; s++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int c = 8 * (t + 4 * (s / 2)) + 4 * (s % 2) + 2 * half;
      float a = own[c * 32], e = own[(c + 1) * 32];
#pragma unroll
      for (int term = 0; term < 3; term++) { const u32 p = pack(a, e); dir[s][term][half] = p; a -= low(p); e -= high(p); }
    }
  const i64 base = ((i64)b * heads + h) * n;
#pragma unroll 2
  for (int i = 0; i < 16; i++) {
    const int row = blockIdx.x * 2048 + (warp * 16 + i) * 16 + g;
    uint4 x0[D / 32], x1[D / 32];
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
      x0[c] = row < n ? __ldg((const uint4*)row_of<elem>(x, b, h, row) + t + 4 * c) : zero;
      x1[c] = row + 8 < n ? __ldg((const uint4*)row_of<elem>(x, b, h, row + 8) + t + 4 * c) : zero;
    }
    float s[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
      const u32 a0[4] = {x0[c].x, x1[c].x, x0[c].y, x1[c].y}, a1[4] = {x0[c].z, x1[c].z, x0[c].w, x1[c].w};
#pragma unroll
      for (int e = 0; e < 3; e++) { mma(s, a0, dir[2 * c][e][0], dir[2 * c][e][1]); mma(s, a1, dir[2 * c + 1][e][0], dir[2 * c + 1][e][1]); }
    }
    u32 code = (u32)(s[0] > 0) << (2 * t) | (u32)(s[1] > 0) << (2 * t + 1) | (u32)(s[2] > 0) << (16 + 2 * t) | (u32)(s[3] > 0) << (17 + 2 * t);
    code |= __shfl_xor_sync(FULL, code, 1); code |= __shfl_xor_sync(FULL, code, 2);
    const int mine = row + 8 * t;
    if (t < 2 && mine < n) rank[base + mine] = gray_rank((t == 0 ? code : code >> 16) & 0xff);
  }
}
#endif
