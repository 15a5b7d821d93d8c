//! Parallel loops whose splitting code is compiled once.
//!
//! Names and splitting follow rayon, and the threads are those of its current pool. rayon compiles its splitting again
//! for every body and every item type, some 3,000 lines of LLVM code per loop; here a loop is one closure over index
//! ranges, which `split` calls through a pointer. Items stay in order: a collected list and a reduction are the same
//! with any number of threads.
//!
//! ```
//! use attlas_num::par::*;
//!
//! let mut rows = vec![0.0; 6];
//! rows.par_chunks_mut(2).enumerate().for_each(|(i, row)| row.fill(i as f64));
//! assert_eq!(rows, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
//! let squares: Vec<usize> = (0..4).into_par_iter().map(|i| i * i).collect();
//! assert_eq!(squares, [0, 1, 4, 9]);
//! ```

pub use super::team::awake;

use super::team;
use std::iter::Sum;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Indexed items of a parallel loop.
///
/// # Safety
/// Different threads may take items with different indices at the same time.
pub unsafe trait Source: Sync {
    /// One item.
    type Item;

    /// Returns the number of items.
    fn items(&self) -> usize;

    /// Returns item `i`.
    ///
    /// # Safety
    /// `i` is below [`items`](Self::items), and each index is taken at most once.
    unsafe fn take(&self, i: usize) -> Self::Item;
}

/// A parallel loop over some items, not yet run.
#[derive(Debug)]
#[must_use = "a loop runs when it is told what to do with its items"]
pub struct Par<S> {
    source: S,
    min: usize,
    max: usize,
}

impl<S: Source> Par<S> {
    fn new(source: S) -> Self {
        Self { source, min: 1, max: usize::MAX }
    }

    fn with<R>(self, wrap: impl FnOnce(S) -> R) -> Par<R> {
        Par { source: wrap(self.source), min: self.min, max: self.max }
    }

    /// Limits how many items a thread takes at a time.
    pub fn with_max_len(self, max: usize) -> Self {
        Self { max: self.max.min(max), ..self }
    }

    /// Sets the fewest items that a thread takes at a time, for bodies shorter than a task.
    pub fn with_min_len(self, min: usize) -> Self {
        Self { min: self.min.max(min), ..self }
    }

    /// Pairs each item with its index.
    pub fn enumerate(self) -> Par<Enumerate<S>> {
        self.with(Enumerate)
    }

    /// Reverses the order of the items.
    pub fn rev(self) -> Par<Rev<S>> {
        self.with(Rev)
    }

    /// Pairs items with those of `other`, up to the shorter length.
    pub fn zip<O: IntoPar>(self, other: O) -> Par<Zip<S, O::Source>> {
        let other = other.into_par_iter();
        let (min, max) = (self.min.max(other.min), self.max.min(other.max));
        Par { source: Zip(self.source, other.source), min, max }
    }

    /// Maps every item through `f`.
    pub fn map<R, F: Fn(S::Item) -> R + Sync>(self, f: F) -> Par<Map<S, F>> {
        self.with(|source| Map(source, f))
    }

    /// Runs `f` on every item.
    pub fn for_each(self, f: impl Fn(S::Item) + Sync) {
        self.for_each_init(|| (), |(), item| f(item));
    }

    /// Runs `f` on every item, with a state that `init` creates for each range of items.
    pub fn for_each_init<A>(self, init: impl Fn() -> A + Sync, f: impl Fn(&mut A, S::Item) + Sync) {
        let source = &self.source;
        split(source.items(), self.min, self.max, &|range| {
            let mut state = init();
            // SAFETY: the ranges of `split` are disjoint and below `items`.
            range.for_each(|i| f(&mut state, unsafe { source.take(i) }));
        });
    }

    /// Runs `f` on every item: each thread takes a run of neighbours, and then items of other runs that nobody has begun.
    ///
    /// For items that follow each other in memory: the bytes prefetched behind an item are then the thread's own next
    /// ones. Handed out one by one, four shares of a product for each thread made a token of SmolLM2 14 % slower than
    /// one share did (two threads of an AMD EPYC).
    pub fn for_each_in_runs(self, f: impl Fn(S::Item) + Sync) {
        let (n, source) = (self.source.items(), &self.source);
        let threads = rayon::current_num_threads().min(n);
        let runs = threads.min(MOST_RUNS);
        let next: [Cursor; MOST_RUNS] =
            std::array::from_fn(|run| Cursor(AtomicUsize::new(n * run / runs.max(1))));
        split(threads, 1, 1, &|range| {
            for own in range.map(|i| i % runs) {
                for run in (own..runs).chain(0..own) {
                    let claim = || next[run].0.fetch_add(1, Ordering::Relaxed);
                    let items = std::iter::repeat_with(claim).take_while(|i| *i < n * (run + 1) / runs);
                    // SAFETY: the runs are disjoint and below `items`, and a cursor gives each index once.
                    items.for_each(|i| f(unsafe { source.take(i) }));
                }
            }
        });
    }

    /// Runs `f` on every item and returns the first error in item order.
    pub fn try_for_each<E: Send>(self, f: impl Fn(S::Item) -> Result<(), E> + Sync) -> Result<(), E> {
        self.map(f).collect()
    }

    /// Collects the items in order, into a list or a `Result` or `Option` of one.
    pub fn collect<C: FromIterator<S::Item>>(self) -> C
    where
        S::Item: Send,
    {
        self.into_vec().into_iter().collect()
    }

    /// Reduces the items in order, starting with `identity`.
    pub fn reduce(
        self,
        identity: impl FnOnce() -> S::Item,
        join: impl FnMut(S::Item, S::Item) -> S::Item,
    ) -> S::Item
    where
        S::Item: Send,
    {
        self.into_vec().into_iter().fold(identity(), join)
    }

    /// Sums the items in order.
    pub fn sum<R: Sum<S::Item>>(self) -> R
    where
        S::Item: Send,
    {
        self.into_vec().into_iter().sum()
    }

    fn into_vec(self) -> Vec<S::Item>
    where
        S::Item: Send,
    {
        let source = &self.source;
        let mut list: Vec<S::Item> = Vec::with_capacity(source.items());
        let places = Parts::room(&mut list);
        split(source.items(), self.min, self.max, &|range| {
            for i in range {
                // SAFETY: the ranges of `split` are disjoint and below `items`, for which the list has room.
                unsafe { places.at(i).write(source.take(i)) };
            }
        });
        // SAFETY: `split` has come back, so every place was written.
        unsafe { list.set_len(source.items()) };
        list
    }
}

/// Calls `body` on the threads of the current pool, with ranges that partition `0..n`. Ranges are halved as in rayon's
/// indexed loops: one part per thread, more where a part was stolen, none longer than `max` (but for rounding) and none
/// shorter than `min`. Within [`awake`], a counter hands out the ranges.
fn split(n: usize, min: usize, max: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
    if n > 0 && !team::lead(n, min, max, body) {
        let splits = rayon::current_num_threads().max(n / max.max(1));
        halve(0..n, splits, false, min.max(1), body);
    }
}

/// Most runs of neighbouring items; more threads share them.
const MOST_RUNS: usize = 32;

/// First item of a run that no thread has taken, on a cache line of its own.
#[repr(align(64))]
struct Cursor(AtomicUsize);

fn halve(range: Range<usize>, splits: usize, stolen: bool, min: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
    let half = range.len() / 2;
    if half < min || splits == 0 && !stolen {
        return body(range);
    }
    let splits = if stolen { (splits / 2).max(rayon::current_num_threads()) } else { splits / 2 };
    let middle = range.start + half;
    rayon::join_context(
        |task| halve(range.start..middle, splits, task.migrated(), min, body),
        |task| halve(middle..range.end, splits, task.migrated(), min, body),
    );
}

/// Runs both closures, in parallel if a thread is free.
pub fn join<A: Send, B: Send>(a: impl FnOnce() -> A + Send, b: impl FnOnce() -> B + Send) -> (A, B) {
    fn run(a: &mut (dyn FnMut() + Send), b: &mut (dyn FnMut() + Send)) {
        rayon::join(a, b);
    }
    let (mut a, mut b) = (Once::new(a), Once::new(b));
    run(&mut || a.run(), &mut || b.run());
    (a.result(), b.result())
}

/// Runs `work` on the threads of `pool`.
pub fn install<R: Send>(pool: &rayon::ThreadPool, work: impl FnOnce() -> R + Send) -> R {
    fn run(pool: &rayon::ThreadPool, work: &mut (dyn FnMut() + Send)) {
        pool.install(work);
    }
    let mut work = Once::new(work);
    run(pool, &mut || work.run());
    work.result()
}

/// Closure called through a pointer, and its result.
struct Once<F, R> {
    work: Option<F>,
    result: Option<R>,
}

impl<R, F: FnOnce() -> R> Once<F, R> {
    fn new(work: F) -> Self {
        Self { work: Some(work), result: None }
    }

    fn run(&mut self) {
        self.result = self.work.take().map(|work| work());
    }

    fn result(self) -> R {
        self.result.unwrap_or_else(|| unreachable!("rayon runs what it is given"))
    }
}

/// Conversion into a parallel loop: over numbers, the elements of a slice, or a list taken by value.
pub trait IntoPar {
    /// The items.
    type Source: Source;

    /// Returns a parallel loop over them.
    fn into_par_iter(self) -> Par<Self::Source>;
}

impl IntoPar for Range<usize> {
    type Source = Self;

    fn into_par_iter(self) -> Par<Self> {
        Par::new(self)
    }
}

impl<S: Source> IntoPar for Par<S> {
    type Source = S;

    fn into_par_iter(self) -> Self {
        self
    }
}

impl<'a, T: Sync> IntoPar for &'a [T] {
    type Source = Self;

    fn into_par_iter(self) -> Par<&'a [T]> {
        Par::new(self)
    }
}

impl<T: Send> IntoPar for Vec<T> {
    type Source = Owned<T>;

    fn into_par_iter(self) -> Par<Owned<T>> {
        Par::new(Owned(self.into_iter().map(ManuallyDrop::new).collect()))
    }
}

/// Parallel loops over the elements of a slice and over its chunks.
pub trait ParSlice<T> {
    /// Loops over every element.
    fn par_iter(&self) -> Par<&[T]>
    where
        T: Sync;

    /// Loops over every element, mutably.
    fn par_iter_mut(&mut self) -> Par<ElementsMut<'_, T>>
    where
        T: Send;

    /// Loops over chunks of `size` elements, the last one possibly shorter.
    fn par_chunks(&self, size: usize) -> Par<Chunks<'_, T>>
    where
        T: Sync;

    /// Loops over chunks of `size` elements mutably, the last one possibly shorter.
    fn par_chunks_mut(&mut self, size: usize) -> Par<ChunksMut<'_, T>>
    where
        T: Send;

    /// Loops over chunks of exactly `size` elements mutably, leaving out the remainder.
    fn par_chunks_exact_mut(&mut self, size: usize) -> Par<ChunksMut<'_, T>>
    where
        T: Send;
}

impl<T> ParSlice<T> for [T] {
    fn par_iter(&self) -> Par<&[T]>
    where
        T: Sync,
    {
        Par::new(self)
    }

    fn par_iter_mut(&mut self) -> Par<ElementsMut<'_, T>>
    where
        T: Send,
    {
        Par::new(ElementsMut(Parts::new(self)))
    }

    fn par_chunks(&self, size: usize) -> Par<Chunks<'_, T>>
    where
        T: Sync,
    {
        assert!(size != 0, "chunks have elements");
        Par::new(Chunks { all: self, size })
    }

    fn par_chunks_mut(&mut self, size: usize) -> Par<ChunksMut<'_, T>>
    where
        T: Send,
    {
        assert!(size != 0, "chunks have elements");
        Par::new(ChunksMut { all: Parts::new(self), size })
    }

    fn par_chunks_exact_mut(&mut self, size: usize) -> Par<ChunksMut<'_, T>>
    where
        T: Send,
    {
        let whole = self.len() - self.len() % size;
        self[..whole].par_chunks_mut(size)
    }
}

/// Elements of a list or slice that several threads change, each its own.
#[derive(Debug)]
struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: as for the slice that it borrows.
unsafe impl<T: Send> Send for Parts<'_, T> {}

// SAFETY: its callers take disjoint elements, which may be sent to other threads.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    fn new(all: &'a mut [T]) -> Self {
        Self { start: all.as_mut_ptr(), len: all.len(), borrowed: PhantomData }
    }

    /// Returns the whole capacity of `list`, written or not; valid while the list is not touched.
    fn room(list: &'a mut Vec<T>) -> Self {
        Self { start: list.as_mut_ptr(), len: list.capacity(), borrowed: PhantomData }
    }

    /// Returns a pointer to element `i`.
    ///
    /// # Safety
    /// `i` is at most `len`.
    unsafe fn at(&self, i: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.start.add(i) }
    }
}

/// Mutable elements of a slice.
#[derive(Debug)]
pub struct ElementsMut<'a, T>(Parts<'a, T>);

// SAFETY: elements with different numbers do not overlap.
unsafe impl<'a, T: Send> Source for ElementsMut<'a, T> {
    type Item = &'a mut T;

    fn items(&self) -> usize {
        self.0.len
    }

    unsafe fn take(&self, i: usize) -> &'a mut T {
        // SAFETY: the element is in the slice, which is borrowed for `'a`, and nobody else takes it.
        unsafe { &mut *self.0.at(i) }
    }
}

/// Mutable chunks of a slice.
#[derive(Debug)]
pub struct ChunksMut<'a, T> {
    all: Parts<'a, T>,
    size: usize,
}

// SAFETY: chunks with different numbers do not overlap.
unsafe impl<'a, T: Send> Source for ChunksMut<'a, T> {
    type Item = &'a mut [T];

    fn items(&self) -> usize {
        self.all.len.div_ceil(self.size)
    }

    unsafe fn take(&self, i: usize) -> &'a mut [T] {
        let from = i * self.size;
        let len = self.size.min(self.all.len - from);
        // SAFETY: the range is in the slice, which is borrowed for `'a`, and nobody else takes it.
        unsafe { std::slice::from_raw_parts_mut(self.all.at(from), len) }
    }
}

/// Chunks of a slice.
#[derive(Debug)]
pub struct Chunks<'a, T> {
    all: &'a [T],
    size: usize,
}

/// Elements of a list taken by value; those not taken, because another item's body panicked, are not dropped.
#[derive(Debug)]
pub struct Owned<T>(Vec<ManuallyDrop<T>>);

// SAFETY: each element is moved out by one thread at most.
unsafe impl<T: Send> Sync for Owned<T> {}

// SAFETY: see above.
unsafe impl<T: Send> Source for Owned<T> {
    type Item = T;

    fn items(&self) -> usize {
        self.0.len()
    }

    unsafe fn take(&self, i: usize) -> T {
        // SAFETY: the element is moved out once, and the list does not drop it.
        unsafe { std::ptr::read(&*self.0[i]) }
    }
}

/// Items with their indices.
#[derive(Debug)]
pub struct Enumerate<S>(S);

/// Items in reverse order.
#[derive(Debug)]
pub struct Rev<S>(S);

/// Pairs of items.
#[derive(Debug)]
pub struct Zip<A, B>(A, B);

/// Results of a function.
#[derive(Debug)]
pub struct Map<S, F>(S, F);

// SAFETY: nothing is changed.
unsafe impl Source for Range<usize> {
    type Item = usize;

    fn items(&self) -> usize {
        self.end.saturating_sub(self.start)
    }

    unsafe fn take(&self, i: usize) -> usize {
        self.start + i
    }
}

// SAFETY: nothing is changed.
unsafe impl<'a, T: Sync> Source for &'a [T] {
    type Item = &'a T;

    fn items(&self) -> usize {
        <[T]>::len(self)
    }

    unsafe fn take(&self, i: usize) -> &'a T {
        &self[i]
    }
}

// SAFETY: nothing is changed.
unsafe impl<'a, T: Sync> Source for Chunks<'a, T> {
    type Item = &'a [T];

    fn items(&self) -> usize {
        self.all.len().div_ceil(self.size)
    }

    unsafe fn take(&self, i: usize) -> &'a [T] {
        let from = i * self.size;
        &self.all[from..][..self.size.min(self.all.len() - from)]
    }
}

// SAFETY: different indices stay different when they are passed on.
unsafe impl<S: Source> Source for Enumerate<S> {
    type Item = (usize, S::Item);

    fn items(&self) -> usize {
        self.0.items()
    }

    unsafe fn take(&self, i: usize) -> (usize, S::Item) {
        // SAFETY: the caller's promise.
        (i, unsafe { self.0.take(i) })
    }
}

// SAFETY: different indices stay different when they are passed on.
unsafe impl<S: Source> Source for Rev<S> {
    type Item = S::Item;

    fn items(&self) -> usize {
        self.0.items()
    }

    unsafe fn take(&self, i: usize) -> S::Item {
        // SAFETY: the caller's promise, counted from the end.
        unsafe { self.0.take(self.items() - 1 - i) }
    }
}

// SAFETY: different indices stay different when they are passed on.
unsafe impl<A: Source, B: Source> Source for Zip<A, B> {
    type Item = (A::Item, B::Item);

    fn items(&self) -> usize {
        self.0.items().min(self.1.items())
    }

    unsafe fn take(&self, i: usize) -> (A::Item, B::Item) {
        // SAFETY: the caller's promise.
        unsafe { (self.0.take(i), self.1.take(i)) }
    }
}

// SAFETY: different indices stay different when they are passed on.
unsafe impl<R, S: Source, F: Fn(S::Item) -> R + Sync> Source for Map<S, F> {
    type Item = R;

    fn items(&self) -> usize {
        self.0.items()
    }

    unsafe fn take(&self, i: usize) -> R {
        // SAFETY: the caller's promise.
        (self.1)(unsafe { self.0.take(i) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn on_threads(threads: usize, work: impl Fn() + Sync + Send) {
        install(&rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap(), work);
    }

    #[test]
    fn every_item_is_met_once_with_any_splitting() {
        for (threads, n) in [(1, 0), (1, 7), (3, 1), (3, 2), (4, 67), (4, 1000)] {
            on_threads(threads, || {
                for (min, max) in [(1, usize::MAX), (1, 1), (5, usize::MAX), (3, 4)] {
                    let met: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                    let all = (0..n).into_par_iter().with_min_len(min).with_max_len(max);
                    all.for_each(|i| {
                        met[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(met.iter().all(|m| m.load(Ordering::Relaxed) == 1), "{threads} {n} {min} {max}");
                }
                let met: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                (0..n).into_par_iter().for_each_in_runs(|i| {
                    met[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(met.iter().all(|m| m.load(Ordering::Relaxed) == 1), "{threads} {n}");
            });
        }
    }

    #[test]
    fn ranges_have_at_most_the_largest_length_and_at_least_the_smallest() {
        on_threads(2, || {
            split(1000, 1, 1, &|range| assert_eq!(range.len(), 1));
            split(1000, 100, 1, &|range| assert!(range.len() >= 100));
            split(3, 4, 1, &|range| assert_eq!(range, 0..3));
        });
    }

    #[test]
    fn adapters_give_what_those_of_the_standard_library_give() {
        let a: Vec<usize> = (0..53).map(|i| i * i % 37).collect();
        on_threads(3, || {
            let mut x = a.clone();
            let pairs = x.par_chunks_mut(5).zip(a.par_chunks(7)).enumerate().rev().with_max_len(1);
            pairs.for_each(|(i, (x, a))| x.iter_mut().zip(a).for_each(|(x, a)| *x += a + i));
            let mut want = a.clone();
            let pairs = want.chunks_mut(5).zip(a.chunks(7)).enumerate();
            pairs.for_each(|(i, (x, a))| x.iter_mut().zip(a).for_each(|(x, a)| *x += a + i));
            assert_eq!(x, want);

            x.par_iter_mut().for_each(|x| *x += 1);
            assert!(x.iter().zip(&want).all(|(x, w)| *x == w + 1));
            assert_eq!(x.par_chunks_exact_mut(5).map(|part| part.len()).collect::<Vec<_>>(), [5; 10]);
            assert_eq!(a.par_iter().map(|a| a + 1).reduce(|| 0, |x, y| 2 * x % 101 + y), {
                a.iter().map(|a| a + 1).fold(0, |x, y| 2 * x % 101 + y)
            });
            let texts: Vec<String> = a.iter().map(ToString::to_string).collect();
            let same: Vec<String> = texts.clone().into_par_iter().collect();
            assert_eq!(same, texts);
        });
    }

    #[test]
    fn the_first_error_in_order_is_the_one_returned() {
        on_threads(4, || {
            let odd = |i: usize| if i % 2 == 1 { Err(i) } else { Ok(i) };
            assert_eq!((0..64).into_par_iter().map(odd).collect::<Result<Vec<_>, _>>(), Err(1));
            assert_eq!((0..64).into_par_iter().try_for_each(|i| odd(i / 2 * 2).map(drop)), Ok(()));
            assert_eq!((0..8).into_par_iter().map(|i| (i < 8).then_some(i)).collect::<Option<Vec<_>>>(), {
                Some((0..8).collect())
            });
        });
    }

    #[test]
    fn closures_that_are_called_once_give_their_results() {
        let text = String::from("moved");
        let (a, b) = join(move || text, || 7);
        assert_eq!((a.as_str(), b), ("moved", 7));
    }
}
