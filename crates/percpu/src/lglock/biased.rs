//! The biased kind: a slot is taken by a section on its own CPU, and by others behind a gate.

use std::fmt;

use crate::cpu::CpuId;
use crate::error::{AllocError, Forked, out_of_memory};
use crate::fence::heavy_rseq;
use crate::park::{Parker, Patience, Wake};
use crate::rseq::section::{self, Refused};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{cpu, mutant, thread_id};
use crate::words::Words;

use super::error::{LockError, Mode};
use super::guard::{GlobalGuard, LocalGuard, PairGuard};
use super::iter::{IntoIter, IterMut};
use super::plain::LgLock;
use super::slot::{Hold, Slot};

/// A value per CPU, each under a lock of its own, that costs next to nothing on its own CPU.
///
/// For data that is global only at a shutdown or a reconfiguration: [`local`](Self::local) runs a
/// restartable section, with no atomic instruction. Everything else closes a gate to all CPUs for
/// as long as it holds its slots, and interrupts each of them once: some microseconds, tens of
/// them in a virtual machine. [`LgLock`] has one price for all CPUs.
///
/// ```
/// use percpu::lglock::{BiasedLgLock, LockError};
///
/// # fn main() -> Result<(), LockError> {
/// let seen = BiasedLgLock::new(|_cpu| 0_u64);
/// *seen.local()? += 1;
/// assert_eq!(seen.global()?.iter().map(|(_cpu, seen)| *seen).sum::<u64>(), 1);
/// # Ok(())
/// # }
/// ```
///
/// A thread holds one guard at a time: [`pair`](Self::pair) and [`global`](Self::global) are there
/// for more. A call that would have to wait while its thread holds another guard of this lock
/// returns [`LockError::Deadlock`] instead.
///
/// Where this process runs no sections ([`capabilities`](crate::capabilities())) it is an
/// [`LgLock`] inside, which may wait where this kind returns `Deadlock`. A thread that has no
/// rseq id takes its slot from behind the gate.
///
/// `BiasedLgLock<T>` is `Sync` if `T` is `Send`, like a mutex. It is invariant in `T`.
#[repr(align(128))] // the gate is read by every CPU, and must not share a line with what is written
pub struct BiasedLgLock<T> {
    /// `None` if this process runs no sections: then `plain` is the lock. Else it is the values.
    bias: Option<Bias>,
    plain: LgLock<T>,
}

/// What stands for the words of the slots. Who waits for anything waits at `parker`.
#[derive(Debug)]
struct Bias {
    /// For each slot the id of the thread that holds it, or 0. Only a section stores an id.
    words: Words,
    /// The id of the thread that closed the gate, or 0. No section takes a slot while it is closed.
    closed: AtomicU64,
    parker: Parker,
}

impl<T> BiasedLgLock<T> {
    /// Makes a slot for every CPU that may ever exist, with the value that `init` gives for it.
    ///
    /// If `init` panics, the values made so far are dropped and the panic goes on.
    ///
    /// # Aborts
    ///
    /// Like `Box::new`, if there is no memory; [`try_new`](Self::try_new) returns that.
    #[must_use]
    pub fn new(init: impl FnMut(CpuId) -> T) -> Self {
        Self::try_new(init).unwrap_or_else(|_| out_of_memory::<Slot<T>>(cpu::possible()))
    }

    /// Makes a slot for every CPU that may ever exist, with the value that `init` gives for it.
    ///
    /// Allocates at least 136 bytes per slot, once; no other method allocates.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new(init: impl FnMut(CpuId) -> T) -> Result<Self, AllocError> {
        let bias = if section::available() { Some(Bias::new()?) } else { None };
        Ok(Self { bias, plain: LgLock::try_new(init)? })
    }

    /// How many slots there are: one for every CPU that may ever exist.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.plain.capacity()
    }

    /// Locks the slot of the CPU that the caller runs on. Blocks while another thread holds it, or
    /// the gate.
    ///
    /// The guard keeps that slot if the thread moves; [`LocalGuard::cpu`] tells which it is.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] and [`LockError::Forked`], where it would otherwise wait.
    #[inline]
    pub fn local(&self) -> Result<LocalGuard<'_, T>, LockError> {
        self.claim(Mode::Wait)
    }

    /// Locks the slot of the CPU that the caller runs on, if it is free and the gate is open.
    /// Never blocks.
    ///
    /// # Errors
    ///
    /// As [`local`](Self::local), and [`LockError::WouldBlock`] where that waits.
    #[inline]
    pub fn try_local(&self) -> Result<LocalGuard<'_, T>, LockError> {
        self.claim(Mode::Try)
    }

    /// Locks the slot of `cpu`, behind the gate. Blocks while another thread holds it, or the gate.
    ///
    /// # Errors
    ///
    /// As [`local`](Self::local), and [`LockError::NoSuchCpu`].
    pub fn local_on(&self, cpu: CpuId) -> Result<LocalGuard<'_, T>, LockError> {
        match &self.bias {
            Some(bias) => self.behind_the_gate(bias, cpu, Mode::Wait),
            None => self.plain.local_on(cpu),
        }
    }

    /// Locks the slot of `cpu`, behind the gate, if both are free. Never blocks.
    ///
    /// # Errors
    ///
    /// As [`local_on`](Self::local_on), and [`LockError::WouldBlock`] where that waits.
    pub fn try_local_on(&self, cpu: CpuId) -> Result<LocalGuard<'_, T>, LockError> {
        match &self.bias {
            Some(bias) => self.behind_the_gate(bias, cpu, Mode::Try),
            None => self.plain.try_local_on(cpu),
        }
    }

    /// Locks the slots of two CPUs, behind the gate. Blocks while another thread holds one of
    /// them, or the gate.
    ///
    /// # Errors
    ///
    /// As [`local_on`](Self::local_on), and [`LockError::SameSlot`].
    pub fn pair(&self, a: CpuId, b: CpuId) -> Result<PairGuard<'_, T>, LockError> {
        match &self.bias {
            Some(bias) => self.pair_behind_the_gate(bias, (a, b), Mode::Wait),
            None => self.plain.pair(a, b),
        }
    }

    /// Locks the slots of two CPUs, behind the gate, if all are free. Never blocks.
    ///
    /// # Errors
    ///
    /// As [`pair`](Self::pair), and [`LockError::WouldBlock`] where that waits.
    pub fn try_pair(&self, a: CpuId, b: CpuId) -> Result<PairGuard<'_, T>, LockError> {
        match &self.bias {
            Some(bias) => self.pair_behind_the_gate(bias, (a, b), Mode::Try),
            None => self.plain.try_pair(a, b),
        }
    }

    /// Locks every slot, behind the gate. Blocks while another thread holds one of them, or the
    /// gate.
    ///
    /// # Errors
    ///
    /// As [`local`](Self::local).
    pub fn global(&self) -> Result<GlobalGuard<'_, T>, LockError> {
        match &self.bias {
            Some(bias) => self.all_behind_the_gate(bias, Mode::Wait),
            None => self.plain.global(),
        }
    }

    /// Locks every slot, behind the gate, if all are free. Never blocks.
    ///
    /// # Errors
    ///
    /// As [`global`](Self::global), and [`LockError::WouldBlock`] where that waits.
    pub fn try_global(&self) -> Result<GlobalGuard<'_, T>, LockError> {
        match &self.bias {
            Some(bias) => self.all_behind_the_gate(bias, Mode::Try),
            None => self.plain.try_global(),
        }
    }

    /// The value of `cpu`, if it has a slot. Locks nothing: nobody else has the lock.
    #[must_use]
    pub fn get_mut(&mut self, cpu: CpuId) -> Option<&mut T> {
        self.plain.get_mut(cpu)
    }

    /// Goes over all slots, ascending. Locks nothing: nobody else has the lock.
    pub fn iter_mut(&mut self) -> IterMut<'_, T> {
        self.plain.iter_mut()
    }

    #[inline(always)]
    fn claim(&self, mode: Mode) -> Result<LocalGuard<'_, T>, LockError> {
        let Some(bias) = &self.bias else { return self.without_sections(mode) };
        match bias.claim() {
            // SAFETY: `claim` has just taken this slot.
            Ok(cpu) => Ok(unsafe { self.claimed(bias, cpu) }),
            Err(why) => self.claim_slow(bias, why, mode),
        }
    }

    /// # Safety
    ///
    /// The caller took the slot of `cpu` by `bias.claim`, and hands it over.
    #[inline(always)]
    unsafe fn claimed<'a>(&'a self, bias: &'a Bias, cpu: CpuId) -> LocalGuard<'a, T> {
        // SAFETY: a section gives a CPU below `cpu::possible()`, for which there is a word.
        let word = unsafe { bias.words.slot_unchecked(cpu) };
        // SAFETY: the section stored this thread's id in the word, from 0: there is no other.
        let hold = unsafe { Hold::new(word, &bias.parker) };
        #[cfg(any(offlock_loom, offlock_shuttle))]
        let hold = hold.beside(cpu, bias.words.slot(CpuId::new(1 - cpu.get())));
        // SAFETY: as for the word: `slots` is as long.
        let slot = unsafe { self.plain.slots.get_unchecked(cpu.index()) };
        // SAFETY: the word is the slot's, and whoever holds that has the value.
        unsafe { LocalGuard::new(slot, hold) }
    }

    #[inline(never)]
    fn without_sections(&self, mode: Mode) -> Result<LocalGuard<'_, T>, LockError> {
        match mode {
            Mode::Wait => self.plain.local(),
            Mode::Try => self.plain.try_local(),
        }
    }

    #[cold]
    #[inline(never)]
    fn claim_slow<'a>(
        &'a self,
        bias: &'a Bias,
        why: Refused,
        mode: Mode,
    ) -> Result<LocalGuard<'a, T>, LockError> {
        if why == Refused::NoCpu {
            return self.behind_the_gate(bias, cpu::current(), mode);
        }
        bias.may_wait(mode)?;
        // On whichever CPU this thread is by then. An id does not go away, so `NoCpu` never comes.
        let cpu = bias.parker.wait(Patience::SHORT, || bias.claim().ok());
        // SAFETY: `claim` has just taken this slot.
        Ok(unsafe { self.claimed(bias, cpu) })
    }

    #[inline(never)]
    fn behind_the_gate<'a>(
        &'a self,
        bias: &'a Bias,
        cpu: CpuId,
        mode: Mode,
    ) -> Result<LocalGuard<'a, T>, LockError> {
        let slot: &Slot<T> = self.plain.slot(cpu)?;
        let hold = bias.close(&[cpu], mode)?;
        // SAFETY: `close` waited for the slot, and nobody takes it before `hold` goes.
        Ok(unsafe { LocalGuard::new(slot, hold) })
    }

    fn pair_behind_the_gate<'a>(
        &'a self,
        bias: &'a Bias,
        (a, b): (CpuId, CpuId),
        mode: Mode,
    ) -> Result<PairGuard<'a, T>, LockError> {
        let slots = self.plain.two_slots(a, b)?;
        let hold = bias.close(&[a, b], mode)?;
        // SAFETY: `close` waited for both, which `two_slots` made sure are two, and nobody takes
        // them before `hold` goes.
        Ok(unsafe { PairGuard::new(slots, (hold, None)) })
    }

    fn all_behind_the_gate<'a>(
        &'a self,
        bias: &'a Bias,
        mode: Mode,
    ) -> Result<GlobalGuard<'a, T>, LockError> {
        let hold = bias.close_all(mode)?;
        // SAFETY: `close_all` waited for every slot, and nobody takes one before `hold` goes.
        Ok(unsafe { GlobalGuard::new(&self.plain.slots, Some(hold)) })
    }
}

impl Bias {
    fn new() -> Result<Self, AllocError> {
        Ok(Self { words: Words::new()?, closed: AtomicU64::new(0), parker: Parker::new(Wake::All) })
    }

    /// Takes the slot of this CPU, if it is free and the gate is open.
    #[inline(always)]
    fn claim(&self) -> Result<CpuId, Refused> {
        let me = thread_id();
        // The section loads the gate and the word with Acquire: that pairs with the Release in
        // `Hold::drop`, of whoever had the gate or the slot, and carries the values.
        let taken = section::claim(&self.closed, &self.words, me);
        if mutant("lglock-foreign-thread-takes-a-word") && taken == Err(Refused::NoCpu) {
            let cpu = cpu::current();
            let word = self.words.slot(cpu);
            let got = word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed);
            return got.map(|_| cpu).map_err(|_| Refused::Busy);
        }
        taken
    }

    /// Closes the gate, and waits until the slots of `cpus` are free.
    fn close(&self, cpus: &[CpuId], mode: Mode) -> Result<Hold<'_>, LockError> {
        self.close_for(|| cpus.iter().map(|&cpu| self.words.slot(cpu)), mode)
    }

    /// Closes the gate, and waits until every slot is free.
    fn close_all(&self, mode: Mode) -> Result<Hold<'_>, LockError> {
        self.close_for(|| self.words.iter(), mode)
    }

    fn close_for<'a, I: Iterator<Item = &'a AtomicU64>>(
        &'a self,
        wanted: impl Fn() -> I,
        mode: Mode,
    ) -> Result<Hold<'a>, LockError> {
        let me = thread_id();
        // Ordering: Relaxed, twice; a hint that saves others the gate and the barrier, but for our
        // own id, which only we store.
        if wanted().any(|word| word.load(Ordering::Relaxed) == me)
            || mode == Mode::Try && wanted().any(|word| word.load(Ordering::Relaxed) != 0)
        {
            self.may_wait(mode)?;
        }

        if !self.try_close(me) {
            self.may_wait(mode)?;
            self.parker.wait(Patience::SHORT, || self.try_close(me).then_some(()));
        }
        // SAFETY: the gate holds our id, from 0: there is no other `Hold`. If a slot cannot be had
        // below, dropping this opens the gate.
        let hold = unsafe { Hold::new(&self.closed, &self.parker) };
        // Sections that saw the gate open have committed or start again, and find it closed: from
        // here on a word that is 0 stays 0.
        if !mutant("lglock-gate-skips-heavy-rseq") {
            heavy_rseq();
        }
        for word in wanted() {
            // Ordering: Acquire pairs with the Release in `Hold::drop`; it carries the value.
            let is_free = || word.load(Ordering::Acquire) == 0;
            if !is_free() && !mutant("lglock-gate-does-not-wait-for-a-slot") {
                self.may_wait_at_the_gate(mode)?;
                self.parker.wait(Patience::SHORT, || is_free().then_some(()));
            }
        }
        Ok(hold)
    }

    #[inline(always)]
    fn try_close(&self, me: u64) -> bool {
        // Ordering: Acquire on success pairs with the Release in `Hold::drop`; it carries the
        // values that were changed behind the gate. Relaxed on failure.
        self.closed.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Whether this thread may wait for somebody else: not while it holds a slot or the gate, which
    /// somebody may wait for.
    #[cold]
    fn may_wait(&self, mode: Mode) -> Result<(), LockError> {
        // Ordering: Relaxed; only this thread stores its id, so it is there or not for sure, as in
        // `take_slow` of `plain`.
        if self.closed.load(Ordering::Relaxed) == thread_id() {
            return Err(LockError::Deadlock);
        }
        self.may_wait_at_the_gate(mode)
    }

    /// The same for the thread that has closed the gate: nobody who holds a slot waits for it.
    fn may_wait_at_the_gate(&self, mode: Mode) -> Result<(), LockError> {
        let me = thread_id();
        // Ordering: Relaxed, as in `may_wait`.
        if self.words.iter().any(|word| word.load(Ordering::Relaxed) == me) {
            return Err(LockError::Deadlock);
        }
        if self.parker.is_inherited() {
            return Err(Forked::new().into());
        }
        if mode == Mode::Try { Err(LockError::WouldBlock) } else { Ok(()) }
    }
}

impl<T: Default> Default for BiasedLgLock<T> {
    fn default() -> Self {
        Self::new(|_| T::default())
    }
}

impl<T> IntoIterator for BiasedLgLock<T> {
    type Item = (CpuId, T);
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        self.plain.into_iter()
    }
}

impl<'a, T> IntoIterator for &'a mut BiasedLgLock<T> {
    type Item = (CpuId, &'a mut T);
    type IntoIter = IterMut<'a, T>;

    fn into_iter(self) -> IterMut<'a, T> {
        self.iter_mut()
    }
}

impl<T> fmt::Debug for BiasedLgLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BiasedLgLock")
            .field("capacity", &self.capacity())
            .field("biased", &self.bias.is_some())
            .finish_non_exhaustive()
    }
}
