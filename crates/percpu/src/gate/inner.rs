//! The protocol of the gate: how readers and the writer enter and leave.
//!
//! The invariants are those of the [module above](super).

use std::panic::{RefUnwindSafe, UnwindSafe};

use crossbeam_utils::CachePadded;

use super::error::GateError;
use crate::fence;
use crate::rseq::section::{self, Refused};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::{Condvar, Mutex, cpu, mutant, thread_id};
use crate::words::Words;

/// The lowest bit of a word that is changed by atomics, and one reader in it.
const CLOSED: u64 = 1;
pub(super) const READER: u64 = 2;

/// What a [`ReadWriteGate`](super::ReadWriteGate) is, for its guards too.
#[repr(C)]
pub(super) struct Inner<T> {
    pub(super) hot: CachePadded<Hot>,
    pub(super) cold: CachePadded<Cold>,
    pub(super) value: UnsafeCell<T>,
}

/// Read by every reader, written by writers only.
pub(super) struct Hot {
    gate: AtomicU64,
    /// The gate of the sections that leave: always 0.
    open: AtomicU64,
    pub(super) words: Words,
}

pub(super) struct Cold {
    pub(super) remote: AtomicU64,
    pub(super) state: Mutex<State>,
    /// Readers wait here for the writer to go, writers for their turn and for readers to leave.
    readers: Condvar,
    writers: Condvar,
}

pub(super) struct State {
    /// The thread that writes, or waits for the readers inside; 0 if none.
    owner: u64,
    /// Readers that wait for it to go.
    pub(super) waiting: usize,
    /// Readers that waited, may enter, and have not yet.
    admitted: usize,
}

// SAFETY: the value moves with the gate; the rest is atomics and locks.
unsafe impl<T: Send> Send for Inner<T> {}
// SAFETY: readers on many threads share `&T`, so `T: Sync`; a writer has `&mut T` on whichever
// thread it is, which is a move as far as `T` can tell, so `T: Send`. Invariants 1 and 2 keep the
// two apart.
unsafe impl<T: Send + Sync> Sync for Inner<T> {}

// A guard is a reference to this, so it is unwind safe where the gate is; `crate::unwind` says why.
impl<T> UnwindSafe for Inner<T> {}
impl<T> RefUnwindSafe for Inner<T> {}

impl<T> Inner<T> {
    pub(super) fn new(value: T, words: Words) -> Self {
        // Decided now: until then every `light` is a full fence.
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

    /// Enters as the writer; waits for the last one and for the readers inside.
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

    /// Enters as the writer if nobody is inside.
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

    /// Counts one more reader; false if the gate is closed.
    #[inline(always)]
    pub(super) fn enter(&self) -> bool {
        if section::available() {
            if mutant("gate-enters-by-an-atomic-add") {
                let open = self.hot.gate.load(Ordering::Acquire) == 0;
                if open {
                    self.hot.words.slot(cpu::recent()).fetch_add(1, Ordering::AcqRel);
                }
                return open;
            }
            match section::add(&self.hot.gate, &self.hot.words, 1) {
                Ok(_) => true,
                Err(Refused::NoCpu) => enter_by_atomic(&self.cold.remote),
                Err(Refused::Closed | Refused::Busy) => false,
            }
        } else {
            enter_by_atomic(self.hot.words.slot(cpu::recent()))
        }
    }

    /// Counts the writer as a reader: by an atomic, since no section enters while the gate is
    /// closed. Which word it is does not matter to the sum.
    pub(super) fn enter_while_closed(&self) {
        let hot = &self.hot;
        let word = match section::available() {
            true => &self.cold.remote,
            false => hot.words.slot(cpu::recent()),
        };
        // Ordering: Relaxed; the next writer sums after it has locked `state`, which this thread
        // unlocks after this.
        word.fetch_add(READER, Ordering::Relaxed);
    }

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
        // Invariant 5: the writer left with us in `admitted`, and no other one came since.
        let entered = self.enter();
        assert!(entered, "the gate closes under `state` only (invariant 3)");
        state.admitted -= 1;
        if state.admitted == 0 && !mutant("gate-forgets-the-next-writer") {
            self.cold.writers.notify_all();
        }
        Ok(())
    }

    /// Counts one reader less, here or on another CPU than it came by, and tells a writer.
    #[inline]
    pub(super) fn leave(&self) {
        let hot = &self.hot;
        if section::available() {
            if mutant("gate-leaves-by-an-atomic-add") {
                hot.words.slot(cpu::recent()).fetch_sub(1, Ordering::AcqRel);
            } else if section::add(&hot.open, &hot.words, -1_i64 as u64).is_err() {
                leave_by_atomic(&self.cold.remote);
            }
        } else {
            leave_by_atomic(hot.words.slot(cpu::recent()));
        }
        if !mutant("gate-leaves-without-light") {
            // Against `heavy` in `close`, invariant 4: the writer's sum sees us gone, or we see
            // the gate closed.
            fence::light();
        }
        // Ordering: Relaxed; only the order with the store above matters, which is the fence's.
        if hot.gate.load(Ordering::Relaxed) != 0 {
            self.wake_writer();
        }
    }

    #[cold]
    fn wake_writer(&self) {
        // The lock puts the wake-up after the writer's sum and wait, or before its next sum.
        let held = (!mutant("gate-wakes-outside-the-lock")).then(|| self.cold.state.lock());
        self.cold.writers.notify_all();
        drop(held);
    }

    /// Becomes the writer. When it returns, nobody enters any more (invariant 1).
    fn close(&self, state: &mut State) {
        let hot = &self.hot;
        state.owner = thread_id();
        // Ordering: Relaxed; the heavy fence below puts it before every section and every leaving
        // reader's load after it.
        hot.gate.store(state.owner, Ordering::Relaxed);
        // Ordering: Relaxed, for `remote` and the words; from here on an entry finds the bit, and
        // `inside` reads at least this value.
        if section::available() {
            self.cold.remote.fetch_or(CLOSED, Ordering::Relaxed);
            if mutant("gate-closes-without-heavy") {
                return;
            }
            fence::heavy_rseq();
        } else {
            for word in hot.words.iter() {
                if mutant("gate-closes-by-load-and-store") {
                    let seen = word.load(Ordering::Relaxed);
                    word.store(seen | CLOSED, Ordering::Relaxed);
                } else {
                    word.fetch_or(CLOSED, Ordering::Relaxed);
                }
            }
            fence::heavy();
        }
    }

    /// Whether there are readers inside; of meaning after `close` only (invariant 2).
    fn has_readers(&self) -> bool {
        let hot = &self.hot;
        // Ordering: Acquire, here and below, pairs with the Release of those who leave; it carries
        // that they have read the value before the writer changes it.
        let load = |word: &AtomicU64| {
            let weak = mutant("gate-sums-relaxed");
            word.load(if weak { Ordering::Relaxed } else { Ordering::Acquire }) as i64
        };
        let counted = |word: &AtomicU64| load(word) >> 1; // keeps the sign
        let mut sum = 0_i64;
        if section::available() {
            sum = sum.wrapping_add(counted(&self.cold.remote));
            if mutant("gate-forgets-the-remote-readers") {
                sum = 0;
            }
            hot.words.iter().for_each(|word| sum = sum.wrapping_add(load(word)));
        } else {
            hot.words.iter().for_each(|word| sum = sum.wrapping_add(counted(word)));
        }
        sum != 0
    }

    /// Stops being the writer: those who waited to read go next, then the next writer.
    fn open(&self, state: &mut State) {
        // Ordering: Release, here and below, pairs with the Acquire of a reader that enters; it
        // carries what the writer wrote.
        if section::available() {
            self.cold.remote.fetch_and(!CLOSED, Ordering::Release);
        } else {
            for word in self.hot.words.iter() {
                word.fetch_and(!CLOSED, Ordering::Release);
            }
        }
        let order =
            if mutant("gate-opens-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        self.hot.gate.store(0, order);
        state.owner = 0;
        state.admitted = std::mem::take(&mut state.waiting);
        if state.admitted != 0 {
            if !mutant("gate-leaves-readers-asleep") {
                self.cold.readers.notify_all();
            }
        } else {
            self.cold.writers.notify_all();
        }
    }

    /// Refuses to wait for a writer, or for readers whose turn it is, if that could not end.
    fn check_deadlock(&self, state: &State) -> Result<(), GateError> {
        if state.owner == thread_id() { Err(GateError::Deadlock) } else { Ok(()) }
    }

    /// What to tell a thread that only tried, and found the gate closed or others inside.
    #[cold]
    pub(super) fn try_error(&self) -> GateError {
        // Ordering: Relaxed; a living thread's id is stored by that thread alone, so it is there or
        // not for sure.
        if self.hot.gate.load(Ordering::Relaxed) == thread_id() {
            GateError::Deadlock
        } else {
            GateError::WouldBlock
        }
    }
}

/// Counts one more reader in a word unless it is closed.
#[inline]
fn enter_by_atomic(word: &AtomicU64) -> bool {
    // Ordering: Relaxed; the exchange checks it.
    let mut seen = word.load(Ordering::Relaxed);
    while seen & CLOSED == 0 {
        let new = seen.wrapping_add(READER);
        // Ordering: Acquire on success pairs with the Release in `open`; it carries what the last
        // writer wrote. Relaxed on failure: the next attempt checks again.
        match word.compare_exchange_weak(seen, new, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => seen = now,
        }
    }
    false
}

#[inline]
fn leave_by_atomic(word: &AtomicU64) {
    // Ordering: Release pairs with the Acquire in `inside`; it carries that this reader is done.
    word.fetch_sub(READER, Ordering::Release);
}
