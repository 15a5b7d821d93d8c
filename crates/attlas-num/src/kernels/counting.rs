//! A global allocator that counts bytes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with a count of the bytes in use and of their peak.
///
/// Zeros and moved memory come from the system as they do without the count: large zeros as pages that are not yet
/// there, growing memory without a copy where its pages can be moved.
///
/// ```
/// use attlas_num::kernels::Counting;
///
/// #[global_allocator]
/// static ALLOCATOR: Counting = Counting;
///
/// Counting::reset_peak();
/// drop(vec![1u8; 1 << 20]);
/// assert!(Counting::peak_bytes() >= 1 << 20);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Counting;

impl Counting {
    /// Returns the bytes in use.
    pub fn bytes_in_use() -> usize {
        IN_USE.load(Ordering::Relaxed)
    }

    /// Returns the most bytes in use at one time since the last [`reset_peak`](Self::reset_peak).
    pub fn peak_bytes() -> usize {
        PEAK.load(Ordering::Relaxed)
    }

    /// Restarts the peak from the bytes in use now.
    pub fn reset_peak() {
        PEAK.store(IN_USE.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

fn taken(bytes: usize) {
    let now = IN_USE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

fn returned(bytes: usize) {
    IN_USE.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator with the arguments of the caller; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on from the caller.
        let memory = unsafe { System.alloc(layout) };
        if !memory.is_null() {
            taken(layout.size());
        }
        memory
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on from the caller.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if !memory.is_null() {
            taken(layout.size());
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: passed on from the caller.
        unsafe { System.dealloc(memory, layout) };
        returned(layout.size());
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: passed on from the caller.
        let moved = unsafe { System.realloc(memory, layout, size) };
        if !moved.is_null() {
            match size.checked_sub(layout.size()) {
                Some(more) => taken(more),
                None => returned(layout.size() - size),
            }
        }
        moved
    }
}
