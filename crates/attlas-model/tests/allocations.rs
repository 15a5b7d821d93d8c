//! Once its buffers exist, decoding a token allocates nothing.

mod common;

use attlas::Schedule;
use attlas_model::{Compute, Decoder, Model, Recipe};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The system's allocator, which counts calls while `COUNTS` is set.
struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicUsize = AtomicUsize::new(0);

fn count() {
    if COUNTS.load(Ordering::Relaxed) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: passed on from the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on from the caller.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: passed on from the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the calls of the allocator while `steps` tokens are decoded after a prompt and some warm-up tokens.
fn calls(model: &Arc<Model>, compute: Compute, threads: usize, steps: u32) -> usize {
    let schedule = Schedule { threads, ..Schedule::default() };
    let mut decoder = Decoder::new(model.clone(), &Recipe::default(), schedule).unwrap();
    decoder.compute_in(compute);
    decoder.reserve(200);
    let mut logits = Vec::new();
    let prompt: Vec<u32> = (100..140).collect();
    decoder.next_logits(&prompt, &mut logits).unwrap();
    (0..4).for_each(|id| decoder.next_logits(&[200 + id], &mut logits).unwrap());
    CALLS.store(0, Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
    (0..steps).for_each(|id| decoder.next_logits(&[300 + id], &mut logits).unwrap());
    COUNTS.store(false, Ordering::Relaxed);
    assert!(logits.iter().all(|x| x.is_finite()));
    CALLS.load(Ordering::Relaxed)
}

// Only one test in this file: others would be counted, too.
#[test]
fn a_token_allocates_nothing() {
    let model = Arc::new(Model::open(&common::smollm2()).unwrap());
    for compute in Compute::ALL {
        for threads in [1, 2] {
            // The queue into a thread pool consists of blocks of 31 slots, and each token enters it twice: for the
            // layers and for the logits.
            let steps = 31;
            let queue = 2 * steps as usize / 31 + 1;
            let found = calls(&model, compute, threads, steps);
            assert!(found <= queue, "{compute}, {threads} threads: {found} calls for {steps} tokens");
        }
    }
}
