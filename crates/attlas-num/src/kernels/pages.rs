//! Large pages for memory that is read far and wide, such as the cache of a long context or the rows that a method
//! gathers from: the processor finds one page of 2 MiB faster than 512 of 4 KiB, most of all where rows are read here and
//! there.
//!
//! Linux gives large pages to memory that is marked before it is first written, and joins small pages on request.
//! Elsewhere, and where memory is short, nothing changes.

use bytemuck::Pod;

/// Memory below this size is left as it is, in bytes: it would be a page or two.
const LEAST: usize = 4 << 20;

/// So many zeros, in large pages where they are worth it.
pub fn zeros<T: Pod>(len: usize) -> Vec<T> {
    // Comes from the system untouched where it is large.
    let mut zeros = vec![T::zeroed(); len];
    ask(zeros.as_mut_ptr(), len);
    zeros
}

/// Makes room for `more` elements behind those of `rows`, in large pages where they are worth it; room grows by doubling.
pub fn reserve<T: Pod>(rows: &mut Vec<T>, more: usize) {
    let needed = rows.len().saturating_add(more);
    if needed <= rows.capacity() {
        return;
    }
    if needed.saturating_mul(size_of::<T>()) < LEAST {
        return rows.reserve(more);
    }
    // Not by `Vec::reserve`, which moves pages to places where large ones cannot stay large.
    // With room for more: the first rows after a long prompt must not copy all of it. Untouched room takes no memory.
    let roomy = needed.saturating_add(needed / 4).max(rows.capacity().saturating_mul(2));
    let mut grown = Vec::with_capacity(roomy);
    ask(grown.as_mut_ptr(), grown.capacity());
    grown.extend_from_slice(rows);
    *rows = grown;
}

#[cfg(target_os = "linux")]
fn ask<T: Pod>(memory: *mut T, len: usize) {
    const PAGE: usize = 4096;
    // The number that Linux gives it; not every C library has a name for it.
    const MADV_COLLAPSE: i32 = 25;
    let bytes = len.saturating_mul(size_of::<T>());
    if bytes < LEAST {
        return;
    }
    // Whole pages inside; an address that is not one on machines with other page sizes is refused and changes nothing.
    let skipped = memory.addr().next_multiple_of(PAGE) - memory.addr();
    let whole = (bytes - skipped) / PAGE * PAGE;
    // SAFETY: the range lies inside one allocation that the caller holds, and the advice changes neither contents nor
    // addresses; what it returns says only whether it was taken.
    unsafe {
        let start = memory.cast::<u8>().add(skipped).cast();
        libc::madvise(start, whole, libc::MADV_HUGEPAGE);
        // What an allocator hands out again was written before, in small pages: these are joined. Memory that was
        // never written stays as it is.
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
