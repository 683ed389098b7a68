//! The protocol by which readers and the writer enter and leave a gate.
//!
//! The invariants are those of the [module above](super).

use std::panic::{RefUnwindSafe, UnwindSafe};

use crossbeam_utils::CachePadded;

use super::error::GateError;
use crate::fence;
use crate::rseq::section::{self, Refused};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::std_lock::{Condvar, Mutex};
use crate::sync::{cpu, order, step, thread_id};
use crate::words::Words;

/// The bit that closes a word to atomic entries. Set while the gate is closed. The words that
/// sections change do not use it.
const CLOSED: u64 = 1;
/// What a reader without a section adds to a word. A section adds 1.
pub(super) const READER: u64 = 2;

/// The state of a [`ReadWriteGate`](super::ReadWriteGate), which its guards point to.
#[repr(C)]
pub(super) struct Inner<T> {
    pub(super) hot: CachePadded<Hot>,
    pub(super) cold: CachePadded<Cold>,
    pub(super) value: UnsafeCell<T>,
}

/// The fields that every reader reads and only a writer writes.
pub(super) struct Hot {
    /// The id of the thread that closed the gate, or 0.
    gate: AtomicU64,
    /// Always 0. A section that leaves tests this in place of `gate`, so it is never refused.
    open: AtomicU64,
    pub(super) words: Words,
}

/// The fields that threads without a CPU id, writers and waiting readers use.
pub(super) struct Cold {
    pub(super) remote: AtomicU64,
    pub(super) state: Mutex<State>,
    /// Readers wait here for the writer to leave.
    readers: Condvar,
    /// Writers wait here until the gate opens, and then until the readers inside have left.
    writers: Condvar,
}

/// The state that writers and waiting readers share, under a mutex.
pub(super) struct State {
    /// The id of the thread that closed the gate: it writes, or waits for the readers inside. 0 if
    /// the gate is open.
    owner: u64,
    /// The number of readers that wait for the writer to leave.
    pub(super) waiting: usize,
    /// The number of readers that waited for the last writer and have not entered yet.
    admitted: usize,
}

// SAFETY: the value moves with the gate; the rest is atomics and locks.
unsafe impl<T: Send> Send for Inner<T> {}
// SAFETY: readers on several threads share `&T`, so `T: Sync`. A writer on any thread has `&mut T`,
// which is a move as far as `T` can tell, so `T: Send`. Invariants 1 and 2 keep readers and the
// writer apart.
unsafe impl<T: Send + Sync> Sync for Inner<T> {}

// A guard is a reference to an `Inner`. So the guard is unwind safe because the gate is;
// `crate::unwind` says why.
impl<T> UnwindSafe for Inner<T> {}
impl<T> RefUnwindSafe for Inner<T> {}

impl<T> Inner<T> {
    pub(super) fn new(value: T, words: Words) -> Self {
        // Chosen before the first reader, because `light` is a full fence until then.
        let _ = fence::strategy();
        let hot = CachePadded::new(Hot { gate: AtomicU64::new(0), open: AtomicU64::new(0), words });
        let cold = CachePadded::new(Cold {
            remote: AtomicU64::new(0),
            state: Mutex::new(State { owner: 0, waiting: 0, admitted: 0 }),
            readers: Condvar::new(),
            writers: Condvar::new(),
        });
        Self { hot, cold, value: UnsafeCell::new(value) }
    }

    /// Enters as the writer. Waits until the previous writer has left, the readers that waited for
    /// that writer have entered, and all readers have left.
    pub(super) fn write(&self) -> Result<(), GateError> {
        let mut state = self.cold.state.lock();
        while state.owner != 0 || state.admitted != 0 {
            self.check_deadlock(&state)?;
            self.cold.writers.wait(&mut state);
        }
        self.close(&mut state);
        while self.has_readers() {
            self.cold.writers.wait(&mut state);
        }
        Ok(())
    }

    /// Enters as the writer if the gate is open, no reader is inside, and no reader that waited for
    /// the previous writer has still to enter.
    pub(super) fn try_write(&self) -> Result<(), GateError> {
        let mut state = self.cold.state.lock();
        if state.owner != 0 || state.admitted != 0 {
            return Err(self.try_error());
        }
        self.close(&mut state);
        if self.has_readers() {
            self.open(&mut state);
            return Err(self.try_error());
        }
        Ok(())
    }

    /// Leaves as the writer.
    pub(super) fn leave_writer(&self) {
        self.open(&mut self.cold.state.lock());
    }

    /// Adds a reader. Returns false if the gate is closed.
    #[inline(always)]
    pub(super) fn enter(&self) -> bool {
        if section::available() {
            match section::add(&self.hot.gate, 0, &self.hot.words, 1) {
                Ok(_) => true,
                Err(Refused::NoCpu) => enter_by_atomic(&self.cold.remote),
                Err(Refused::Closed | Refused::OutOfRange) => false,
            }
        } else {
            enter_by_atomic(self.hot.words.slot(cpu::recent()))
        }
    }

    /// Counts the writer as a reader too. By an atomic, because no section enters a closed gate, in
    /// any word, because only the sum matters.
    pub(super) fn enter_while_closed(&self) {
        let hot = &self.hot;
        let word = match section::available() {
            true => &self.cold.remote,
            false => hot.words.slot(cpu::recent()),
        };
        // Ordering: Relaxed; this thread later unlocks `state`, and the next writer locks `state`
        // before it sums the words.
        word.fetch_add(READER, Ordering::Relaxed);
    }

    /// Adds a reader after `enter` returned false. Waits until the writer has left.
    #[cold]
    pub(super) fn enter_slow(&self) -> Result<(), GateError> {
        let mut state = self.cold.state.lock();
        if state.owner == 0 {
            let entered = self.enter();
            assert!(entered, "the gate closes under `state` only (invariant 3)");
            return Ok(());
        }
        self.check_deadlock(&state)?;
        state.waiting += 1;
        while state.owner != 0 {
            self.cold.readers.wait(&mut state);
        }
        // Invariant 5: the writer counted this reader in `admitted` when it left, so the gate has
        // stayed open since.
        let entered = self.enter();
        assert!(entered, "the gate closes under `state` only (invariant 3)");
        state.admitted -= 1;
        if state.admitted == 0 {
            step!("enter: wake the next writer", self.cold.writers.notify_all());
        }
        Ok(())
    }

    /// Subtracts a reader from the word of this CPU, and wakes a waiting writer.
    #[inline]
    pub(super) fn leave(&self) {
        let hot = &self.hot;
        if section::available() {
            if section::add(&hot.open, 0, &hot.words, -1_i64 as u64).is_err() {
                leave_by_atomic(&self.cold.remote);
            }
        } else {
            leave_by_atomic(hot.words.slot(cpu::recent()));
        }
        // Pairs with the heavy fence in `close` (invariant 4): the writer's sum sees that this reader
        // has left, or this reader sees the closed gate.
        step!("leave: before the look at the gate", fence::light());
        // Ordering: Relaxed; the fence orders it after the store above.
        if hot.gate.load(Ordering::Relaxed) != 0 {
            self.wake_writer();
        }
    }

    #[cold]
    fn wake_writer(&self) {
        // Under `state`, so that the wake-up does not come between the writer's sum and its wait.
        let _held = self.cold.state.lock();
        self.cold.writers.notify_all();
    }

    /// Makes the calling thread the writer. No reader enters after this returns (invariant 1).
    fn close(&self, state: &mut State) {
        let hot = &self.hot;
        state.owner = thread_id();
        // Ordering: Relaxed; the heavy fence below makes the store visible to each section that
        // commits after it, and to the load in `leave` of each reader that the sum still counts.
        hot.gate.store(state.owner, Ordering::Relaxed);
        // Ordering: Relaxed, for `remote` and the words; a later entry to the same word finds the
        // bit, and `has_readers` reads this value of the word or a later one.
        if section::available() {
            self.cold.remote.fetch_or(CLOSED, Ordering::Relaxed);
            step!("close: no section still enters", fence::heavy_rseq());
        } else {
            for word in hot.words.iter() {
                word.fetch_or(CLOSED, Ordering::Relaxed);
            }
            fence::heavy();
        }
    }

    /// Returns whether a reader is inside. Only meaningful after `close` (invariant 2).
    fn has_readers(&self) -> bool {
        let hot = &self.hot;
        // Ordering: Acquire pairs with the Release of the section in `leave` and with the Release
        // in `leave_by_atomic`. A reader that left finished its reads before the writer's changes.
        let load = |word: &AtomicU64| word.load(order!(Acquire, "sum: the reads are done")) as i64;
        let counted = |word: &AtomicU64| load(word) >> 1; // keeps the sign
        let mut sum = 0_i64;
        if section::available() {
            step!("sum: the remote readers", sum = sum.wrapping_add(counted(&self.cold.remote)));
            hot.words.iter().for_each(|word| sum = sum.wrapping_add(load(word)));
        } else {
            hot.words.iter().for_each(|word| sum = sum.wrapping_add(counted(word)));
        }
        sum != 0
    }

    /// Opens the gate. The waiting readers enter next, before the next writer.
    fn open(&self, state: &mut State) {
        // Ordering: Release, on `remote`, the words and the gate, pairs with the Acquire in
        // `enter_by_atomic` and in the section of `enter`; it carries what the writer wrote.
        if section::available() {
            self.cold.remote.fetch_and(!CLOSED, Ordering::Release);
        } else {
            for word in self.hot.words.iter() {
                word.fetch_and(!CLOSED, Ordering::Release);
            }
        }
        self.hot.gate.store(0, order!(Release, "open: the write is done"));
        state.owner = 0;
        state.admitted = std::mem::take(&mut state.waiting);
        if state.admitted != 0 {
            step!("open: wake the readers", self.cold.readers.notify_all());
        } else {
            self.cold.writers.notify_all();
        }
    }

    /// Returns [`GateError::Deadlock`] if the calling thread is the writer.
    fn check_deadlock(&self, state: &State) -> Result<(), GateError> {
        if state.owner == thread_id() { Err(GateError::Deadlock) } else { Ok(()) }
    }

    /// Returns the error of a `try_` method that found the gate closed or a reader inside.
    #[cold]
    pub(super) fn try_error(&self) -> GateError {
        // Ordering: Relaxed; no other living thread stores the id of the calling thread, and this
        // thread sees its own store.
        if self.hot.gate.load(Ordering::Relaxed) == thread_id() {
            GateError::Deadlock
        } else {
            GateError::WouldBlock
        }
    }
}

/// Adds a reader to `word`. Returns false if the word is closed.
#[inline]
fn enter_by_atomic(word: &AtomicU64) -> bool {
    // Ordering: Relaxed; the compare-exchange checks the value.
    let mut seen = word.load(Ordering::Relaxed);
    while seen & CLOSED == 0 {
        let new = seen.wrapping_add(READER);
        // Ordering: Acquire on success pairs with the Release in `open`; it carries what the
        // previous writer wrote. Relaxed on failure: the next attempt checks again.
        match word.compare_exchange_weak(seen, new, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => seen = now,
        }
    }
    false
}

/// Subtracts a reader from `word`, which may be closed.
#[inline]
fn leave_by_atomic(word: &AtomicU64) {
    // Ordering: Release pairs with the Acquire in `has_readers`; this reader finished its reads
    // before the writer's changes.
    word.fetch_sub(READER, Ordering::Release);
}
