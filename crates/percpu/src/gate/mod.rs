//! A read-write lock whose readers count per CPU: nothing shared is written to read.
//!
//! A reader adds one to its CPU's word when it enters and takes one off, on whichever CPU it is
//! by then, when it leaves. A writer closes the gate and waits until the words sum to 0.
//!
//! ```text
//!   reader                                   writer
//!   section: gate = 0? word[cpu] += 1        under `state`: owner = me; gate = me
//!   ...reads...                              heavy_rseq()   nobody enters after this
//!   section: word[cpu] -= 1                  while sum(words) != 0 { wait }
//!   light()                                  ...writes...
//!   gate != 0? wake the writer               under `state`: owner = 0; gate = 0; wake
//! ```
//!
//! That is the shape of the Linux kernel's percpu-rwsem (`kernel/locking/percpu-rwsem.c`, 3.8; the
//! rseq section and its barrier take the place of disabled preemption and of the grace period).
//! Where no sections run, the readers use compare-exchanges, and the lowest bit of a word says
//! that it is closed; a thread without a CPU id does the same with a word of its own, `remote`.
//!
//! # Invariants
//!
//! 1. Nobody enters while the gate is closed: a section commits its entry only while `gate` is 0,
//!    a compare-exchange only from a value without `CLOSED`. `close` returns when no entry begun
//!    before it can still commit.
//! 2. From then on the words only fall, until the writer counts itself in to go on reading
//!    (`downgrade`), so a sum of 0, read word by word in any order, means that
//!    nobody is inside: each word was at least what it is at the end of the walk.
//! 3. `owner` and the gate change under `state` only, and are the same then: the id of the thread
//!    that closed the gate, or 0.
//! 4. A reader that leaves either is seen by the writer's sum, or sees the closed gate and wakes
//!    the writer under `state`: its store and load against the writer's, with `light` and `heavy`
//!    in between.
//! 5. While `turn` is not 0 there is no writer: the readers that waited for the last one go first.
//!
//! # Who excludes whom
//!
//! | | reader | writer |
//! |---|---|---|
//! | reader | never | from the closing of the gate on; those inside are waited for |
//! | writer | always | always |

mod error;
mod guard;

use std::fmt;
use std::marker::PhantomData;

use crossbeam_utils::CachePadded;

pub use self::error::GateError;
pub use self::guard::{ReadGuard, WriteGuard};
use crate::error::NewError;
use crate::fence;
use crate::rseq::section::{self, Refused};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::{Condvar, Mutex, cpu, mutant, thread_id};
use crate::words::Words;

/// The lowest bit of a word that is changed by atomics, and one reader in it.
const CLOSED: u64 = 1;
const READER: u64 = 2;

/// A read-write lock for what is read all the time and written almost never.
///
/// Reading writes to this CPU's own word only: two rseq sections without an atomic
/// read-modify-write where those run ([`capabilities`](crate::capabilities())), two atomic
/// operations on it elsewhere. Writing is dear: a heavy fence (microseconds) and a walk over the
/// CPUs' words, and readers wait meanwhile.
///
/// A writer that waits keeps new readers out, so it is not starved by them; the readers that
/// waited for a writer go before the next one, so they are not starved either. Writers among
/// themselves have no order. There is no poisoning: a panic unlocks.
///
/// A thread that waits is parked. Waiting for a writer on the same thread is refused, since it could
/// not end. What is not detected:
/// [`write`](Self::write) on a thread that holds a [`ReadGuard`], and a second
/// [`read`](Self::read) on it while a writer waits, both wait for ever, as does `write` after a
/// [`ReadGuard`] was forgotten. A thread may exit, or move to another CPU, with or without its
/// guard: readers are not counted by thread.
///
/// Memory: 256 bytes and 8 bytes for every CPU, and the value, rounded up to 128 bytes.
///
/// ```
/// use percpu::ReadWriteGate;
///
/// let routes = ReadWriteGate::new(vec!["default"])?;
/// assert_eq!(routes.read()?.len(), 1);
/// routes.write()?.push("lan");
/// assert_eq!(*routes.read()?, ["default", "lan"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[repr(C)]
pub struct ReadWriteGate<T> {
    hot: CachePadded<Hot>,
    cold: CachePadded<Cold>,
    value: UnsafeCell<T>,
}

/// Read by every reader, written by writers only.
struct Hot {
    gate: AtomicU64,
    /// The gate of the sections that leave: always 0.
    open: AtomicU64,
    words: Words,
}

struct Cold {
    remote: AtomicU64,
    state: Mutex<State>,
    /// Readers wait here for the writer to go, writers for their turn and for readers to leave.
    readers: Condvar,
    writers: Condvar,
}

#[cfg(all(target_arch = "x86_64", not(any(offlock_loom, offlock_shuttle))))]
const _: () = assert!(size_of::<ReadWriteGate<[u8; 128]>>() == 256 + 128);

struct State {
    /// The thread that writes, or waits for the readers inside; 0 if none.
    owner: u64,
    /// Readers that wait for it to go.
    waiting: usize,
    /// Readers that waited, may enter, and have not yet.
    turn: usize,
}

// SAFETY: the value moves with the gate; the rest is atomics and locks.
unsafe impl<T: Send> Send for ReadWriteGate<T> {}
// SAFETY: readers on many threads share `&T`, so `T: Sync`; a writer has `&mut T` on whichever
// thread it is, which is a move as far as `T` can tell, so `T: Send`. Invariants 1 and 2 keep the
// two apart.
unsafe impl<T: Send + Sync> Sync for ReadWriteGate<T> {}

impl<T> ReadWriteGate<T> {
    /// Creates a gate with nobody inside. May map memory for the CPUs' words.
    ///
    /// # Errors
    ///
    /// [`NewError`] if memory is out; it gives `value` back.
    pub fn new(value: T) -> Result<Self, NewError<T>> {
        let Ok(words) = Words::new() else { return Err(NewError(value)) };
        // Decided now: until then every `light` is a full fence.
        let _ = fence::strategy();
        let hot = CachePadded::new(Hot { gate: AtomicU64::new(0), open: AtomicU64::new(0), words });
        let cold = CachePadded::new(Cold {
            remote: AtomicU64::new(0),
            state: Mutex::new(State { owner: 0, waiting: 0, turn: 0 }),
            readers: Condvar::new(),
            writers: Condvar::new(),
        });
        Ok(Self { hot, cold, value: UnsafeCell::new(value) })
    }

    /// Enters to read; blocks while a writer is inside or waits.
    ///
    /// Wait-free if there is no writer and sections run; lock-free if there is no writer.
    ///
    /// # Errors
    ///
    /// [`GateError::Deadlock`] if this thread is the writer.
    #[inline]
    pub fn read(&self) -> Result<ReadGuard<'_, T>, GateError> {
        if !self.enter() {
            self.enter_when_open()?;
        }
        Ok(ReadGuard { gate: self })
    }

    /// Enters to read, unless a writer is inside or waits. Never blocks; progress as
    /// [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), and [`GateError::WouldBlock`] where that waits.
    #[inline]
    pub fn try_read(&self) -> Result<ReadGuard<'_, T>, GateError> {
        if self.enter() { Ok(ReadGuard { gate: self }) } else { Err(self.refusal()) }
    }

    /// Enters to write: keeps new readers out, and blocks until those inside have left.
    ///
    /// Costs a heavy fence and a walk over the CPUs' words.
    ///
    /// # Errors
    ///
    /// [`GateError::Deadlock`] if this thread is the writer already.
    pub fn write(&self) -> Result<WriteGuard<'_, T>, GateError> {
        let mut state = self.cold.state.lock();
        while state.owner != 0 || state.turn != 0 {
            self.may_wait(&state)?;
            self.cold.writers.wait(&mut state);
        }
        self.close(&mut state);
        while self.inside() {
            self.cold.writers.wait(&mut state);
        }
        Ok(WriteGuard { gate: self, _same_thread: PhantomData })
    }

    /// Enters to write if nobody is inside. Does not wait for readers or writers, but costs as much
    /// as [`write`](Self::write), and keeps new readers out for that long.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write), and [`GateError::WouldBlock`] where that waits.
    pub fn try_write(&self) -> Result<WriteGuard<'_, T>, GateError> {
        let mut state = self.cold.state.lock();
        if state.owner != 0 || state.turn != 0 {
            return Err(self.refusal());
        }
        self.close(&mut state);
        if self.inside() {
            self.open(&mut state);
            return Err(self.refusal());
        }
        Ok(WriteGuard { gate: self, _same_thread: PhantomData })
    }

    /// Reaches the value without entering: `&mut self` proves that nobody is inside.
    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: as above; a guard borrows the gate.
        self.value.with_mut(|value| unsafe { &mut *value })
    }

    /// Takes the value out.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }

    /// Counts one more reader; false if the gate is closed.
    #[inline(always)]
    fn enter(&self) -> bool {
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
                Err(Refused::NoCpu) => enter_open(&self.cold.remote),
                Err(Refused::Closed | Refused::Busy) => false,
            }
        } else {
            enter_open(self.hot.words.slot(cpu::recent()))
        }
    }

    /// Counts the writer as a reader: by an atomic, since no section enters while the gate is
    /// closed. Which word it is does not matter to the sum.
    fn enter_closed(&self) {
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
    fn enter_when_open(&self) -> Result<(), GateError> {
        let mut state = self.cold.state.lock();
        if state.owner == 0 {
            let entered = self.enter();
            assert!(entered, "the gate closes under `state` only (invariant 3)");
            return Ok(());
        }
        self.may_wait(&state)?;
        state.waiting += 1;
        while state.owner != 0 {
            self.cold.readers.wait(&mut state);
        }
        // Invariant 5: the writer left with us in `turn`, and no other one came since.
        let entered = self.enter();
        assert!(entered, "the gate closes under `state` only (invariant 3)");
        state.turn -= 1;
        if state.turn == 0 && !mutant("gate-forgets-the-next-writer") {
            self.cold.writers.notify_all();
        }
        Ok(())
    }

    /// Counts one reader less, here or on another CPU than it came by, and tells a writer.
    #[inline]
    fn leave(&self) {
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
    fn inside(&self) -> bool {
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
        state.turn = std::mem::take(&mut state.waiting);
        if state.turn != 0 {
            if !mutant("gate-leaves-readers-asleep") {
                self.cold.readers.notify_all();
            }
        } else {
            self.cold.writers.notify_all();
        }
    }

    /// Refuses to wait for a writer, or for readers whose turn it is, if that could not end.
    fn may_wait(&self, state: &State) -> Result<(), GateError> {
        if state.owner == thread_id() { Err(GateError::Deadlock) } else { Ok(()) }
    }

    /// What to tell a thread that only tried, and found the gate closed or others inside.
    #[cold]
    fn refusal(&self) -> GateError {
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
fn enter_open(word: &AtomicU64) -> bool {
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

impl<T: fmt::Debug> fmt::Debug for ReadWriteGate<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gate = f.debug_struct("ReadWriteGate");
        match self.try_read() {
            Ok(value) => gate.field("value", &*value),
            Err(_) => gate.field("value", &format_args!("<closed>")),
        };
        gate.finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
