//! Large pages for memory read in scattered order, such as the cache of a long context or the rows that a method
//! gathers. One page of 2 MiB needs less address translation than 512 pages of 4 KiB, above all when rows are far
//! apart.
//!
//! Linux uses large pages for memory marked before its first write, and merges small pages on request. On other
//! systems, and when memory is short, nothing changes.

use bytemuck::Pod;

/// Size in bytes below which memory is left alone: it would be a page or two.
const LEAST: usize = 4 << 20;

/// Returns `len` zeros, in large pages if the size warrants them.
pub fn zeros<T: Pod>(len: usize) -> Vec<T> {
    // A large allocation comes from the system unwritten.
    let mut zeros = vec![T::zeroed(); len];
    ask(zeros.as_mut_ptr(), len);
    zeros
}

/// Reserves space for `more` further elements in `rows`, in large pages if the size warrants them; capacity at least
/// doubles.
pub fn reserve<T: Pod>(rows: &mut Vec<T>, more: usize) {
    let needed = rows.len().saturating_add(more);
    if needed <= rows.capacity() {
        return;
    }
    if needed.saturating_mul(size_of::<T>()) < LEAST {
        return rows.reserve(more);
    }
    // `Vec::reserve` may move pages to addresses where large ones cannot stay large. The capacity leaves room for more:
    // the first rows after a long prompt must not copy all of it. Untouched room takes no memory.
    let roomy = needed.saturating_add(needed / 4).max(rows.capacity().saturating_mul(2));
    let mut grown = Vec::with_capacity(roomy);
    ask(grown.as_mut_ptr(), grown.capacity());
    grown.extend_from_slice(rows);
    *rows = grown;
}

#[cfg(target_os = "linux")]
fn ask<T: Pod>(memory: *mut T, len: usize) {
    const PAGE: usize = 4096;
    // Value from the Linux headers; not every C library defines it.
    const MADV_COLLAPSE: i32 = 25;
    let bytes = len.saturating_mul(size_of::<T>());
    if bytes < LEAST {
        return;
    }
    // Only whole pages inside the range. On machines with other page sizes Linux rejects an unaligned address and
    // changes nothing.
    let skipped = memory.addr().next_multiple_of(PAGE) - memory.addr();
    let whole = (bytes - skipped) / PAGE * PAGE;
    // SAFETY: the range lies inside one allocation that the caller holds, and the advice changes neither contents nor
    // addresses; its return value says only whether Linux took it.
    unsafe {
        let start = memory.cast::<u8>().add(skipped).cast();
        libc::madvise(start, whole, libc::MADV_HUGEPAGE);
        // An allocator may reuse memory that was already written, in small pages: this merges them. Memory never
        // written stays as it is.
        libc::madvise(start, whole, MADV_COLLAPSE);
    }
}

#[cfg(not(target_os = "linux"))]
fn ask<T: Pod>(_: *mut T, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_made_by_doubling_and_keeps_what_was_there() {
        let mut rows: Vec<f32> = Vec::new();
        let large = LEAST / size_of::<f32>();
        for len in [0, 1, 5, large - 1, large, large + 1, 3 * large] {
            let (first, before) = (rows.len(), rows.capacity());
            reserve(&mut rows, len - first);
            assert!(rows.capacity() >= len && (rows.capacity() == before || rows.capacity() >= 2 * before));
            rows.extend((first..len).map(|i| i as f32));
        }
        assert!(rows.iter().enumerate().all(|(i, &x)| x == i as f32));
        let room = rows.capacity();
        reserve(&mut rows, 0);
        assert_eq!(rows.capacity(), room);
    }

    #[test]
    fn zeros_are_zero_whatever_their_number() {
        for len in [0, 1, 1000, LEAST / 4 + 3] {
            assert_eq!(zeros::<f32>(len), vec![0.0; len]);
        }
    }
}
