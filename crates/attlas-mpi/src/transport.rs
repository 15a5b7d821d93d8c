//! Movement of bytes between processes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes a process moved, and the time it waited for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Traffic {
    /// Bytes sent.
    pub bytes: u64,
    /// Messages sent.
    pub messages: u64,
    /// Seconds that this process spent only waiting for a message.
    pub waited: f64,
}

impl Traffic {
    /// Returns the traffic since `before`.
    #[must_use]
    pub fn since(self, before: Traffic) -> Traffic {
        Traffic {
            bytes: self.bytes - before.bytes,
            messages: self.messages - before.messages,
            waited: self.waited - before.waited,
        }
    }
}

/// Processes that send each other bytes. Every process calls the same functions in the same order. An unreachable
/// process ends all of them, as in MPI: no function returns an error.
pub trait Transport: Debug {
    /// Returns the rank of this process, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of processes.
    fn size(&self) -> usize;

    /// Returns the machine of this process.
    fn node(&self) -> String;

    /// Sends `send` to `to` and receives `recv` from `from` while `meanwhile` runs, which may call its argument to
    /// advance the messages.
    fn exchange(
        &self,
        to: usize,
        send: &[u8],
        from: usize,
        recv: &mut [u8],
        meanwhile: &mut dyn FnMut(&dyn Fn()),
    );

    /// Sends a message.
    fn send(&self, to: usize, bytes: &[u8]);

    /// Receives a message of the length of `bytes`.
    fn receive(&self, from: usize, bytes: &mut [u8]);

    /// Returns the next number of a shared counter, from 0.
    fn fetch_add(&self, counter: usize) -> u64;

    /// Resets a counter to 0. No process may use it at the same time.
    fn reset(&self, counter: usize);

    /// Sends a message of any length to process 0, which receives it from [`arrived`](Self::arrived).
    fn report(&self, bytes: &[u8]);

    /// Returns reported messages not returned yet, on process 0.
    fn arrived(&self) -> Vec<Vec<u8>>;

    /// Returns all traffic and waiting time so far.
    fn traffic(&self) -> Traffic;

    /// Waits until all processes have called it.
    fn barrier(&self) {
        self.gather_all(&[]);
    }

    /// Returns the bytes of every process, in the order of ranks, on every process.
    fn gather_all(&self, own: &[u8]) -> Vec<Vec<u8>> {
        let (rank, size) = (self.rank(), self.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let mut all: Vec<Vec<u8>> = vec![Vec::new(); size];
        all[rank] = own.to_vec();
        let mut lens = vec![own.len() as u64; size];
        for step in 0..size.saturating_sub(1) {
            let mine = lens[(rank + size - step) % size].to_le_bytes();
            let mut theirs = [0; 8];
            self.exchange(next, &mine, before, &mut theirs, &mut |_| ());
            lens[(rank + size - step - 1) % size] = u64::from_le_bytes(theirs);
        }
        for step in 0..size.saturating_sub(1) {
            let (give, take) = ((rank + size - step) % size, (rank + size - step - 1) % size);
            let mut received = vec![0; lens[take] as usize];
            self.exchange(next, &all[give], before, &mut received, &mut |_| ());
            all[take] = received;
        }
        all
    }

    /// Broadcasts the bytes of `root` to every process, along a binary tree.
    fn broadcast(&self, root: usize, bytes: &mut Vec<u8>) {
        let (size, place) = (self.size(), (self.rank() + self.size() - root) % self.size());
        let real = |place: usize| (place + root) % size;
        let mut len = (bytes.len() as u64).to_le_bytes();
        // The lowest set bit of a place determines its parent.
        let below = if place == 0 { size.next_power_of_two() } else { place & place.wrapping_neg() };
        if place != 0 {
            self.receive(real(place - below), &mut len);
            bytes.resize(u64::from_le_bytes(len) as usize, 0);
            self.receive(real(place - below), bytes);
        }
        let mut step = below / 2;
        while step > 0 {
            if place + step < size {
                self.send(real(place + step), &len);
                self.send(real(place + step), bytes);
            }
            step /= 2;
        }
    }
}

/// Processes as threads of one program, for tests and for work on one machine.
#[derive(Debug)]
pub struct Threads {
    rank: usize,
    shared: Arc<Shared>,
    /// Number of messages requested from each sender: as in MPI, the order of requests matches them to messages.
    asked: RefCell<Vec<u64>>,
    traffic: RefCell<Traffic>,
}

#[derive(Debug)]
struct Shared {
    size: usize,
    /// One mailbox per sender and receiver.
    boxes: Vec<Mailbox>,
    reported: Mutex<Vec<Vec<u8>>>,
    counters: Vec<AtomicU64>,
    barrier: Barrier,
}

#[derive(Debug, Default)]
struct Mailbox {
    letters: Mutex<Letters>,
    came: Condvar,
}

/// Arrived messages by number, and the number of all arrivals.
#[derive(Debug, Default)]
struct Letters {
    waiting: BTreeMap<u64, Vec<u8>>,
    sent: u64,
}

/// Time after which a waiting process gives up: another one has failed and reported it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Counters that processes share.
pub(crate) const COUNTERS: usize = 2;

impl Threads {
    /// Runs `work` as each of `size` processes; returns the results in the order of ranks.
    pub fn run<R: Send>(size: usize, work: impl Fn(&Threads) -> R + Sync) -> Vec<R> {
        let shared = Arc::new(Shared {
            size,
            boxes: (0..size * size).map(|_| Mailbox::default()).collect(),
            reported: Mutex::new(Vec::new()),
            counters: (0..COUNTERS).map(|_| AtomicU64::new(0)).collect(),
            barrier: Barrier::new(size),
        });
        let (work, shared) = (&work, &shared);
        std::thread::scope(|scope| {
            let handles: Vec<_> = (0..size)
                .map(|rank| {
                    let own = Threads {
                        rank,
                        shared: shared.clone(),
                        asked: RefCell::new(vec![0; size]),
                        traffic: RefCell::default(),
                    };
                    scope.spawn(move || work(&own))
                })
                .collect();
            let end = |handle: std::thread::ScopedJoinHandle<'_, R>| match handle.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            handles.into_iter().map(end).collect()
        })
    }

    fn post(&self, to: usize, bytes: &[u8]) {
        let mailbox = &self.shared.boxes[self.rank * self.shared.size + to];
        let mut letters = mailbox.letters.lock().unwrap_or_else(PoisonError::into_inner);
        let number = letters.sent;
        letters.sent += 1;
        letters.waiting.insert(number, bytes.to_vec());
        drop(letters);
        mailbox.came.notify_one();
        let mut traffic = self.traffic.borrow_mut();
        traffic.bytes += bytes.len() as u64;
        traffic.messages += 1;
    }

    /// Requests the next message of `from`.
    fn ask(&self, from: usize) -> u64 {
        let asked = &mut self.asked.borrow_mut()[from];
        *asked += 1;
        *asked - 1
    }

    /// Waits for the requested message.
    fn fetch(&self, from: usize, number: u64, bytes: &mut [u8]) {
        let begun = Instant::now();
        let mailbox = &self.shared.boxes[from * self.shared.size + self.rank];
        let mut letters = mailbox.letters.lock().unwrap_or_else(PoisonError::into_inner);
        let message = loop {
            match letters.waiting.remove(&number) {
                Some(message) => break message,
                None => {
                    let (back, late) =
                        mailbox.came.wait_timeout(letters, PATIENCE).unwrap_or_else(PoisonError::into_inner);
                    letters = back;
                    assert!(!late.timed_out(), "process {} heard nothing from {from}", self.rank);
                }
            }
        };
        drop(letters);
        assert_eq!(message.len(), bytes.len(), "a message of another length from {from} to {}", self.rank);
        bytes.copy_from_slice(&message);
        self.traffic.borrow_mut().waited += begun.elapsed().as_secs_f64();
    }
}

impl Transport for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn node(&self) -> String {
        "threads".into()
    }

    fn exchange(
        &self,
        to: usize,
        send: &[u8],
        from: usize,
        recv: &mut [u8],
        meanwhile: &mut dyn FnMut(&dyn Fn()),
    ) {
        self.post(to, send);
        let number = self.ask(from);
        meanwhile(&|| ());
        self.fetch(from, number, recv);
    }

    fn send(&self, to: usize, bytes: &[u8]) {
        self.post(to, bytes);
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) {
        let number = self.ask(from);
        self.fetch(from, number, bytes);
    }

    fn fetch_add(&self, counter: usize) -> u64 {
        self.shared.counters[counter % COUNTERS].fetch_add(1, Ordering::Relaxed)
    }

    fn reset(&self, counter: usize) {
        self.shared.counters[counter % COUNTERS].store(0, Ordering::Relaxed);
    }

    fn report(&self, bytes: &[u8]) {
        self.shared.reported.lock().unwrap_or_else(PoisonError::into_inner).push(bytes.to_vec());
    }

    fn arrived(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut *self.shared.reported.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn traffic(&self) -> Traffic {
        *self.traffic.borrow()
    }

    fn barrier(&self) {
        self.shared.barrier.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_hears_everything_in_order() {
        for size in 1..=5 {
            let heard = Threads::run(size, |t| {
                let own = vec![t.rank() as u8; 3 * t.rank()];
                let all = t.gather_all(&own);
                let said: Vec<Vec<u8>> = (0..size)
                    .map(|root| {
                        let mut bytes = if t.rank() == root { vec![root as u8; root + 1] } else { vec![] };
                        t.broadcast(root, &mut bytes);
                        bytes
                    })
                    .collect();
                (all, said)
            });
            for (all, said) in heard {
                for rank in 0..size {
                    assert_eq!(all[rank], vec![rank as u8; 3 * rank]);
                    assert_eq!(said[rank], vec![rank as u8; rank + 1]);
                }
            }
        }
    }

    #[test]
    fn a_shared_counter_gives_each_number_once() {
        let mut taken: Vec<u64> =
            Threads::run(3, |t| (0..10).map(|_| t.fetch_add(1)).collect::<Vec<_>>()).concat();
        taken.sort_unstable();
        assert_eq!(taken, (0..30).collect::<Vec<u64>>());
    }
}
