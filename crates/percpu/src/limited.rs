//! A counter with a limit that holds exactly, and that is cheap far from it.
//!
//! Every CPU holds a share of the limit: some of it used, the rest room. Adding turns room of a
//! share into use, subtracting turns use into room, by one compare-exchange on the CPU's own word.
//! What no CPU holds is in the pool, under a mutex:
//!
//! ```text
//!  limit = | room | used |  +  | room | used |  +  | room | used |
//!            share of cpu 0      share of cpu 1      pool, under the mutex
//!            word: used << 32 | room                 also: over, what is used beyond the limit
//! ```
//!
//! A CPU whose share does not do goes to the pool and takes a share that lasts a while. If the pool
//! does not do either, it takes the shares of all CPUs into the pool first. A share of nothing
//! cannot be turned into anything, so a CPU whose share was taken comes to the mutex for its next
//! operation: taking a share freezes it. When all are taken the pool is exact, and nobody can
//! change that before the mutex is unlocked: what is refused then is refused rightly.
//!
//! Summing without taking would refuse while there is room (use turns into room in a share already
//! read, room into use in one not yet read), and so would taking one share at a time and giving it
//! back; checking a share against an exact sum of the others would overshoot.
//!
//! # Invariants
//!
//! 1. The room and the use of all shares and of the pool add up to the limit, and to `over` more
//!    use. The value is the use.
//! 2. Room and use of a share are below 2^32 together.
//! 3. Only the holder of the mutex adds to a share as a whole, or takes from it.
//! 4. `over > 0` implies that there is no room, and that every share is 0.

use std::error::Error;
use std::fmt;
use std::io;

use crate::cpu::CpuId;
use crate::error::{AllocError, Forked};
use crate::fork::Generation;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, cpu, mutant};
use crate::words::Words;

/// A share taken from the pool is for this many operations of the size that needed it, if the pool
/// has that much. A guess, as for the counter's batch.
const OPERATIONS: u64 = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 256 };

/// A count between 0 and a limit, that never goes beyond and never refuses while there is room.
///
/// [`try_add`](Self::try_add) and [`try_sub`](Self::try_sub) are linearizable: there is an order of
/// all operations in which each is right, with the value between 0 and the limit at each point. An
/// error is never a guess. Like a semaphore it orders: what happened before a `try_sub` is visible
/// after a `try_add` that would have been refused without it.
///
/// Progress: lock-free on a word of this CPU while its share lasts. Every some hundred operations,
/// and near the limit or near 0 up to every time, an operation blocks shortly on a mutex and may
/// visit the words of all CPUs. So this is for limits that are seldom reached: a budget of bytes, a
/// number of connections.
///
/// Allocates once, in the constructor, 8 bytes per CPU.
///
/// # Fork
///
/// A child goes on with a copy. If a thread of the parent held the mutex at the fork, or another
/// thread of the child holds it, operations that need it return [`Forked`] (as an error of kind
/// [`LimitError::Forked`]) rather than wait, until [`fork::adopt`](crate::fork::adopt).
///
/// ```
/// use percpu::{LimitError, LimitedCounter};
///
/// let budget = LimitedCounter::new(3);
/// budget.try_add(2)?;
/// assert_eq!(budget.try_add(2), Err(LimitError::LimitReached));
/// budget.try_add(1)?; // there was room for that
/// budget.try_sub(3)?;
/// assert_eq!(budget.try_sub(1), Err(LimitError::BelowZero));
/// assert_eq!(budget.value()?, 0);
/// # Ok::<(), LimitError>(())
/// ```
pub struct LimitedCounter {
    /// `None` if there was no memory: everything is in the pool.
    words: Option<Words>,
    born: Generation,
    pool: Pool,
}

/// On lines of its own, off the pointer that every operation reads.
#[repr(align(128))]
struct Pool(Mutex<Totals>);

/// What no CPU holds. Invariants 1 and 4.
#[derive(Debug)]
struct Totals {
    limit: u64,
    room: u64,
    used: u64,
    over: u64,
}

/// Why a [`LimitedCounter`] did not do what was asked. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitError {
    /// The value would have gone beyond the limit. Maps to `EAGAIN`.
    LimitReached,
    /// The value would have gone below 0: more was taken back than was added. Maps to `EINVAL`.
    BelowZero,
    /// See [`Forked`]. Maps to `EOWNERDEAD`.
    Forked(Forked),
}

impl LimitError {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::LimitReached => libc::EAGAIN,
            Self::BelowZero => libc::EINVAL,
            Self::Forked(forked) => forked.errno(),
        }
    }
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LimitReached => f.write_str("the limit is reached"),
            Self::BelowZero => f.write_str("more taken back than was added"),
            Self::Forked(_) => f.write_str("the counter was in use at a fork"),
        }
    }
}

impl Error for LimitError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Forked(forked) => Some(forked),
            Self::LimitReached | Self::BelowZero => None,
        }
    }
}

impl From<LimitError> for io::Error {
    fn from(error: LimitError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

impl From<Forked> for LimitError {
    fn from(forked: Forked) -> Self {
        Self::Forked(forked)
    }
}

/// What a CPU holds: invariant 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    room: u32,
    used: u32,
}

/// The two directions, which differ in nothing else.
#[derive(Clone, Copy, Debug)]
enum Turn {
    RoomIntoUse,
    UseIntoRoom,
}

impl Share {
    fn from_word(word: u64) -> Self {
        Self { room: word as u32, used: (word >> 32) as u32 }
    }

    fn to_word(self) -> u64 {
        u64::from(self.used) << 32 | u64::from(self.room)
    }

    /// The share after `n` were turned, if it has that many.
    fn turned(self, turn: Turn, n: u32) -> Option<Self> {
        let Self { room, used } = self;
        // The sums are at most room + used, which invariant 2 bounds.
        match turn {
            Turn::RoomIntoUse => Some(Self { room: room.checked_sub(n)?, used: used + n }),
            Turn::UseIntoRoom => Some(Self { used: used.checked_sub(n)?, room: room + n }),
        }
    }
}

impl LimitedCounter {
    /// Makes a counter of 0 that may go up to `limit`.
    ///
    /// Where there is no memory for the words of the CPUs, every operation takes the mutex: right,
    /// and slow. [`try_new`](Self::try_new) returns that instead.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self::with_words(limit, Words::new().ok())
    }

    /// Makes a counter of 0 that may go up to `limit`.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the words of the CPUs.
    pub fn try_new(limit: u64) -> Result<Self, AllocError> {
        Ok(Self::with_words(limit, Some(Words::new()?)))
    }

    fn with_words(limit: u64, words: Option<Words>) -> Self {
        let totals = Totals { limit, room: limit, used: 0, over: 0 };
        Self { words, born: Generation::current(), pool: Pool(Mutex::new(totals)) }
    }

    /// Adds `n` if the value stays within the limit. Adding 0 always succeeds.
    ///
    /// # Errors
    ///
    /// [`LimitError::LimitReached`] if it would not, at the moment of the refusal;
    /// [`LimitError::Forked`] as the type's page says.
    #[inline]
    pub fn try_add(&self, n: u64) -> Result<(), LimitError> {
        self.turn_on(cpu::current, Turn::RoomIntoUse, n)
    }

    /// Takes `n` back if that much is there. Taking 0 always succeeds.
    ///
    /// # Errors
    ///
    /// [`LimitError::BelowZero`] if the value is less than `n`, at the moment of the refusal;
    /// [`LimitError::Forked`] as the type's page says, and then `n` is still counted.
    #[inline]
    pub fn try_sub(&self, n: u64) -> Result<(), LimitError> {
        self.turn_on(cpu::current, Turn::UseIntoRoom, n)
    }

    /// The value, exact at one moment between call and return.
    ///
    /// Blocks on the mutex, visits the words of all CPUs and takes the shares: the next operation
    /// on each CPU is a slow one.
    ///
    /// # Errors
    ///
    /// [`LimitError::Forked`] as the type's page says.
    pub fn value(&self) -> Result<u64, LimitError> {
        let mut totals = self.lock()?;
        self.take_all(&mut totals);
        Ok(totals.used)
    }

    /// The limit. Blocks shortly on the mutex.
    ///
    /// # Errors
    ///
    /// [`LimitError::Forked`] as the type's page says.
    pub fn limit(&self) -> Result<u64, LimitError> {
        Ok(self.lock()?.limit)
    }

    /// Sets another limit. Below the value it is no error: adds are refused until enough was taken
    /// back, and every operation takes the mutex until then. Costs as much as
    /// [`value`](Self::value).
    ///
    /// # Errors
    ///
    /// [`LimitError::Forked`] as the type's page says.
    pub fn set_limit(&self, limit: u64) -> Result<(), LimitError> {
        let mut totals = self.lock()?;
        self.take_all(&mut totals);
        totals.limit = limit;
        totals.room = limit.saturating_sub(totals.used);
        totals.over = totals.used.saturating_sub(limit);
        Ok(())
    }

    /// Turns `n`, in the share of the CPU that `cpu` names or else through the pool. Tests name
    /// one; inlined, it is `cpu::current`.
    #[inline(always)]
    fn turn_on(&self, cpu: impl Fn() -> CpuId, turn: Turn, n: u64) -> Result<(), LimitError> {
        if let (Some(words), Ok(few)) = (&self.words, u32::try_from(n)) {
            let word = words.slot(cpu());
            // Ordering: Relaxed; the word is the whole message.
            let mut seen = word.load(Ordering::Relaxed);
            while let Some(next) = Share::from_word(seen).turned(turn, few) {
                // Ordering: AcqRel on success pairs with that of the other turns, so that an add
                // happens after the sub whose room it takes; Relaxed on failure, nothing is used.
                let done = if mutant("limited-turns-relaxed") {
                    Ordering::Relaxed
                } else {
                    Ordering::AcqRel
                };
                match word.compare_exchange_weak(seen, next.to_word(), done, Ordering::Relaxed) {
                    Ok(_) => return Ok(()),
                    Err(now) => seen = now,
                }
            }
        }
        self.turn_in_pool(cpu(), turn, n)
    }

    /// Turns `n` in the pool, if need be with the shares of all CPUs in it, and leaves `cpu` a
    /// share to go on with.
    #[cold]
    #[inline(never)]
    fn turn_in_pool(&self, cpu: CpuId, turn: Turn, n: u64) -> Result<(), LimitError> {
        let mut totals = self.lock()?;
        if !totals.turn(turn, n) {
            if mutant("limited-refuses-by-the-pool-alone") {
                return Err(turn.refused());
            }
            self.take_all(&mut totals);
            if !totals.turn(turn, n) {
                return Err(turn.refused());
            }
        }
        if let Some(words) = &self.words {
            totals.share_out(words.slot(cpu), n.saturating_mul(OPERATIONS));
        }
        Ok(())
    }

    /// Takes the shares of all CPUs into the pool. Each can do nothing until the mutex is unlocked.
    fn take_all(&self, totals: &mut Totals) {
        for word in self.words.iter().flat_map(Words::iter) {
            if mutant("limited-sums-without-taking") {
                let share = Share::from_word(word.load(Ordering::Relaxed));
                totals.used += u64::from(share.used);
                totals.room += u64::from(share.room);
                continue;
            }
            // Ordering: Relaxed; who made a share of nothing into something held the mutex before us,
            // so 0 is what it is, and its line need not come here.
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // Ordering: Acquire pairs with the Release of the turns in `turn_on`; through the
            // mutex it carries what was done before a sub to the add that takes its room.
            let taken = if mutant("limited-takes-in-two-steps") {
                let seen = word.load(Ordering::Acquire);
                word.store(0, Ordering::Relaxed);
                seen
            } else {
                word.swap(0, Ordering::Acquire)
            };
            let share = Share::from_word(taken);
            totals.used += u64::from(share.used);
            totals.room += u64::from(share.room);
            if mutant("limited-takes-one-at-a-time") {
                totals.share_out(word, OPERATIONS);
            }
        }
    }

    /// Waits for the mutex, unless its holder may not exist in this process.
    fn lock(&self) -> Result<MutexGuard<'_, Totals>, Forked> {
        self.born.lock(&self.pool.0)
    }
}

impl Turn {
    fn refused(self) -> LimitError {
        match self {
            Self::RoomIntoUse => LimitError::LimitReached,
            Self::UseIntoRoom => LimitError::BelowZero,
        }
    }
}

impl Totals {
    /// Turns `n` of what is in the pool, if it has that much.
    fn turn(&mut self, turn: Turn, n: u64) -> bool {
        match turn {
            Turn::RoomIntoUse if n == 0 => {}
            Turn::RoomIntoUse if n > self.room => return false,
            Turn::RoomIntoUse => {
                self.room -= n;
                self.used += n;
            }
            Turn::UseIntoRoom if n > self.used => return false,
            Turn::UseIntoRoom => {
                let beyond = n.min(self.over); // invariant 4: this does not become room
                self.over -= beyond;
                self.used -= n;
                self.room += n - beyond;
            }
        }
        true
    }

    /// Makes the share behind `word` one of up to `most` room and `most` use, from the pool or
    /// back into it: no more of either than would leave as much for each CPU and for the pool.
    fn share_out(&mut self, word: &AtomicU64, most: u64) {
        if self.over > 0 {
            return; // invariant 4
        }
        let most = most.min(u64::from(u32::MAX / 2)); // invariant 2
        let part = |have: u64| (have / (cpu::possible() as u64 + 1)).min(most) as u32;
        // Ordering: Relaxed; as in `turn_on`.
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let old = Share::from_word(seen);
            let (room, used) = (self.room + u64::from(old.room), self.used + u64::from(old.used));
            let new = Share { room: part(room), used: part(used) };
            if mutant("limited-shares-out-by-a-store") {
                word.store(new.to_word(), Ordering::Release);
            }
            // Ordering: AcqRel on success, Relaxed on failure; as in `turn_on`.
            let exchanged = word.compare_exchange_weak(
                seen,
                new.to_word(),
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            match exchanged {
                Err(now) if !mutant("limited-shares-out-by-a-store") => seen = now,
                _ => {
                    self.room = room - u64::from(new.room);
                    self.used = used - u64::from(new.used);
                    return;
                }
            }
        }
    }
}

impl fmt::Debug for LimitedCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitedCounter").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
