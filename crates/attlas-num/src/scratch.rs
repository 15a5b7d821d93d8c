//! Reusable scratch memory that tracks how much is in use.
//!
//! A [`Scratch`] hands out buffers and takes them back when they are dropped, so repeated calls allocate nothing. The
//! contents of a fresh buffer are unspecified; [`Scratch::poisoned`] fills them with NaN bit patterns, for tests that
//! look for reads of uninitialised memory. Buffers start on a cache line.
//!
//! ```
//! use attlas_num::Scratch;
//!
//! let scratch = Scratch::new();
//! let mut buffer = scratch.take_zeroed::<f32>(100);
//! buffer[3] = 1.0;
//! drop(buffer); // the next buffer of this size allocates nothing
//! assert!(scratch.peak_bytes() >= 400);
//! ```

use crate::kernels::pages;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// One cache line; the unit of allocation.
#[derive(Clone, Copy, Default, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u64; 8]);

const LINE_BYTES: usize = 64;

/// Pool of buffers, shared by the threads of one call.
#[derive(Debug, Default)]
pub struct Scratch {
    free: Mutex<Vec<Vec<Line>>>,
    in_use: AtomicUsize,
    peak: AtomicUsize,
    poison: AtomicBool,
}

impl Scratch {
    /// Creates an empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a pool whose buffers come filled with NaN.
    pub fn poisoned() -> Self {
        let pool = Self::default();
        pool.poison.store(true, Ordering::Relaxed);
        pool
    }

    /// Takes a buffer of `len` elements with unspecified contents.
    pub fn take<T: bytemuck::Pod>(&self, len: usize) -> Buf<'_, T> {
        let lines = (len * size_of::<T>()).div_ceil(LINE_BYTES);
        let mut store: Vec<Line> = {
            let mut free = self.free.lock().unwrap_or_else(|e| e.into_inner());
            // Best fit keeps large buffers for large requests.
            let best =
                (0..free.len()).filter(|&i| free[i].capacity() >= lines).min_by_key(|&i| free[i].capacity());
            best.map(|i| free.swap_remove(i)).unwrap_or_default()
        };
        let more = lines.saturating_sub(store.len());
        pages::reserve(&mut store, more);
        store.resize(lines, Line::default());
        if self.poison.load(Ordering::Relaxed) {
            store.fill(Line([u64::MAX; 8]));
        }
        let now = self.in_use.fetch_add(lines * LINE_BYTES, Ordering::Relaxed) + lines * LINE_BYTES;
        self.peak.fetch_max(now, Ordering::Relaxed);
        Buf { pool: self, store, len, _type: std::marker::PhantomData }
    }

    /// Takes a buffer of `len` elements, all zero bits.
    pub fn take_zeroed<T: bytemuck::Pod>(&self, len: usize) -> Buf<'_, T> {
        let mut buf = self.take(len);
        buf.fill(T::zeroed());
        buf
    }

    /// Takes a buffer with a copy of `values`.
    pub fn take_copy<T: bytemuck::Pod>(&self, values: &[T]) -> Buf<'_, T> {
        let mut buf = self.take(values.len());
        buf.copy_from_slice(values);
        buf
    }

    /// Returns the most bytes handed out at one time since the last [`reset_peak`](Self::reset_peak).
    pub fn peak_bytes(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    /// Restarts the peak from the bytes in use now.
    pub fn reset_peak(&self) {
        self.peak.store(self.in_use.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns all free buffers to the system.
    pub fn trim(&self) {
        self.free.lock().unwrap_or_else(|e| e.into_inner()).clear();
    }
}

/// Borrowed buffer: a slice of `T` that returns to its pool when dropped.
#[derive(Debug)]
pub struct Buf<'p, T> {
    pool: &'p Scratch,
    store: Vec<Line>,
    len: usize,
    _type: std::marker::PhantomData<T>,
}

impl<T: bytemuck::Pod> Deref for Buf<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.store)[..self.len]
    }
}

impl<T: bytemuck::Pod> DerefMut for Buf<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.store)[..self.len]
    }
}

impl<T> Drop for Buf<'_, T> {
    fn drop(&mut self) {
        self.pool.in_use.fetch_sub(self.store.len() * LINE_BYTES, Ordering::Relaxed);
        let store = std::mem::take(&mut self.store);
        self.pool.free.lock().unwrap_or_else(|e| e.into_inner()).push(store);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_the_peak_is_counted() {
        let pool = Scratch::new();
        let address = {
            let a = pool.take::<f32>(100);
            let _b = pool.take::<f64>(8);
            assert_eq!(a.as_ptr() as usize % LINE_BYTES, 0);
            a.as_ptr() as usize
        };
        assert_eq!(pool.peak_bytes(), 448 + 64);
        assert_eq!(pool.take::<u32>(90).as_ptr() as usize, address);
        pool.reset_peak();
        assert_eq!(pool.peak_bytes(), 0);
        assert!(pool.take::<f32>(0).is_empty());
    }

    #[test]
    fn poisoned_buffers_hold_nan() {
        let pool = Scratch::poisoned();
        assert!(pool.take::<f32>(17).iter().all(|x| x.is_nan()));
        assert!(pool.take_zeroed::<f64>(3).iter().all(|&x| x == 0.0));
    }
}
