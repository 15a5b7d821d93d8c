// Features of sm_90a: barriers in shared memory, the copy engine, products of warpgroups. The host generates wg_qk and
// wg_pv for the shape; they precede this source.
struct alignas(64) TensorMap { u64 x[16]; };
DEV void mbar_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
DEV void mbar_expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
DEV void mbar_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
DEV void mbar_wait(u32 b, u32 phase) {
  asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(b), "r"(phase) : "memory");
}
DEV void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from moving reads of an accumulator across a wait.
DEV void keep(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEV void tma_load(u32 to, const TensorMap* m, int column, int row, int head, int batch, u32 bar) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5}], [%6];"
               ::"r"(to), "l"(m), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(bar) : "memory");
}
// Operand in shared memory with the 128-byte swizzle: 1024 bytes between groups of 8 rows; `panel` bytes between
// panels of 64 columns, used only if the operand is transposed.
DEV u64 operand(u32 address, u32 panel) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(panel >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
// Swizzled place of 16-byte piece c of row r in panels of 128-byte rows.
DEV u32 piece_at(int rows, int r, int c) { return (c >> 3) * rows * 128 + r * 128 + (((c & 7) ^ (r & 7)) << 4); }
